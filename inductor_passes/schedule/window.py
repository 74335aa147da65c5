"""Re-order a window of consecutive positions optimally or nearly so, everything outside it kept.

Before the window, the *head*: the clocks of the compute lane and of the machines, collectives in flight, live bytes.
After it, the *tail*: the longest path from each of these clocks to the end of the program, in the order as it is. The
makespan of the whole program is then the maximum over the clocks at the window's end of clock + tail, exactly, so a
candidate costs as much as the window is long. Live bytes depend only on which tasks have run, so the memory cap is
local to the window too.

The search goes through the sets of tasks that have run, one task more per level. Of the states with the same set only
those that no other dominates are kept (all clocks no later, or over when the compute lane gets there), and of all
states of a level the ``width`` best by a lower bound on the resulting makespan. If no state was cut off for width, the
answer is optimal for the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    bound: tuple[int, int] = (0, 0)
    #: ``now``, ``free`` and ``ends``, none of them before ``now``.
    clocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a window stands in an order.

    Attributes:
        head, tail: what comes before and after it.
        unread: per storage how many of its readers have not run before the window.
        incumbent: (makespan in ns, time at which the compute lane leaves the window) of the present order.
    """

    head: Head
    tail: Tail
    unread: Sequence[int]
    incumbent: tuple[int, int]


def improve_window(t: Tables, window: Sequence[int], place: Place, cap_bytes: int | None, width: int) -> Answer:
    """The best order of ``window`` found; without tasks when none is better than the incumbent.

    Args:
        cap_bytes: no state may have more live bytes; None: unlimited.
        width: states kept per level.
    """
    search = _Search(t, window, place, cap_bytes)
    level = [_State(0, place.head.now, tuple(place.head.free), (0,) * len(search.slot), place.head.live, None, -1)]
    complete = True
    for _ in window:
        following: dict[int, list[_State]] = {}
        for state in level:
            search.expand(state, following)
        level = [s for states in following.values() for s in states]
        if len(level) > width:
            level.sort(key=_rank)
            del level[width:]
            complete = False
        if not level:
            return Answer([], place.incumbent, search.expanded, complete)
    best = min(level, key=_rank)
    tasks = []
    state = best
    while state.parent is not None:
        tasks.append(state.task)
        state = state.parent
    return Answer(tasks[::-1], best.bound, search.expanded, complete)


class _Search:
    """What the states of one window have in common; members of the window are numbered from 0 in its present order.

    Attributes:
        slot: start in the window -> its place in ``_State.ends``.
        expanded: states looked at so far.
    """

    def __init__(self, t: Tables, window: Sequence[int], place: Place, cap_bytes: int | None) -> None:
        self.t = t
        self.window = window
        self.place = place
        self.cap = cap_bytes
        self.expanded = 0
        local = {i: k for k, i in enumerate(window)}
        need = [sum(1 << local[p] for p in t.preds[i] if p in local) for i in window]
        #: (member, its own bit and those of its predecessors)
        self.own = [(k, mask | 1 << k) for k, mask in enumerate(need)]
        self.busy = [t.busy_ns[i] for i in window]
        #: waits that take neither time nor memory
        self.cheap = sum(1 << k for k, i in enumerate(window) if t.kind[i] > _START and not t.busy_ns[i] + t.alloc[i])
        self.slot = {i: j for j, i in enumerate(i for i in window if t.kind[i] == _START)}
        self.releases = self._releases()
        waited = {t.start[i] for i in window if t.kind[i] > _START}
        waits = place.tail.wait
        #: (place in ``_State.ends``, longest path from there) of collectives that are waited for behind the window
        self.after = [(j, waits[s]) for s, j in self.slot.items() if waits[s] and s not in waited]
        lanes = [0] * t.machines
        for i in self.slot:
            lanes[t.machine[i]] += t.lane_ns[i]
        #: by the set of members that have run: what is left to run on the compute lane, and on each machine, what is
        #: left and the longest path from there to the end of the program
        self.left = {0: (sum(self.busy), tuple(x + path for x, path in zip(lanes, place.tail.machine)))}

    def _releases(self) -> list[list[tuple[int, int]]]:
        """Per member: (all readers, bytes) of the storages that die when the last of these has run in the window."""
        t = self.t
        readers: dict[int, list[int]] = {}
        for k, i in enumerate(self.window):
            for s in t.consumes[i]:
                readers.setdefault(s, []).append(k)
        found: list[list[tuple[int, int]]] = [[] for _ in self.window]
        for s, ks in readers.items():
            if len(ks) == self.place.unread[s]:
                mask = sum(1 << k for k in ks)
                for k in ks:
                    found[k].append((mask, t.size[s]))
        return found

    def expand(self, state: _State, following: dict[int, list[_State]]) -> None:
        """Enter the states that come of ``state`` by one task more, as far as they are worth keeping."""
        t, cap, busy, incumbent = self.t, self.cap, self.busy, self.place.incumbent
        path = self.place.tail.compute
        for k in self._ready(state):
            i = self.window[k]
            live = state.live + t.alloc[i]
            if cap is not None and live > cap and t.alloc[i]:
                continue
            self.expanded += 1
            now, free, ends = state.now + busy[k], state.free, state.ends
            kind = t.kind[i]
            if kind == _START:
                m, j = t.machine[i], self.slot[i]
                end = (free[m] if free[m] > now else now) + t.lane_ns[i]
                free, ends = (*free[:m], end, *free[m + 1 :]), (*ends[:j], end, *ends[j + 1 :])
            elif kind != _COMPUTE:
                end = self._end(state, i)
                if end > state.now:
                    now = end + busy[k]
            mask = state.done | 1 << k
            if mask not in self.left:
                self._enter(state.done, mask, k, i)
            left, machines = self.left[mask]
            finish = now + left
            # No order of what is left ends sooner.
            bound = finish + path
            for f, rest in zip(free, machines):
                if f + rest > bound:
                    bound = f + rest
            for j, rest in self.after:
                if ends[j] + rest > bound:
                    bound = ends[j] + rest
            if (bound, finish) >= incumbent:
                continue
            rivals = following.setdefault(mask, [])
            # What is over when the compute lane gets there makes no difference, however long it has been over.
            clocks = (now, *[f if f > now else now for f in free], *[e if e > now else now for e in ends])
            for r in rivals:
                if _all_le(r.clocks, clocks):
                    break
            else:
                rivals[:] = [r for r in rivals if not _all_le(clocks, r.clocks)]
                live -= t.transient[i]
                if self.releases[k]:
                    live -= self._freed(k, mask)
                rivals.append(_State(mask, now, free, ends, live, state, i, (bound, finish), clocks))

    def _freed(self, k: int, mask: int) -> int:
        """Bytes of the storages that die with member ``k`` as the last of ``mask``."""
        return sum([size for readers, size in self.releases[k] if not readers & ~mask])

    def _ready(self, state: _State) -> list[int]:
        """Members whose predecessors have run; only one when that is a wait that costs nothing.

        Such a wait only makes memory free and readers ready.
        """
        missing = ~state.done
        ready = [k for k, mask in self.own if missing & mask == 1 << k]
        if missing & self.cheap:
            for k in ready:
                if self.cheap >> k & 1 and self._end(state, self.window[k]) <= state.now:
                    return [k]
        return ready

    def _end(self, state: _State, wait: int) -> int:
        """When the collective that ``wait`` waits for has ended."""
        start = self.t.start[wait]
        return state.ends[self.slot[start]] if start in self.slot else self.place.head.lane_end[start]

    def _enter(self, done: int, mask: int, k: int, i: int) -> None:
        """Work out what is left behind a set of members."""
        busy, machines = self.left[done]
        if self.t.kind[i] == _START:
            m = self.t.machine[i]
            machines = (*machines[:m], machines[m] - self.t.lane_ns[i], *machines[m + 1 :])
        self.left[mask] = busy - self.busy[k], machines


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
