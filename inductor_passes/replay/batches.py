"""Memory of generated C++ code: kernels in a row become one function, and nothing is freed inside of one.

Inductor's C++ backend collects fused kernels until an extern kernel, a start or a wait comes. It allocates their
results on the way and frees what they have read behind the function, so a row of kernels holds more than kernels one by
one. The planner does not know rows: what it finds is measured here, and planned again with less where that is too much.

Source: ``Scheduler.flush`` in torch/_inductor/scheduler.py, ``CppScheduling`` in torch/_inductor/codegen/cpp.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from inductor_passes.schedule import least_memory
from inductor_passes.schedule.plan import Plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import timed
from inductor_passes.schedule.tables import Tables, tables

#: How often a problem is planned with less memory than is allowed.
TRIES = 3
#: Tasks that are tried between the kernels of a row, from each side of it.
_NEAR = 6
#: Replays when rows are taken apart: about this many tasks in all, at least so many replays.
_REPLAYED, _LEAST_REPLAYS = 400_000, 48


def peak_bytes(problem: Problem, order: Sequence[int], batched: Sequence[bool]) -> int:
    """Highest number of bytes in use over ``order`` when rows of ``batched`` tasks free at their end; O(N)."""
    return max(_profile(problem, order, batched), default=tables(problem).live0)


def _profile(problem: Problem, order: Sequence[int], batched: Sequence[bool]) -> Iterator[int]:
    """Bytes in use while each task of ``order`` runs."""
    t = tables(problem)
    unread = [len(r) for r in t.readers]
    live, pending = t.live0, 0
    for i in order:
        if not batched[i]:
            live -= pending
            pending = 0
        live += t.alloc[i]
        yield live
        freed = t.transient[i]
        for s in t.consumes[i]:
            unread[s] -= 1
            if not unread[s]:
                freed += t.size[s]
        if batched[i]:
            pending += freed
        else:
            live -= freed


def least(problem: Problem, batched: Sequence[bool]) -> int:
    """What the generated code needs in the order of least memory that is known, in bytes."""
    return least_memory.least(tables(problem), lambda order: peak_bytes(problem, order, batched))


def fastest(problem: Problem, batched: Sequence[bool], limit_bytes: int) -> Sequence[int]:
    """The fastest of the orders of low memory whose generated code is within the cap; the cap is no less than one's."""
    t = tables(problem)
    found = [order for order in least_memory.orders(t) if peak_bytes(problem, order, batched) <= limit_bytes]
    return min(found, key=lambda order: timed(t, order).makespan)


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
        for order in _taken_apart(problem, found.order, batched):
            if peak_bytes(problem, order, batched) <= limit_bytes:
                return found, order
        limit -= over
    return None


def _taken_apart(problem: Problem, order: Sequence[int], batched: Sequence[bool]) -> Iterator[list[int]]:
    """Orders like this one with shorter rows, what costs least to find first."""
    spread_out = spread(problem, order, batched)
    yield spread_out
    yield parted(problem, order, batched)
    yield parted(problem, spread_out, batched)


def parted(problem: Problem, order: Sequence[int], batched: Sequence[bool]) -> list[int]:
    """``order`` with the row of highest peak taken apart, again and again while that makes the peak lower.

    Another task, from right behind or right before the row, goes in front of the kernel that reaches the peak: what the
    row has freed so far is free then.
    """
    t = tables(problem)
    best = list(order)
    peak = peak_bytes(problem, best, batched)
    for _ in range(max(_LEAST_REPLAYS, _REPLAYED // max(1, t.n)) // (2 * _NEAR)):
        at = _reached(problem, best, batched)
        found = [(peak_bytes(problem, one, batched), one) for one in _with_another_at(t, best, batched, at)]
        lowest = min(found, key=lambda one: one[0], default=(peak, best))
        if lowest[0] >= peak:
            break
        peak, best = lowest
    return best


def _reached(problem: Problem, order: Sequence[int], batched: Sequence[bool]) -> int:
    """Where the peak is reached first."""
    profile = list(_profile(problem, order, batched))
    return max(range(len(profile)), key=profile.__getitem__, default=0)


def _with_another_at(t: Tables, order: list[int], batched: Sequence[bool], at: int) -> Iterator[list[int]]:
    """Legal orders in which a task that is no part of a row comes right before the one at ``at``, from near by."""
    position = {task: k for k, task in enumerate(order)}
    near = 0
    for k in range(at + 1, len(order)):
        if batched[order[k]]:
            continue
        if all(position[p] < at for p in t.preds[order[k]]):
            yield [*order[:at], order[k], *order[at:k], *order[k + 1 :]]
        near += 1
        if near == _NEAR:
            break
    near = 0
    for k in range(at - 1, -1, -1):
        if batched[order[k]]:
            continue
        if k + 1 < at and all(position[p] >= at for p in t.succs[order[k]]):
            yield [*order[:k], *order[k + 1 : at], order[k], *order[at:]]
        near += 1
        if near == _NEAR:
            break


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
