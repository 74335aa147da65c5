"""Memory of rows of C++ kernels, and planning with less where a plan holds more than is allowed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.replay import batches
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import INPUT, Kind, Problem, Storage, Task
from inductor_passes.schedule.tables import tables
from tests.support.schedule_graphs import random_problem


def _held(problem: Problem, order: Sequence[int], batched: Sequence[bool]) -> int:
    """By the definition: a storage lives until the end of the row in which it is used last."""
    place = {task: at for at, task in enumerate(order)}
    end = list(range(len(order)))
    for at in reversed(range(len(order) - 1)):
        if batched[order[at]] and batched[order[at + 1]]:
            end[at] = end[at + 1]
    peak = problem.base_bytes + sum(s.size_bytes for s in problem.storages if s.producer == INPUT)
    for at in range(len(order)):
        held = problem.base_bytes
        for s in problem.storages:
            first = -1 if s.producer == INPUT else place[s.producer]
            last = len(order) if s.pinned else end[max([first, *(place[r] for r in s.readers)], default=0)]
            held += s.size_bytes * (first <= at <= last)
        peak = max(peak, held)
    return peak


def _with_rows(seed: int, chosen: int) -> tuple[Problem, list[bool]]:
    """A random problem, and which of its tasks are kernels that make rows: one bit of ``chosen`` each."""
    problem = random_problem(seed)
    return problem, [task.lane < 0 and bool(chosen >> i & 1) for i, task in enumerate(problem.tasks)]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 2**16))
def test_peak_of_rows(seed: int, chosen: int) -> None:
    problem, batched = _with_rows(seed, chosen)
    order = problem.input_order
    found = batches.peak_bytes(problem, order, batched)
    assert found == _held(problem, order, batched) >= peak_bytes(problem, order)
    assert batches.peak_bytes(problem, order, [False] * len(batched)) == peak_bytes(problem, order)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0, 5, 25]))
def test_a_plan_holds_no_more_than_is_allowed(seed: int, above: int) -> None:
    problem = random_problem(seed, tasks=12)
    draw = random.Random(seed)
    batched = [task.lane < 0 and draw.random() < 0.7 for task in problem.tasks]
    needed = batches.least(problem, batched)
    assert needed <= _held(problem, problem.input_order, batched)
    limit = needed + needed * above // 100
    assert _held(problem, batches.fastest(problem, batched, limit), batched) <= limit
    found = batches.within(problem, batched, limit, lambda cap: plan(problem, cap))
    if found is not None:
        problem.check_order(found[1])
        assert _held(problem, found[1], batched) <= limit


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 2**16))
def test_kernels_that_free_are_brought_forward(seed: int, chosen: int) -> None:
    problem, batched = _with_rows(seed, chosen)
    order = batches.spread(problem, problem.input_order, batched)
    problem.check_order(order)
    assert peak_bytes(problem, order) <= peak_bytes(problem, problem.input_order) + max(tables(problem).alloc)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 2**16))
def test_rows_are_taken_apart(seed: int, chosen: int) -> None:
    problem, batched = _with_rows(seed, chosen)
    order = batches.parted(problem, problem.input_order, batched)
    problem.check_order(order)
    assert _held(problem, order, batched) <= _held(problem, problem.input_order, batched)


def test_a_kernel_in_between_frees_what_the_row_has_read() -> None:
    """Found: no plan held to the cap because of rows, and the order of least memory took a third more time."""
    kernels = [Task(f"kernel{i}", Kind.COMPUTE, 10) for i in range(3)]
    problem = Problem(
        (*kernels, Task("extern", Kind.COMPUTE, 10)),
        ((),) * 4,
        storages=tuple(Storage(100, INPUT, (i,)) for i in range(3)) + tuple(Storage(60, i, (), True) for i in range(3)),
    )
    batched = [True, True, True, False]
    order = batches.parted(problem, problem.input_order, batched)
    assert batches.peak_bytes(problem, problem.input_order, batched) == 480
    assert batches.peak_bytes(problem, order, batched) < 480 and order.index(3) < 3
    found = batches.within(problem, batched, 380, lambda cap: plan(problem, cap))
    assert found is not None and batches.peak_bytes(problem, found[1], batched) <= 380
