"""A partition of collectives into buckets of one size: neighbours in graph order, whatever memory there is for them.

The sweep (``greedy``) asks each bucket for its memory at every place where it may live, and leaves out what does not
fit at one of them. An order can often avoid such a place: it starts a gather later. These buckets leave that to the
planner, which judges every partition under the cap anyway.
"""

from __future__ import annotations

from inductor_passes.bucket.candidates import Candidate, GroupKey
from inductor_passes.bucket.question import Question
from inductor_passes.schedule.memory import peak_bytes

#: Members of a bucket, at most.
_MEMBERS = 64
#: Above this many tasks these buckets gained nothing and cost their plans.
MOST_TASKS = 4000


def sized(question: Question, *, share: int) -> list[list[Candidate]]:
    """Disjoint buckets of at least two members each, of one key, mergeable together.

    None for large problems.

    Args:
        share: a bucket sends and receives at most the peak of the graph as it is, divided by this.
    """
    if len(question.problem) > MOST_TASKS:
        return []
    dependencies, costs = question.dependencies.copy(), question.costs
    most = peak_bytes(question.problem) // share
    buckets: list[list[Candidate]] = []
    last: dict[GroupKey, list[Candidate]] = {}
    held: dict[GroupKey, int] = {}
    for candidate in question.found:
        key, size = candidate.key, candidate.input_bytes + candidate.output_bytes
        bucket = last.get(key)
        if (
            bucket is None
            or len(bucket) == _MEMBERS
            or held[key] + size > most
            # Merged members share their dependencies: one of them speaks for all.
            or dependencies.conflict([bucket[0].collective], candidate.collective) is not None
            or costs.gain_ns([costs.load(bucket), costs.load([candidate])]) <= 0
        ):
            bucket = last[key] = []
            held[key] = 0
            buckets.append(bucket)
        else:
            dependencies.merge([bucket[0].collective, candidate.collective])
        bucket.append(candidate)
        held[key] += size
    return [bucket for bucket in buckets if len(bucket) > 1]
