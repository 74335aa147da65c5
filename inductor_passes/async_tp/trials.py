"""How many of the chosen regions the whole graph plans fastest with.

Regions are priced one by one. What one of them hides may be no gain for the graph, because something else is the
bottleneck there, or because another region has hidden it already; then each further region costs its overhead. So
the graph is planned with the best region alone, with the best two, four, ... and with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from inductor_passes.async_tp.region import Recipe
from inductor_passes.report import Decision
from inductor_passes.schedule.plan import Plan

Score = tuple[bool, int]
"""(above the cap, makespan in ns); the least is best."""


@dataclass(frozen=True)
class Trials:
    """What was tried so far, and what to try next.

    Attributes:
        ranked: how every region that was chosen was grown, the one of largest gain first.
        first: what was decided when all of them were carried out, by collective.
        scores: number of regions -> how the graph planned with the best ones.
        count: number of regions to carry out now.
        settled: that number is final.
    """

    ranked: tuple[Recipe, ...]
    first: Mapping[str, Decision]
    scores: Mapping[int, Score] = field(default_factory=dict)
    count: int = 0
    settled: bool = False

    @classmethod
    def of(cls, ranked: Sequence[Recipe], decisions: Sequence[Decision]) -> Trials:
        """The trial of all regions, which have been carried out."""
        return cls(tuple(ranked), {d.node: d for d in decisions}, count=len(ranked))

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Of the regions to carry out now."""
        return self.ranked[: self.count]

    def with_result(self, planned: Plan) -> Trials:
        """Half as many regions next, down to one; then the number that was best, the smaller of equal ones."""
        scores = {**self.scores, self.count: (not planned.feasible, planned.makespan_ns)}
        if self.count > 1:
            return replace(self, scores=scores, count=self.count // 2)
        best = min(scores, key=lambda count: (scores[count], count))
        return replace(self, scores=scores, count=best, settled=True)
