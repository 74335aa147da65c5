"""The record of a planned schedule, for the report."""

from __future__ import annotations

from inductor_passes.report import ScheduleReport
from inductor_passes.schedule.plan import Plan
from inductor_passes.schedule.problem import Problem
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
