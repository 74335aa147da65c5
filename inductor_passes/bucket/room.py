"""What the memory budget leaves at the places where a bucket would live.

A bucket holds its message from where its first member is sent to where its last member is read. What it may take there
is the cap less the memory of the graph as it came in at those places, less what other buckets take: a peak elsewhere
refuses nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from inductor_passes.bucket.candidates import Candidate
from inductor_passes.schedule.memory import RangeMax, live_bytes
from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.tables import tables


@dataclass(frozen=True, slots=True)
class Span:
    """Positions ``first`` to ``stop - 1`` of the input order."""

    first: int
    stop: int

    def __or__(self, other: Span) -> Span:
        return Span(min(self.first, other.first), max(self.stop, other.stop))


class Room:
    """Memory of the input order and of what was decided so far; O(log tasks) per question.

    Args:
        problem: of the graph as it is; its START tasks carry the names of the candidates' start nodes.
        limit_bytes: cap on the peak.
    """

    def __init__(self, problem: Problem, limit_bytes: int) -> None:
        t = tables(problem)
        self._limit = limit_bytes
        self._bytes = live_bytes(t, range(t.n))
        self._tree = RangeMax(self._bytes)
        self._number = {task.name: i for i, task in enumerate(problem.tasks) if task.kind is Kind.START}
        self._t = t

    def copy(self) -> Room:
        """Of the same graph, nothing taken."""
        other = copy.copy(self)
        other._tree = RangeMax(self._bytes)
        return other

    def span(self, members: Iterable[Candidate]) -> Span:
        """Where a bucket of these would live."""
        ends = [self._life(self._number[member.collective.start.name]) for member in members]
        return Span(min(first for first, _ in ends), max(last for _, last in ends) + 1)

    def free_bytes(self, span: Span) -> int:
        """What may still be taken at all of its positions; negative where the input itself is above the cap."""
        return self._limit - self._tree.max(span.first, span.stop)

    def take(self, span: Span, size_bytes: int) -> None:
        """Take memory, or give it back."""
        self._tree.add(span.first, span.stop, size_bytes)

    def _life(self, start: int) -> tuple[int, int]:
        """Positions of a start and of the last reader of what it receives."""
        t = self._t
        last = start
        for task in (start, *t.waits[start]):
            last = max(last, task)
            for storage in t.produces[task]:
                last = max(last, t.n - 1 if not t.releasable[storage] else max(t.readers[storage], default=task))
        return start, last
