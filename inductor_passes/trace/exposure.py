"""Who pays for the time in which the compute lane stands still.

The compute lane idles only inside waits (and, for a collective that nobody waits for, at the very end). Every such
stall is split over the transfers that fill it: a wait whose collective is still queued stalls first for the
collectives ahead of it on its communicator or on a shared link, then for its own transfer. Charged this way a
collective is never exposed for longer than it transfers, and the exposed times add up to the makespan minus the busy
time of the compute lane, exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.trace.intervals import Intervals


@dataclass(frozen=True)
class Exposure:
    """Exposure of one simulated order.

    Attributes:
        exposed_ns: per task number; 0 for everything but a ``START``.
        stalled_wait: per task number of a ``START``: the task whose stall it was charged to first, or -1.
        queued_behind: per ``START``: the collective whose transfer ended when its own began although it had been
            issued before, or -1 when it did not queue.
        compute_ns: busy time of the compute lane.
    """

    exposed_ns: tuple[int, ...]
    stalled_wait: tuple[int, ...]
    queued_behind: tuple[int, ...]
    compute_ns: int


def exposure(problem: Problem, order: Sequence[int], at: Intervals) -> Exposure:
    """Charge every stall of the compute lane to the transfers that fill it. O(tasks log tasks)."""
    n = len(problem)
    exposed = [0] * n
    stalled_wait = [-1] * n
    queues = _Queues(problem, order, at)
    busy = 0
    last_end = 0
    for i in order:
        task = problem.tasks[i]
        busy += task.issue_ns if task.kind is not Kind.COMPUTE else task.duration_ns
        last_end = max(last_end, at.host_end[i])
        if task.kind is Kind.WAIT:
            begin = at.host_begin[i]
            stall = at.host_end[i] - begin - task.issue_ns
            if stall > 0:
                _charge(task.start, begin, begin + stall, i, queues, exposed, stalled_wait, at)
    if at.makespan > last_end:
        final = max((i for i in order if problem.tasks[i].kind is Kind.START), key=lambda i: at.lane_end[i])
        _charge(final, last_end, at.makespan, -1, queues, exposed, stalled_wait, at)
    return Exposure(tuple(exposed), tuple(stalled_wait), tuple(queues.behind), busy)


class _Queues:
    """For each collective, the one ahead of it that it queued for."""

    def __init__(self, problem: Problem, order: Sequence[int], at: Intervals) -> None:
        self.behind = [-1] * len(problem)
        resources: dict[str, list[tuple[int, int]]] = {}
        starts = [i for i in order if problem.tasks[i].kind is Kind.START]
        for i in starts:
            for key in resources_of(problem, i):
                resources.setdefault(key, []).append((at.lane_end[i], i))
        for ends in resources.values():
            ends.sort()
        for i in starts:
            if at.lane_begin[i] <= at.host_end[i]:
                continue
            for key in resources_of(problem, i):
                ends = resources[key]
                k = bisect_right(ends, (at.lane_begin[i], len(problem))) - 1
                while k >= 0 and ends[k][0] == at.lane_begin[i]:
                    other = ends[k][1]
                    # A transfer of no length ends where it begins; only one that took time can be queued for.
                    if other != i and at.lane_end[other] > at.lane_begin[other]:
                        self.behind[i] = other
                        break
                    k -= 1
                if self.behind[i] >= 0:
                    break


def resources_of(problem: Problem, start: int) -> tuple[str, ...]:
    """What a transfer occupies: its communicator, and the link when it has one."""
    lane = problem.tasks[start].lane
    link = problem.lanes[lane].link
    return (f"lane {lane}", f"link {link}") if link else (f"lane {lane}",)


def _charge(
    start: int,
    begin: int,
    end: int,
    wait: int,
    queues: _Queues,
    exposed: list[int],
    stalled_wait: list[int],
    at: Intervals,
) -> None:
    """Walk back from the awaited transfer through the queue until the stall's begin."""
    while end > begin:
        behind = queues.behind[start]
        # Without a recorded predecessor the rest of the stall is this collective's own, so the sum stays exact.
        own_begin = max(begin, at.lane_begin[start]) if behind >= 0 else begin
        share = end - own_begin
        if share > 0:
            exposed[start] += share
            if stalled_wait[start] < 0:
                stalled_wait[start] = wait
        end = own_begin
        start = behind
