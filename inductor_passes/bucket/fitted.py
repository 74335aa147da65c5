"""Large buckets where some order keeps the cap with them, and smaller ones beside them.

Buckets of one size (``sized``) fit as a whole or not at all: a single one that does not fit spoils them. Here the
largest are taken, halved where they are too much together, and what they leave is filled with smaller ones.
"""

from __future__ import annotations

from inductor_passes.bucket.candidates import Candidate
from inductor_passes.bucket.merged import merged
from inductor_passes.bucket.question import Question
from inductor_passes.bucket.sized import sized
from inductor_passes.schedule.least_memory import least_peak
from inductor_passes.schedule.tables import tables

#: Sizes of buckets, as shares of the graph's peak: one over these.
_SHARES = (2, 8, 32)
#: Merged problems that are looked at, at most.
_LOOKS = 16


def fitted(question: Question) -> list[list[Candidate]]:
    """Disjoint buckets of at least two members each, of one key, mergeable together.

    None where memory is unlimited, and none for large problems.
    """
    if question.limit_bytes is None:
        return []
    taken: list[list[Candidate]] = []
    looks = _LOOKS
    for share in _SHARES:
        inside = {member for bucket in taken for member in bucket}
        waiting = [[bucket for bucket in sized(question, share=share) if inside.isdisjoint(bucket)]]
        while waiting and looks:
            group = waiting.pop(0)
            if not group:
                continue
            looks -= 1
            if _fits(question, [*taken, *group]):
                taken += group
            elif len(group) > 1:
                half = len(group) // 2
                waiting[:0] = [group[:half], group[half:]]
            elif len(group[0]) > 3:
                half = len(group[0]) // 2
                waiting[:0] = [[group[0][:half]], [group[0][half:]]]
    return taken


def _fits(question: Question, buckets: list[list[Candidate]]) -> bool:
    """Whether the buckets can be merged together and an order of least memory keeps the cap."""
    assert question.limit_bytes is not None
    dependencies = question.dependencies.copy()
    for first, *others in buckets:
        for other in others:
            # Buckets of different sizes were not found beside each other.
            if dependencies.conflict([first.collective], other.collective) is not None:
                return False
            dependencies.merge([first.collective, other.collective])
    return least_peak(tables(merged(question.problem, buckets, question.costs))) <= question.limit_bytes
