"""Re-order a window of consecutive positions optimally or nearly so, everything outside it kept.

Before the window, the *head*: the clocks of the compute lane and of the machines, collectives in flight, live bytes.
After it, the *tail*: the longest path from each of these clocks to the end of the program, in the order as it is. The
makespan of the whole program is then the maximum over the clocks at the window's end of clock + tail, exactly, so a
candidate costs as much as the window is long. Live bytes depend only on which tasks have run, so the memory cap is
local to the window too.

The search goes through the sets of tasks that have run, one task more per level. Of the states with the same set only
those that no other dominates (all clocks no later) are kept, and of all states of a level the ``width`` best by a
lower bound on the resulting makespan. If no state was cut off for width, the answer is optimal for the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.tables import Tables

_COMPUTE, _START = int(Kind.COMPUTE), int(Kind.START)


@dataclass(slots=True)
class Head:
    """What the tasks before the window leave behind; times in ns."""

    now: int
    free: list[int]
    lane_end: Sequence[int]
    live: int


@dataclass(slots=True)
class Tail:
    """Longest path in ns from a clock at the window's end to the end of the program, in its present order.

    ``compute``: from the compute lane, ``machine``: from each machine becoming free, ``wait``: from the end of a
    collective whose first wait comes after the window (others: 0).
    """

    compute: int
    machine: list[int]
    wait: list[int]

    @staticmethod
    def at_end(t: Tables) -> Tail:
        """After the last task."""
        return Tail(0, [0] * t.machines, [0] * t.n)

    def extend(self, t: Tables, i: int) -> None:
        """Put task ``i`` in front."""
        kind = t.kind[i]
        after = self.compute
        if kind == _START:
            m = t.machine[i]
            end = self.wait[i]
            if self.machine[m] > end:
                end = self.machine[m]
            self.machine[m] = end + t.lane_ns[i]
            if self.machine[m] > after:
                after = self.machine[m]
        self.compute = after + t.busy_ns[i]
        if kind > _START:
            s = t.start[i]
            if self.compute > self.wait[s]:
                self.wait[s] = self.compute


@dataclass(slots=True)
class Answer:
    """Tasks of the window in their new order; the makespan it leads to; search effort and whether it was complete."""

    tasks: list[int]
    value: tuple[int, int]
    expanded: int
    optimal: bool


@dataclass(slots=True)
class _State:
    done: int
    now: int
    free: tuple[int, ...]
    ends: tuple[int, ...]
    live: int
    parent: _State | None
    task: int
    bound: tuple[int, int] = field(default=(0, 0))


def improve_window(
    t: Tables,
    window: Sequence[int],
    head: Head,
    tail: Tail,
    unread: Sequence[int],
    cap_bytes: int | None,
    width: int,
    incumbent: tuple[int, int],
) -> Answer:
    """The best order of ``window`` found; without tasks when none is better than ``incumbent``.

    Args:
        unread: per storage how many of its readers have not run before the window.
        incumbent: (makespan, time at which the compute lane leaves the window) of the present order.
    """
    w = len(window)
    local = {i: k for k, i in enumerate(window)}
    need = [sum(1 << local[p] for p in t.preds[i] if p in local) for i in window]
    own = [(k, mask | 1 << k) for k, mask in enumerate(need)]
    slot: dict[int, int] = {}
    for i in window:
        if t.kind[i] == _START:
            slot[i] = len(slot)
    readers: dict[int, list[int]] = {}
    for k, i in enumerate(window):
        for s in t.consumes[i]:
            readers.setdefault(s, []).append(k)
    releases: list[list[tuple[int, int]]] = [[] for _ in window]
    for s, ks in readers.items():
        if len(ks) == unread[s]:
            mask = sum(1 << k for k in ks)
            for k in ks:
                releases[k].append((mask, t.size[s]))
    busy = [t.busy_ns[i] for i in window]
    total_busy = sum(busy)
    machines = range(t.machines)
    lane_total = [0] * t.machines
    for i in window:
        if t.kind[i] == _START:
            lane_total[t.machine[i]] += t.lane_ns[i]
    waited = {t.start[i] for i in window if t.kind[i] > _START}
    after = [(k, tail.wait[s]) for s, k in slot.items() if tail.wait[s] and s not in waited]
    first = _State(0, head.now, tuple(head.free), (0,) * len(slot), head.live, None, -1)
    level = [first]
    left_busy = {0: total_busy}
    left_lane = {0: tuple(lane_total)}
    expanded, complete = 0, True
    for _ in range(w):
        following: dict[int, list[_State]] = {}
        for state in level:
            done, now, free = state.done, state.now, state.free
            missing = ~done
            ready = [k for k, mask in own if missing & mask == 1 << k]
            # A wait that costs nothing only makes memory free and readers ready.
            for k in ready:
                i = window[k]
                if t.kind[i] > _START and not busy[k] and not t.alloc[i]:
                    s = t.start[i]
                    if (state.ends[slot[s]] if s in slot else head.lane_end[s]) <= now:
                        ready = [k]
                        break
            for k in ready:
                i = window[k]
                live = state.live + t.alloc[i]
                if cap_bytes is not None and live > cap_bytes and t.alloc[i]:
                    continue
                expanded += 1
                later, next_free, ends = now, free, state.ends
                kind = t.kind[i]
                if kind == _COMPUTE:
                    later += busy[k]
                elif kind == _START:
                    later += busy[k]
                    m = t.machine[i]
                    end = (free[m] if free[m] > later else later) + t.lane_ns[i]
                    next_free = free[:m] + (end,) + free[m + 1 :]
                    j = slot[i]
                    ends = ends[:j] + (end,) + ends[j + 1 :]
                else:
                    s = t.start[i]
                    end = ends[slot[s]] if s in slot else head.lane_end[s]
                    later = (end if end > now else now) + busy[k]
                mask = done | 1 << k
                if mask not in left_busy:
                    left_busy[mask] = left_busy[done] - busy[k]
                    lanes = left_lane[done]
                    if kind == _START:
                        m = t.machine[i]
                        lanes = lanes[:m] + (lanes[m] - t.lane_ns[i],) + lanes[m + 1 :]
                    left_lane[mask] = lanes
                finish = later + left_busy[mask]
                bound = finish + tail.compute
                lanes = left_lane[mask]
                for m in machines:
                    value = next_free[m] + lanes[m] + tail.machine[m]
                    if value > bound:
                        bound = value
                for j, q in after:
                    if ends[j] + q > bound:
                        bound = ends[j] + q
                if (bound, finish) >= incumbent:
                    continue
                live -= t.transient[i]
                for readers_mask, size in releases[k]:
                    if not readers_mask & ~mask:
                        live -= size
                rivals = following.setdefault(mask, [])
                dominated = False
                for r in rivals:
                    if r.now <= later and _all_le(r.free, next_free) and _all_le(r.ends, ends):
                        dominated = True
                        break
                if dominated:
                    continue
                new = _State(mask, later, next_free, ends, live, state, i, (bound, finish))
                rivals[:] = [
                    r for r in rivals if not (later <= r.now and _all_le(next_free, r.free) and _all_le(ends, r.ends))
                ]
                rivals.append(new)
        level = [s for states in following.values() for s in states]
        if len(level) > width:
            level.sort(key=_rank)
            del level[width:]
            complete = False
        if not level:
            return Answer([], incumbent, expanded, complete)
    best = min(level, key=_rank)
    tasks = []
    state = best
    while state.parent is not None:
        tasks.append(state.task)
        state = state.parent
    return Answer(tasks[::-1], best.bound, expanded, complete)


def evaluate(t: Tables, window: Sequence[int], head: Head, tail: Tail) -> tuple[int, int]:
    """(makespan of the program as far as it passes through the window, time at which the compute lane leaves it)."""
    now, free = head.now, list(head.free)
    ends: dict[int, int] = {}
    waited = set()
    for i in window:
        kind = t.kind[i]
        if kind == _COMPUTE:
            now += t.busy_ns[i]
        elif kind == _START:
            now += t.busy_ns[i]
            m = t.machine[i]
            free[m] = ends[i] = max(free[m], now) + t.lane_ns[i]
        else:
            s = t.start[i]
            waited.add(s)
            now = max(now, ends[s] if s in ends else head.lane_end[s]) + t.busy_ns[i]
    value = now + tail.compute
    for m, f in enumerate(free):
        value = max(value, f + tail.machine[m])
    for s, end in ends.items():
        if tail.wait[s] and s not in waited:
            value = max(value, end + tail.wait[s])
    return value, now


def _rank(s: _State) -> tuple[int, int, int, int]:
    return (*s.bound, sum(s.free), s.live)


def _all_le(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    # A loop, because a generator costs several times as much on tuples of two or three.
    for x, y in zip(a, b):  # noqa: SIM110
        if x > y:
            return False
    return True
