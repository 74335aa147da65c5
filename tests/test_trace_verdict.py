"""Every collective has a verdict whose exposed times add up, whose reason is the binding one, whose setting helps."""

from __future__ import annotations

import dataclasses
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.report import CollectiveReport, Reason
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Kind, Lane, Problem, Storage, Task
from inductor_passes.schedule.simulate import simulate
from inductor_passes.settings.budget import MemoryBudget
from inductor_passes.trace.verdict import explain
from inductor_passes.trace.whatif import latencies, scale_compute, scale_links
from tests.support.trace_samples import fsdp_problem


def start(name: str, ns: int, *, lane: int = 0, size: int = 0, fence: bool = False) -> Task:
    return Task(name, Kind.START, ns, lane, -1, 0, size, name, fence=fence)


def wait(name: str, number: int, *, lane: int = 0) -> Task:
    return Task(name, Kind.WAIT, 0, lane, number, 0, 0, name)


def mm(name: str, ns: int) -> Task:
    return Task(name, Kind.COMPUTE, ns, label=name)


def program(
    *rows: tuple[Task, tuple[int, ...]], lanes: tuple[Lane, ...] = (Lane("dp"),), storages: tuple[Storage, ...] = ()
) -> Problem:
    return Problem(tuple(t for t, _ in rows), tuple(p for _, p in rows), lanes, storages)


def verdicts(
    problem: Problem, budget: int | None = None, order: tuple[int, ...] | None = None, what_if: bool = True
) -> dict[str, CollectiveReport]:
    chosen = order if order is not None else problem.input_order
    reports = explain(problem, chosen, simulate(problem), simulate(problem, chosen), budget, what_if=what_if)
    assert_adds_up(problem, chosen, reports)
    return {report.label: report for report in reports}


def assert_adds_up(problem: Problem, order: tuple[int, ...], reports: list[CollectiveReport]) -> None:
    timeline = simulate(problem, order)
    busy = sum(t.issue_ns if t.kind is not Kind.COMPUTE else t.duration_ns for t in problem.tasks)
    assert sum(r.exposed_ns for r in reports) == timeline.makespan_ns - busy
    for report in reports:
        assert report.hidden_ns >= 0 and report.exposed_ns >= 0
        assert report.hidden_ns + report.exposed_ns == report.duration_ns
        assert (report.reason is Reason.HIDDEN) == (report.exposed_ns == 0)
    assert len(reports) == sum(t.kind is Kind.START for t in problem.tasks)


def test_hidden_collective() -> None:
    problem = program((start("AG0", 50), ()), (mm("mm0", 100), ()), (wait("W0", 0), (0,)), (mm("mm1", 10), (2,)))
    assert verdicts(problem)["AG0"].reason is Reason.HIDDEN


def test_first_communication_is_head_and_last_is_tail() -> None:
    problem = program(
        (start("AG0", 100), ()),
        (wait("W0", 0), (0,)),
        (mm("mm", 50), (1,)),
        (start("RS1", 70), (2,)),
        (wait("W1", 3), (3,)),
    )
    found = verdicts(problem)
    assert found["AG0"].reason is Reason.HEAD and found["AG0"].gain_ns == 100
    assert found["RS1"].reason is Reason.TAIL and found["RS1"].exposed_ns == 70


def test_collective_between_dependent_kernels_is_a_data_dependency() -> None:
    problem = program(
        (mm("mm0", 100), ()), (start("AR0", 40), (0,)), (wait("W0", 1), (1,)), (mm("mm1", 100), (2,))
    )
    found = verdicts(problem)["AR0"]
    assert found.reason is Reason.DATA_DEPENDENCY and found.gain_ns == 40


def test_independent_work_that_is_used_up() -> None:
    # mm1 runs beside AR0 already; nothing else is independent of it.
    problem = program(
        (mm("mm0", 100), ()),
        (start("AR0", 90), (0,)),
        (mm("mm1", 50), (0,)),
        (wait("W0", 1), (1,)),
        (mm("mm2", 100), (2, 3)),
    )
    found = verdicts(problem)["AR0"]
    assert (found.reason, found.exposed_ns) == (Reason.NO_INDEPENDENT_COMPUTE, 40)


def test_queue_charges_the_transfer_that_fills_the_stall() -> None:
    # The wait for AG1 stands still for the rest of AG0 (60) and for all of AG1 (100).
    problem = program(
        (start("AG0", 100), ()),
        (start("AG1", 100), ()),
        (mm("mm0", 40), ()),
        (wait("W1", 1), (1,)),
        (mm("mm1", 10), (3,)),
        (wait("W0", 0), (0,)),
        (mm("mm2", 10), (5,)),
    )
    found = verdicts(problem)
    assert (found["AG0"].exposed_ns, found["AG0"].hidden_ns) == (60, 40)
    assert found["AG1"].exposed_ns == 100 and found["AG1"].reason is Reason.LANE_BUSY


def test_lanes_that_share_a_link_queue_for_each_other() -> None:
    problem = program(
        (start("AG0", 100), ()),
        (start("AG1", 100, lane=1), ()),
        (wait("W0", 0), (0,)),
        (mm("mm0", 20), (2,)),
        (wait("W1", 1, lane=1), (1,)),
        (mm("mm1", 10), (4,)),
        lanes=(Lane("dp", "net"), Lane("tp", "net")),
    )
    found = verdicts(problem)["AG1"]
    assert (found.reason, found.exposed_ns) == (Reason.LANE_BUSY, 80)
    assert "AG0" in found.detail


def test_small_collectives_behind_each_other_are_latency_bound() -> None:
    # 100 ns of latency, 1 ns per byte: seen from a small and a large one of the same kind.
    rows: list[tuple[Task, tuple[int, ...]]] = [(start(f"AG{k}", 110, size=10), ()) for k in range(4)]
    rows.append((start("AG4", 1100, size=1000), ()))
    rows += [(wait(f"W{k}", k), (k,)) for k in range(5)]
    rows.append((mm("mm", 10), tuple(range(5, 10))))
    problem = program(*rows)
    assert latencies(problem)[:5] == [100] * 5
    found = verdicts(problem)
    assert found["AG2"].reason is Reason.LATENCY_BOUND and "91%" in found["AG2"].detail
    assert found["AG4"].reason is Reason.LANE_BUSY
    # Without the latency of the four small ones.
    assert found["AG2"].gain_ns == 400
    assert found["AG2"].setting == "merge small collectives into buckets"
    capped = verdicts(problem, simulate(problem).peak_bytes)["AG2"]
    assert capped.setting.startswith(found["AG2"].setting) and "a larger memory_budget" in capped.setting


def test_fence_binds_what_it_holds_back() -> None:
    problem = program(
        (mm("mm0", 100), ()),
        (dataclasses.replace(mm("sync", 10), fence=True), (0,)),
        (start("AG0", 60), ()),
        (wait("W0", 2), (2,)),
        (mm("mm1", 10), (3,)),
    )
    found = verdicts(problem)["AG0"]
    assert found.reason is Reason.FENCE and "sync" in found.detail
    assert found.gain_ns == 60


def test_memory_budget_binds_and_its_setting_gives_the_gain() -> None:
    problem = fsdp_problem(8)
    before = simulate(problem)
    answer = plan(problem, before.peak_bytes)
    reports = explain(problem, answer.order, before, simulate(problem, answer.order), before.peak_bytes)
    bound = [r for r in reports if r.reason is Reason.MEMORY_BUDGET]
    assert bound, [r.reason for r in reports]
    name, value = bound[0].setting.split("=")
    assert name == "memory_budget"
    limit = MemoryBudget.parse(value.strip('"')).limit_bytes(before.peak_bytes)
    assert answer.makespan_ns - plan(problem, limit).makespan_ns == bound[0].gain_ns > 0


def test_the_budget_that_is_set_is_not_suggested() -> None:
    """Found: a report advised the memory_budget that was on. Its cap was lower, for the rows of generated kernels."""
    problem = fsdp_problem(8)
    before = simulate(problem)
    answer = plan(problem, before.peak_bytes)
    after = simulate(problem, answer.order)
    reports = explain(problem, answer.order, before, after, before.peak_bytes)
    (without,) = {r.setting for r in reports if r.reason is Reason.MEMORY_BUDGET}
    has = MemoryBudget.parse(without.split("=")[1].strip('"'))
    reports = explain(problem, answer.order, before, after, before.peak_bytes, setting=has)
    (suggested,) = {r.setting for r in reports if r.reason is Reason.MEMORY_BUDGET}
    found = MemoryBudget.parse(suggested.split("=")[1].strip('"'))
    assert found.unlimited or found.fraction > has.fraction  # type: ignore[operator]


def test_without_what_if_there_are_reasons_but_no_settings() -> None:
    problem = fsdp_problem(6)
    found = verdicts(problem, simulate(problem).peak_bytes, what_if=False)
    assert all(r.reason is not Reason.HIDDEN and r.setting == "" and r.gain_ns == 0 for r in found.values())


def test_before_and_after_are_told_apart() -> None:
    problem = fsdp_problem(8)
    answer = plan(problem, None)
    found = explain(problem, answer.order, simulate(problem), simulate(problem, answer.order), None)
    assert [r.exposed_before_ns for r in found] == [100_000] * 8
    assert sum(r.exposed_ns for r in found) < sum(r.exposed_before_ns for r in found)


def test_collective_that_nobody_waits_for_is_exposed_at_the_end() -> None:
    problem = program((mm("mm0", 10), ()), (start("AR0", 100), (0,)), (mm("mm1", 30), ()))
    found = verdicts(problem)["AR0"]
    assert (found.exposed_ns, found.hidden_ns) == (70, 30)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, tuple[int, ...]]:
    """A random program and a random legal order of it."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    lanes = tuple(Lane(f"l{k}", rng.choice(["", "net"])) for k in range(rng.randint(1, 3)))
    rows: list[tuple[Task, tuple[int, ...]]] = []
    unwaited: list[int] = []
    for i in range(draw(st.integers(1, 25))):
        needs = tuple(sorted(rng.sample(range(i), min(i, rng.choice([0, 0, 1, 2])))))
        kind = rng.random()
        if kind < 0.35:
            lane = rng.randrange(len(lanes))
            ns, issue, size = rng.randrange(90), rng.randrange(3), rng.randrange(99)
            task = Task(f"s{i}", Kind.START, ns, lane, -1, issue, size, f"AG{i}")
            unwaited.append(i)
        elif kind < 0.65 and unwaited:
            number = unwaited.pop(rng.randrange(len(unwaited)))
            task = Task(f"w{i}", Kind.WAIT, 0, rows[number][0].lane, number, rng.randrange(3))
        else:
            task = Task(f"c{i}", Kind.COMPUTE, rng.randrange(0, 60), fence=rng.random() < 0.1)
        rows.append((task, needs))
    storages = tuple(
        Storage(rng.randrange(100), i, tuple(j for j in range(i + 1, len(rows)) if i in rows[j][1]))
        for i in range(len(rows))
    )
    problem = program(*rows, lanes=lanes, storages=storages)
    edges, done, order = problem.edges(), set(), []
    while len(order) < len(rows):
        ready = [i for i in range(len(rows)) if i not in done and all(p in done for p in edges[i])]
        order.append(rng.choice(ready))
        done.add(order[-1])
    return problem, tuple(order)


@settings(max_examples=150, deadline=None)
@given(problems(), st.booleans())
def test_exposed_times_add_up_for_any_legal_order(case: tuple[Problem, tuple[int, ...]], tight: bool) -> None:
    problem, order = case
    timeline = simulate(problem, order)
    reports = explain(
        problem, order, simulate(problem), timeline, timeline.peak_bytes if tight else None, what_if=False
    )
    assert_adds_up(problem, order, reports)


def test_scaling_links_and_compute() -> None:
    problem = fsdp_problem(3)
    faster = scale_links(problem, bandwidth=Fraction(2))
    assert [t.duration_ns for t in faster.tasks if t.kind is Kind.START] == [50_000] * 3
    later = scale_links(problem, added_ns=7)
    assert [t.duration_ns for t in later.tasks if t.kind is Kind.START] == [100_007] * 3
    slower = scale_compute(problem, Fraction("1/2"))
    assert [t.duration_ns for t in slower.tasks if t.kind is Kind.COMPUTE] == [160_000] * 3
    with pytest.raises(ValueError, match="bandwidth scale 0"):
        scale_links(problem, bandwidth=Fraction(0))
    with pytest.raises(ValueError, match="compute scale"):
        scale_compute(problem, Fraction(-1))

