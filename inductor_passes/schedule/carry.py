"""A plan of one problem as the plan of another one with the same tasks.

What is known of a graph before a pass changes it is a forecast of its problem. Tasks and their numbers are as forecast,
but a rule that depends on the order of the program may ask for a few dependencies more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.memory_bound import Bound
from inductor_passes.schedule.plan import Plan, of_order, plan
from inductor_passes.schedule.problem import Problem, Task
from inductor_passes.schedule.robust import disturbed
from inductor_passes.schedule.tables import tables


def carried(known: Plan, other: Problem, problem: Problem) -> Plan | None:
    """``known``, which is a plan of ``other``, for ``problem`` under the same cap.

    None where the tasks are others, or the cap does not hold any more: to plan anew is better then. Durations may
    differ by what a forecast cannot know. What comes before its predecessors goes behind them, and the order is planned
    from there without a search.
    """
    if [_role(task) for task in other.tasks] != [_role(task) for task in problem.tasks]:
        return None
    t = tables(problem)
    order = repaired(problem, known.order)
    moved = of_order(problem, order, known.budget_bytes, known.method, Bound(lower_bound(problem), "any memory"))
    if known.feasible and not moved.feasible:
        return None
    moved = dataclasses.replace(moved, disturbed_ns=disturbed(t, order).mean_ns)
    return plan(problem, known.budget_bytes, effort=0, start=moved)


def _role(task: Task) -> tuple[object, ...]:
    return task.kind, task.lane, task.start, task.fence


def repaired(problem: Problem, order: Sequence[int]) -> list[int]:
    """``order``, but every task after its predecessors: those that are missing come right before it. O(edges)."""
    done = [False] * len(problem)
    result: list[int] = []
    for root in order:
        stack = [root]
        while stack:
            task = stack[-1]
            missing = [] if done[task] else [p for p in problem.expanded[task] if not done[p]]
            if missing:
                stack += missing
                continue
            stack.pop()
            if not done[task]:
                done[task] = True
                result.append(task)
    return result
