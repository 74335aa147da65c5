"""A lower bound on the makespan over all orders and all partitions of the collectives into buckets.

A merged message takes the time of its bytes, and once what any message takes. So of a collective that may be merged
only a part is sure to take up its lane whatever it travels with; its issue is not sure to take up the compute lane. A
path through it is as long as ever: a bucket takes no less than each of its members, and everything that a member comes
after or before comes before or after the bucket. Copies are left out, and so is memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from inductor_passes.schedule.bounds import Work, with_work
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.tables import tables


def partition_bound(problem: Problem, share_ns: Mapping[int, int]) -> int:
    """A time in ns that no order of ``problem`` can beat, however the collectives of ``share_ns`` are merged.

    Holds where a bucket's transfer and issue take no less than each member's, its wait no less than a member's wait,
    and its transfer no less than its members' shares together. O(N log N + edges).

    Args:
        share_ns: ``START`` that may be merged -> time in ns that it adds to any bucket's transfer.
    """
    lanes = {problem.tasks[s].lane for s in share_ns}
    if any(problem.lanes[k].fixed_order for k in lanes):
        # Neighbours of a lane that keeps its order may travel together.
        free = [dataclasses.replace(lane, fixed_order=False) for lane in problem.lanes]
        problem = dataclasses.replace(
            problem, lanes=tuple(free[k] if k in lanes else lane for k, lane in enumerate(problem.lanes))
        )
    t = tables(problem)
    busy, lane_ns = list(t.busy_ns), list(t.lane_ns)
    for s, share in share_ns.items():
        lane_ns[s] = min(share, lane_ns[s])
        for i in (s, *t.waits[s]):
            busy[i] = 0
    return with_work(t, Work(busy, lane_ns))


def shares(sizes: Mapping[int, int], all_together_ns: int) -> dict[int, int]:
    """What each message adds to any bucket at least, if time per byte does not grow with a message's size.

    Args:
        sizes: ``START`` -> bytes, of collectives that may be merged with each other.
        all_together_ns: time of one message of all of them.
    """
    total = sum(sizes.values())
    return {s: all_together_ns * size // total if total else 0 for s, size in sizes.items()}
