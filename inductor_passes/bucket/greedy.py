"""A partition of collectives into buckets by one sweep, in time linear in their number.

In graph order, a collective joins the latest open bucket of its key with whose members it shares no dependency, as
long as that saves more latency than it costs in copies. A bucket is full when its transfer takes ``spread`` times its
latency (from there on little latency is left to save, while its first member waits ever longer for the last), and when
it takes more than a ``share`` of the memory that the budget leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.bucket.candidates import Candidate, GroupKey
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.bucket.question import Question

#: Buckets of one key that stay open at a time: bounds the work per collective.
OPEN_BUCKETS = 4


def greedy(question: Question, *, spread: float = 4.0, share: float = 1.0) -> list[list[Candidate]]:
    """Disjoint buckets of at least two members each, of one key, mergeable together."""
    dependencies, costs = question.dependencies.copy(), question.costs
    buckets: list[list[Candidate]] = []
    open_of: dict[GroupKey, list[list[Candidate]]] = {}
    for candidate in question.found:
        opened = open_of.setdefault(candidate.key, [])
        for bucket in reversed(opened):
            members = [member.collective for member in bucket]
            if dependencies.conflict(members, candidate.collective) is not None:
                continue
            joined = [*bucket, candidate]
            if costs.gain_ns([bucket, [candidate]]) <= 0 or _full(costs, joined, spread, share):
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


def _full(costs: BucketCosts, members: Sequence[Candidate], spread: float, share: float) -> bool:
    if costs.room_bytes is not None and costs.extra_bytes(members) > share * costs.room_bytes:
        return True
    latency = costs.latency_ns(members)
    return costs.transfer_ns(members) - latency > spread * latency
