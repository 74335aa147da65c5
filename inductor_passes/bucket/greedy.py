"""A partition of collectives into buckets by one sweep: the default where no planner decides.

In graph order, a collective joins the latest open bucket of its key with whose members it shares no dependency, as
long as that saves more latency than it costs in copies. A bucket is full when its transfer takes ``spread`` times its
latency (from there on little latency is left to save, while its first member waits ever longer for the last), and when
it takes more memory than the budget leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from inductor_passes.bucket.candidates import Candidate, GroupKey
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.bucket.gain import BucketCosts

#: (candidates in graph order, dependencies that the answer may merge into, costs) -> buckets of two members or more.
Partition = Callable[[Sequence[Candidate], Dependencies, BucketCosts], list[list[Candidate]]]

#: Buckets of one key that stay open at a time: bounds the work per collective.
OPEN_BUCKETS = 4


def greedy(
    candidates: Sequence[Candidate], dependencies: Dependencies, costs: BucketCosts, *, spread: float = 4.0
) -> list[list[Candidate]]:
    """Disjoint buckets of at least two members each, of one key, mergeable together."""
    buckets: list[list[Candidate]] = []
    open_of: dict[GroupKey, list[list[Candidate]]] = {}
    for candidate in candidates:
        opened = open_of.setdefault(candidate.key, [])
        for bucket in reversed(opened):
            members = [member.collective for member in bucket]
            if dependencies.conflict(members, candidate.collective) is not None:
                continue
            joined = [*bucket, candidate]
            if costs.gain_ns([bucket, [candidate]]) <= 0 or _full(costs, joined, spread):
                continue
            dependencies.merge([*members, candidate.collective])
            bucket.append(candidate)
            break
        else:
            bucket = [candidate]
            buckets.append(bucket)
            opened.append(bucket)
            del opened[:-OPEN_BUCKETS]
    return [bucket for bucket in buckets if len(bucket) > 1]


#: Tried by default: buckets of rising appetite.
ATTEMPTS: tuple[Partition, ...] = tuple(functools.partial(greedy, spread=spread) for spread in (4.0, 1.0, 16.0))


def _full(costs: BucketCosts, members: Sequence[Candidate], spread: float) -> bool:
    if costs.room_bytes is not None and costs.extra_bytes(members) > costs.room_bytes:
        return True
    latency = costs.latency_ns(members)
    return costs.transfer_ns(members) - latency > spread * latency
