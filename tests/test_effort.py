"""The setting ``effort``: a higher level is never worse, reaches both planners, and says what it needs."""

from __future__ import annotations

import importlib.util
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inductor_passes import ConfigError, PassConfig
from inductor_passes.engine import identity
from inductor_passes.engine.passes import passes_of
from inductor_passes.records.words import Effort
from inductor_passes.reorder import pass_ as reorder_pass
from inductor_passes.reorder.pass_ import ReorderPass
from inductor_passes.replay import ordering
from inductor_passes.rewriting.contract import Cap
from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.effort import plan_with_effort
from inductor_passes.schedule.least_memory import least_peak
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.renumber import renumbered
from inductor_passes.schedule.robust import disturbed
from inductor_passes.schedule.simulate import simulate
from inductor_passes.schedule.tables import tables
from tests.support.schedule_graphs import best_makespan, fsdp_backward, random_problem

LEVELS: tuple[Effort, ...] = get_args(Effort)
HAS_SOLVER = importlib.util.find_spec("ortools") is not None


def value(problem: Problem, found: Plan) -> tuple[bool, int, int, int]:
    """Time, then time under disturbances, then memory: memory is spent where that helps either."""
    problem.check_order(found.order)
    timeline = simulate(problem, found.order)
    assert (timeline.makespan_ns, timeline.peak_bytes) == (found.makespan_ns, found.peak_bytes)
    mean_ns = disturbed(tables(problem), found.order).mean_ns
    assert mean_ns == found.disturbed_ns
    return not found.feasible, found.makespan_ns, mean_ns, found.peak_bytes


@given(seed=st.integers(0, 10_000), slack=st.sampled_from([None, 0, 64]))
@settings(max_examples=25, deadline=None)
@example(seed=553, slack=None)
def test_high_is_never_worse(seed: int, slack: int | None) -> None:
    problem = random_problem(seed, 14, fences=seed % 4 == 0)
    budget = None if slack is None else peak_bytes(problem) + slack
    normal = plan_with_effort(problem, budget, "normal")
    assert value(problem, normal) <= value(problem, plan(problem, budget))
    assert value(problem, plan_with_effort(problem, budget, "high")) <= value(problem, normal)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_a_problem_that_comes_in_another_order_is_the_same_problem(seed: int) -> None:
    problem = random_problem(seed, 14, fences=seed % 4 == 0)
    first, second = (plan(problem, None).order for _ in range(2))
    assert first == second
    again = renumbered(problem, first)
    before, after = simulate(problem, first), simulate(again)
    assert (before.makespan_ns, before.peak_bytes) == (after.makespan_ns, after.peak_bytes)
    assert [t.name for t in again.tasks] == [problem.tasks[i].name for i in first]
    back = [0] * len(first)
    for k, i in enumerate(first):
        back[i] = k
    assert renumbered(again, back) == problem
    assert lower_bound(again) <= before.makespan_ns


def test_an_order_that_was_found_is_where_the_search_goes_on_from() -> None:
    """Alone a search ends 1 to 4% above what is found from its own result."""
    gained = 0
    for seed in range(6):
        problem = random_problem(seed, 200)
        cap = least_peak(tables(problem))
        alone, found = plan(problem, cap), plan_with_effort(problem, cap, "normal")
        value(problem, found)
        assert found.makespan_ns <= alone.makespan_ns and found.peak_bytes <= cap
        assert (found.input_makespan_ns, found.input_peak_bytes) == (alone.input_makespan_ns, alone.input_peak_bytes)
        gained += found.makespan_ns < alone.makespan_ns
    assert gained


@pytest.mark.parametrize("seed", range(8))
def test_a_larger_cap_is_no_slower_on_large_graphs(seed: int) -> None:
    problem = random_problem(seed, 700)
    needed = least_peak(tables(problem))
    caps = [needed * (100 + percent) // 100 for percent in (0, 2, 5, 10, 25)]
    alone = [plan(problem, cap) for cap in caps]
    for position, cap in enumerate(caps):
        found = plan_with_effort(problem, cap, "normal", smaller=caps[:position])
        value(problem, found)
        assert found.budget_bytes == cap and found.peak_bytes <= cap
        # Nothing else is tried that close to the bound.
        near = found.lower_bound_ns * 1.005
        assert found.makespan_ns <= max(near, min(one.makespan_ns for one in alone[: position + 1]))
        assert found.lower_bound_ns <= found.makespan_ns


@pytest.mark.skipif(not HAS_SOLVER, reason="needs OR-Tools")
@pytest.mark.parametrize("seed", range(6))
def test_exact_is_never_worse_and_finds_the_optimum_of_small_graphs(seed: int) -> None:
    problem = random_problem(seed, 8)
    budget = peak_bytes(problem)
    levels = [plan_with_effort(problem, budget, level) for level in LEVELS]
    assert [value(problem, p) for p in levels] == sorted((value(problem, p) for p in levels), reverse=True)
    assert levels[-1].makespan_ns == best_makespan(problem, budget)


@pytest.mark.skipif(not HAS_SOLVER, reason="needs OR-Tools")
def test_exact_improves_a_backward_under_a_cap() -> None:
    problem = fsdp_backward(4, parts=1)
    budget = peak_bytes(problem)
    levels = [plan_with_effort(problem, budget, level) for level in LEVELS]
    assert levels[2].makespan_ns <= levels[1].makespan_ns <= levels[0].makespan_ns


def test_settings_name_the_levels() -> None:
    assert PassConfig().effort == "normal"
    with pytest.raises(ConfigError, match=r"effort='extreme' is not allowed; expected \"normal\" or \"high\" or"):
        PassConfig(effort="extreme")  # type: ignore[arg-type]


def test_exact_without_the_solver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ortools" else found(name, *a))
    with pytest.raises(ConfigError, match=r'OR-Tools, which is not installed: pip install "inductor-passes\[exact\]"'):
        PassConfig(effort="exact")
    assert PassConfig(effort="high").effort == "high"


def test_the_setting_reaches_the_graph_pass() -> None:
    (found,) = [p for p in passes_of(PassConfig(effort="high")) if isinstance(p, ReorderPass)]
    assert found.effort == "high"


class _Facts:
    """What ``ReorderPass`` asks about a graph before it plans."""

    limit_bytes = None
    solved = None
    cap = Cap()


def test_both_planners_are_asked_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def note(problem: Problem, budget: int | None, effort: Effort, **kwargs: Any) -> Plan:
        asked.append(effort)
        return plan_with_effort(problem, budget, effort, **kwargs)

    problem = random_problem(1, 8)
    monkeypatch.setattr(reorder_pass, "plan_with_effort", note)
    ReorderPass(effort="high")._plan(_Facts(), problem)  # type: ignore[arg-type]
    monkeypatch.setattr(ordering, "plan_with_effort", note)
    built = type("Built", (), {"problem": problem, "nodes": [], "collectives": {}, "batched": ()})()
    monkeypatch.setattr(ordering, "kernel_names", lambda nodes: [])
    ordering.order(built, simulate(problem), lambda least: None, None, "high")
    assert asked == ["high", "high"]


@pytest.mark.skipif(not HAS_SOLVER, reason="needs OR-Tools")
def test_the_solvers_version_is_in_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = identity.load_profile(PassConfig())
    keys = set()
    for version in ("1", "2"):
        monkeypatch.setattr(identity, "version", lambda name, v=version: v)
        keys.add(identity.cache_key(PassConfig(effort="exact"), profile))
        keys.add(identity.cache_key(PassConfig(effort="high"), profile))
    assert len(keys) == 3
