"""How many of the chosen regions the whole graph plans fastest with.

Regions are priced one by one. What one of them hides may be no gain for the graph, because something else is the
bottleneck there, or because another region has hidden it already; then each further region costs its overhead. So
the graph is planned with all of them, and where that is faster than without any, with the better half, a quarter, ...
until two numbers in a row are slower; else with the best one alone, the best two, ... until more are no faster.

Prices of regions end at their borders: that all parts of one have to arrive before the next one begins is no part of
any. So where there are fewer, longer regions that are nearly as good by their prices, the graph is planned with those
as well.

Parts are many small messages, each of which has to be in time. Where the best plan with regions is no faster than the
one without any when durations are not as estimated (``schedule.robust``), there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from inductor_passes.async_tp.region import Recipe
from inductor_passes.report import Decision
from inductor_passes.schedule.plan import Plan


@dataclass(frozen=True)
class Untouched:
    """How the graph plans as it came. It comes back as it was for every trial, so nobody plans that again.

    Attributes:
        plan: to be beaten.
        exposed_ns: of every collective, by the name of its start.
    """

    plan: Plan
    exposed_ns: Mapping[str, int]


Score = tuple[bool, int, int]
"""(above the cap, makespan in ns, its mean under disturbances or 0); the least is best."""


@dataclass(frozen=True)
class Trials:
    """What was tried so far, and what to try next.

    Attributes:
        ranked: how every region that was chosen was grown, the one of largest gain first.
        first: what was decided when all of those were carried out that were tried first, by collective.
        before: how the graph plans without any.
        scores: number of regions -> how the graph planned with the best ones.
        count: number of regions to carry out now.
        rival: other regions for the same collectives, fewer ones, not tried yet; () where there are none.
        best: the best score of the regions that were tried before the rival, and those regions.
        settled: these regions are final.
    """

    ranked: tuple[Recipe, ...]
    first: Mapping[str, Decision]
    before: Untouched
    scores: Mapping[int, Score] = field(default_factory=dict)
    count: int = 0
    rival: tuple[Recipe, ...] = ()
    best: tuple[Score, tuple[Recipe, ...]] | None = None
    settled: bool = False

    @classmethod
    def of(
        cls,
        ranked: Sequence[Recipe],
        decisions: Sequence[Decision],
        before: Untouched,
        rival: Sequence[Recipe] = (),
    ) -> Trials:
        """The trial of all regions, which have been carried out."""
        return cls(tuple(ranked), {d.node: d for d in decisions}, before, count=len(ranked), rival=tuple(rival))

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Of the regions to carry out now."""
        return self.ranked[: self.count]

    def with_result(self, planned: Plan) -> Trials:
        """Another number next, or the rival; in the end what was best and pays, of equal numbers the smaller one."""
        scores = {**self.scores, self.count: _score(planned)}
        following = self._following(scores)
        if following is not None:
            return replace(self, scores=scores, count=following)
        count = min(scores, key=lambda count: (not self._pays(scores[count]), scores[count], count))
        best = (scores[count], self.ranked[:count])
        if self.best is not None and (not self._pays(self.best[0]), self.best[0]) <= (not self._pays(best[0]), best[0]):
            best = self.best
        if self.rival:
            return Trials(self.rival, self.first, self.before, count=len(self.rival), best=best)
        regions = best[1] if self._pays(best[0]) else ()
        return replace(self, ranked=regions, scores=scores, count=len(regions), settled=True)

    def _pays(self, score: Score) -> bool:
        """Whether a plan is no slower than the one without regions when durations are not as estimated; one within the
        cap always pays where that one is above it."""
        above, _, disturbed_ns = score
        if not above and not self.before.plan.feasible:
            return True
        return not disturbed_ns or disturbed_ns < self.before.plan.disturbed_ns

    def _following(self, scores: Mapping[int, Score]) -> int | None:
        """The number to try behind those tried already, None when there is none.

        Each number takes as long as planning the whole graph. The curve over them is close to having one valley: it is
        followed from the end that lies lower, from all of them over one number that is worse.
        """
        halves = [len(self.ranked)]
        while halves[-1] > 1:
            halves.append(halves[-1] // 2)
        everything, tried = scores[halves[0]], list(scores.values())
        if everything < _score(self.before.plan):
            on = len(tried) < 3 or min(tried[-2:]) <= min(tried[:-2])
            return halves[len(tried)] if on and len(tried) < len(halves) else None
        on = len(tried) < 3 or tried[-1] < tried[-2]
        return halves[-len(tried)] if on and len(tried) < len(halves) else None


def _score(planned: Plan) -> Score:
    return not planned.feasible, planned.makespan_ns, planned.disturbed_ns
