"""Memory of generated C++ code: kernels in a row become one function, and nothing is freed inside of one.

Inductor's C++ backend collects fused kernels until an extern kernel, a start or a wait comes. It allocates their
results on the way and frees what they have read behind the function, so a row of kernels holds more than kernels one by
one. The planner does not know rows: what it finds is measured here, and planned again with less where that is too much.

Source: ``Scheduler.flush`` in torch/_inductor/scheduler.py, ``CppScheduling`` in torch/_inductor/codegen/cpp.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inductor_passes.schedule import least_memory
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


def least(problem: Problem, batched: Sequence[bool]) -> tuple[int, Sequence[int]]:
    """What the generated code needs in the order of least memory that is known, in bytes, and that order."""
    return least_memory.least(tables(problem), lambda order: peak_bytes(problem, order, batched))


def within(
    problem: Problem, batched: Sequence[bool], limit_bytes: int, plan: Callable[[int], Plan]
) -> tuple[Plan, Sequence[int]] | None:
    """A plan and its order, changed where that was needed for the generated code to hold to the cap.

    Args:
        plan: finds an order within a cap on kernels one by one.
    """
    limit = limit_bytes
    for _ in range(1 + TRIES):
        found = plan(limit)
        if not found.feasible:
            return None
        over = peak_bytes(problem, found.order, batched) - limit_bytes
        if over <= 0:
            return found, found.order
        order = spread(problem, found.order, batched)
        if peak_bytes(problem, order, batched) <= limit_bytes:
            return found, order
        limit -= over
    return None


def spread(problem: Problem, order: Sequence[int], batched: Sequence[bool]) -> list[int]:
    """``order`` with those of its ``batched`` tasks that free at least what they take right behind what they need.

    So they are in fewer rows with others, which would keep what they free. O(N log N + edges).
    """
    t = tables(problem)
    unread = [len(readers) for readers in t.readers]
    key: list[tuple[int, int]] = [(0, 0)] * t.n
    for at, i in enumerate(order):
        key[i] = (at, 0)
        freed = t.transient[i]
        for s in t.consumes[i]:
            unread[s] -= 1
            if not unread[s]:
                freed += t.size[s]
        if batched[i] and freed >= t.alloc[i] and t.preds[i]:
            last = max(key[p] for p in t.preds[i])
            key[i] = (last[0], at + 1)
    return sorted(order, key=key.__getitem__)
