"""Orders are judged by what they cost when durations are not as estimated, and get slack against that."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from expecttest import assert_expected_inline
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inductor_passes.schedule.guarded import Timing, Trial, just_in_time
from inductor_passes.schedule.list_schedule import list_schedule
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Kind, Lane, Problem, Storage, Task
from inductor_passes.schedule.robust import disturbed, makespans, with_slack
from inductor_passes.schedule.simulate import simulate
from inductor_passes.schedule.tables import tables
from tests.support.schedule_graphs import fsdp_backward, fsdp_forward, random_problem, training_graphs
from tests.test_schedule_plan import labels


def at_random(problem: Problem, spread: float, seeds: range) -> Iterator[Problem]:
    """The problem with every duration off by up to ``spread``: other draws than those that the planner knows."""
    for seed in seeds:
        numbers = random.Random(seed)
        tasks = (
            replace(t, duration_ns=round(t.duration_ns * numbers.uniform(1 - spread, 1 + spread)))
            for t in problem.tasks
        )
        yield replace(problem, tasks=tuple(tasks))


def mean_step(problem: Problem, order: Sequence[int]) -> float:
    steps = [simulate(one, order).makespan_ns for one in at_random(problem, 0.4, range(40))]
    return sum(steps) / len(steps)


def just_in_time_order(problem: Problem) -> list[int]:
    """As fast as can be by the estimates, every gather at the last moment."""
    t = tables(problem)
    found = plan(problem, None)
    return list_schedule(t, just_in_time(t, Trial("", found.order, found.makespan_ns, found.peak_bytes), Timing()))


@pytest.mark.parametrize("gather_ns", [400, 800, 1600])
@pytest.mark.parametrize("build", [fsdp_forward, fsdp_backward])
def test_slack_pays_under_draws_that_the_planner_does_not_know(build, gather_ns: int) -> None:  # type: ignore[no-untyped-def]
    problem = build(8, gather_ns=gather_ns)
    late = just_in_time_order(problem)
    found = with_slack(tables(problem), late, None)
    assert found.mean_ns < found.plain_ns
    assert mean_step(problem, found.order) < mean_step(problem, late)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 60), st.sampled_from([None, 0, 5, 40]))
def test_slack_costs_no_time_and_keeps_to_the_cap(seed: int, tasks: int, above: int | None) -> None:
    problem = random_problem(seed, tasks, fences=seed % 3 == 0)
    t, given_order = tables(problem), problem.input_order
    cap = None if above is None else peak_bytes(problem) * (100 + above) // 100
    found = with_slack(t, given_order, cap)
    problem.check_order(found.order)
    after = simulate(problem, found.order)
    assert after.makespan_ns <= simulate(problem).makespan_ns
    assert cap is None or after.peak_bytes <= cap
    assert found.mean_ns == disturbed(t, found.order).mean_ns <= found.plain_ns == disturbed(t, given_order).mean_ns


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 40))
@example(14447, 37)
def test_more_memory_is_never_slower_under_disturbances(seed: int, tasks: int) -> None:
    """Of one order: what a smaller cap allows, a larger one does too."""
    problem = random_problem(seed, tasks)
    t, peak = tables(problem), peak_bytes(problem)
    means = [with_slack(t, problem.input_order, peak + peak * above // 100).mean_ns for above in (0, 10, 50, 200)]
    assert all(later <= earlier for earlier, later in pairwise(means))


def test_a_plan_is_no_worse_under_disturbances_than_without_slack() -> None:
    for problem in training_graphs(6):
        t, peak = tables(problem), peak_bytes(problem)
        for cap in (peak, peak * 5 // 4, None):
            found = plan(problem, cap)
            assert found.makespan_ns <= found.input_makespan_ns
            assert disturbed(t, found.order).mean_ns <= with_slack(t, found.order, cap).plain_ns
            if cap is None:
                assert mean_step(problem, found.order) <= 1.001 * mean_step(problem, just_in_time_order(problem))


def test_schedule_with_slack() -> None:
    problem = fsdp_forward(4, parts=2)
    late = just_in_time_order(problem)
    assert_expected_inline(labels(problem, late), """\
AG0 WAG0 AG1 mm mm WAG1 AG2 mm mm WAG2 AG3 mm mm WAG3 mm mm loss
""")
    assert_expected_inline(labels(problem, with_slack(tables(problem), late, None).order), """\
AG0 AG1 WAG0 AG2 mm mm WAG1 mm mm AG3 WAG2 mm mm WAG3 mm mm loss
""")


def two_streams(late_is_worth: int) -> Problem:
    """Input ``C AG W D`` with compute before the gather that needs nothing of it."""
    tasks = (
        Task("c", Kind.COMPUTE, 100),
        Task("ag", Kind.START, late_is_worth, lane=0),
        Task("d", Kind.COMPUTE, 100),
        Task("w", Kind.WAIT, lane=0, start=1),
        Task("e", Kind.COMPUTE, 100),
    )
    return Problem(tasks, ((), (), (0,), (1,), (2, 3)), (Lane("g"),), (Storage(8, 1, (3, 4)),))


def test_the_input_stays_unless_it_is_fragile() -> None:
    """By the estimates nothing is gained. A gather as long as what hides it loses when anything is late."""
    assert plan(two_streams(20), None).order == (0, 1, 2, 3, 4)
    fragile = two_streams(100)
    found = plan(fragile, None)
    assert found.makespan_ns == found.input_makespan_ns == 300
    assert found.method == "input/slack" and found.order[0] == 1
    assert disturbed(tables(fragile), found.order).mean_ns < disturbed(tables(fragile), range(5)).mean_ns


def test_disturbances_are_the_same_everywhere() -> None:
    problem = fsdp_backward(2, gather_ns=500)
    assert makespans(tables(problem), problem.input_order) == [
        *(5286, 5805, 7761, 7245, 6336),
        *(7206, 6261, 5811, 6937, 6937),
    ]


def test_numbers_that_fit_into_no_machine_word() -> None:
    problem = fsdp_forward(3, gather_ns=1 << 62)
    found = plan(problem, None)
    assert found.makespan_ns >= 3 << 62 and found.disturbed_ns > 0


def test_nothing_to_disturb() -> None:
    empty = Problem((), ())
    assert disturbed(tables(empty), ()).mean_ns == 0
    assert plan(empty, None).order == ()
    alone = Problem((Task("a", Kind.COMPUTE, 10),), ((),))
    assert plan(alone, None).method == "input"
