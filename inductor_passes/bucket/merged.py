"""The problem that a partition makes of a graph's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from inductor_passes.bucket.candidates import Candidate
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.schedule.merge import Bucket, changed, merge
from inductor_passes.schedule.problem import Kind, Problem


def merged(problem: Problem, buckets: Sequence[Sequence[Candidate]], costs: BucketCosts) -> Problem:
    """The problem of the graph with ``buckets`` merged.

    Args:
        problem: its START tasks carry the names of the candidates' start nodes.
    """
    number = {task.name: i for i, task in enumerate(problem.tasks) if task.kind is Kind.START}
    fused = costs.fused(buckets)
    parts = []
    for k, bucket in enumerate(buckets):
        load = costs.load(bucket)
        starts = tuple(number[member.collective.start.name] for member in bucket)
        # Own estimates of the members' durations carry over to the bucket.
        stated = sum(problem.tasks[start].duration_ns for start in starts)
        modelled = sum(costs.transfer_ns(costs.load([member])) for member in bucket)
        parts.append(
            Bucket(
                starts=starts,
                duration_ns=costs.transfer_ns(load) * stated // modelled if modelled else costs.transfer_ns(load),
                issue_ns=costs.issue_ns(load),
                pack_ns=fused.pack_ns[k],
                unpack_ns=fused.copy_out_ns[k] if costs.copies_out(load) else None,
                sent_bytes=load.sent_bytes,
                received_bytes=load.received_bytes,
                shared_output=costs.copies(load) and not costs.copies_out(load),
                prepared=costs.prepared(bucket),
                held=costs.uneven,
            )
        )
    return merge(problem, parts, fused.producers_ns)


def with_durations(problem: Problem, changed_ns: Mapping[str, int]) -> Problem:
    """The problem with other durations of the compute tasks of those names."""
    return dataclasses.replace(problem, tasks=tuple(changed(problem.tasks, changed_ns)))
