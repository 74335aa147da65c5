"""Memory of generated C++ code: kernels in a row become one function, and nothing is freed inside of one.

Inductor's C++ backend collects fused kernels until an extern kernel, a start or a wait comes. It allocates their
results on the way and frees what they have read behind the function, so a row of kernels holds more than kernels one by
one. The planner does not know rows: what it finds is measured here, and planned again with less where that is too much.

Source: ``Scheduler.flush`` in torch/_inductor/scheduler.py, ``CppScheduling`` in torch/_inductor/codegen/cpp.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inductor_passes.schedule.plan import Plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.tables import tables

#: How often a problem is planned with less memory than is allowed.
TRIES = 3


def peak_bytes(problem: Problem, order: Sequence[int], batched: Sequence[bool]) -> int:
    """Highest number of bytes in use over ``order`` when rows of ``batched`` tasks free at their end; O(N)."""
    t = tables(problem)
    unread = [len(r) for r in t.readers]
    live = peak = t.live0
    pending = 0
    for i in order:
        if not batched[i]:
            live -= pending
            pending = 0
        live += t.alloc[i]
        peak = max(peak, live)
        freed = t.transient[i]
        for s in t.consumes[i]:
            unread[s] -= 1
            if not unread[s]:
                freed += t.size[s]
        if batched[i]:
            pending += freed
        else:
            live -= freed
    return peak


def within(
    problem: Problem,
    batched: Sequence[bool],
    limit_bytes: int | None,
    allowed: Callable[[int], int | None],
    plan: Callable[[int | None], Plan],
) -> tuple[Plan, bool]:
    """The first plan found that the generated code holds to, and True; or the first plan of all, and False.

    Args:
        limit_bytes: the cap on kernels one by one.
        allowed: the cap on the generated code for the peak of the order in which kernels came.
        plan: finds an order within a cap.
    """
    first = found = plan(limit_bytes)
    if limit_bytes is None or not any(batched):
        return found, True
    came = peak_bytes(problem, problem.input_order, batched)
    most = max(came, allowed(came) or 0)
    for _ in range(TRIES):
        over = peak_bytes(problem, found.order, batched) - most
        if over <= 0:
            return found, True
        limit_bytes -= over
        found = plan(limit_bytes)
        if not found.feasible:
            return first, False
    holds = peak_bytes(problem, found.order, batched) <= most
    return (found, True) if holds else (first, False)
