"""The simulator and the memory replay: hand-checked programs, and accounting that must hold for every legal order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.schedule.memory import Continuation, RangeMax, peak_bytes, profile
from inductor_passes.schedule.problem import INPUT, Kind, Lane, Problem, ProblemError, Storage, Task
from inductor_passes.schedule.simulate import simulate
from inductor_passes.schedule.tables import tables
from inductor_passes.trace.exposure import charge_stalls
from tests.support.schedule_graphs import Builder, fsdp_backward, random_problem


def random_order(problem: Problem, seed: int) -> list[int]:
    """A legal order, uniform over choices of the next ready task."""
    rng = random.Random(seed)
    preds = [set(e) for e in problem.edges()]
    order: list[int] = []
    while len(order) < len(problem):
        ready = [i for i in range(len(problem)) if i not in order and preds[i] <= set(order)]
        order.append(rng.choice(ready))
    return order


def two_gathers(link: str = "") -> Problem:
    """AG0 W0 a AG1 W1 b: gathers of 10 ns on two lanes, kernels of 6 ns."""
    b = Builder("two", lanes=(Lane("x", link), Lane("y", link)))
    shards = [b.input(1), b.input(1)]
    first = b.compute("a", 6, [b.collective("AG0", 10, [shards[0]], 4)], 2)
    b.compute("b", 6, [first, b.collective("AG1", 10, [shards[1]], 4, lane=1)], 2, pinned=True)
    return b.build()


def test_input_order_exposes_everything() -> None:
    problem = two_gathers()
    timeline = simulate(problem)
    assert timeline.makespan_ns == 32
    assert timeline.exposed_ns == [10, 0, 0, 10, 0, 0]
    assert timeline.hidden_ns == [0] * 6


def test_prefetch_hides_what_compute_covers() -> None:
    problem = two_gathers()
    order = [0, 3, 1, 2, 4, 5]
    timeline = simulate(problem, order)
    assert timeline.makespan_ns == 22
    assert timeline.exposed_ns[3] == 0 and timeline.hidden_ns[3] == 10
    assert timeline.peak_bytes == 2 + 4 + 4 + 2


def test_shared_link_serves_one_at_a_time() -> None:
    problem = two_gathers("nic")
    order = [0, 3, 1, 2, 4, 5]
    timeline = simulate(problem, order)
    assert timeline.lane_begin_ns[3] == 10
    assert timeline.makespan_ns == 26
    # The second queues behind the first, and what the compute lane waits for until then is the first one's.
    charges = charge_stalls(problem, order, timeline)
    assert charges.behind == [-1, -1, -1, 0, -1, -1]
    assert charges.exposed_ns == [10, 0, 0, 4, 0, 0]


def test_a_collective_that_nobody_waits_for_ends_the_program() -> None:
    problem = Problem(
        tasks=(Task("s", Kind.START, 9, lane=0, issue_ns=2), Task("k", Kind.COMPUTE, 4)),
        preds=((), ()),
        lanes=(Lane("x"),),
    )
    timeline = simulate(problem)
    assert (timeline.makespan_ns, timeline.exposed_ns) == (11, [5, 0])
    assert timeline.hidden_ns == [4, 0]


def test_a_wait_before_its_start_is_an_error() -> None:
    problem = two_gathers()
    with pytest.raises(ProblemError, match="waits before its start"):
        simulate(problem, [1, 0, 2, 3, 4, 5])
    with pytest.raises(ProblemError, match="has 2 of 6 tasks"):
        simulate(problem, [0, 1])


def test_empty_program() -> None:
    problem = Problem((), (), base_bytes=7)
    timeline = simulate(problem)
    assert (timeline.makespan_ns, timeline.peak_bytes, peak_bytes(problem)) == (0, 7, 7)


def test_storage_rules() -> None:
    """Allocation before release inside a task; unread values die at once; pinned and unread inputs stay."""
    problem = Problem(
        tasks=tuple(Task(f"t{k}", Kind.COMPUTE, 1) for k in range(3)),
        preds=((), (0,), (1,)),
        storages=(
            Storage(100, INPUT, (0,)),
            Storage(10, INPUT),
            Storage(5, 0, (1,)),
            Storage(1000, 1),
            Storage(7, 1, (), pinned=True),
        ),
        base_bytes=1,
    )
    assert profile(problem) == [116, 1023, 18]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(3, 14))
def test_accounting_holds_for_every_order(seed: int, order_seed: int, tasks: int) -> None:
    problem = random_problem(seed, tasks, fences=seed % 3 == 0)
    order = random_order(problem, order_seed)
    problem.check_order(order)
    timeline = simulate(problem, order)
    assert timeline.makespan_ns == timeline.compute_ns + timeline.issue_ns + timeline.total_exposed_ns
    position = {i: k for k, i in enumerate(order)}
    naive = [0] * len(problem)
    for storage in problem.storages:
        first = 0 if storage.producer == INPUT else position[storage.producer]
        last = max((position[r] for r in storage.readers), default=first)
        if storage.pinned or (storage.producer == INPUT and not storage.readers):
            last = len(problem) - 1
        for k in range(first, last + 1):
            naive[k] += storage.size_bytes
    assert profile(problem, order) == naive
    assert timeline.peak_bytes == peak_bytes(problem, order) == max(naive)
    for i, task in enumerate(problem.tasks):
        if task.kind is Kind.START:
            assert timeline.lane_begin_ns[i] >= timeline.end_ns[i]
            assert timeline.lane_end_ns[i] - timeline.lane_begin_ns[i] == task.duration_ns
            assert timeline.hidden_ns[i] == max(0, task.duration_ns - timeline.exposed_ns[i])
    charges = charge_stalls(problem, order, timeline)
    assert sum(charges.exposed_ns) == timeline.total_exposed_ns
    assert all(e <= t.duration_ns for e, t in zip(charges.exposed_ns, problem.tasks) if t.kind is Kind.START)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-20, 20), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(-9, 9)), max_size=30),
)
def test_range_max_equals_a_plain_list(values: list[int], changes: list[tuple[int, int, int]]) -> None:
    tree, plain = RangeMax(values), list(values)
    for first, stop, value in changes:
        first, stop = min(first, len(plain)), min(stop, len(plain))
        tree.add(first, stop, value)
        for k in range(first, stop):
            plain[k] += value
        if first < stop:
            assert tree.max(first, stop) == max(plain[first:stop])
            assert tree.at_most(first, stop, max(plain[first:stop]))
            assert not tree.at_most(first, stop, max(plain[first:stop]) - 1)
        assert tree.max(0, len(plain)) == max(plain)
    with pytest.raises(ValueError, match="empty range"):
        tree.max(1, 1)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10))
def test_continuation_admits_exactly_what_can_still_be_finished(seed: int, choices: int, slack: int) -> None:
    """``admits`` equals replaying: what ran, then the task, then the rest of the reference, within the cap."""
    problem = random_problem(seed, 10)
    t = tables(problem)
    reference = random_order(problem, choices)
    cap = peak_bytes(problem, reference) + slack
    memory = Continuation(t, reference, cap)
    rng = random.Random(choices)
    order: list[int] = []
    while len(order) < t.n:
        ready = [i for i in reference if i not in order and set(t.preds[i]) <= set(order)]
        for i in ready:
            rest = [j for j in reference if j not in order and j != i]
            assert memory.admits(i) == (max(profile(problem, [*order, i, *rest])) <= cap)
        assert memory.admits(memory.upcoming())
        chosen = rng.choice([i for i in ready if memory.admits(i)])
        memory.run(chosen)
        order.append(chosen)
    assert peak_bytes(problem, order) <= cap


def test_rejects_a_reader_before_its_producer() -> None:
    with pytest.raises(ProblemError, match="reader outside"):
        Problem((Task("a", Kind.COMPUTE), Task("b", Kind.COMPUTE)), ((), ()), storages=(Storage(1, 1, (0,)),))


def test_storages_order_their_readers() -> None:
    problem = Problem(
        (Task("a", Kind.COMPUTE), Task("b", Kind.COMPUTE)), ((), ()), storages=(Storage(1, 0, (1,)),)
    )
    with pytest.raises(ProblemError, match="b runs before its predecessor a"):
        problem.check_order([1, 0])


def test_json_round_trip_keeps_everything() -> None:
    problem = fsdp_backward(3)
    again = Problem.from_json(problem.to_json())
    assert again == problem and again.digest() == problem.digest()
    assert simulate(again) == simulate(problem)
