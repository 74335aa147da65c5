"""What a partition is asked: the candidates and everything that decides which of them travel together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from inductor_passes.bucket.candidates import Candidate
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.bucket.room import Room
from inductor_passes.schedule.plan import Plan
from inductor_passes.schedule.problem import Problem


class Sweep(NamedTuple):
    """What decides what one sweep of :func:`~inductor_passes.bucket.greedy.greedy` finds; see there."""

    spread: float
    share: float
    tight: bool

    def allows_no_more_than(self, other: Sweep) -> bool:
        """Whether no two may travel together here that may not in ``other``."""
        return self.spread <= other.spread and self.share <= other.share and self.tight >= other.tight


@dataclass(frozen=True)
class Question:
    """See the module's docstring.

    Attributes:
        problem: of the graph as it is; its START tasks carry the names of the candidates' start nodes.
        before: the plan for it.
        found: candidates in graph order.
        dependencies: between all collectives of the graph, nothing merged.
        costs: of buckets.
        limit_bytes: cap on the peak, None: unlimited.
        room: what the cap leaves over time, None: unlimited; nothing is taken.
        tight: what the peak of the graph as it is would leave; the same object as ``room`` where that is no less.
        swept: what sweeps have found already: many settings ask for the same.
    """

    problem: Problem
    before: Plan
    found: Sequence[Candidate]
    dependencies: Dependencies
    costs: BucketCosts
    limit_bytes: int | None
    room: Room | None = None
    tight: Room | None = None
    swept: dict[Sweep, list[list[Candidate]]] = field(default_factory=dict, compare=False, repr=False)


#: Proposes disjoint buckets of two members or more, of one key each, mergeable together.
Partition = Callable[[Question], list[list[Candidate]]]
