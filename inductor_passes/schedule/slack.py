"""How late each collective of a simulated order may be issued without delaying anything (its *latest* time).

One sweep backwards over the order: a wait is needed when its first reader begins, a collective must end when its first
wait is needed and when the next one on its machine must begin. Prefetching earlier than that gains no time and holds
memory, which, accumulated over hundreds of layers, eats the room that later prefetches need.

Two programs do not share a clock (stalls differ), so the times are given as *progress*: ns of compute-lane work done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from inductor_passes.schedule import native
from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.simulate import Trace
from inductor_passes.schedule.tables import Tables, once

_COMPUTE, _START = int(Kind.COMPUTE), int(Kind.START)


def latest_issue(
    t: Tables, order: Sequence[int], trace: Trace, wait_by: Sequence[int] | None = None
) -> list[int]:
    """Per ``START`` the latest issue in ns on the timeline of ``order``; other tasks: the latest begin. O(N + edges).

    Waits may move down to their first reader; with ``wait_by`` (ns per task) they may not move beyond that.
    """
    if (flat := native.flat(t)) is not None:
        return native.latest_issue(*flat, order, (trace.makespan, trace.begin, trace.lane_begin), wait_by)
    latest = [trace.makespan] * t.n
    next_begin = [trace.makespan] * t.machines
    for k in range(t.n - 1, -1, -1):
        i = order[k]
        if t.kind[i] == _COMPUTE:
            latest[i] = trace.begin[i]
            continue
        need = trace.makespan
        for j in t.succs[i]:
            if latest[j] < need:
                need = latest[j]
        if wait_by is not None and t.kind[i] != _START and wait_by[i] < need:
            need = wait_by[i]
        if t.kind[i] == _START:
            m = t.machine[i]
            if next_begin[m] < need:
                need = next_begin[m]
            # What is exposed today may stay exposed: it need not end before its wait ends today.
            need -= t.lane_ns[i]
            if trace.lane_begin[i] > need:
                need = trace.lane_begin[i]
            next_begin[m] = need
        latest[i] = need - (t.busy_ns[i] if t.kind[i] == _START or wait_by is None else 0)
    return latest


def as_progress(t: Tables, order: Sequence[int], trace: Trace, latest: Sequence[int]) -> list[int]:
    """Times of ``order``'s timeline as ns of compute-lane work done by then. O(N log N)."""
    if (flat := native.flat(t)) is not None:
        return native.as_progress(*flat, order, trace.begin, latest)
    begins, progress, done = [], [], 0
    for i in order:
        if t.kind[i] == _COMPUTE and t.busy_ns[i]:
            begins.append(trace.begin[i])
            progress.append(done)
        done += t.busy_ns[i]
    progress.append(done)
    result = []
    for time in latest:
        k = bisect_right(begins, time) - 1
        result.append(min(progress[k] + time - begins[k], progress[k + 1]) if k >= 0 else 0)
    return result


@once
def relieves(t: Tables) -> list[bool]:
    """Per ``START``: whether running it and its waits early frees at least as much memory as it takes.

    True for reductions, whose input dies at the wait, False for gathers, whose output is the larger part.
    """
    result = [False] * t.n
    for i in range(t.n):
        if t.kind[i] != _START:
            continue
        mine = {i, *t.waits[i]}
        freed = sum(t.size[s] for s in t.consumes[i] if mine.issuperset(t.readers[s]))
        result[i] = freed >= t.alloc[i]
    return result
