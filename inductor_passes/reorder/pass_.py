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

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch.fx

from inductor_passes.pin.pins import GivenUp
from inductor_passes.problems.fx import NoHintError
from inductor_passes.problems.record import schedule_report
from inductor_passes.records.words import Effort
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.rewriting import rungs
from inductor_passes.rewriting.arrange import arrange
from inductor_passes.rewriting.contract import Facts, GroupOrder, Outcome, Scheduled, Solved
from inductor_passes.rewriting.messages import order_like
from inductor_passes.rewriting.order import CycleError
from inductor_passes.schedule.construct import SMALL
from inductor_passes.schedule.effort import plan_with_effort
from inductor_passes.schedule.plan import Plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import simulate


@dataclass(frozen=True)
class ReorderPass:
    """See the module's docstring.

    Attributes:
        effort: how hard the planner tries.
        like: messages in the order in which the graph has to send them, see ``messages.order_like``; empty: in any.
    """

    effort: Effort = "normal"
    like: tuple[tuple[str, ...], ...] = ()
    name: str = "reorder"
    group_order: ClassVar[GroupOrder] = "any"

    def may_shorten(self, facts: Facts) -> bool:
        """It only orders."""
        return False

    def run(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        """Plan and apply; the input order stays when nothing better fits the budget."""
        arranged = _arranged(graph, facts, self.like) if self.like else None
        facts = arranged or facts
        try:
            fx = facts.problem
        except NoHintError as error:
            return Outcome(_without_hint(facts, str(error), changed=arranged is not None))
        before = simulate(fx.problem)
        pinned, given_up = _pinned(facts, fx.problem)
        result = pinned or self._plan(facts, fx.problem)
        after = simulate(fx.problem, result.order)
        changed = result.method != "input" or arranged is not None
        if changed:
            arrange(graph, fx.node_order(result.order))
        reason = Reason.PROFITABLE if changed else Reason.ALREADY_OPTIMAL
        if not result.feasible:
            reason = Reason.OVER_BUDGET
        elif pinned is not None:
            reason = Reason.PLAN_PINNED
        decisions = [
            Decision(
                "reorder",
                c.start.name,
                Verdict.APPLIED if changed else Verdict.REFUSED,
                reason,
                f"{result.method}; whole graph {before.makespan_ns} -> {after.makespan_ns} ns",
                group=c.group.name,
                gain_ns=before.makespan_ns - after.makespan_ns,
            )
            for c in facts.view.collectives
        ]
        metrics: dict[str, float] = {
            "makespan_before_ns": before.makespan_ns,
            "makespan_after_ns": after.makespan_ns,
            "peak_before_bytes": before.peak_bytes,
            "peak_after_bytes": after.peak_bytes,
        }
        record = schedule_report("fx", fx.problem, result, before, after)
        report = PassReport(self.name, changed=changed, decisions=decisions, metrics=metrics)
        return Outcome(report, scheduled=Scheduled(fx, result, record), given_up=given_up)

    def _plan(self, facts: Facts, problem: Problem) -> Plan:
        """The best order found, no worse than the one that is known of this problem already."""
        solved = _known(facts, problem)
        known, searched = (None, False) if solved is None else (solved.plan, solved.searched)
        # On a large problem the known plan is where planning again would begin.
        start = known if len(problem) > SMALL else None
        smaller = [cap.limit_bytes for cap in rungs.lower(facts.cap) if cap.limit_bytes is not None]
        return plan_with_effort(
            problem, facts.limit_bytes, self.effort, start=start, smaller=smaller, known=known, searched=searched
        )


def _arranged(graph: torch.fx.Graph, facts: Facts, like: tuple[tuple[str, ...], ...]) -> Facts | None:
    """Facts about the graph once it sends like another one, and may not send otherwise; None where it cannot."""
    try:
        order = order_like(facts.view, like)
    except CycleError:
        order = None
    if order is None:
        return None
    arrange(graph, order)
    found = facts.of(graph)
    return dataclasses.replace(found, look=dataclasses.replace(found.look, agreed=False))


def _without_hint(facts: Facts, detail: str, *, changed: bool) -> PassReport:
    decisions = [
        Decision("reorder", c.start.name, Verdict.REFUSED, Reason.NO_HINT, detail, group=c.group.name)
        for c in facts.view.collectives
    ]
    return PassReport("reorder", changed=changed, decisions=decisions)


def _pinned(facts: Facts, problem: Problem) -> tuple[Plan | None, str]:
    """The pinned order, None when there is none; and why it was given up."""
    if facts.pins is None:
        return None, ""
    try:
        return facts.pins.fx_plan(problem, facts.limit_bytes), ""
    except GivenUp as error:
        return None, str(error)


def _known(facts: Facts, problem: Problem) -> Solved | None:
    """A plan that was made of the same problem already."""
    if (solved := facts.solved) is None or solved.problem is problem:
        return solved
    return solved if len(solved.problem) == len(problem) and solved.problem.digest() == problem.digest() else None
