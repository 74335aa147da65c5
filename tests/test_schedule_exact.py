"""The exact window against brute force, and that it only ever improves the heuristic's answer."""

from __future__ import annotations

import sys

import pytest

from inductor_passes.schedule.exact import ExactUnavailableError, solve_window
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.simulate import simulate
from inductor_passes.schedule.tables import tables
from inductor_passes.schedule.window import Head, Place, Tail
from tests.support.schedule_graphs import best_makespan, fsdp_backward, hsdp_backward, random_problem


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("slack", [None, 0])
def test_whole_problem_reaches_the_optimum(seed: int, slack: int | None) -> None:
    pytest.importorskip("ortools")
    problem = random_problem(seed, 8, fences=seed % 4 == 0)
    t = tables(problem)
    before = simulate(problem)
    budget = None if slack is None else before.peak_bytes + slack
    head = Head(0, [0] * t.machines, [-1] * t.n, t.live0)
    unread = [len(r) for r in t.readers]
    limit = (before.makespan_ns, before.makespan_ns + 1)
    answer = solve_window(t, range(t.n), Place(head, Tail.at_end(t), unread, limit), budget)
    assert answer.optimal
    problem.check_order(answer.tasks)
    found = simulate(problem, answer.tasks)
    assert found.makespan_ns == answer.value[0] == best_makespan(problem, budget)
    assert budget is None or found.peak_bytes <= budget


def test_windows_improve_a_plan_under_a_cap() -> None:
    pytest.importorskip("ortools")
    gained = 0
    for problem in (fsdp_backward(4, parts=1), hsdp_backward(3)):
        budget = peak_bytes(problem)
        without = plan(problem, budget, effort=0)
        found = plan(problem, budget, effort=0, exact_window=True)
        problem.check_order(found.order)
        assert found.peak_bytes <= budget
        assert found.lower_bound_ns <= found.makespan_ns <= without.makespan_ns
        assert plan(problem, budget, effort=0, exact_window=True) == found
        gained += found.makespan_ns < without.makespan_ns
    assert gained


def test_the_heuristic_alone_is_optimal_on_small_training_steps() -> None:
    """Whole programs of 25 to 37 tasks within the input's peak, proven by the solver."""
    pytest.importorskip("ortools")
    for problem in (fsdp_backward(4, parts=1), fsdp_backward(4, parts=2), hsdp_backward(3)):
        t = tables(problem)
        budget = peak_bytes(problem)
        found = plan(problem, budget)
        head = Head(0, [0] * t.machines, [-1] * t.n, t.live0)
        unread = [len(r) for r in t.readers]
        limit = (found.makespan_ns, found.makespan_ns + 1)
        answer = solve_window(t, found.order, Place(head, Tail.at_end(t), unread, limit), budget)
        assert answer.optimal
        assert answer.value[0] == found.makespan_ns


def test_missing_solver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    problem = fsdp_backward(4)
    with pytest.raises(ExactUnavailableError, match=r"inductor-passes\[exact\]"):
        plan(problem, peak_bytes(problem), exact_window=True)
    assert plan(problem, peak_bytes(problem)).feasible
