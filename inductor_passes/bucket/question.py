"""What a partition is asked: the candidates and everything that decides which of them travel together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inductor_passes.bucket.candidates import Candidate
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.bucket.room import Room
from inductor_passes.schedule.plan import Plan
from inductor_passes.schedule.problem import Problem


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
        answered: what partitions have found out already, by whose it is: many settings ask for the same.
    """

    problem: Problem
    before: Plan
    found: Sequence[Candidate]
    dependencies: Dependencies
    costs: BucketCosts
    limit_bytes: int | None
    room: Room | None = None
    tight: Room | None = None
    answered: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)


#: Proposes disjoint buckets of two members or more, of one key each, mergeable together.
Partition = Callable[[Question], list[list[Candidate]]]
