"""Local search: windows of an order are re-ordered one after another, from the end of the program to its beginning.

Going backwards, the clocks before a window are those of one forward replay, untouched by what was changed further
back, and the tails after it grow by the tasks passed: every window is judged by the exact makespan of the whole
program at a cost that depends on the window alone. Only windows in which time is lost are searched: the compute lane
waits in them, or a machine falls idle before a collective on the critical path.

The allowance is a number of expanded states, so that every rank makes the same decisions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from inductor_passes.schedule import native
from inductor_passes.schedule.exact import LONGEST, load_solver, solve_window
from inductor_passes.schedule.memory import live_bytes
from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.simulate import Trace, replay_time
from inductor_passes.schedule.tables import Tables
from inductor_passes.schedule.window import Answer, Head, Place, Tail, evaluate, improve_window

_START = int(Kind.START)
#: (window length, states kept per level), tried in turn; a wider search only when the narrower ones found nothing.
SHAPES = ((12, 24), (24, 16), (48, 12), (24, 96), (48, 64), (96, 48), (48, 256))
#: Problems up to this length are searched whole, with a width at which most are solved to optimality.
WHOLE, WHOLE_WIDTH = 14, 3000


def local_search(t: Tables, order: Sequence[int], cap_bytes: int | None, bound: int, allowance: int) -> list[int]:
    """An order at least as good as ``order``, within ``cap_bytes`` if that is."""
    result = list(order)
    shapes = ((t.n, WHOLE_WIDTH),) if t.n <= WHOLE else SHAPES
    idle = turn = 0
    while idle < len(shapes) and allowance > 0:
        length, width = shapes[turn % len(shapes)]
        before = replay_time(t, result).makespan
        if before <= bound:
            break
        result, used = _improved(t, result, (length, width), cap_bytes, allowance)
        allowance -= used + t.n // 8
        if replay_time(t, result).makespan < before:
            idle = turn = 0
        else:
            idle += 1
            turn += 1
    return result


def _improved(
    t: Tables, order: list[int], shape: tuple[int, int], cap_bytes: int | None, allowance: int
) -> tuple[list[int], int]:
    """One pass over all windows of a length, with so many states kept; the number of states expanded."""
    if shape[0] <= native.LONGEST and (flat := native.flat(t)) is not None:
        return native.sweep(*flat, order, shape, cap_bytes, allowance)
    search = functools.partial(_in_python, t, cap_bytes=cap_bytes, width=shape[1])
    return _sweep(t, order, shape[0], search, allowance)


def _in_python(t: Tables, window: Sequence[int], place: Place, cap_bytes: int | None, width: int) -> Answer:
    answer = improve_window(t, window, place, cap_bytes, width)
    native.looked_at(answer.expanded)
    return answer


def exact_search(t: Tables, order: Sequence[int], cap_bytes: int | None, windows: int) -> list[int]:
    """``order`` with up to ``windows`` of its critical windows solved by CP-SAT, the present order being the hint.

    Raises:
        ExactUnavailableError: OR-Tools is not installed.
    """
    left = windows

    def solve(window: list[int], place: Place) -> Answer:
        nonlocal left
        if left <= 0:
            return Answer([], place.incumbent, 0, False)
        left -= 1
        return solve_window(t, window, place, cap_bytes)

    load_solver()
    return _sweep(t, list(order), LONGEST, solve, 1 << 62)[0]


def search_whole(t: Tables, cap_bytes: int, limit_ns: int) -> list[int] | None:
    """For a problem of up to ``WHOLE`` tasks: an order within ``cap_bytes`` and ``limit_ns``, None when there is none.

    For caps below what the constructions reach.
    """
    if t.n > WHOLE or t.live0 > cap_bytes:
        return None
    head = Head(0, [0] * t.machines, [-1] * t.n, t.live0)
    unread = [len(r) for r in t.readers]
    limit = (limit_ns, limit_ns + 1)
    place = Place(head, Tail.at_end(t), unread, limit)
    answer = _in_python(t, range(t.n), place, cap_bytes, WHOLE_WIDTH)
    return answer.tasks or None


def search_all(t: Tables, order: Sequence[int], cap_bytes: int | None, states: int) -> tuple[list[int], bool]:
    """An order at least as fast as ``order``, and whether no order within ``cap_bytes`` is faster than that.

    Goes through all sets of tasks that can have run, level by level; where a level has more states than ``states``
    allows, the rest is lost and nothing is known. A cap makes these sets few.
    """
    width = states // max(1, t.n)
    if t.n > native.LONGEST or width < 2:
        return list(order), False
    makespan = replay_time(t, order).makespan
    head = Head(0, [0] * t.machines, [-1] * t.n, t.live0)
    # An order that is as fast is not looked for.
    place = Place(head, Tail.at_end(t), [len(r) for r in t.readers], (makespan, 0))
    if (flat := native.flat(t)) is not None:
        tasks, _, _, complete = native.improve_window(*flat, range(t.n), place, cap_bytes, width)
    else:
        answer = _in_python(t, range(t.n), place, cap_bytes, width)
        tasks, complete = answer.tasks, answer.optimal
    return tasks or list(order), complete


def _sweep(
    t: Tables,
    order: list[int],
    length: int,
    search: Callable[[list[int], Place], Answer],
    allowance: int,
) -> tuple[list[int], int]:
    """One pass over all windows, last to first; the new order and the number of states expanded."""
    n = t.n
    trace = replay_time(t, order)
    live = live_bytes(t, order)
    loses = _loses_time(t, order, trace)
    free_before = [0] * n
    free = [0] * t.machines
    for i in order:
        if t.kind[i] == _START:
            free_before[i] = free[t.machine[i]]
            free[t.machine[i]] = trace.lane_end[i]
    unread = [0] * len(t.size)
    tail = Tail.at_end(t)
    used, stop, at = 0, n, n
    while stop > 0 and used < allowance:
        first = max(0, stop - length)
        while at > first:
            at -= 1
            i = order[at]
            for s in t.consumes[i]:
                unread[s] += 1
            if t.kind[i] == _START:
                free[t.machine[i]] = free_before[i]
        if any(loses[first:stop]):
            window = order[first:stop]
            head = Head(trace.begin[window[0]], free, trace.lane_end, live[first] - t.alloc[window[0]])
            answer = search(window, Place(head, tail, unread, evaluate(t, window, head, tail)))
            used += len(window) + answer.expanded
            if answer.tasks:
                order[first:stop] = answer.tasks
        step = max(1, (stop - first) // 2) if first else stop
        for k in range(stop - 1, stop - step - 1, -1):
            tail.extend(t, order[k])
        stop -= step
    return order, used


def _loses_time(t: Tables, order: Sequence[int], trace: Trace) -> list[bool]:
    """Per position: whether a critical path loses time there.

    That is a wait in which the compute lane stands still, or a start whose machine was idle before it: only these
    can be improved by issuing something sooner or covering it better.
    """
    result = [False] * t.n
    tail = Tail.at_end(t)
    for k in range(t.n - 1, -1, -1):
        i = order[k]
        tail.extend(t, i)
        if t.kind[i] == _START:
            begin = trace.lane_begin[i]
            result[k] = begin == trace.end[i] and begin + tail.machine[t.machine[i]] >= trace.makespan
        elif t.kind[i] > _START:
            end = trace.lane_end[t.start[i]]
            result[k] = end > trace.begin[i] and end + tail.compute >= trace.makespan
    return result
