"""What list scheduling finds without local search."""

from __future__ import annotations

import random

import pytest

from inductor_passes.schedule.bounds import heads, lower_bound
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import SLACK, plan
from inductor_passes.schedule.problem import Kind, Lane, Problem, Storage, Task
from inductor_passes.schedule.simulate import simulate
from inductor_passes.schedule.tables import tables
from tests.support.schedule_graphs import tp_fsdp_forward


def _gathers(seed: int, count: int = 24) -> Problem:
    """Gathers, many of them as short as the time to issue one, each read by a compute task of its own."""
    generator = random.Random(seed)
    issue = generator.randint(2, 8)
    tasks: list[Task] = []
    preds: list[tuple[int, ...]] = []
    storages = []
    for k in range(count):
        at = len(tasks)
        duration = generator.choice((issue, issue + 1, 4 * issue, 12 * issue))
        tasks += [
            Task(f"AG{k}", Kind.START, duration, lane=0, issue_ns=issue, label=f"AG{k}"),
            Task(f"W{k}", Kind.WAIT, lane=0, start=at, label=f"W{k}"),
            Task(f"mm{k}", Kind.COMPUTE, generator.choice((1, 3, 20)), label="mm"),
        ]
        preds += [(), (), (at + 1, at - 1) if k else (at + 1,)]
        storages.append(Storage(generator.choice((1, 10, 40)), at, (at + 1, at + 2)))
    return Problem(tuple(tasks), tuple(preds), (Lane("g"),), tuple(storages))


@pytest.mark.parametrize("seed", [5, 9, 14])
def test_issuing_does_not_starve_a_machine_of_short_collectives(seed: int) -> None:
    # Fed just in time, the machine idles while the next collective is issued: 6 to 7% above the bound.
    found = plan(_gathers(seed), None, effort=0)
    assert found.makespan_ns == found.lower_bound_ns


@pytest.mark.parametrize("seed", [5, 9, 14])
def test_the_cap_holds_where_prefetching_everything_would_be_faster(seed: int) -> None:
    problem = _gathers(seed)
    cap = peak_bytes(problem)
    found = plan(problem, cap, effort=0)
    assert found.feasible and found.peak_bytes <= cap
    assert found.lower_bound_ns < found.makespan_ns < found.input_makespan_ns


@pytest.mark.parametrize("layers", [3, 12, 40])
def test_what_has_to_wait_issues_meanwhile(layers: int) -> None:
    """Gathers issued in the time of a reduction cost nothing; issued with compute ready they delay every layer."""
    problem = tp_fsdp_forward(layers)
    found = plan(problem, None, effort=0)
    # What the first layer's gathers delay, however many layers follow.
    assert found.makespan_ns <= found.lower_bound_ns + 3 * 20
    held = plan(problem, peak_bytes(problem) + 700, effort=0)
    assert held.feasible and held.makespan_ns <= found.lower_bound_ns * 1.02


def test_compute_caught_between_collectives_counts_as_a_whole() -> None:
    """Three matmuls that need the same reduction and make the next one's operand: one after the other, not at once."""
    tasks = [Task("AR0", Kind.START, 50, lane=0), Task("W0", Kind.WAIT, lane=0, start=0)]
    preds: list[tuple[int, ...]] = [(), (0,)]
    tasks += [Task(f"mm{k}", Kind.COMPUTE, 100) for k in range(3)]
    preds += [(1,)] * 3
    tasks += [Task("AR1", Kind.START, 70, lane=0), Task("W1", Kind.WAIT, lane=0, start=5)]
    preds += [(2, 3, 4), (5,)]
    # Something else for the compute lane, so that its load alone does not tell.
    tasks += [Task("end", Kind.COMPUTE, 10)]
    preds += [(6,)]
    problem = Problem(tuple(tasks), tuple(preds), (Lane("g"),))
    assert lower_bound(problem) == 50 + 3 * 100 + 70 + 10 == simulate(problem).makespan_ns
    assert max(heads(tables(problem))) == 50 + 100 + 70


def _late_sum(layers: int, sum_ns: int) -> Problem:
    """A backward pass: a reduction per layer, and one of a piece of every layer, which the program names half-way."""
    tasks: list[Task] = []
    preds: list[tuple[int, ...]] = []

    def add(task: Task, *before: int) -> int:
        tasks.append(task)
        preds.append(before)
        return len(tasks) - 1

    def reduce(name: str, duration_ns: int, *before: int) -> None:
        start = add(Task(name, Kind.START, duration_ns, lane=0, issue_ns=1, label=name), *before)
        add(Task(f"W{name}", Kind.WAIT, lane=0, start=start, label=f"W{name}"))

    chain: list[int] = []
    pieces: list[int] = []
    for k in range(layers):
        chain.append(add(Task(f"mm{k}", Kind.COMPUTE, 10, label="mm"), *chain[-1:]))
        pieces.append(add(Task(f"piece{k}", Kind.COMPUTE, 2, label="mul"), chain[k]))
    for k in range(layers):
        if k == layers // 2:
            reduce("RSall", sum_ns, *pieces)
        reduce(f"RS{k}", 22, add(Task(f"grad{k}", Kind.COMPUTE, 10, label="mm"), chain[k]))
    return Problem(tuple(tasks), tuple(preds), (Lane("g"),))


@pytest.mark.parametrize("sum_ns", [60, 120])
def test_what_is_ready_last_goes_last_however_large_it_is(sum_ns: int) -> None:
    # Orders built from the front put the large reduction first and leave the link idle before it: 24 to 30% slower.
    found = plan(_late_sum(8, sum_ns), None, effort=0)
    assert (found.makespan_ns, found.method.removesuffix(SLACK)) == (found.lower_bound_ns, "list/backwards")


def test_what_is_ready_last_goes_last_under_a_cap_too() -> None:
    problem = _late_sum(8, 60)
    storages = tuple(Storage(10, i, (i + 1,)) for i, task in enumerate(problem.tasks) if task.kind is Kind.START)
    held = Problem(problem.tasks, problem.preds, problem.lanes, storages)
    cap = peak_bytes(held) + 10
    found = plan(held, cap, effort=0)
    assert found.peak_bytes <= cap and found.makespan_ns == found.lower_bound_ns
