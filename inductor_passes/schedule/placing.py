"""Starts and waits of a given order put elsewhere, as far as memory allows; nothing else moves.

One sweep over the order each. A sweep looks at the order's own timeline and never asks what its moves do to it: the
caller replays the result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from inductor_passes.schedule import native
from inductor_passes.schedule.memory import RangeMax, live_bytes
from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.simulate import replay_time
from inductor_passes.schedule.slack import latest_issue, relieves
from inductor_passes.schedule.tables import Tables

_START = int(Kind.START)


def _positions(t: Tables, order: Sequence[int]) -> list[int]:
    position = [0] * t.n
    for k, i in enumerate(order):
        position[i] = k
    return position


def _insert(order: Sequence[int], anchor: dict[int, int]) -> list[int]:
    """``order`` with every task of ``anchor`` taken out and put right before the task now at position ``anchor``."""
    at: dict[int, list[int]] = {}
    for i in order:
        if i in anchor:
            at.setdefault(anchor[i], []).append(i)
    result: list[int] = []
    for k, i in enumerate(order):
        result.extend(at.get(k, ()))
        if i not in anchor:
            result.append(i)
    result.extend(at.get(len(order), ()))
    return result


def starts_down(t: Tables, order: Sequence[int]) -> list[int]:
    """Starts that take more memory than they free at the latest position that delays nothing. O(N log N)."""
    trace = replay_time(t, order)
    position = _positions(t, order)
    latest = latest_issue(t, order, trace, trace.begin)
    reliever = relieves(t)
    begins = [trace.begin[i] for i in order]
    following = [t.n] * t.machines
    anchor: dict[int, int] = {}
    for k in range(t.n - 1, -1, -1):
        i = order[k]
        if t.kind[i] != _START:
            continue
        m = t.machine[i]
        place = k
        if not reliever[i]:
            # The last boundary reached in time, before everything that must come after it.
            place = max(k, bisect_right(begins, latest[i]) - 1)
            while place > k and begins[place] > latest[i]:
                place -= 1
            for j in t.succs[i]:
                place = min(place, anchor.get(j, position[j]))
            place = max(k, min(place, following[m]))
        if place > k + 1:
            anchor[i] = place
        following[m] = anchor.get(i, k)
    return _insert(order, anchor)


def waits_down(t: Tables, order: Sequence[int], limit_bytes: int) -> list[int]:
    """Waits right before their first reader where that keeps to ``limit_bytes``. O(N log N + edges)."""
    if (flat := native.flat(t)) is not None:
        return native.waits_down(*flat, order, limit_bytes)
    position = _positions(t, order)
    tree = RangeMax(live_bytes(t, order))
    last_reader = [max((position[r] for r in readers), default=-1) for readers in t.readers]
    anchor: dict[int, int] = {}
    for k in range(t.n - 1, -1, -1):
        i = order[k]
        if t.kind[i] <= _START or t.alloc[i]:
            continue
        place = min((anchor.get(j, position[j]) for j in t.succs[i]), default=t.n)
        if place <= k + 1:
            continue
        held = [s for s in t.consumes[i] if last_reader[s] < place]
        size = sum(t.size[s] for s in held)
        # Storages that other tasks read later than this wait are held from their last reader on.
        first = min((last_reader[s] for s in held), default=k) + 1
        if size and not tree.at_most(first, place, limit_bytes - size):
            continue
        for s in held:
            tree.add(last_reader[s] + 1, place, t.size[s])
            last_reader[s] = place
        anchor[i] = place
    return _insert(order, anchor)


def starts_up(t: Tables, order: Sequence[int], limit_bytes: int, ahead_ns: int = 0) -> list[int]:
    """Starts up to ``ahead_ns`` before their machine falls free, or as far as ``limit_bytes`` allows.

    Starts on one machine keep their order. O(N log² N + edges).
    """
    if (flat := native.flat(t)) is not None:
        return native.starts_up(*flat, order, limit_bytes, ahead_ns)
    trace = replay_time(t, order)
    position = _positions(t, order)
    tree = RangeMax(live_bytes(t, order))
    begins = [trace.begin[i] for i in order]
    before = [0] * t.machines
    free = [0] * t.machines
    anchor: dict[int, int] = {}
    for k, i in enumerate(order):
        if t.kind[i] != _START:
            continue
        m = t.machine[i]
        # Ties in time resolve to the first boundary: zero-length neighbours do not matter.
        place = bisect_right(begins, free[m] - t.busy_ns[i] - ahead_ns, 0, k) - 1
        place = max(place, before[m])
        for p in t.preds[i]:
            place = max(place, anchor[p] if p in anchor else position[p] + 1)
        while place < k and not tree.at_most(place, k, limit_bytes - t.alloc[i]):
            place += max(1, (k - place + 1) // 2)
        if place < k:
            tree.add(place, k, t.alloc[i] - t.transient[i])
            anchor[i] = place
        before[m] = anchor.get(i, k + 1)
        free[m] = trace.lane_end[i]
    return _insert(order, anchor)
