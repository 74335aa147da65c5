"""A pinned order of a problem's tasks: which rule it breaks, and the plan that it is."""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.schedule.memory_bound import best_known
from inductor_passes.schedule.plan import Plan
from inductor_passes.schedule.problem import Problem, ProblemError
from inductor_passes.schedule.simulate import simulate

METHOD = "pinned"


def plan_of(problem: Problem, order: tuple[int, ...], limit_bytes: int | None) -> Plan:
    """A legal order as a plan under a cap in bytes (None: unlimited), which it may exceed."""
    before, after = simulate(problem), simulate(problem, order)
    fits = limit_bytes is None or after.peak_bytes <= limit_bytes
    bound = best_known(problem, limit_bytes if fits else None, after.makespan_ns)
    return Plan(
        order=order,
        makespan_ns=after.makespan_ns,
        peak_bytes=after.peak_bytes,
        lower_bound_ns=bound.ns,
        gap=bound.gap(after.makespan_ns),
        # An order that changes nothing counts as the input's.
        method=METHOD if order != problem.input_order else "input",
        input_makespan_ns=before.makespan_ns,
        input_peak_bytes=before.peak_bytes,
        budget_bytes=limit_bytes,
        feasible=fits,
        bound_on=bound.on,
    )


def broken_rule(problem: Problem, order: Sequence[int], names: Sequence[str]) -> str:
    """The first dependency that an order breaks, in words; "" when it is legal."""
    position = {i: k for k, i in enumerate(order)}
    for i in order:
        task = problem.tasks[i]
        if task.start >= 0 and position[task.start] > position[i]:
            return f"{names[i]} waits for {names[task.start]}, which starts later"
    for i, preds in enumerate(problem.expanded):
        for p in preds:
            if position[p] > position[i]:
                fence = next((names[k] for k in (i, p) if problem.tasks[k].fence), "")
                why = f" ({fence} is a fence: nothing that communicates crosses it)" if fence else ""
                return f"{names[i]} runs before {names[p]}, which it depends on{why}"
    try:
        problem.check_order(order)
    except ProblemError as error:
        return str(error)
    return ""
