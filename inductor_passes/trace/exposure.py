"""Which collectives the idle time of the compute lane is charged to.

The compute lane idles only inside waits (and, for a collective that nobody waits for, at the very end). Every such
stall is split over the transfers that fill it: a wait whose collective is still queued stalls first for the
collectives ahead of it on its communicator or on a shared link, then for its own transfer. Charged this way a
collective is never exposed for longer than it transfers, and the exposed times add up to the makespan minus the busy
time of the compute lane, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.simulate import Timeline
from inductor_passes.schedule.tables import tables


@dataclass(frozen=True)
class Charges:
    """Stalls of one simulated order, charged to transfers; lists are indexed by task number.

    Attributes:
        exposed_ns: stall time that the transfer of a ``START`` fills; 0 for other tasks.
        stall: the wait whose stall was first charged to a ``START``; -1 when nothing or only the end of the program.
        behind: the collective that a ``START`` queued for, -1 when its machine was free.
        previous: the collective before a ``START`` on its machine, -1 for the first.
    """

    exposed_ns: list[int]
    stall: list[int]
    behind: list[int]
    previous: list[int]


def charge_stalls(problem: Problem, order: Sequence[int], timeline: Timeline) -> Charges:
    """Charge every stall of the compute lane to the transfers that fill it. O(N), plus the lengths of the queues."""
    n = len(problem)
    machine = tables(problem).machine
    previous = _previous(problem, order)
    behind = [p if p >= 0 and timeline.lane_begin_ns[i] > timeline.end_ns[i] else -1 for i, p in enumerate(previous)]
    charges = Charges([0] * n, [-1] * n, behind, previous)
    latest: dict[int, int] = {}
    last_end = 0
    for i in order:
        task = problem.tasks[i]
        last_end = timeline.end_ns[i]
        if task.kind is Kind.START:
            latest[machine[i]] = i
        elif task.kind is Kind.WAIT:
            # The issue cost of a wait comes after the stall.
            begin, end = timeline.start_ns[i], timeline.end_ns[i] - task.issue_ns
            _charge(charges, timeline, task.start, begin, end, i)
    if timeline.makespan_ns > last_end:
        outliving = max(latest.values(), key=lambda i: timeline.lane_end_ns[i])
        _charge(charges, timeline, outliving, last_end, timeline.makespan_ns, -1)
    return charges


def _previous(problem: Problem, order: Sequence[int]) -> list[int]:
    """For each collective the one before it on its machine."""
    machine = tables(problem).machine
    previous = [-1] * len(problem)
    latest: dict[int, int] = {}
    for i in order:
        if problem.tasks[i].kind is Kind.START:
            previous[i] = latest.get(machine[i], -1)
            latest[machine[i]] = i
    return previous


def _charge(charges: Charges, timeline: Timeline, start: int, begin: int, end: int, wait: int) -> None:
    """Walk back from the awaited transfer through its queue until the stall's begin."""
    while end > begin:
        own_begin = max(begin, timeline.lane_begin_ns[start])
        charges.exposed_ns[start] += end - own_begin
        if charges.stall[start] < 0:
            charges.stall[start] = wait
        end, start = own_begin, charges.behind[start]
