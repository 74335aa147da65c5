"""Precedences that a memory cap implies: what every order within the cap keeps, beyond what the program demands.

Take a *chain*, tasks ``x_0, x_1, ...`` each of which must run before the next. While ``x_k`` runs, every storage is
live whose producer must have run by then and one of whose readers must not have run before. What the cap leaves beside
these is the *room* at ``x_k``. Any other task either runs before ``x_k`` or after it, and either can take memory there:

* **too early**: a task that runs before ``x_k`` although what it leads to is read at or after ``x_k`` leaves something
  live there: its result, or what was made of it. Where each of these alone is larger than the room, the task comes
  after ``x_k``: memory forbids the prefetch.
* **too late**: a task that runs after ``x_k`` although what it needs exists before leaves that live there. Where each
  is larger than the room, the task comes before ``x_k``: memory forbids to put it off.

New precedences make more storages live, so it is done again, on several chains. Each chain takes time linear in tasks
and edges. A circle means that no order holds to the cap.

The idea is that of energetic and disjunctive reasoning for cumulative resources (P. Baptiste, C. Le Pape, W. Nuijten,
*Constraint-Based Scheduling*, 2001), with storages instead of activities that hold a resource for a known time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from inductor_passes.schedule import native
from inductor_passes.schedule.tables import Tables

#: About this many tasks are looked at, chain by chain; at least and at most that many chains, half of them again with
#: the precedences found.
_TASKS, _LEAST, _MOST = 40_000, 3, 12
#: Ways of holding memory that are remembered of a task.
_WAYS = 3


class Precedence:
    """A precedence graph that grows, and a topological order of it.

    Attributes:
        preds, succs: by task.
        order: tasks, each after its predecessors.
        added: how many edges are new.
    """

    __slots__ = ("_position", "_stale", "added", "order", "preds", "succs")

    def __init__(self, t: Tables) -> None:
        self.preds = [list(p) for p in t.preds]
        self.succs = [list(s) for s in t.succs]
        self.order: Sequence[int] = range(t.n)
        self._position: Sequence[int] = range(t.n)
        self._stale = False
        self.added = 0

    def add(self, before: int, after: int) -> None:
        """Enter an edge; :attr:`order` may be wrong until :meth:`settle`."""
        self.preds[after].append(before)
        self.succs[before].append(after)
        self.added += 1
        if self._position[before] > self._position[after]:
            self._stale = True

    def with_edges(self, edges: Sequence[tuple[int, int]], order: Sequence[int]) -> Precedence:
        """The same with edges entered, and an order that they allow."""
        for before, after in edges:
            self.add(before, after)
        position = [0] * len(order)
        for k, i in enumerate(order):
            position[i] = k
        self.order, self._position, self._stale = order, position, False
        return self

    def settle(self) -> bool:
        """Bring :attr:`order` up to date; False where there is none, because the edges run in a circle."""
        if not self._stale:
            return True
        missing = [len(p) for p in self.preds]
        ready = [i for i, count in enumerate(missing) if not count]
        order: list[int] = []
        while ready:
            i = heapq.heappop(ready)
            order.append(i)
            for j in self.succs[i]:
                missing[j] -= 1
                if not missing[j]:
                    heapq.heappush(ready, j)
        if len(order) < len(missing):
            return False
        position = [0] * len(order)
        for k, i in enumerate(order):
            position[i] = k
        self.order, self._position, self._stale = order, position, False
        return True


@dataclass(slots=True)
class _Chain:
    """Tasks that follow each other, and where the others stand beside them; places are numbered from 0.

    Attributes:
        tasks: of the chain.
        place: of a task on the chain; -1 for others.
        after: last place that a task must not come before; -1: none. A task on the chain has its own.
        before: first place that a task must not come after; ``len(tasks)``: none. A task on the chain has its own.
        last: per storage the last place that one of its readers must not come before; the end of the chain if it is
            never released.
        room: bytes that the cap leaves at each place.
    """

    tasks: list[int]
    place: list[int]
    after: list[int]
    before: list[int]
    last: list[int]
    room: list[int]


def implied(t: Tables, cap_bytes: int) -> Precedence | None:
    """The precedences of every order whose peak is at most ``cap_bytes``; None when there is no such order.

    That there may be none without this being found is why the answer is not a test of feasibility. Near linear: a
    number of chains that shrinks with the problem, each O(tasks + edges + readers).
    """
    precedence = Precedence(t)
    if not t.n:
        return precedence if t.live0 <= cap_bytes else None
    producer = [-1] * len(t.size)
    for i, made in enumerate(t.produces):
        for s in made:
            producer[s] = i
    chains = max(_LEAST, min(_MOST, _TASKS // t.n))
    if (flat := native.flat(t)) is not None and cap_bytes <= native.LARGEST:
        found = native.implied(*flat, (producer, t.releasable), chains, cap_bytes)
        return None if found is None else precedence.with_edges(*found)
    for share in ((chains + 1) // 2, chains // 2):
        known = precedence.added
        weight = [1 + b + d for b, d in zip(t.busy_ns, t.lane_ns)]
        for _ in range(share):
            tasks = _longest(precedence, weight)
            if not any(weight[i] for i in tasks):
                break
            for i in tasks:
                weight[i] = 0
            chain = _placed(t, precedence, producer, tasks, cap_bytes)
            if min(chain.room) < 0:
                return None
            _not_before(t, precedence, chain)
            _not_after(t, precedence, producer, chain)
            if not precedence.settle():
                return None
        if precedence.added == known:
            break
    return precedence


def _longest(precedence: Precedence, weight: Sequence[int]) -> list[int]:
    """Tasks of a path of greatest weight, the first one first."""
    n = len(weight)
    best, came = [0] * n, [-1] * n
    for i in precedence.order:
        most, p_most = 0, -1
        for p in precedence.preds[i]:
            if best[p] > most:
                most, p_most = best[p], p
        best[i], came[i] = most + weight[i], p_most
    i = max(range(n), key=best.__getitem__)
    path = []
    while i >= 0:
        path.append(i)
        i = came[i]
    return path[::-1]


def _placed(
    t: Tables, precedence: Precedence, producer: Sequence[int], tasks: list[int], cap_bytes: int
) -> _Chain:
    """Where everything stands beside a chain, and the room that the cap leaves at it."""
    place = [-1] * t.n
    for k, i in enumerate(tasks):
        place[i] = k
    end = len(tasks)
    after, before = [-1] * t.n, [end] * t.n
    for i in precedence.order:
        k = place[i]
        if k < 0:
            for p in precedence.preds[i]:
                if after[p] > k:
                    k = after[p]
        after[i] = k
    for i in reversed(precedence.order):
        k = place[i]
        if k < 0:
            k = end
            for j in precedence.succs[i]:
                if before[j] < k:
                    k = before[j]
        before[i] = k
    last = [
        max([after[r] for r in readers]) if dies else end - 1 for readers, dies in zip(t.readers, t.releasable)
    ]
    # Bytes that must be live at each place, as differences from the place before.
    change = [0] * (end + 1)
    live = t.live0
    for s, (p, size, until) in enumerate(zip(producer, t.size, last)):
        if p < 0:
            if t.releasable[s]:
                change[until + 1] -= size
        elif before[p] <= until:
            change[before[p]] += size
            change[until + 1] -= size
    room = []
    for k, i in enumerate(tasks):
        live += change[k]
        room.append(cap_bytes - live - t.transient[i])
    return _Chain(tasks, place, after, before, last, room)


def _not_before(t: Tables, precedence: Precedence, chain: _Chain) -> None:
    """Enter what memory forbids to run early; see the module's docstring."""
    after, before, last, room = chain.after, chain.before, chain.last, chain.room
    tight = _Tight(room)
    # Per task: (place, bytes): run before that place or any earlier one that it may come after, it leaves so much live.
    leaves: list[tuple[tuple[int, int], ...]] = [()] * t.n
    for i in reversed(precedence.order):
        if chain.place[i] >= 0:
            continue
        ways = []
        for s in t.produces[i]:
            size = t.size[s]
            if last[s] > after[i]:
                ways.append((last[s], size))
            if t.releasable[s]:
                # Its readers can have run too; then what they leave is live.
                ways += [(k, min(b, size)) for r in t.readers[s] for k, b in leaves[r] if k > last[s]]
        if not ways:
            continue
        leaves[i] = _best(sorted(ways, reverse=True))
        for k, held in leaves[i]:
            k = tight.at_or_before(min(k, before[i] - 1), held)
            if k > after[i]:
                precedence.add(chain.tasks[k], i)
                after[i] = k


def _not_after(t: Tables, precedence: Precedence, producer: Sequence[int], chain: _Chain) -> None:
    """Enter what memory forbids to put off; see the module's docstring."""
    after, before, last, room = chain.after, chain.before, chain.last, chain.room
    end = len(room)
    tight = _Tight(room[::-1])
    # Per task: (place, bytes): not run by that place or any later one that it may come before, it leaves so much live.
    keeps: list[tuple[tuple[int, int], ...]] = [()] * t.n
    for i in precedence.order:
        if chain.place[i] >= 0:
            continue
        ways = []
        for s in t.consumes[i]:
            p, size, free = producer[s], t.size[s], last[s] + 1
            if p < 0:
                ways.append((free, size))
                continue
            ways.append((max(before[p], free), size))
            # Its producer can have been put off too; then what that needs is live.
            ways += [(max(k, free), min(b, size)) for k, b in keeps[p]]
        ways = [way for way in ways if way[0] < before[i]]
        if not ways:
            continue
        keeps[i] = _best(sorted(ways, key=lambda way: (way[0], -way[1])))
        for k, held in keeps[i]:
            k = end - 1 - tight.at_or_before(end - 1 - max(k, after[i] + 1), held)
            if k < before[i]:
                precedence.add(i, chain.tasks[k])
                before[i] = k


def _best(ways: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Of ``ways``, the widest ones first, those that hold more than all wider ones."""
    kept: list[tuple[int, int]] = []
    for way in ways:
        if not kept or way[1] > kept[-1][1]:
            kept.append(way)
    return tuple(kept[:_WAYS])


class _Tight:
    """Finds the nearest place with too little room; built in O(places log places), each question O(log places)."""

    __slots__ = ("_earlier", "_room")

    def __init__(self, room: Sequence[int]) -> None:
        nearest = []
        open_places: list[int] = []
        for k, bytes_left in enumerate(room):
            while open_places and room[open_places[-1]] >= bytes_left:
                open_places.pop()
            nearest.append(open_places[-1] if open_places else -1)
            open_places.append(k)
        self._room = room
        #: by level: the place reached by 1, 2, 4, ... steps to the nearest earlier place with less room; -1: none
        self._earlier = [nearest]
        while max(self._earlier[-1], default=-1) >= 0:
            step = self._earlier[-1]
            self._earlier.append([step[k] if k >= 0 else -1 for k in step])

    def at_or_before(self, k: int, size_bytes: int) -> int:
        """The last place up to ``k`` whose room is less than ``size_bytes``; -1: none, or ``k`` is negative."""
        if k < 0 or self._room[k] < size_bytes:
            return max(k, -1)
        for step in reversed(self._earlier):
            if step[k] >= 0 and self._room[step[k]] >= size_bytes:
                k = step[k]
        return self._earlier[0][k]
