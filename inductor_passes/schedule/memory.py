"""Exact replay of storages over an order, and structures that keep it current while tasks move.

A storage lives from the position of its producer through the position of its last reader (inputs from the beginning,
pinned ones to the end). The bytes live *during* a position count what its task allocates and what it is about to
release. Peak memory is the maximum over positions, so moving one task changes the profile by a few range additions:
a tree with range-add and range-max does that in O(log N).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from inductor_passes.schedule import native
from inductor_passes.schedule.problem import INPUT, Problem
from inductor_passes.schedule.tables import Tables, tables


def profile(problem: Problem, order: Sequence[int] | None = None) -> list[int]:
    """Bytes live during each position of ``order`` (default: the input order). O(N)."""
    return _as_it_came(problem)[1:] if order is None else live_bytes(tables(problem), order)


def peak_bytes(problem: Problem, order: Sequence[int] | None = None) -> int:
    """Highest number of live bytes over ``order``; what is live before the first task counts too. O(N)."""
    if order is None:
        return max(_as_it_came(problem))
    return max(profile(problem, order), default=tables(problem).live0)


def _as_it_came(problem: Problem) -> list[int]:
    """Bytes live before the first task and during each task of the input order.

    Without the tables: those take ten times as long, and of many problems nothing else is asked.
    """
    n = len(problem)
    # By position: bytes more than at the position before.
    change = [0] * (n + 2)
    change[0] = problem.base_bytes
    for storage in problem.storages:
        producer, readers = storage.producer, storage.readers
        change[producer + 1] += storage.size_bytes
        if not storage.pinned and (readers or producer != INPUT):
            change[max(readers, default=producer) + 2] -= storage.size_bytes
    return list(itertools.accumulate(change[: n + 1]))


def live_bytes(t: Tables, order: Sequence[int]) -> list[int]:
    """:func:`profile` on the flat view."""
    found = native.flat(t) if len(order) == t.n else None
    if found is not None:
        return native.live_bytes(*found, order)
    unread = [len(r) for r in t.readers]
    live = t.live0
    result = []
    for i in order:
        live += t.alloc[i]
        result.append(live)
        live -= t.transient[i]
        for s in t.consumes[i]:
            unread[s] -= 1
            if not unread[s]:
                live -= t.size[s]
    return result


class RangeMax:
    """A list of integers with ``add`` on ranges and ``max`` over ranges, both O(log n), built in O(n).

    A bottom-up segment tree whose pending additions stay at inner nodes and are never pushed down.
    """

    __slots__ = ("_add", "_max", "_size")

    def __init__(self, values: Sequence[int]) -> None:
        # One unused leaf on either side, so that every range has a neighbour to the left and to the right.
        size = 1
        while size < len(values) + 2:
            size *= 2
        self._size = size
        self._add = [0] * (2 * size)
        top = self._max = [0] * (2 * size)
        top[size + 1 : size + 1 + len(values)] = values
        for p in range(size - 1, 0, -1):
            a, b = top[2 * p], top[2 * p + 1]
            top[p] = a if a > b else b

    def add(self, first: int, stop: int, value: int) -> None:
        """Add ``value`` to positions ``first`` .. ``stop - 1``; an empty range does nothing."""
        if first >= stop or not value:
            return
        top, pending = self._max, self._add
        # Nodes just outside the range, on every level up to where they are siblings.
        left, right = first + self._size, stop + 1 + self._size
        while left ^ right != 1:
            if not left & 1:
                top[left + 1] += value
                pending[left + 1] += value
            if right & 1:
                top[right - 1] += value
                pending[right - 1] += value
            left >>= 1
            right >>= 1
            a, b = top[2 * left], top[2 * left + 1]
            top[left] = (a if a > b else b) + pending[left]
            a, b = top[2 * right], top[2 * right + 1]
            top[right] = (a if a > b else b) + pending[right]
        left >>= 1
        while left:
            a, b = top[2 * left], top[2 * left + 1]
            if b > a:
                a = b
            a += pending[left]
            if top[left] == a:
                # Nothing changes further up either.
                return
            top[left] = a
            left >>= 1

    def at_most(self, first: int, stop: int, limit: int) -> bool:
        """Whether no position ``first`` .. ``stop - 1`` exceeds ``limit``."""
        return self._max[1] <= limit or first >= stop or self.max(first, stop) <= limit

    def max(self, first: int, stop: int) -> int:
        """Maximum over positions ``first`` .. ``stop - 1``.

        Raises:
            ValueError: the range is empty.
        """
        if first >= stop:
            raise ValueError(f"empty range {first}..{stop}")
        top, pending = self._max, self._add
        left, right = first + 1 + self._size, stop + self._size
        a, b = top[left], top[right]
        while left >> 1 != right >> 1:
            if not left & 1 and top[left + 1] > a:
                a = top[left + 1]
            if right & 1 and top[right - 1] > b:
                b = top[right - 1]
            left >>= 1
            right >>= 1
            a += pending[left]
            b += pending[right]
        if b > a:
            a = b
        left >>= 1
        while left:
            a += pending[left]
            left >>= 1
        return a


class Continuation:
    """Memory of "what has run, then the rest in a reference order", current while tasks run out of that order.

    If the reference order stays within a cap, a scheduler that only runs tasks for which :meth:`admits` holds can
    always fall back on the reference: it never runs into a dead end and never exceeds the cap (the idea of the
    banker's algorithm, with lifetimes instead of claims). Tasks may be let run ahead of, never behind, their
    predecessors. Each call is O((produced + read storages) log N).
    """

    __slots__ = ("_cap", "_last", "_live", "_order", "_position", "_ran", "_readers", "_t", "_tree", "_unread", "next")

    def __init__(self, t: Tables, reference: Sequence[int], cap_bytes: int) -> None:
        self._t = t
        self._cap = cap_bytes
        self._order = reference
        position = self._position = [0] * t.n
        for k, i in enumerate(reference):
            position[i] = k
        self._tree = RangeMax(live_bytes(t, reference))
        self._ran = bytearray(t.n)
        #: readers of each storage by position, the last still to run at the end
        self._readers = [
            sorted(r, key=position.__getitem__) if len(r) > 1 else list(r) for r in t.readers
        ]
        self._unread = [len(r) for r in t.readers]
        self._live = t.live0
        #: position of the first task of the reference that has not run
        self.next = 0

    def upcoming(self) -> int:
        """The next task of the reference, which may always run."""
        return self._order[self.next]

    def admits(self, i: int) -> bool:
        """Whether task ``i`` (its predecessors have run) may run now."""
        t = self._t
        if not t.alloc[i]:
            return True
        at = self._position[i]
        if at == self.next:
            return True
        if self._live + t.alloc[i] > self._cap:
            return False
        held = t.alloc[i] - t.transient[i]
        if not held:
            return True
        if self._tree.at_most(self.next, at, self._cap - held):
            return True
        released = self._releases(i, at)
        if not released:
            return False
        for first, size in released:
            self._tree.add(first, at + 1, -size)
        fits = self._tree.at_most(self.next, at, self._cap - held)
        for first, size in released:
            self._tree.add(first, at + 1, size)
        return fits

    def run(self, i: int) -> None:
        """Task ``i`` runs now."""
        t = self._t
        at = self._position[i]
        if at != self.next:
            for first, size in self._releases(i, at):
                self._tree.add(first, at + 1, -size)
            self._tree.add(self.next, at, t.alloc[i] - t.transient[i])
            if t.transient[i]:
                self._tree.add(at, at + 1, -t.transient[i])
        self._ran[i] = 1
        self._live += t.alloc[i] - t.transient[i]
        for s in t.consumes[i]:
            self._unread[s] -= 1
            if not self._unread[s]:
                self._live -= t.size[s]
        ran, order, k, n = self._ran, self._order, self.next, t.n
        while k < n and ran[order[k]]:
            k += 1
        self.next = k

    def _releases(self, i: int, at: int) -> list[tuple[int, int]]:
        """(first position, bytes) of every lifetime that ends sooner, and then before ``at``, if ``i`` runs now."""
        result = []
        for s in self._t.consumes[i]:
            readers = self._readers[s]
            while self._ran[readers[-1]]:
                readers.pop()
            if readers[-1] != i:
                continue
            k = len(readers) - 2
            while k >= 0 and self._ran[readers[k]]:
                k -= 1
            first = self._position[readers[k]] + 1 if k >= 0 else self.next
            result.append((first, self._t.size[s]))
        return result
