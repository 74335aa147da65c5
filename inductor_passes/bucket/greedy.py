"""A partition of collectives into buckets by one sweep, in time linear in their number.

In graph order, a collective joins the latest open bucket of its key with whose members it shares no dependency, as
long as that saves more latency than it costs in copies. A bucket is full when its transfer takes ``spread`` times its
latency (from there on little latency is left to save, while its first member waits ever longer for the last), and when
it takes more than a ``share`` of the memory that the budget leaves where it lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from inductor_passes.bucket.candidates import Candidate, GroupKey
from inductor_passes.bucket.gain import BucketCosts, Load
from inductor_passes.bucket.question import Question, Sweep
from inductor_passes.bucket.room import Room, Span

#: Buckets of one key that stay open at a time: bounds the work per collective.
OPEN_BUCKETS = 4


def greedy(
    question: Question, *, spread: float = 4.0, share: float = 1.0, tight: bool = False
) -> list[list[Candidate]]:
    """Disjoint buckets of at least two members each, of one key, mergeable together.

    Args:
        tight: take no more memory than ``memory_budget="0"`` leaves, so that what a small budget finds is tried under
            a larger one too.
    """
    given = question.tight if tight else question.room
    asked = Sweep(spread, share if given is not None else 1.0, tight and given is not question.room)
    if asked not in question.swept:
        # Where not even two may travel together, they may not with less of anything either.
        nothing = any(not found and asked.allows_no_more_than(other) for other, found in question.swept.items())
        question.swept[asked] = [] if nothing else _swept(question, spread, share, given)
    return question.swept[asked]


def _swept(question: Question, spread: float, share: float, given: Room | None) -> list[list[Candidate]]:
    dependencies, costs = question.dependencies.copy(), question.costs
    room = given.copy() if given is not None else None
    buckets: list[_Open] = []
    open_of: dict[GroupKey, list[_Open]] = {}
    for candidate in question.found:
        opened = open_of.setdefault(candidate.key, [])
        load = costs.load([candidate])
        alone_ns = costs.all_ns(load)
        for bucket in reversed(opened):
            # Merged members share their dependencies: one of them speaks for all.
            if dependencies.conflict([bucket.members[0].collective], candidate.collective) is not None:
                continue
            joined = bucket.load + load
            together_ns = costs.all_ns(joined)
            if bucket.all_ns + alone_ns <= together_ns or _full(costs, joined, spread):
                continue
            if room is not None and not _moved_in(bucket, candidate, costs.extra_bytes(joined), room, share):
                continue
            bucket.members.append(candidate)
            bucket.load, bucket.all_ns = joined, together_ns
            # The first speaks for all that it was merged with.
            dependencies.merge([bucket.members[0].collective, candidate.collective])
            break
        else:
            buckets.append(_Open([candidate], load, alone_ns))
            opened.append(buckets[-1])
            del opened[:-OPEN_BUCKETS]
    return [bucket.members for bucket in buckets if len(bucket.members) > 1]


@dataclass
class _Open:
    members: list[Candidate]
    load: Load
    all_ns: int
    taken: tuple[Span, int] | None = None


def _moved_in(bucket: _Open, candidate: Candidate, extra_bytes: int, room: Room, share: float) -> bool:
    """Whether a bucket finds the memory that it takes with one member more; takes it then."""
    span = room.span([candidate])
    if bucket.taken is not None:
        old, size = bucket.taken
        span |= old
        room.take(old, -size)
    else:
        span |= room.span(bucket.members)
    fits = extra_bytes <= share * room.free_bytes(span)
    if fits:
        bucket.taken = span, extra_bytes
    if bucket.taken is not None:
        room.take(*bucket.taken)
    return fits


def _full(costs: BucketCosts, load: Load, spread: float) -> bool:
    latency = costs.latency_ns(load)
    return costs.transfer_ns(load) - latency > spread * latency
