"""The partition with which the step was planned when it was chosen what forward saves: the partitioner hands it over.

It was found for the step as it came, within the memory of the state that was chosen. Without it a state could be chosen
for a plan that nobody proposes again.
"""

from __future__ import annotations

from inductor_passes.bucket.candidates import Candidate
from inductor_passes.bucket.question import Question


def handed(question: Question, *, proposed: tuple[tuple[str, ...], ...]) -> list[list[Candidate]]:
    """Disjoint buckets of at least two members each, of one key, mergeable together.

    Args:
        proposed: names of the starts of each bucket; those that the graph does not have any more are left out.
    """
    by_name = {c.collective.start.name: c for c in question.found}
    dependencies = question.dependencies.copy()
    buckets: list[list[Candidate]] = []
    for names in proposed:
        bucket: list[Candidate] = []
        for candidate in (by_name.pop(name) for name in names if name in by_name):
            if bucket:
                # Merged members share their dependencies: one of them speaks for all.
                first = bucket[0].collective
                if candidate.key != bucket[0].key or dependencies.conflict([first], candidate.collective) is not None:
                    continue
                dependencies.merge([first, candidate.collective])
            bucket.append(candidate)
        buckets.append(bucket)
    return [bucket for bucket in buckets if len(bucket) > 1]
