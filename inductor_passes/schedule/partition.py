"""Which collectives of a lane travel together: bucketing as part of the plan.

A bucket saves a latency per member beyond the first. It costs copies on the compute lane (unless the backend sends
from where the members lie), and it ties its members' times together: it cannot begin before the last member's inputs
exist, and none of its members arrives before all have been transferred. So for the collectives of one lane in the
order of their due dates, a partition into consecutive buckets minimises

    copies + time by which buckets end after the due date of their first-needed member,

by dynamic programming over (number of members placed, when the lane falls free, cost so far), of which only the states
not dominated in both are kept. Ready times and due dates come from a planned order. They are estimates, since other
lanes and memory are left out. Therefore several partitions are computed (by bucket size and by order), each is merged,
planned and simulated, and the best plan wins; leaving everything as it is is always one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.merge import Bucket, merge
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import Problem, ProblemError
from inductor_passes.schedule.tables import tables

#: States kept per prefix of the lane.
_STATES = 6
#: Largest number of members that the dynamic programme considers for one bucket.
_MEMBERS = 64


@dataclass(frozen=True, slots=True)
class Member:
    """A collective that may be bucketed: its ``START``, what it sends and receives, and with what it may travel.

    Only members with equal ``key`` (group, operation, reduction dtype, ...) share a bucket.
    """

    start: int
    sent_bytes: int
    received_bytes: int
    key: str = ""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a bucket of one key costs.

    Attributes:
        alpha_ns, beta_ns_per_byte: of the transfer, by the bytes *sent or received, whichever are more*.
        issue_ns: of a start on the compute lane.
        copy: whether members are packed into a message and unpacked again.
        launch_ns: of one copy kernel. ``pack_ns_per_byte``, ``unpack_ns_per_byte``: of the bytes sent and received.
        unpack: False where the parts of the received message are used as views of it.
    """

    alpha_ns: float
    beta_ns_per_byte: float
    issue_ns: int = 0
    copy: bool = True
    unpack: bool = True
    launch_ns: float = 0.0
    pack_ns_per_byte: float = 0.0
    unpack_ns_per_byte: float = 0.0

    def transfer_ns(self, sent_bytes: int, received_bytes: int) -> int:
        """On the lane."""
        return math.ceil(self.alpha_ns + self.beta_ns_per_byte * max(sent_bytes, received_bytes))

    def pack_ns(self, sent_bytes: int) -> int:
        """On the compute lane; 0 without copies."""
        return math.ceil(self.launch_ns + self.pack_ns_per_byte * sent_bytes) if self.copy else 0

    def unpack_ns(self, received_bytes: int) -> int:
        """On the compute lane; 0 without copies and where parts are views."""
        return math.ceil(self.launch_ns + self.unpack_ns_per_byte * received_bytes) if self.copy and self.unpack else 0

    def bucket(self, members: Sequence[Member]) -> Bucket:
        """The bucket of ``members`` for :func:`~inductor_passes.schedule.merge.merge`."""
        sent, received = sum(m.sent_bytes for m in members), sum(m.received_bytes for m in members)
        return Bucket(
            starts=tuple(m.start for m in members),
            duration_ns=self.transfer_ns(sent, received),
            issue_ns=self.issue_ns,
            pack_ns=self.pack_ns(sent) if self.copy else None,
            unpack_ns=tuple(self.unpack_ns(m.received_bytes) for m in members) if self.copy and self.unpack else None,
            sent_bytes=sent,
            received_bytes=received,
            shared_output=self.copy,
        )


@dataclass(frozen=True, slots=True)
class Window:
    """A member's times in a planned order (inputs exist, result needed), and its length today."""

    member: Member
    ready_ns: int
    due_ns: int
    duration_ns: int


@dataclass(frozen=True)
class PartitionChoice:
    """The best partition found: its buckets (two members or more each), the merged problem and the plan for it.

    ``tried`` lists (partition's name, planned makespan in ns, planned peak in bytes) of everything that was planned.
    """

    buckets: tuple[Bucket, ...]
    problem: Problem
    plan: Plan
    method: str
    tried: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a bucket may be at most: members, and bytes sent plus received (None: no limit)."""

    members: int = _MEMBERS
    size_bytes: int | None = None


@dataclass(slots=True)
class _State:
    free: int
    cost: int
    previous: _State | None
    first: int


def windows(problem: Problem, order: Sequence[int], members: Sequence[Member]) -> list[Window]:
    """Ready times and due dates of ``members`` in ``order``, by due date, on the clock of compute-lane work.

    That clock stands still while the compute lane waits, so that a partition's stalls are its own.
    """
    t = tables(problem)
    begin = [0] * t.n
    now = 0
    for i in order:
        begin[i] = now
        now += t.busy_ns[i]
    found = []
    for member in members:
        s = member.start
        ready = max((begin[p] + t.busy_ns[p] for p in t.preds[s]), default=0)
        due = min((begin[j] for w in t.waits[s] for j in t.succs[w]), default=now)
        found.append(Window(member, ready, due, t.lane_ns[s]))
    return sorted(found, key=lambda w: (w.due_ns, w.member.start))


def partition(members: Sequence[Window], costs: Costs, limits: Limits | None = None) -> list[list[Member]]:
    """Consecutive buckets of ``members`` (one lane, one key, by due date) of least cost. O(n * bucket size).

    Buckets of one member stand for a collective that stays as it is.
    """
    limits = limits or Limits()
    n = len(members)
    best: list[list[_State]] = [[] for _ in range(n + 1)]
    best[0] = [_State(0, 0, None, 0)]
    for first in range(n):
        sent = received = ready = copies = 0
        due = members[first].due_ns
        states = best[first]
        for stop in range(first + 1, min(n, first + limits.members) + 1):
            w = members[stop - 1]
            sent += w.member.sent_bytes
            received += w.member.received_bytes
            ready, due = max(ready, w.ready_ns), min(due, w.due_ns)
            single = stop == first + 1
            if not single and limits.size_bytes is not None and sent + received > limits.size_bytes:
                break
            if not single and ready > members[first].due_ns:
                # The last member's inputs may depend on the first one's result.
                break
            duration = w.duration_ns if single else costs.transfer_ns(sent, received)
            copies = 0 if single else costs.pack_ns(sent) + costs.unpack_ns(received)
            for state in states:
                end = max(state.free, ready) + duration
                # A stall stops the clock, so the lane falls free sooner by it.
                late = max(0, end - due)
                _keep(best[stop], _State(end - late, state.cost + copies + late, state, first))
    last = min(best[n], key=lambda s: (s.cost, s.free))
    parts = []
    stop = n
    while last.previous is not None:
        parts.append([w.member for w in members[last.first : stop]])
        stop = last.first
        last = last.previous
    return parts[::-1]


def _keep(states: list[_State], new: _State) -> None:
    for s in states:
        if s.free <= new.free and s.cost <= new.cost:
            return
    states[:] = [s for s in states if not (new.free <= s.free and new.cost <= s.cost)]
    states.append(new)
    if len(states) > _STATES:
        states.remove(max(states, key=lambda s: (s.cost, s.free)))


def choose_partition(
    problem: Problem,
    members: Sequence[Member],
    costs: Callable[[str], Costs],
    budget_bytes: int | None,
    *,
    effort: int = 0,
    rounds: int = 2,
    baseline: Plan | None = None,
) -> PartitionChoice:
    """Partition ``members`` (any lanes and keys), re-plan every candidate, and return the fastest.

    Never slower than ``problem`` itself planned with the same budget and effort, and never above
    ``max(budget_bytes, the plan's peak without buckets)``; ties go to fewer merged members.

    Args:
        costs: of a key.
        rounds: how often the partition is computed again from the timeline of the best plan so far.
        baseline: ``plan(problem, budget_bytes, effort=effort)``, if the caller has it.
    """
    before = baseline or plan(problem, budget_bytes, effort=effort)
    best = PartitionChoice((), problem, before, "none", ())
    tried = [("none", before.makespan_ns, before.peak_bytes)]
    cap = None if budget_bytes is None else max(budget_bytes, before.peak_bytes)
    order: Sequence[int] = before.order
    seen: set[tuple[tuple[int, ...], ...]] = {()}
    for turn in range(rounds):
        planned = windows(problem, order, members)
        as_found = windows(problem, problem.input_order, members)
        improved = False
        for name, times, limits in _variants(planned, as_found, before, cap):
            buckets = _buckets(problem, times, costs, limits)
            signature = tuple(sorted(b.starts for b in buckets))
            if signature in seen:
                continue
            seen.add(signature)
            merged, buckets = merge_what_is_legal(problem, buckets)
            # What cannot win is not planned: planning takes most of the time.
            if lower_bound(merged) >= best.plan.makespan_ns:
                continue
            found = plan(merged, cap, effort=effort)
            label = f"{name}/{turn}"
            tried.append((label, found.makespan_ns, found.peak_bytes))
            if not found.feasible or found.makespan_ns >= best.plan.makespan_ns:
                continue
            best = PartitionChoice(tuple(buckets), merged, found, label, ())
            improved = True
        if not improved:
            break
        order = _unmerged_order(problem, best)
    return PartitionChoice(best.buckets, best.problem, best.plan, best.method, tuple(tried))


def _variants(
    planned: list[Window], as_found: list[Window], before: Plan, cap: int | None
) -> list[tuple[str, list[Window], Limits]]:
    largest = max((w.member.sent_bytes + w.member.received_bytes for w in planned), default=0)
    room = None if cap is None else max(largest, cap - before.peak_bytes)
    return [
        ("due", planned, Limits()),
        ("due/room", planned, Limits(size_bytes=room)),
        ("due/few", planned, Limits(members=4)),
        ("due/pairs", planned, Limits(members=2)),
        ("input", as_found, Limits(members=8)),
    ]


def _buckets(
    problem: Problem, times: Sequence[Window], costs: Callable[[str], Costs], limits: Limits
) -> list[Bucket]:
    lanes: dict[tuple[int, str], list[Window]] = {}
    for w in times:
        lanes.setdefault((problem.tasks[w.member.start].lane, w.member.key), []).append(w)
    buckets = []
    for (_, key), ws in lanes.items():
        cost = costs(key)
        buckets += [cost.bucket(part) for part in partition(ws, cost, limits) if len(part) > 1]
    return buckets


def merge_what_is_legal(problem: Problem, buckets: list[Bucket]) -> tuple[Problem, list[Bucket]]:
    """Merge all buckets, or else each one that can be merged with those before it."""
    try:
        return merge(problem, buckets), buckets
    except ProblemError:
        pass
    kept: list[Bucket] = []
    step = max(1, len(buckets) // 2)
    waiting = [buckets[k : k + step] for k in range(0, len(buckets), step)]
    while waiting:
        group = waiting.pop(0)
        try:
            merge(problem, kept + group)
            kept += group
        except ProblemError:
            if len(group) > 1:
                half = len(group) // 2
                waiting[:0] = [group[:half], group[half:]]
    return merge(problem, kept), kept


def _unmerged_order(problem: Problem, choice: PartitionChoice) -> list[int]:
    """The order of the merged plan told in the tasks of ``problem``: members stand where their bucket stands."""
    names = {task.name: i for i, task in enumerate(problem.tasks)}
    expand: dict[str, list[int]] = {}
    t = tables(problem)
    for bucket in choice.buckets:
        name = f"{problem.tasks[bucket.starts[0]].name}+{len(bucket.starts) - 1}"
        expand[name] = list(bucket.starts)
        expand[f"wait_{name}"] = [w for s in bucket.starts for w in t.waits[s]]
    order: list[int] = []
    for i in choice.plan.order:
        name = choice.problem.tasks[i].name
        order.extend(expand[name] if name in expand else [names[name]] if name in names else [])
    return order
