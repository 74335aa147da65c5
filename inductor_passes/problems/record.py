"""The record of a planned schedule, for the report, and the digest of a whole plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from inductor_passes.problems.fx import FxProblem
from inductor_passes.report import ScheduleReport
from inductor_passes.schedule.plan import Plan
from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.robust import disturbed
from inductor_passes.schedule.simulate import Timeline
from inductor_passes.schedule.tables import tables


def schedule_report(level: str, problem: Problem, plan: Plan, before: Timeline, after: Timeline) -> ScheduleReport:
    """What was planned, before and after; ``level`` is ``fx`` or ``scheduler``."""
    t = tables(problem)
    disturbed_before, disturbed_after = disturbed(t, problem.input_order), disturbed(t, plan.order)
    return ScheduleReport(
        level=level,
        tasks=len(problem),
        makespan_before_ns=before.makespan_ns,
        makespan_after_ns=after.makespan_ns,
        compute_ns=after.compute_ns,
        communication_ns=after.communication_ns,
        lower_bound_ns=plan.lower_bound_ns,
        gap=plan.gap,
        exposed_before_ns=before.total_exposed_ns,
        exposed_after_ns=after.total_exposed_ns,
        peak_before_bytes=before.peak_bytes,
        peak_after_bytes=after.peak_bytes,
        budget_bytes=plan.budget_bytes,
        digest=problem.digest(plan.order),
        schedule_before=problem.schedule_text(),
        schedule_after=problem.schedule_text(plan.order),
        method=plan.method,
        disturbed_before_ns=disturbed_before.mean_ns,
        disturbed_after_ns=disturbed_after.mean_ns,
        disturbed_worst_ns=disturbed_after.worst_ns,
        bound_on=plan.bound_on,
        contention_before_ns=before.contention_ns,
        contention_after_ns=after.contention_ns,
    )


def plan_digest(fx: FxProblem | None, fx_order: Sequence[int], kernels: Problem, order: Sequence[int]) -> str:
    """The digest of a graph's plan (16 hex digits), equal on ranks that agree.

    It is that of the kernels and their order. Where shards are uneven a rank's kernels are its own: it pads its shard,
    which costs time and memory, and its neighbour has nothing to pad. Then it is made of what all ranks see alike: the
    problem that was solved on FX, its answer, the order of what is sent, and which library kernels there are. Where a
    rank waits, and when it runs its library kernels, depends on what its own kernels cost.

    Args:
        fx: the problem on FX, None where there was none; ``fx_order``: its answer.
        kernels: the problem of the fused kernels; ``order``: its answer.
    """
    if fx is None or not fx.uneven:
        return kernels.digest(order)
    labelled = [t for i in order if (t := kernels.tasks[i]).label]
    sent = [(t.label, t.lane, t.size_bytes) for t in labelled if t.kind is Kind.START]
    computed = sorted(t.label for t in labelled if t.kind is Kind.COMPUTE)
    content = json.dumps([fx.problem.digest(fx_order), sent, computed], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]
