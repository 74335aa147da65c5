"""A partition that leaves together which sums over ranks travel together in a program that runs already.

A library adds in an order that depends on the message, so other messages would change last bits in the middle of a run.
Between two ranks there is one order only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inductor_passes.bucket.candidates import Candidate
from inductor_passes.bucket.handed import handed
from inductor_passes.bucket.question import Partition, Question


def same_sums(question: Question, *, partition: Partition, before: Sequence[tuple[str, ...]]) -> list[list[Candidate]]:
    """Disjoint buckets of at least two members each, of one key, mergeable together.

    Args:
        partition: proposes what else travels together.
        before: names of the starts of each bucket of the plan that runs.
    """
    fixed = {one.collective.start.name for one in question.found if one.key.reduce_op and _many(one)}
    sums = handed(question, proposed=tuple(names for names in before if fixed.issuperset(names)))
    dependencies = question.dependencies.copy()
    for bucket in sums:
        dependencies.merge([one.collective for one in bucket])
    free = [one for one in question.found if one.collective.start.name not in fixed]
    # A partition is asked about nothing where there is nothing else.
    others = partition(replace(question, found=free, dependencies=dependencies)) if free else []
    return [*sums, *others]


def _many(one: Candidate) -> bool:
    return len(one.collective.group.ranks) > 2
