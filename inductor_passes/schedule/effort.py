"""How hard the planner tries. A level begins with the plan of the one below it, so more effort is never worse.

``normal`` constructs and searches; ``high`` searches on, with a larger allowance; ``exact`` then solves windows of the
order by constraint programming (``exact``), which needs OR-Tools. All are pure functions of the problem; ``exact`` is
one of OR-Tools' version too, so ranks must have the same one.
"""

from __future__ import annotations

from inductor_passes.records.words import Effort
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import Problem

#: Units of effort that ``high`` searches on with, after the one of ``normal``.
HIGH = 8


def plan_with_effort(
    problem: Problem, budget_bytes: int | None, effort: Effort, *, start: Plan | None = None, slack: bool = True
) -> Plan:
    """The best order found, see :func:`~inductor_passes.schedule.plan.plan`; a higher level is never worse.

    Raises:
        ExactUnavailableError: ``exact`` without OR-Tools.
    """
    found = plan(problem, budget_bytes, start=start, slack=slack)
    if effort == "normal":
        return found
    found = plan(problem, budget_bytes, effort=HIGH, start=found, slack=slack)
    if effort == "high":
        return found
    return plan(problem, budget_bytes, effort=0, exact_window=True, start=found, slack=slack)
