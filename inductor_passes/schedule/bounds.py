"""Lower bounds on the makespan of any legal order, memory ignored.

Three relaxations, each valid on its own; the bound is their maximum:

* the longest path through the precedence graph, a collective's duration lying between its start and its waits;
* the compute lane as one machine: every task ``i`` has a head ``r_i`` (longest path before it), needs the lane for
  ``p_i`` and leaves a tail ``q_i`` (longest path after it). Jackson's preemptive schedule (longest tail first among
  released jobs) minimises ``max(C_i + q_i)`` for one machine with preemption, so its value bounds every schedule
  (J. R. Jackson, *Scheduling a production line to minimize maximum tardiness*, 1955; J. Carlier, *The one-machine
  sequencing problem*, EJOR 11, 1982);
* the same for every communication machine (lane, or link shared by lanes).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.tables import Tables, tables

_START = int(Kind.START)


def heads(t: Tables) -> list[int]:
    """Earliest time in ns at which each task can begin on the compute lane, resources ignored. O(N + edges)."""
    head = [0] * t.n
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
        head[i] = h
    return head


def tails(t: Tables) -> tuple[list[int], list[int]]:
    """(tail, lane tail) in ns: longest path after a task has left the compute lane, respectively after a ``START`` has
    left its machine (0 for other tasks). For a ``START`` the former includes its own time on the machine.
    """
    tail, lane_tail = [0] * t.n, [0] * t.n
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
        tail[i] = q
    return tail, lane_tail


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
    t = tables(problem)
    if not t.n:
        return 0
    head = heads(t)
    tail, lane_tail = tails(t)
    best = one_machine((head[i], t.busy_ns[i], tail[i]) for i in range(t.n))
    for m in range(t.machines):
        best = max(
            best,
            one_machine(
                (head[i] + t.busy_ns[i], t.lane_ns[i], lane_tail[i])
                for i in range(t.n)
                if t.kind[i] == _START and t.machine[i] == m
            ),
        )
    return max(best, max(h + b + q for h, b, q in zip(head, t.busy_ns, tail)))
