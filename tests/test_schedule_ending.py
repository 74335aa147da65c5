"""Compute that nobody waits for is put off until the end, where the last collectives have nothing to hide behind."""

from __future__ import annotations

import pytest

from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.ending import reorder_end
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Kind, Lane, Problem, Storage, Task
from inductor_passes.schedule.simulate import simulate
from inductor_passes.schedule.tables import tables
from tests.support.schedule_graphs import random_problem, training_graphs


def backward(layers: int, last_ns: int, others_ns: int = 2) -> Problem:
    """Per layer a gradient of the activations, one of the weights from it and from what forward saved, its reduction.

    The last reduction takes ``last_ns``, the others ``others_ns``. A saved activation is 100 bytes,
    a gradient of one 10.
    """
    tasks: list[Task] = []
    preds: list[tuple[int, ...]] = []
    storages: list[Storage] = []
    before: tuple[int, ...] = ()
    for k in range(layers):
        first = len(tasks)
        tasks += [
            Task(f"d{k}", Kind.COMPUTE, 10),
            Task(f"w{k}", Kind.COMPUTE, 10),
            Task(f"rs{k}", Kind.START, last_ns if k == layers - 1 else others_ns, lane=0),
            Task(f"wait{k}", Kind.WAIT, lane=0, start=first + 2),
        ]
        preds += [before, (first,), (first + 1,), (first + 2,)]
        storages += [
            Storage(100, -1, (first + 1,), False, f"saved{k}"),
            Storage(10, first, (first + 1, first + 4) if k < layers - 1 else (first + 1,), False, f"d{k}"),
            Storage(8, first + 1, (first + 2, first + 3), False, f"w{k}"),
        ]
        before = (first,)
    return Problem(tuple(tasks), tuple(preds), (Lane("dp"),), tuple(storages), name="backward")


def test_the_last_reduction_hides_behind_what_was_put_off() -> None:
    problem = backward(30, 60)
    t = tables(problem)
    given = simulate(problem)
    # Each reduction is waited for at once.
    assert given.makespan_ns == 30 * 20 + 29 * 2 + 60
    found = reorder_end(t, problem.input_order, given.peak_bytes)
    after = simulate(problem, found)
    assert after.peak_bytes <= given.peak_bytes
    # Six gradients of 10 ns hide the last one's 60 ns.
    assert after.makespan_ns <= given.makespan_ns - 60 + 2
    problem.check_order(tuple(found))
    planned = plan(problem, given.peak_bytes)
    assert planned.makespan_ns <= after.makespan_ns and planned.peak_bytes <= given.peak_bytes


def test_an_end_without_anything_exposed_is_left_alone() -> None:
    problem = backward(30, 0, 0)
    assert reorder_end(tables(problem), problem.input_order, simulate(problem).peak_bytes) == list(problem.input_order)


@pytest.mark.parametrize("seed", range(60))
def test_never_slower_never_above_the_cap(seed: int) -> None:
    problem = random_problem(seed, tasks=30, fences=bool(seed % 2))
    given = simulate(problem)
    found = reorder_end(tables(problem), problem.input_order, given.peak_bytes)
    problem.check_order(tuple(found))
    after = simulate(problem, found)
    assert after.makespan_ns <= given.makespan_ns and after.peak_bytes <= given.peak_bytes


def test_training_graphs_gain_from_it() -> None:
    gained = 0
    for problem in training_graphs():
        given = simulate(problem)
        if given.makespan_ns > lower_bound(problem):
            found = reorder_end(tables(problem), problem.input_order, given.peak_bytes)
            gained += simulate(problem, found).makespan_ns < given.makespan_ns
    assert gained >= 3
