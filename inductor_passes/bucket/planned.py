"""A partition by the planner's dynamic programme, see ``schedule.partition``.

The programme knows lanes, ready times and due dates, but costs only as straight lines in bytes (``lines``). Buckets
that the graph's dependencies do not allow are left out.
"""

from __future__ import annotations

from inductor_passes.bucket.candidates import Candidate
from inductor_passes.bucket.lines import of
from inductor_passes.bucket.question import Question
from inductor_passes.schedule.partition import Member, choose_partition
from inductor_passes.schedule.problem import Kind

#: Above this many tasks the programme has won on no captured graph, and its own plans take as long as everything else.
MOST_TASKS = 600


def planned(question: Question) -> list[list[Candidate]]:
    """Disjoint buckets of at least two members each, of one key, mergeable together; none for large problems."""
    if len(question.problem) > MOST_TASKS:
        return []
    number = {task.name: i for i, task in enumerate(question.problem.tasks) if task.kind is Kind.START}
    of_start = {number[c.collective.start.name]: c for c in question.found}
    lines = of(question.found, question.costs)
    choice = choose_partition(
        question.problem,
        [Member(start, c.input_bytes, c.output_bytes, lines.names[c.key]) for start, c in of_start.items()],
        lines.lines.__getitem__,
        question.limit_bytes,
        effort=0,
        rounds=1,
        baseline=question.before,
    )
    dependencies = question.dependencies.copy()
    buckets = []
    for bucket in choice.buckets:
        members = sorted((of_start[start] for start in bucket.starts), key=lambda c: c.collective.index)
        collectives = [member.collective for member in members]
        if dependencies.independent(collectives):
            dependencies.merge(collectives)
            buckets.append(members)
    return buckets
