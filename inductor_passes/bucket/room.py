"""What the memory budget leaves at the places where a bucket would live.

A bucket holds its message from where its first member is sent to where its last member is read. What it may take there
is the cap less the memory of the graph as it came in at those places, less what other buckets take: a peak elsewhere
refuses nothing. Where a second memory model has a cap of its own (:class:`Capped`), the smaller room counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inductor_passes.bucket.candidates import Candidate
from inductor_passes.schedule.least_memory import least_peak
from inductor_passes.schedule.memory import RangeMax, live_bytes, peak_bytes
from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.tables import tables


@dataclass(frozen=True, slots=True)
class Span:
    """Positions ``first`` to ``stop - 1`` of the input order."""

    first: int
    stop: int

    def __or__(self, other: Span) -> Span:
        return Span(min(self.first, other.first), max(self.stop, other.stop))


@dataclass(frozen=True)
class Capped:
    """A second memory model of a graph's tasks, with its own cap.

    Attributes:
        problem: the same tasks with other storages.
        limit_bytes: cap on its peak.
    """

    problem: Problem
    limit_bytes: int

    def room(self) -> Room:
        """What the cap leaves over time."""
        return Room(self.problem, self.limit_bytes)

    def tight(self) -> Room:
        """What the peak of the graph as it is would leave, where that is less."""
        return Room(self.problem, min(self.limit_bytes, peak_bytes(self.problem)))

    def fits(self, problem: Problem, order: Sequence[int]) -> bool:
        """Whether the merged problem is below the cap, in the order given or in the one of least memory."""
        t = tables(problem)
        return max(live_bytes(t, order), default=0) <= self.limit_bytes or least_peak(t) <= self.limit_bytes


class Room:
    """Memory of the input order and of what was decided so far; O(log tasks) per question.

    Args:
        problem: of the graph as it is; its START tasks carry the names of the candidates' start nodes.
        limit_bytes: cap on the peak.
        other: the room by another memory model of the same tasks.
    """

    def __init__(self, problem: Problem, limit_bytes: int, other: Room | None = None) -> None:
        t = tables(problem)
        self._limit = limit_bytes
        self._bytes = live_bytes(t, range(t.n))
        self._tree = RangeMax(self._bytes)
        self._number = {task.name: i for i, task in enumerate(problem.tasks) if task.kind is Kind.START}
        self._lives: dict[int, tuple[int, int]] = {}
        self._t = t
        self._other = other

    def copy(self) -> Room:
        """Of the same graph, nothing taken."""
        other = copy.copy(self)
        other._tree = RangeMax(self._bytes)
        other._other = None if self._other is None else self._other.copy()
        return other

    def span(self, members: Iterable[Candidate]) -> Span:
        """Where a bucket of these would live."""
        ends = [self._life(self._number[member.collective.start.name]) for member in members]
        return Span(min(first for first, _ in ends), max(last for _, last in ends) + 1)

    def free_bytes(self, span: Span) -> int:
        """What may still be taken at all of its positions; negative where the input itself is above the cap."""
        free = self._limit - self._tree.max(span.first, span.stop)
        return free if self._other is None else min(free, self._other.free_bytes(span))

    def take(self, span: Span, size_bytes: int) -> None:
        """Take memory, or give it back."""
        self._tree.add(span.first, span.stop, size_bytes)
        if self._other is not None:
            self._other.take(span, size_bytes)

    def _life(self, start: int) -> tuple[int, int]:
        """Positions of a start and of the last reader of what it receives."""
        if (known := self._lives.get(start)) is not None:
            return known
        t = self._t
        last = start
        for task in (start, *t.waits[start]):
            last = max(last, task)
            for storage in t.produces[task]:
                last = max(last, t.n - 1 if not t.releasable[storage] else max(t.readers[storage], default=task))
        self._lives[start] = start, last
        return start, last
