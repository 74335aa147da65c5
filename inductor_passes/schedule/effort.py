"""How hard the planner tries. A level begins with the plan of the one below it, so more effort is never worse.

``normal`` constructs and searches; ``high`` searches on, with a larger allowance; ``exact`` then solves windows of the
order by constraint programming (``exact``), which needs OR-Tools. All are pure functions of the problem; ``exact`` is
one of OR-Tools' version too, so ranks must have the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inductor_passes.records.words import Effort
from inductor_passes.schedule.construct import SMALL, near
from inductor_passes.schedule.memory_bound import Bound
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.renumber import renumbered
from inductor_passes.schedule.robust import disturbed
from inductor_passes.schedule.tables import tables

#: Up to this many tasks whoever plans tries smaller caps by itself, with everything that comes before planning.
_ALONE = 600
#: How often an order is the input of the next search, at most; it seldom helps more often.
_ROUNDS = 3
#: Units of effort that ``high`` searches on with, after the one of ``normal``.
HIGH = 8


def plan_with_effort(
    problem: Problem,
    budget_bytes: int | None,
    effort: Effort,
    *,
    start: Plan | None = None,
    slack: bool = True,
    smaller: Sequence[int] = (),
    known: Plan | None = None,
    searched: bool = False,
) -> Plan:
    """The best order found, see :func:`~inductor_passes.schedule.plan.plan`; a higher level is never worse.

    Args:
        smaller: caps in bytes below ``budget_bytes``. Where an order found for one of them is faster, the search goes
            on from there: a larger cap is never slower.
        known: a plan of the same problem under the same cap that the result is no worse than.
        searched: ``known`` is what this function found, at ``normal`` at least and without ``smaller``.

    Raises:
        ExactUnavailableError: ``exact`` without OR-Tools.
    """
    if known is not None and searched:
        found = known
        if len(problem) > _ALONE:
            found = _no_slower_than(problem, found, smaller, slack)
        found = found if found is known else _once_more(problem, found, slack)
    else:
        found = plan(problem, budget_bytes, start=start, slack=slack)
        if known is not None:
            found = min(found, known, key=lambda p: p.value)
        if len(problem) > _ALONE:
            found = _no_slower_than(problem, found, (budget_bytes, *smaller), slack)
        found = _once_more(problem, found, slack)
    if effort == "normal":
        return found
    found = plan(problem, budget_bytes, effort=HIGH, start=found, slack=slack)
    if effort == "high":
        return found
    return plan(problem, budget_bytes, effort=0, exact_window=True, start=found, slack=slack)


def _no_slower_than(problem: Problem, found: Plan, caps: Sequence[int | None], slack: bool) -> Plan:
    """The best of ``found`` and of what other searches find: for ``caps``, its own or smaller, thorough or not.

    Searches under a cap end at local optima, on large graphs often 10% apart, and neither way to search is the better
    one of all graphs.
    """
    for cap in caps:
        for thorough in (True, False):
            if near(found.makespan_ns, found.lower_bound_ns):
                return found
            if cap == found.budget_bytes and thorough == (len(problem) <= SMALL):
                continue  # what ``found`` came from
            other = plan(problem, cap, thorough=thorough, slack=slack)
            if (not other.feasible, other.makespan_ns) < (not found.feasible, found.makespan_ns):
                bound = Bound(found.lower_bound_ns, found.bound_on)
                other = dataclasses.replace(other, budget_bytes=found.budget_bytes).against(bound)
                found = plan(problem, found.budget_bytes, start=other, slack=slack)
    return found


def _once_more(problem: Problem, found: Plan, slack: bool) -> Plan:
    """``found``, or what :func:`again` makes of it, a few times over."""
    for _ in range(_ROUNDS):
        other = again(problem, found, slack=slack)
        if other is found:
            break
        found = other
    return found


def again(
    problem: Problem, found: Plan, *, effort: int = 1, thorough: bool | None = None, slack: bool = True
) -> Plan:
    """``found``, or a faster plan with its order as the input: rules that keep close to the input find others then.

    Args:
        effort, thorough: see :func:`~inductor_passes.schedule.plan.plan`.
    """
    if near(found.makespan_ns, found.lower_bound_ns) or not found.feasible:
        return found
    numbered = renumbered(problem, found.order)
    other = plan(numbered, found.budget_bytes, effort=effort, thorough=thorough, slack=slack)
    if other.makespan_ns >= found.makespan_ns:
        return found
    order = tuple(found.order[i] for i in other.order)
    return dataclasses.replace(
        other,
        order=order,
        # What is disturbed follows the numbers of the tasks.
        disturbed_ns=disturbed(tables(problem), order).mean_ns,
        input_makespan_ns=found.input_makespan_ns,
        input_peak_bytes=found.input_peak_bytes,
    )
