"""Lower bounds on the makespan of any legal order, memory ignored.

Relaxations, each valid on its own; the bound is their maximum:

* the longest path through the precedence graph, a collective's duration lying between its start and its waits;
* the compute lane as one machine: every task ``i`` has a head ``r_i`` (longest path before it), needs the lane for
  ``p_i`` and leaves a tail ``q_i`` (longest path after it). Jackson's preemptive schedule (longest tail first among
  released jobs) minimises ``max(C_i + q_i)`` for one machine with preemption, so its value bounds every schedule
  (J. R. Jackson, *Scheduling a production line to minimize maximum tardiness*, 1955; J. Carlier, *The one-machine
  sequencing problem*, EJOR 11, 1982);
* the same for every communication machine (lane, or link shared by lanes).

Heads and tails are longest paths, and longer than that where compute is caught between communication: whatever follows
a wait and precedes a start has to pass the compute lane one by one in between, however short each path through it is.
In a tensor-parallel layer that is all there is between two of its collectives.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.tables import ANY_NUMBERING, Tables, once, tables

_COMPUTE, _START = int(Kind.COMPUTE), int(Kind.START)
#: How often the longest path is looked at for compute that is caught in it.
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Passage:
    """At least ``length_ns`` lie between the end of task ``after`` and the beginning of task ``before``."""

    after: int
    before: int
    length_ns: int


def heads(t: Tables, passages: Iterable[Passage] = ()) -> list[int]:
    """Earliest time in ns at which each task can begin on the compute lane, but for ``passages`` resources ignored.

    O(N + edges).
    """
    head = [0] * t.n
    ending = {one.before: one for one in passages}
    # Inputs are numbered in a legal order, so one sweep is enough.
    for i, ps in enumerate(t.preds):
        h = 0
        for p in ps:
            e = head[p] + t.busy_ns[p]
            if e > h:
                h = e
        s = t.start[i]
        if s >= 0:
            e = head[s] + t.busy_ns[s] + t.lane_ns[s]
            if e > h:
                h = e
        if i in ending:
            passage = ending[i]
            h = max(h, head[passage.after] + t.busy_ns[passage.after] + passage.length_ns)
        head[i] = h
    return head


def tails(t: Tables, passages: Iterable[Passage] = ()) -> tuple[list[int], list[int]]:
    """(tail, lane tail) in ns: longest path after a task has left the compute lane, respectively after a ``START`` has
    left its machine (0 for other tasks). For a ``START`` the former includes its own time on the machine.
    """
    tail, lane_tail = [0] * t.n, [0] * t.n
    beginning = {one.after: one for one in passages}
    busy = t.busy_ns
    for i in range(t.n - 1, -1, -1):
        q = 0
        for j in t.succs[i]:
            e = tail[j] + busy[j]
            if e > q:
                q = e
        if t.kind[i] == _START:
            after = 0
            for w in t.waits[i]:
                e = tail[w] + busy[w]
                if e > after:
                    after = e
            lane_tail[i] = after
            if after + t.lane_ns[i] > q:
                q = after + t.lane_ns[i]
        if i in beginning:
            passage = beginning[i]
            q = max(q, passage.length_ns + busy[passage.before] + tail[passage.before])
        tail[i] = q
    return tail, lane_tail


@once
def urgency(t: Tables) -> list[int]:
    """A priority, smallest first: the task with the longest path after it."""
    return [-q for q in tails(t)[0]]


def one_machine(jobs: Iterable[tuple[int, int, int]]) -> int:
    """Jackson's preemptive bound in ns for jobs ``(head, processing, tail)`` on one machine. O(n log n)."""
    ordered = sorted(jobs)
    ready: list[tuple[int, int]] = []
    now = best = 0
    k, n = 0, len(ordered)
    while k < n or ready:
        if not ready and ordered[k][0] > now:
            now = ordered[k][0]
        while k < n and ordered[k][0] <= now:
            heapq.heappush(ready, (-ordered[k][2], ordered[k][1]))
            k += 1
        minus_tail, left = heapq.heappop(ready)
        until = now + left
        if k < n and ordered[k][0] < until:
            heapq.heappush(ready, (minus_tail, until - ordered[k][0]))
            now = ordered[k][0]
        else:
            now = until
            if now - minus_tail > best:
                best = now - minus_tail
    return best


def lower_bound(problem: Problem) -> int:
    """A time in ns that no legal order of ``problem`` can beat, whatever memory it uses. O(N log N + edges)."""
    return any_order(tables(problem))


def any_order(t: Tables) -> int:
    """:func:`lower_bound` on the flat view."""
    return max(without_memory(t), under_contention(t))


def work_alone(t: Tables) -> int:
    """A time in ns that no order can beat, looser than :func:`any_order` and a fraction of its cost: the busiest lane's
    work. O(N)."""
    # One more, because kernels are on machine -1, where they take no time.
    lanes = [0] * (t.machines + 1)
    for machine, ns in zip(t.machine, t.lane_ns):
        lanes[machine] += ns
    return max(sum(t.busy_ns), *lanes)


def under_contention(t: Tables) -> int:
    """A time in ns that no order can beat where transfers slow kernels down; 0 where none does. O(N).

    While a transfer that makes kernels take p percent longer is under way, the compute lane issues, stands still, or
    loses the share p / (100 + p) of the time. So what a machine transfers costs that share, but for what the compute
    lane may issue meanwhile; standing still costs more.
    """
    if not t.slowdown:
        return 0
    compute = sum(b for b, k in zip(t.busy_ns, t.kind) if k == _COMPUTE)
    issue = sum(t.busy_ns) - compute
    lost = [0] * t.machines
    for machine, ns, percent in zip(t.machine, t.lane_ns, t.slowdown):
        if percent:
            lost[machine] += ns * percent // (100 + percent)
    most = max(t.slowdown)
    return compute + issue * 100 // (100 + most) + max(lost)


def without_memory(t: Tables) -> int:
    """:func:`lower_bound` if transfers slowed no kernel down: it reads times, machines and precedence only.

    Worked out once: it holds however tasks are numbered.
    """
    key = f"{ANY_NUMBERING}{__name__}"
    if key not in t.known:
        t.known[key] = with_work(t, Work(t.busy_ns, t.lane_ns))
    found: int = t.known[key]
    return found


@dataclass(frozen=True, slots=True)
class Work:
    """What each task takes up for itself, in ns by task number: of the compute lane, and of its machine.

    Less than the task's times where tasks may be merged: a path through it is as long as ever, but what a message costs
    whatever it carries is paid once for several.
    """

    busy_ns: Sequence[int]
    lane_ns: Sequence[int]


def with_work(t: Tables, work: Work) -> int:
    """The bound for tasks that take up lanes as ``work`` says, with paths as long as the times of ``t``."""
    if not t.n:
        return 0
    passages: list[Passage] = []
    head, (tail, lane_tail) = heads(t), tails(t)
    for _ in range(_ROUNDS):
        found = _passages(t, work.busy_ns, _longest_path(t, head, tail, passages))
        known = {(one.after, one.before) for one in passages}
        new = [one for one in found if (one.after, one.before) not in known]
        if not new:
            break
        # Of passages that share an end the newest is on a longer path.
        passages = _disjoint([*new, *passages])
        head, (tail, lane_tail) = heads(t, passages), tails(t, passages)
    best = one_machine((head[i], work.busy_ns[i], tail[i]) for i in range(t.n))
    for m in range(t.machines):
        best = max(
            best,
            one_machine(
                (head[i] + t.busy_ns[i], work.lane_ns[i], lane_tail[i])
                for i in range(t.n)
                if t.kind[i] == _START and t.machine[i] == m
            ),
        )
    return max(best, max(h + b + q for h, b, q in zip(head, t.busy_ns, tail)))


def _longest_path(t: Tables, head: Sequence[int], tail: Sequence[int], passages: Iterable[Passage]) -> list[int]:
    """Tasks of a longest path, the first one first."""
    ending = {one.before: one for one in passages}
    beginning = {one.after: one for one in ending.values()}
    i = max(range(t.n), key=lambda k: (head[k] + t.busy_ns[k] + tail[k], -k))
    # What comes after the task is reached from the one that is last on the path.
    while True:
        rest = [j for j in t.succs[i] if t.busy_ns[j] + tail[j] == tail[i]]
        rest += [w for w in t.waits[i] if t.lane_ns[i] + t.busy_ns[w] + tail[w] == tail[i]]
        passage = beginning.get(i)
        if passage is not None and passage.length_ns + t.busy_ns[passage.before] + tail[passage.before] == tail[i]:
            rest.append(passage.before)
        if not rest or not tail[i]:
            break
        i = min(rest)
    path = [i]
    while head[i]:
        before = [p for p in t.preds[i] if head[p] + t.busy_ns[p] == head[i]]
        s = t.start[i]
        if s >= 0 and head[s] + t.busy_ns[s] + t.lane_ns[s] == head[i]:
            before.append(s)
        if i in ending:
            before.append(ending[i].after)
        if not before:
            break
        i = max(before)
        path.append(i)
    return path[::-1]


def _passages(t: Tables, work_ns: Sequence[int], path: Sequence[int]) -> list[Passage]:
    """What compute is caught between communication tasks that follow each other on ``path``. O(N + edges) in all.

    Sweeps only tasks numbered between the two, as all that lie between them in precedence are.
    """
    stops = [i for i in path if t.kind[i] != _COMPUTE]
    found = []
    for after, before in itertools.pairwise(stops):
        if t.start[before] == after or before - after < 2:
            continue
        reached = {after}
        for i in range(after + 1, before):
            if not reached.isdisjoint(t.preds[i]):
                reached.add(i)
        needed, length = {before}, 0
        for i in range(before - 1, after, -1):
            if i in reached and not needed.isdisjoint(t.succs[i]):
                needed.add(i)
                length += work_ns[i]
        if length:
            found.append(Passage(after, before, length))
    return found


def _disjoint(passages: Iterable[Passage]) -> list[Passage]:
    """The first passage for every task that one begins or ends at."""
    begun: set[int] = set()
    ended: set[int] = set()
    kept = []
    for one in passages:
        if one.after not in begun and one.before not in ended:
            begun.add(one.after)
            ended.add(one.before)
            kept.append(one)
    return kept
