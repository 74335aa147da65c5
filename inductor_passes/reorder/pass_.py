"""Reorder an FX graph so that collectives run while there is compute to hide them.

before::

    AG0 W0 mm AG1 W1 mm AG2 W2 mm

after::

    AG0 AG1 W0 mm AG2 W1 mm W2 mm

Correct because only the order changes, along a legal order of a problem that holds all data dependencies, memory
hazards, fences and effects. Saves the time that the compute lane stands still. The order of collectives is decided
here (Inductor keeps it from now on); where exactly starts and waits sit among the fused kernels is decided again by
``replay``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.fx

from inductor_passes.pipeline import Context, arrange, schedule_report
from inductor_passes.reorder.problem import NoHintError
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.schedule.construct import SMALL
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import simulate


@dataclass(frozen=True)
class ReorderPass:
    """See the module's docstring. ``effort`` is the planner's move allowance."""

    effort: int = 1
    name: str = "reorder"
    group_order: ClassVar[Literal["kept", "any"]] = "any"

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Plan and apply; the input order stays when nothing better fits the budget."""
        view = context.view(graph)
        report = PassReport(self.name)
        try:
            fx = context.problem(graph)
        except NoHintError as error:
            report.decisions = [
                Decision("reorder", c.start.name, Verdict.REFUSED, Reason.NO_HINT, str(error), group=c.group.name)
                for c in view.collectives
            ]
            return report
        before = simulate(fx.problem)
        limit = context.limit_bytes(before.peak_bytes)
        pinned = None if context.pins is None else context.pins.fx_plan(fx.problem, limit)
        result = pinned or plan(fx.problem, limit, effort=self.effort, start=_known(context, fx.problem))
        after = simulate(fx.problem, result.order)
        context.plan, context.fx = result, fx
        context.report.schedules.append(schedule_report("fx", fx.problem, result, before, after))
        report.changed = result.method != "input"
        if report.changed:
            arrange(graph, fx.node_order(result.order))
        verdict = Verdict.APPLIED if report.changed else Verdict.REFUSED
        reason = Reason.PROFITABLE if report.changed else Reason.ALREADY_OPTIMAL
        if not result.feasible:
            reason = Reason.OVER_BUDGET
        elif pinned is not None:
            reason = Reason.PLAN_PINNED
        report.decisions = [
            Decision(
                "reorder",
                c.start.name,
                verdict,
                reason,
                f"{result.method}; whole graph {before.makespan_ns} -> {after.makespan_ns} ns",
                group=c.group.name,
                gain_ns=before.makespan_ns - after.makespan_ns,
            )
            for c in view.collectives
        ]
        report.metrics = {
            "makespan_before_ns": before.makespan_ns,
            "makespan_after_ns": after.makespan_ns,
            "peak_before_bytes": before.peak_bytes,
            "peak_after_bytes": after.peak_bytes,
        }
        return report


def _known(context: Context, problem: Problem) -> Plan | None:
    """The plan that bucketing made of the same problem, if it is one that planning again would begin with."""
    if context.solved is None or len(problem) <= SMALL:
        return None
    other, found = context.solved
    return found if len(other) == len(problem) and other.digest() == problem.digest() else None
