"""Merging collectives in a problem, and choosing which."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.schedule.memory import peak_bytes, profile
from inductor_passes.schedule.merge import Bucket, merge
from inductor_passes.schedule.partition import Costs, Limits, Member, Window, choose_partition, partition, windows
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import INPUT, Kind, Lane, Problem, ProblemError
from inductor_passes.schedule.simulate import simulate
from tests.support.schedule_graphs import Builder, fsdp_backward, many_small_forward, random_problem, training_graphs


def members_of(problem: Problem) -> list[Member]:
    sent = {i: 0 for i, t in enumerate(problem.tasks) if t.kind is Kind.START}
    received = dict(sent)
    for s in problem.storages:
        if s.producer in received:
            received[s.producer] += s.size_bytes
        for r in s.readers:
            if r in sent:
                sent[r] += s.size_bytes
    return [Member(i, sent[i], received[i], problem.tasks[i].label.rstrip("0123456789")) for i in sent]


def two_gathers(**lane: bool) -> Problem:
    b = Builder("two", lanes=(Lane("x", **lane),))
    a, c = b.input(3, pinned=False), b.input(5, pinned=False)
    x = b.compute("f", 7, [b.collective("AG0", 10, [a], 12)], 2)
    b.compute("g", 7, [x, b.collective("AG1", 10, [c], 20)], 2, pinned=True)
    return b.build()


def test_packed_bucket() -> None:
    """Inputs die at the packing, the message at the wait, the received message at the unpacking."""
    problem = two_gathers()
    merged = merge(problem, [Bucket((0, 3), 15, 1, pack_ns=2, unpack_ns=(2, 2), sent_bytes=8, received_bytes=32)])
    assert merged.schedule_text() == "pack AG0+AG1 W(AG0+AG1) unpack unpack f g"
    assert profile(merged) == [8 + 8, 8 + 32, 8 + 32, 32 + 12, 32 + 32, 32 + 2, 2 + 20 + 2]
    assert simulate(merged).makespan_ns == 2 + 1 + 15 + 4 + 7 + 7


def test_bucket_without_copies() -> None:
    """Received in place, each output dies with its own last reader; as views of one buffer they die together."""
    problem = two_gathers()
    own = merge(problem, [Bucket((0, 3), 15)])
    assert own.schedule_text() == "AG0+AG1 W(AG0+AG1) f g"
    assert profile(own) == [8 + 32, 8 + 32, 32 + 2, 2 + 20 + 2]
    views = merge(problem, [Bucket((0, 3), 15, shared_output=True)])
    assert profile(views) == [8 + 32, 8 + 32, 32 + 2, 2 + 32 + 2]


@pytest.mark.parametrize("pack_ns", [None, 3])
def test_neighbours_on_a_fixed_lane_merge(pack_ns: int | None) -> None:
    merged = merge(two_gathers(fixed_order=True), [Bucket((0, 3), 15, pack_ns=pack_ns)])
    assert sum(t.kind is Kind.START for t in merged.tasks) == 1


def test_refusals() -> None:
    b = Builder("chain", lanes=(Lane("x"), Lane("y")))
    first = b.collective("AR0", 5, [b.input(1)], 1)
    mid = b.compute("f", 5, [first], 1)
    second = b.collective("AR1", 5, [mid], 1)
    other = b.collective("AG2", 5, [b.input(1)], 1, lane=1)
    third = b.collective("AR3", 5, [b.input(1)], 1)
    b.compute("g", 5, [second, other, third], 1, pinned=True)
    problem = b.build()
    with pytest.raises(ProblemError, match="depend on each other"):
        merge(problem, [Bucket((0, 3), 9)])
    with pytest.raises(ProblemError, match="different lanes"):
        merge(problem, [Bucket((0, 5), 9)])
    with pytest.raises(ProblemError, match="there twice"):
        merge(problem, [Bucket((0, 7), 9), Bucket((3, 7), 9)])
    with pytest.raises(ProblemError, match="two members or more"):
        merge(problem, [Bucket((0,), 9)])
    with pytest.raises(ProblemError, match="not a START"):
        merge(problem, [Bucket((0, 1), 9)])
    assert len(merge(problem, [Bucket((3, 7), 9)])) == len(problem) - 2


def test_buckets_that_depend_on_each_other_crosswise_are_refused() -> None:
    b = Builder("cross")
    a, c = (b.compute("f", 1, [b.collective(f"AG{k}", 5, [b.input(1)], 1)], 1) for k in range(2))
    b.collective("RS0", 5, [a], 1, pinned=True)
    b.collective("RS1", 5, [c], 1, pinned=True)
    problem = b.build()
    starts = [i for i, t in enumerate(problem.tasks) if t.kind is Kind.START]
    gather0, gather1, scatter0, scatter1 = starts
    assert merge(problem, [Bucket((gather0, gather1), 7), Bucket((scatter0, scatter1), 7)])
    assert merge(problem, [Bucket((gather0, scatter1), 7)])
    with pytest.raises(ProblemError, match="depend on each other"):
        merge(problem, [Bucket((gather0, scatter1), 7), Bucket((gather1, scatter0), 7)])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 2]), st.sampled_from([None, 3]))
def test_a_pair_merges_exactly_when_independent(seed: int, pack: int | None, unpack: int | None) -> None:
    problem = random_problem(seed, 12, fences=seed % 3 == 0)
    n = len(problem)
    reach = [{i} for i in range(n)]
    for i, preds in enumerate(problem.edges()):
        for p in preds:
            reach[i] |= reach[p]
    starts = [i for i, t in enumerate(problem.tasks) if t.kind is Kind.START]
    for a, c in itertools.combinations(starts, 2):
        if problem.tasks[a].lane != problem.tasks[c].lane or problem.lanes[problem.tasks[a].lane].fixed_order:
            continue
        mine, other = ([s, *(w for w, t in enumerate(problem.tasks) if t.start == s)] for s in (a, c))
        dependent = any(x in reach[y] for x in mine for y in other) or any(x in reach[y] for x in other for y in mine)
        ends = [*mine, *other]
        fenced = any(t.fence and min(ends) <= i <= max(ends) for i, t in enumerate(problem.tasks))
        copies = None if unpack is None else (unpack, unpack)
        bucket = Bucket((a, c), 5, pack_ns=pack, unpack_ns=copies, sent_bytes=4, received_bytes=6)
        if dependent or fenced:
            with pytest.raises(ProblemError):
                merge(problem, [bucket])
            continue
        merged = merge(problem, [bucket])
        merged.check_order(merged.input_order)
        assert len(merged) == n - 2 + (pack is not None) + 2 * (unpack is not None)
        assert Problem.from_json(merged.to_json()) == merged
        kept = {t.name: i for i, t in enumerate(merged.tasks)}
        later = [{i} for i in range(len(merged))]
        for i, preds in enumerate(merged.edges()):
            for p in preds:
                later[i] |= later[p]
        for i, task in enumerate(problem.tasks):
            for p in reach[i]:
                if task.name in kept and problem.tasks[p].name in kept:
                    assert kept[problem.tasks[p].name] in later[kept[task.name]]
        waits = {s: {w for w, t in enumerate(problem.tasks) if t.start == s} for s in (a, c)}
        # What a member makes and only its waits read is what it sends: it is written to the message.
        sent = [
            s for s in problem.storages if s.readers and not s.pinned and {*s.readers} <= waits.get(s.producer, set())
        ]
        size = sum(s.size_bytes for s in problem.storages if pack is None or s not in sent)
        copies = (4 if pack is not None else 0) + (6 if unpack is not None else 0)
        assert sum(s.size_bytes for s in merged.storages) == size + copies
        assert plan(merged, peak_bytes(merged)).makespan_ns <= simulate(merged).makespan_ns


def cost_of(parts: list[list[Window]], costs: Costs) -> int:
    """The objective written out: one lane on a clock that stops while the program waits."""
    free = total = 0
    for part in parts:
        sent, received = sum(w.member.sent_bytes for w in part), sum(w.member.received_bytes for w in part)
        single = len(part) == 1
        duration = part[0].duration_ns if single else costs.transfer_ns(sent, received)
        total += 0 if single else costs.pack_ns(sent) + costs.unpack_ns(received)
        free = max(free, max(w.ready_ns for w in part)) + duration
        late = max(0, free - min(w.due_ns for w in part))
        total += late
        free -= late
    return total


@pytest.mark.parametrize("seed", range(150))
def test_dynamic_programme_equals_enumeration(seed: int) -> None:
    rng = random.Random(seed)
    costs = Costs(rng.randint(0, 30), rng.random(), launch_ns=rng.randint(0, 5), pack_ns_per_byte=rng.random() / 8)
    n = rng.randint(1, 9)
    dues = sorted(rng.randint(0, 150) for _ in range(n))
    ws = []
    for k, due in enumerate(dues):
        size = rng.randint(1, 40)
        # Ready before the first is due, so that no bucket is excluded as a possible dependency.
        ws.append(Window(Member(k, size, size), rng.randint(0, dues[0]), due, costs.transfer_ns(size, size)))
    optimum = min(
        cost_of([ws[a:c] for a, c in itertools.pairwise((0, *cuts, n))], costs)
        for k in range(n)
        for cuts in itertools.combinations(range(1, n), k)
    )
    parts = partition(ws, costs)
    assert [m.start for part in parts for m in part] == list(range(n))
    by_start = {w.member.start: w for w in ws}
    assert cost_of([[by_start[m.start] for m in part] for part in parts], costs) == optimum


def test_limits_hold() -> None:
    ws = [Window(Member(k, 10, 10), 0, 1000 * k, 50) for k in range(10)]
    costs = Costs(50, 0.0)
    assert max(map(len, partition(ws, costs, Limits(members=3)))) <= 3
    assert max(map(len, partition(ws, costs, Limits(size_bytes=40)))) <= 2


def test_windows_are_on_the_clock_of_compute_work() -> None:
    problem = two_gathers()
    found = windows(problem, problem.input_order, [Member(3, 5, 20), Member(0, 3, 12)])
    assert [(w.member.start, w.ready_ns, w.due_ns, w.duration_ns) for w in found] == [(0, 0, 0, 10), (3, 0, 7, 10)]


LATENCY = Costs(20, 0.125, launch_ns=2, pack_ns_per_byte=0.01, unpack_ns_per_byte=0.01)


def test_latency_bound_program_gains_a_third() -> None:
    problem = many_small_forward(12)
    budget = peak_bytes(problem) * 21 // 20
    choice = choose_partition(problem, members_of(problem), lambda key: LATENCY, budget)
    assert choice.plan.makespan_ns * 1.3 <= plan(problem, budget).makespan_ns
    assert choice.plan.peak_bytes <= budget
    assert choice.problem == merge(problem, choice.buckets)
    assert choice.plan.makespan_ns == min(makespan for _, makespan, _ in choice.tried)


@pytest.mark.parametrize("problem", training_graphs(6), ids=lambda p: p.name)
@pytest.mark.parametrize("room", [0, 400])
def test_never_slower_and_within_budget(problem: Problem, room: int) -> None:
    budget = peak_bytes(problem) + room
    costs = Costs(100, 3, launch_ns=20, pack_ns_per_byte=0.5, unpack_ns_per_byte=0.5)
    choice = choose_partition(problem, members_of(problem), lambda key: costs, budget)
    assert choice.plan.makespan_ns <= plan(problem, budget, effort=0).makespan_ns
    assert choice.plan.peak_bytes <= budget
    choice.problem.check_order(choice.plan.order)
    keys = {m.start: m.key for m in members_of(problem)}
    for bucket in choice.buckets:
        assert len({keys[s] for s in bucket.starts}) == 1


def test_expensive_copies_mean_no_buckets() -> None:
    problem = fsdp_backward(5)
    costs = Costs(1, 3.75, launch_ns=10_000)
    choice = choose_partition(problem, members_of(problem), lambda key: costs, None)
    assert (choice.buckets, choice.method, choice.problem) == ((), "none", problem)


def test_inputs_of_the_program_keep_their_place() -> None:
    problem = two_gathers()
    merged = merge(problem, [Bucket((0, 3), 15)])
    assert [s.size_bytes for s in merged.storages if s.producer == INPUT] == [3, 5]
