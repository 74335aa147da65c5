"""The bound over all orders and all partitions into buckets: below every partition's optimum, tight where known."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.merge import merge
from inductor_passes.schedule.partition import Costs, Member
from inductor_passes.schedule.partition_bound import partition_bound, shares
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Kind, Lane, Problem, ProblemError
from tests.support.schedule_graphs import Builder, best_makespan, fsdp_forward, random_problem


def partitions(items: Sequence[Member]) -> Iterator[list[list[Member]]]:
    """All set partitions."""
    if not items:
        yield []
        return
    first, *rest = items
    for found in partitions(rest):
        yield [[first], *found]
        for k, part in enumerate(found):
            yield [*found[:k], [first, *part], *found[k + 1 :]]


def every_merge(problem: Problem, members: Sequence[Member], costs: Costs) -> Iterator[Problem]:
    """``problem`` with its collectives merged in every way that is allowed."""
    for parts in partitions(members):
        buckets = [part for part in parts if len(part) > 1]
        if any(len({member.key for member in part}) > 1 for part in buckets):
            continue
        try:
            yield merge(problem, [costs.bucket(part) for part in buckets])
        except ProblemError:
            continue


def priced(problem: Problem, seed: int, costs: Costs) -> tuple[Problem, list[Member]]:
    """``problem`` with transfers and issues that cost as ``costs`` says, and its collectives."""
    rng = random.Random(seed)
    tasks, members = list(problem.tasks), []
    for i, task in enumerate(tasks):
        if task.kind is Kind.START:
            size = rng.randint(0, 9)
            members.append(Member(i, size, size, f"{task.lane}"))
            tasks[i] = dataclasses.replace(
                task, duration_ns=costs.transfer_ns(size, size), issue_ns=costs.issue_ns, size_bytes=size
            )
    return dataclasses.replace(problem, tasks=tuple(tasks)), members


def least_shares(members: Sequence[Member], costs: Costs) -> dict[int, int]:
    found = {}
    for key in sorted({member.key for member in members}):
        sizes = {member.start: member.received_bytes for member in members if member.key == key}
        found |= shares(sizes, costs.transfer_ns(sum(sizes.values()), sum(sizes.values())))
    return found


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 8),
    st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 2)),
    st.booleans(),
)
def test_no_partition_has_a_faster_order(seed: int, tasks: int, prices: tuple[int, int, int], copy: bool) -> None:
    """Against every order of every partition: lanes of fixed order, shared links, fences, with and without copies."""
    alpha, beta, issue = prices
    costs = Costs(alpha, beta, issue, copy=copy, launch_ns=1)
    problem, members = priced(random_problem(seed, tasks, fences=seed % 4 == 0), seed, costs)
    bound = partition_bound(problem, least_shares(members, costs))
    assert bound <= lower_bound(problem) or any(lane.fixed_order for lane in problem.lanes)
    for merged in every_merge(problem, members, costs):
        optimum = best_makespan(merged, None)
        assert optimum is not None and bound <= optimum


def test_nothing_to_merge_is_the_bound_on_any_order() -> None:
    problem = fsdp_forward(6)
    assert partition_bound(problem, {}) == lower_bound(problem)
    everything = {i: task.duration_ns for i, task in enumerate(problem.tasks) if task.kind is Kind.START}
    assert partition_bound(problem, everything) == lower_bound(problem)


def latency_bound_program(fixed: bool) -> tuple[Problem, list[Member], Costs]:
    costs = Costs(100, 1, issue_ns=5, copy=False)
    b = Builder("latency", lanes=(Lane("pg", fixed_order=fixed),), issue_ns=5)
    gathered = [b.collective(f"AG{k}", costs.transfer_ns(10, 10), [b.input(1)], 10) for k in range(20)]
    b.compute("mm", 50, gathered, 1)
    problem = b.build()
    members = [Member(i, 10, 10) for i, task in enumerate(problem.tasks) if task.kind is Kind.START]
    return problem, members, costs


@pytest.mark.parametrize("fixed", [False, True])
def test_tight_where_all_travel_in_one_message(fixed: bool) -> None:
    """Twenty latencies without buckets, one with the best: the bound is that of the one."""
    problem, members, costs = latency_bound_program(fixed)
    bound = partition_bound(problem, least_shares(members, costs))
    together = merge(problem, [costs.bucket(members)])
    assert lower_bound(problem) > 2000
    assert bound == plan(together, None).makespan_ns == 5 + 100 + 20 * 10 + 50


def test_shares_add_up_to_no_more_than_one_message() -> None:
    found = shares({3: 10, 5: 20, 9: 3}, 100)
    assert list(found) == [3, 5, 9] and 98 <= sum(found.values()) <= 100
    assert shares({3: 0, 5: 0}, 100) == {3: 0, 5: 0}
