"""The order of the fused kernels: planned or pinned, with the reason for every collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inductor_passes.pin.kernels import kernel_names
from inductor_passes.pin.pins import GivenUp, Pins
from inductor_passes.problems.kernels import SchedulerProblem
from inductor_passes.records.words import Effort
from inductor_passes.replay import batches
from inductor_passes.report import Decision, Reason, Verdict
from inductor_passes.schedule.effort import plan_with_effort
from inductor_passes.schedule.memory_bound import best_known
from inductor_passes.schedule.plan import Plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import Timeline, simulate


@dataclass(frozen=True)
class Ordered:
    """An order of the kernels.

    Attributes:
        names: of the kernels, by task number, as in a plan file.
        pinned: the order is that of a plan file.
        given_up: why a pinned order was given up, "" when it was not.
        least_bytes: what the kernels need in the order of least memory that is known; 0 where nothing limits them.
        above_bytes: by how much the kernels need more than the budget allows, in the order of least memory.
    """

    built: SchedulerProblem
    plan: Plan
    before: Timeline
    names: tuple[str, ...]
    pinned: bool = False
    given_up: str = ""
    above_bytes: int = 0
    least_bytes: int = 0

    @property
    def changed(self) -> bool:
        """Whether the order is another one than Inductor's."""
        return self.plan.method != "input"

    @property
    def after(self) -> Timeline:
        """The simulation of the order."""
        return simulate(self.built.problem, self.plan.order) if self.changed else self.before

    def left_alone(self) -> Ordered:
        """Inductor's own order instead."""
        unchanged = dataclasses.replace(
            self.plan,
            order=self.built.problem.input_order,
            makespan_ns=self.before.makespan_ns,
            peak_bytes=self.before.peak_bytes,
            method="input",
        )
        unchanged = _held_against(self.built.problem, unchanged, self.plan.budget_bytes)
        return dataclasses.replace(self, plan=unchanged, pinned=False)

    def decisions(self) -> list[Decision]:
        """One per collective."""
        gain = self.before.makespan_ns - self.after.makespan_ns
        if not self.plan.feasible:
            reason = Reason.OVER_BUDGET
        elif self.pinned:
            reason = Reason.PLAN_PINNED
        else:
            reason = Reason.PROFITABLE if self.changed else Reason.ALREADY_OPTIMAL
        return [
            Decision(
                "replay",
                self.built.problem.tasks[start].name,
                Verdict.APPLIED if self.changed else Verdict.REFUSED,
                reason,
                self.plan.method,
                source=self.built.problem.tasks[start].source,
                group=collective.group.name,
                gain_ns=gain,
            )
            for start, collective in self.built.collectives.items()
        ]


def order(
    built: SchedulerProblem,
    before: Timeline,
    allowed: Callable[[int], int | None],
    pins: Pins | None,
    effort: Effort = "normal",
) -> Ordered:
    """The best order of the kernels within the cap, or the one that is pinned.

    Args:
        before: Inductor's own order, simulated.
        allowed: the cap in bytes on the generated code, given what it needs at least; None: unlimited.
        pins: the plan that is pinned for the graph, None when there is none.
        effort: how hard the planner tries.
    """
    names, problem = tuple(kernel_names(list(built.nodes))), built.problem
    limit, given_up, above, needed = None, "", 0, 0
    if allowed(0) is not None:
        needed = batches.least(problem, built.batched)
        asked = allowed(needed) or 0
        # Nothing is known that needs less.
        limit, above = max(asked, needed), max(0, needed - asked)
    if pins is not None:
        try:
            pinned = pins.kernel_plan(problem, names, limit)
            if pinned is not None:
                return Ordered(built, pinned, before, names, pinned=True)
        except GivenUp as error:
            given_up = str(error)

    def plan(limit_bytes: int | None) -> Plan:
        # Where the cap is the least that is known to do, the budget leaves nothing for slack.
        return plan_with_effort(problem, limit_bytes, effort, slack=limit is None or limit > needed)

    found = plan(None) if limit is None else _held(built, limit, plan)
    if found.budget_bytes != limit:
        # What holds for less memory, or for any, is not what can be said of this budget.
        found = _held_against(problem, dataclasses.replace(found, budget_bytes=limit), limit)
    return Ordered(built, found, before, names, given_up=given_up, above_bytes=above, least_bytes=needed)


def _held(built: SchedulerProblem, limit: int, plan: Callable[[int | None], Plan]) -> Plan:
    """The best order found that the generated code holds to the cap in."""
    found = batches.within(built.problem, built.batched, limit, plan)
    if found is None:
        return _of_order(built.problem, batches.fastest(built.problem, built.batched, limit), "least-memory")
    planned, order = found
    return planned if order is planned.order else _of_order(built.problem, order, f"{planned.method}/spread")


def _of_order(problem: Problem, order: Sequence[int], method: str) -> Plan:
    """An order as a plan."""
    before, after, bound = simulate(problem), simulate(problem, order), best_known(problem, None)
    return Plan(
        order=tuple(order),
        makespan_ns=after.makespan_ns,
        peak_bytes=after.peak_bytes,
        lower_bound_ns=bound.ns,
        gap=bound.gap(after.makespan_ns),
        method="input" if tuple(order) == problem.input_order else method,
        input_makespan_ns=before.makespan_ns,
        input_peak_bytes=before.peak_bytes,
    )


def _held_against(problem: Problem, found: Plan, limit_bytes: int | None) -> Plan:
    """``found`` with the best bound on orders as large as it is or as the limit allows."""
    cap = None if limit_bytes is None else max(limit_bytes, found.peak_bytes)
    return found.against(best_known(problem, cap, found.makespan_ns))
