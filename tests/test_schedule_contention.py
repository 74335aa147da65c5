"""Kernels that a transfer slows down: what the simulator makes of them, in Python and compiled, and the bound."""

from __future__ import annotations

import dataclasses
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.schedule import native
from inductor_passes.schedule.bounds import any_order, lower_bound, under_contention, without_memory
from inductor_passes.schedule.memory import live_bytes
from inductor_passes.schedule.merge import Bucket, merge
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Kind, Lane, Problem, ProblemError, Task
from inductor_passes.schedule.robust import makespans
from inductor_passes.schedule.simulate import replay_time, simulate, timed, value
from inductor_passes.schedule.tables import Tables, tables
from tests.support.schedule_graphs import random_problem
from tests.test_schedule_simulate import random_order

_SEEDS = st.integers(0, 1 << 30)


def contended(problem: Problem, seed: int) -> Problem:
    """``problem`` in which about half of the collectives slow kernels down, some to a third of their speed."""
    rng = random.Random(seed)
    tasks = [
        dataclasses.replace(t, slowdown_percent=rng.choice((0, 1, 30, 100, 200))) if t.kind is Kind.START else t
        for t in problem.tasks
    ]
    return dataclasses.replace(problem, tasks=tuple(tasks))


def beside(transfer_ns: int, kernel_ns: int, percent: int) -> Problem:
    """A transfer, a kernel that does not need it, and the wait."""
    return Problem(
        tasks=(
            Task("s", Kind.START, transfer_ns, lane=0, slowdown_percent=percent),
            Task("k", Kind.COMPUTE, kernel_ns),
            Task("w", Kind.WAIT, lane=0, start=0),
        ),
        preds=((), (), (0,)),
        lanes=(Lane("x"),),
    )


def test_a_kernel_is_slowed_down_as_long_as_something_transfers() -> None:
    # 60 ns beside the transfer do the work of 40, and the rest is done at full speed.
    timeline = simulate(beside(60, 100, 50))
    assert (timeline.makespan_ns, timeline.contention_ns, timeline.compute_ns) == (120, 20, 100)
    assert timeline.exposed_ns == [0, 0, 0] and timeline.end_ns[1] - timeline.start_ns[1] == 120
    # A transfer that outlives the kernel.
    timeline = simulate(beside(500, 100, 50))
    assert (timeline.makespan_ns, timeline.contention_ns, timeline.exposed_ns[0]) == (500, 50, 350)


def test_of_two_transfers_at_a_time_the_larger_slowdown_counts() -> None:
    problem = Problem(
        tasks=(
            Task("a", Kind.START, 300, lane=0, slowdown_percent=100),
            Task("b", Kind.START, 100, lane=1, slowdown_percent=300),
            Task("k", Kind.COMPUTE, 200),
        ),
        preds=((), (), ()),
        lanes=(Lane("x"), Lane("y")),
    )
    # 100 ns at a quarter of the speed, 200 at a half, and 75 alone.
    assert simulate(problem).end_ns[2] == 375
    one_link = dataclasses.replace(problem, lanes=(Lane("x", "wire"), Lane("y", "wire")))
    # One after the other: 300 at a half, then 50 ns of work at a quarter would take 200, of which 100 are there.
    assert simulate(one_link).end_ns[2] == 300 + 100 + 25


def exactly(problem: Problem, order: list[int]) -> Fraction:
    """When the compute lane has done everything, worked out from the definition in rational numbers."""
    t = problem.tasks
    queue: list[tuple[Fraction, Fraction, int, str]] = []
    ended: dict[int, Fraction] = {}
    now = Fraction(0)
    for i in order:
        if t[i].kind is Kind.START:
            now += t[i].issue_ns
            lane = problem.lanes[t[i].lane]
            wire = f"link {lane.link}" if lane.link else f"lane {t[i].lane}"
            begin = max([now, *(end for _, end, _, other in queue if other == wire)])
            ended[i] = begin + t[i].duration_ns
            queue.append((begin, ended[i], t[i].slowdown_percent, wire))
        elif t[i].kind is Kind.WAIT:
            now = max(now, ended[t[i].start]) + t[i].issue_ns
        else:
            left = Fraction(t[i].duration_ns)
            edges = sorted({x for begin, end, _, _ in queue for x in (begin, end) if x > now})
            for edge in [*edges, None]:
                percent = max([p for begin, end, p, _ in queue if begin <= now < end], default=0)
                speed = Fraction(100, 100 + percent)
                if edge is None or left <= (edge - now) * speed:
                    now += left / speed
                    break
                left -= (edge - now) * speed
                now = edge
    return max([now, *ended.values()])


@settings(max_examples=150, deadline=None)
@given(_SEEDS, st.integers(3, 40))
def test_times_follow_from_the_definition(seed: int, tasks: int) -> None:
    problem = contended(random_problem(seed, tasks), seed)
    order = random_order(problem, seed)
    timeline = simulate(problem, order)
    exact = exactly(problem, order)
    # Whole ns: a kernel may end one later per transfer that begins or ends during it.
    assert exact <= timeline.makespan_ns <= exact + 3 * len(problem) ** 2
    assert timeline.makespan_ns == (
        timeline.compute_ns + timeline.issue_ns + timeline.total_exposed_ns + timeline.contention_ns
    )
    plain = replay_time(tables(problem), order)
    assert timeline.makespan_ns >= plain.makespan
    bare = dataclasses.replace(problem, tasks=tuple(dataclasses.replace(t, slowdown_percent=0) for t in problem.tasks))
    assert simulate(bare, order).makespan_ns == plain.makespan
    assert lower_bound(problem) <= timeline.makespan_ns


@pytest.mark.skipif(native._compiler() is None, reason="no C++ compiler")
@settings(max_examples=80, deadline=None)
@given(_SEEDS, st.integers(1, 120))
def test_the_compiled_core_gives_the_same_times(seed: int, tasks: int) -> None:
    problem = contended(random_problem(seed, tasks), seed)
    order = random_order(problem, seed)
    assert native.core() is not None
    ours, theirs = tables(problem), tables(Problem.from_json(problem.to_json()))
    object.__setattr__(ours, "flat", native._flatten(ours))
    object.__setattr__(theirs, "flat", False)
    assert isinstance(ours.flat, native.Flat)
    assert timed(ours, order) == timed(theirs, order)
    assert replay_time(ours, order) == replay_time(theirs, order)
    peak = max(live_bytes(theirs, order), default=theirs.live0)
    assert value(ours, order) == value(theirs, order) == (timed(theirs, order).makespan, peak)
    assert makespans(ours, order) == makespans(theirs, order)


def test_times_too_large_for_the_core_with_their_slowdown_are_left_to_python() -> None:
    problem = beside(1 << 57, 1 << 57, 200)
    assert native._flatten(tables(problem)) is False
    assert native._flatten(tables(beside(1 << 57, 1 << 57, 0))) is not False
    assert simulate(problem).contention_ns == (1 << 57) - (1 << 57) * 100 // 300


@settings(max_examples=60, deadline=None)
@given(_SEEDS, st.integers(3, 60))
def test_plans_know_it(seed: int, tasks: int) -> None:
    """Never slower than what came in, by the times that the report shows, and never below the bound."""
    problem = contended(random_problem(seed, tasks), seed)
    for cap in (None, value(tables(problem), range(len(problem)))[1]):
        found = plan(problem, cap)
        assert found.makespan_ns == simulate(problem, found.order).makespan_ns
        assert found.lower_bound_ns <= found.makespan_ns <= simulate(problem).makespan_ns
        assert found.lower_bound_ns >= under_contention(tables(problem))


def _all(t: Tables) -> tuple[int, int]:
    return without_memory(t), any_order(t)


def test_the_bound_knows_what_transfers_cost_in_any_order() -> None:
    # Whatever is done, 600 ns of transfer take 300 ns of the compute lane away: 1000 + 300.
    problem = beside(600, 1000, 100)
    assert _all(tables(problem)) == (1000, 1300)
    assert plan(problem, None).makespan_ns == 1300
    assert plan(problem, None).gap == 0.0


def test_merged_collectives_keep_it() -> None:
    tasks = (
        Task("a", Kind.START, 10, lane=0, slowdown_percent=40),
        Task("b", Kind.START, 10, lane=0, slowdown_percent=40),
        Task("k", Kind.COMPUTE, 100),
        Task("wa", Kind.WAIT, lane=0, start=0),
        Task("wb", Kind.WAIT, lane=0, start=1),
    )
    problem = Problem(tasks, ((), (), (), (0,), (1,)), (Lane("x"),))
    merged = merge(problem, [Bucket((0, 1), 15)])
    assert [t.slowdown_percent for t in merged.tasks if t.kind is Kind.START] == [40]


def test_it_travels_with_the_problem_and_counts_in_its_digest() -> None:
    problem = beside(60, 100, 50)
    assert Problem.from_json(problem.to_json()) == problem
    assert problem.digest() != beside(60, 100, 60).digest()
    plain = beside(60, 100, 0).to_json()
    assert plain.pop("slowdowns") == []
    assert Problem.from_json(plain) == beside(60, 100, 0), "files from before have none"


@pytest.mark.parametrize("task", [Task("s", Kind.START, 1, lane=0, slowdown_percent=-1),
                                  Task("k", Kind.COMPUTE, 1, slowdown_percent=5)])
def test_only_starts_slow_down(task: Task) -> None:
    with pytest.raises(ProblemError, match="slowdown_percent"):
        Problem((task,), ((),), (Lane("x"),))
