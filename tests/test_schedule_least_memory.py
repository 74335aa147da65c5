"""Orders that need little memory: legal, near linear, and what a plan falls back on below the input's peak."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.schedule.least_memory import greedy, large_needs_first, least_peak, orders
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import INPUT, Kind, Problem, Storage, Task
from inductor_passes.schedule.tables import tables
from tests.support.schedule_graphs import random_problem

_SEEDS = st.integers(0, 1 << 30)


def chains(count: int) -> Problem:
    """All chains begin before any goes on: ``count`` large results are held where one would do."""
    tasks = [Task(f"make{i}", Kind.COMPUTE, 10) for i in range(count)]
    tasks += [Task(f"use{i}", Kind.COMPUTE, 10) for i in range(count)]
    large = [Storage(100, i, (count + i,)) for i in range(count)]
    return Problem(tuple(tasks), ((),) * len(tasks), storages=(*large, Storage(7, INPUT, (0,))))


@settings(max_examples=60, deadline=None)
@given(_SEEDS, st.integers(1, 120))
def test_orders_are_legal(seed: int, tasks: int) -> None:
    problem = random_problem(seed, tasks)
    for order in orders(tables(problem)):
        problem.check_order(order)


def test_what_is_made_is_used_at_once() -> None:
    problem = chains(9)
    t = tables(problem)
    assert peak_bytes(problem) == 900
    for order in (greedy(t), large_needs_first(t)):
        assert peak_bytes(problem, order) <= 107
    assert least_peak(t) <= 107


@settings(max_examples=60, deadline=None)
@given(_SEEDS, st.integers(1, 80))
def test_the_least_peak_can_be_planned(seed: int, tasks: int) -> None:
    """A budget is relative to it, so "0" must always be possible."""
    problem = random_problem(seed, tasks)
    least = least_peak(tables(problem))
    assert least <= peak_bytes(problem)
    found = plan(problem, least)
    assert found.feasible and found.peak_bytes <= least
    below = plan(problem, least - 1)
    assert below.feasible == (below.peak_bytes < least) and (below.feasible or below.method == "input")
