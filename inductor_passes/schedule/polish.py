"""Among equally fast orders the one of least peak memory, and with that peak the most robust one.

1. Waits move down to right before their first reader as far as the peak allows.
2. Starts of gathers move down to the latest position that delays nothing. Both together lower the peak.
3. Waits move down again, then starts up to where their machine falls free, as far as the new peak allows. By the cost
   model that gains no time; it is slack for collectives that are slower than predicted.

Every step is checked by replay and dropped unless makespan and peak are at least as good.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from inductor_passes.schedule.memory import RangeMax, live_bytes
from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.simulate import replay_time
from inductor_passes.schedule.slack import latest_issue, relieves
from inductor_passes.schedule.tables import Tables

_COMPUTE, _START = int(Kind.COMPUTE), int(Kind.START)


def polish(t: Tables, order: Sequence[int]) -> list[int]:
    """An order as fast as ``order``, of at most its peak, with starts and waits placed as described above."""
    result = list(order)
    for step in (_waits_down, _starts_no_earlier_than_needed, _waits_down, _starts_up):
        changed = step(t, result)
        if _value(t, changed) <= _value(t, result):
            result = changed
    return result


def _value(t: Tables, order: Sequence[int]) -> tuple[int, int]:
    return replay_time(t, order).makespan, max(live_bytes(t, order), default=t.live0)


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


def _starts_no_earlier_than_needed(t: Tables, order: Sequence[int]) -> list[int]:
    """Move starts that take more memory than they free to their latest position. O(N log N)."""
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


def _waits_down(t: Tables, order: Sequence[int]) -> list[int]:
    """Move waits right before their first reader where the peak allows. O(N log N + edges)."""
    position = _positions(t, order)
    profile = live_bytes(t, order)
    peak = max(profile, default=0)
    tree = RangeMax(profile)
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
        if size and not tree.at_most(first, place, peak - size):
            continue
        for s in held:
            tree.add(last_reader[s] + 1, place, t.size[s])
            last_reader[s] = place
        anchor[i] = place
    return _insert(order, anchor)


def _starts_up(t: Tables, order: Sequence[int]) -> list[int]:
    """Move starts up to where their machine falls free, where the peak allows. O(N log N + edges)."""
    trace = replay_time(t, order)
    position = _positions(t, order)
    profile = live_bytes(t, order)
    peak = max(profile, default=0)
    tree = RangeMax(profile)
    begins = [trace.begin[i] for i in order]
    before = [0] * t.machines
    free = [0] * t.machines
    anchor: dict[int, int] = {}
    for k, i in enumerate(order):
        if t.kind[i] != _START:
            continue
        m = t.machine[i]
        # Ties in time resolve to the first boundary: zero-length neighbours do not matter.
        place = bisect_right(begins, free[m] - t.busy_ns[i], 0, k) - 1
        place = max(place, before[m])
        for p in t.preds[i]:
            place = max(place, anchor[p] if p in anchor else position[p] + 1)
        if place < k and tree.at_most(place, k, peak - t.alloc[i]):
            tree.add(place, k, t.alloc[i] - t.transient[i])
            anchor[i] = place
        before[m] = anchor.get(i, k + 1)
        free[m] = trace.lane_end[i]
    return _insert(order, anchor)
