"""A partition by the planner's dynamic programme, see ``schedule.partition``.

The programme knows lanes, ready times and due dates, but costs only as straight lines in bytes; the lines here go
through the empty message and through the message of all candidates of a key. Buckets that the graph's dependencies do
not allow are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.bucket.candidates import Candidate, GroupKey
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.bucket.question import Question
from inductor_passes.schedule.partition import Costs, Member, choose_partition
from inductor_passes.schedule.problem import Kind

#: Above this many tasks the programme's own plans take longer than they save.
MOST_TASKS = 4000


def planned(question: Question) -> list[list[Candidate]]:
    """Disjoint buckets of at least two members each, of one key, mergeable together; none for large problems."""
    if len(question.problem) > MOST_TASKS:
        return []
    number = {task.name: i for i, task in enumerate(question.problem.tasks) if task.kind is Kind.START}
    of_start = {number[c.collective.start.name]: c for c in question.found}
    by_key: dict[GroupKey, list[Candidate]] = {}
    for candidate in question.found:
        by_key.setdefault(candidate.key, []).append(candidate)
    names = {key: str(position) for position, key in enumerate(by_key)}
    lines = {names[key]: _line(members, question.costs) for key, members in by_key.items()}
    choice = choose_partition(
        question.problem,
        [Member(start, c.input_bytes, c.output_bytes, names[c.key]) for start, c in of_start.items()],
        lines.__getitem__,
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


def _line(members: Sequence[Candidate], costs: BucketCosts) -> Costs:
    load = costs.load(members)
    latency, kernel = costs.latency_ns(load), costs.kernel_ns
    return Costs(
        alpha_ns=latency,
        beta_ns_per_byte=(costs.transfer_ns(load) - latency) / max(1, load.sent_bytes, load.received_bytes),
        issue_ns=costs.issue_ns(costs.load(members[:1])),
        copy=costs.copies(load),
        unpack=costs.copies_out(load),
        launch_ns=kernel,
        pack_ns_per_byte=max(0, costs.pack_ns(load) - kernel) / max(1, load.sent_bytes),
        unpack_ns_per_byte=max(0, costs.unpack_ns(load) - kernel) / max(1, load.received_bytes),
    )
