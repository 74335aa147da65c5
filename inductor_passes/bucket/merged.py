"""The problem that a partition makes of a graph's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from inductor_passes.bucket.candidates import Candidate
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.schedule.merge import Bucket, merge
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
            )
        )
    return merge(with_durations(problem, fused.producers_ns), parts)


def with_durations(problem: Problem, changed_ns: Mapping[str, int]) -> Problem:
    """The problem with other durations of the tasks of those names."""
    tasks = tuple(
        dataclasses.replace(task, duration_ns=changed_ns[task.name])
        if task.kind is Kind.COMPUTE and changed_ns.get(task.name, task.duration_ns) != task.duration_ns
        else task
        for task in problem.tasks
    )
    return dataclasses.replace(problem, tasks=tasks)
