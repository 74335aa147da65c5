"""A lower bound on the makespan of any order within a memory cap.

The bounds of :mod:`~inductor_passes.schedule.bounds` hold for a relaxation of the program that keeps its precedences
and forgets its memory. Here the relaxation keeps what the cap implies as precedences too
(:mod:`~inductor_passes.schedule.implied`): a gather that memory forbids to issue before a kernel ends is exposed for as
long as its path says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from inductor_passes.records.words import BoundOn
from inductor_passes.schedule.bounds import any_order, without_memory
from inductor_passes.schedule.implied import Precedence, implied
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.tables import ANY_NUMBERING, Tables, tables

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bound:
    """A time in ns that no order can beat, and of which orders that is said."""

    ns: int
    on: BoundOn

    def gap(self, makespan_ns: int) -> float:
        """How far a makespan is above it, as a share of it; 0.0 for an empty program."""
        return makespan_ns / self.ns - 1 if self.ns else 0.0


def best_known(problem: Problem, cap_bytes: int | None, makespan_ns: int | None = None) -> Bound:
    """The best bound on orders within ``cap_bytes``; that on any order where it is as good, or no order fits.

    Args:
        makespan_ns: of an order within the cap. The cap is not looked at where no order at all is faster.
    """
    t = tables(problem)
    free = any_order(t)
    if cap_bytes is None or (makespan_ns is not None and makespan_ns <= free):
        return Bound(free, "any memory")
    capped = within(t, cap_bytes)
    return Bound(free, "any memory") if capped is None or capped <= free else Bound(capped, "this budget")


def memory_bound(problem: Problem, cap_bytes: int) -> int | None:
    """A time in ns that no order with a peak of at most ``cap_bytes`` can beat; None: no order holds to the cap.

    Never below :func:`~inductor_passes.schedule.bounds.lower_bound`. Near linear.
    """
    return within(tables(problem), cap_bytes)


def within(t: Tables, cap_bytes: int) -> int | None:
    """:func:`memory_bound` on the flat view, worked out once per problem and cap."""
    key = f"{ANY_NUMBERING}{__name__}/{cap_bytes}"
    if key not in t.known:
        free, precedence = any_order(t), implied(t, cap_bytes)
        if precedence is None:
            t.known[key] = None
        else:
            t.known[key] = max(free, without_memory(_renumbered(t, precedence))) if precedence.added else free
    found: int | None = t.known[key]
    return found


def _renumbered(t: Tables, precedence: Precedence) -> Tables:
    """The times of ``t`` under other precedences, with tasks numbered in an order that these allow."""
    order = precedence.order
    number = [0] * t.n
    for k, i in enumerate(order):
        number[i] = k

    def sorted_by(column: Sequence[T]) -> list[T]:
        return [column[i] for i in order]

    def numbers(lists: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[number[j] for j in lists[i]] for i in order]

    return dataclasses.replace(
        t,
        kind=sorted_by(t.kind),
        busy_ns=sorted_by(t.busy_ns),
        lane_ns=sorted_by(t.lane_ns),
        machine=sorted_by(t.machine),
        start=[number[s] if s >= 0 else -1 for s in sorted_by(t.start)],
        waits=numbers(t.waits),
        preds=numbers(precedence.preds),
        succs=numbers(precedence.succs),
        flat=False,
        known={},
    )
