"""The end of a program in another order, for when the last collectives are exposed.

At the end of a backward pass the last reductions have no compute left to hide behind, unless other compute is put off
until then: weight gradients, whose results nobody reads. That holds their inputs longer. Under a memory cap an ideal
order that puts them off everywhere does not fit, but the end of the program is where memory is free. So the order is
kept up to some point, and from there on the longest tail goes first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from inductor_passes.schedule.bounds import tails
from inductor_passes.schedule.list_schedule import PriorityRule, Reach, list_schedule
from inductor_passes.schedule.simulate import Trace, replay_time
from inductor_passes.schedule.tables import Tables

#: One part in so many of the compute is the end.
_LAST = 20
#: Standing still for less than one part in so many of the whole time is not worth it.
_WORTH = 1000
#: Thousandths of the time that are put in another order, and the factors from the best one to its neighbours.
_SHARES, _FINER = (200, 100, 50, 400), ((7, 5), (5, 7))


def stands_still(t: Tables, order: Sequence[int], trace: Trace) -> int:
    """Ns that the compute lane stands still in the last part of its work."""
    least = sum(t.busy_ns) // _LAST
    busy, since = 0, trace.makespan
    for i in reversed(order):
        if busy >= least:
            break
        busy += t.busy_ns[i]
        since = trace.begin[i]
    return trace.makespan - since - busy


def reorder_end(t: Tables, order: Sequence[int], cap_bytes: int) -> list[int]:
    """The fastest of ``order`` and variants with another end, within ``cap_bytes`` as ``order`` is. O(N log N)."""
    trace = replay_time(t, order)
    if stands_still(t, order, trace) <= trace.makespan // _WORTH:
        return list(order)
    by_tail = [-q for q in tails(t)[0]]
    rule = PriorityRule("end", by_tail, by_tail, fill=True)
    begins = [trace.begin[i] for i in order]
    best = trace.makespan, list(order)
    at = 0

    def attempt(share: int) -> None:
        nonlocal best, at
        since = trace.makespan - trace.makespan * share // 1000
        kept = bisect_left(begins, since)
        found = list_schedule(t, rule, Reach(order, cap_bytes), order[:kept])
        makespan = replay_time(t, found).makespan
        if makespan < best[0]:
            best, at = (makespan, found), share

    for share in _SHARES:
        attempt(share)
    if at:
        for share in [at * up // down for up, down in _FINER]:
            attempt(share)
    return best[1]
