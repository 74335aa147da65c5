"""Guarded list schedules: as close to an ideal order as a memory cap allows.

They repeat an ideal order's priorities, issue gathers just in time (prefetching early everywhere leaves no room where
it matters) and never leave the reach of a reference order that fits. They cost most of the planning time, so their
number shrinks with the problem; they are chosen by coordinate descent over (ideal order, timing, reference), and then
repeated from the best order found.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inductor_passes.schedule import least_memory, native
from inductor_passes.schedule.list_schedule import PriorityRule, Reach, list_schedule
from inductor_passes.schedule.memory_bound import within
from inductor_passes.schedule.reference import lazy
from inductor_passes.schedule.simulate import replay_time
from inductor_passes.schedule.slack import as_progress, latest_issue, relieves
from inductor_passes.schedule.tables import Tables, once

#: Guarded schedules: about this many tasks scheduled in all, at least and at most that many schedules.
_TASKS, _LEAST, _MOST = 64_000, 4, 24
#: Schedules that an ideal order of another make gets at the end, whatever the others have used up.
_MORE = 3
_SUFFIX = "/just-in-time"


@dataclass(frozen=True, slots=True)
class Trial:
    """An order with its name and its value."""

    name: str
    order: Sequence[int]
    makespan: int
    peak: int


@dataclass(frozen=True, slots=True)
class Timing:
    """When a guarded schedule issues collectives.

    Attributes:
        margin: how many of its own durations before its latest time a gather may be issued.
        relief: collectives that free at least as much memory as they take go first, whatever their due date.
        fill: while the compute lane would only wait, issue whatever memory admits, due or not.
    """

    margin: int = 0
    relief: bool = False
    fill: bool = False


def just_in_time(t: Tables, ideal: Trial, timing: Timing) -> PriorityRule:
    """A rule that repeats the order of ``ideal`` with gathers issued no earlier than they are needed."""
    order = ideal.order
    name = ideal.name.removesuffix(_SUFFIX) + _SUFFIX
    if (flat := native.flat(t)) is not None:
        rule = native.just_in_time(*flat, order, _relievers(t), timing.margin, timing.relief)
        return PriorityRule(name, rule[0], rule[1], fill=timing.fill, release=rule[2])
    trace = replay_time(t, order)
    position = [0] * t.n
    for k, i in enumerate(order):
        position[i] = k
    latest = latest_issue(t, order, trace)
    due = as_progress(t, order, trace, [time - timing.margin * d for time, d in zip(latest, t.lane_ns)])
    reliever = relieves(t)
    release = [0 if early else d for early, d in zip(reliever, due)]
    if timing.relief:
        latest = [k - t.n if early else d for k, early, d in zip(position, reliever, latest)]
    return PriorityRule(name, position, latest, fill=timing.fill, release=release)


@once
def _relievers(t: Tables) -> array[int]:
    return array("q", relieves(t))


class Guard:
    """Tries guarded schedules under one cap and remembers the best.

    Args:
        enough: a makespan in ns at which to stop; also stops at what no order within the cap can beat.
        near: turns such a bound into the makespan in ns at which to stop.
        candidate: names and values an order and tells the planner about it.
    """

    def __init__(
        self,
        t: Tables,
        cap: int,
        enough: int,
        near: Callable[[int], int],
        candidate: Callable[[str, Sequence[int]], Trial],
    ) -> None:
        self._t = t
        self._cap = cap
        self._enough = enough
        self._near = near
        self._candidate = candidate
        self._left = max(_LEAST, min(_MOST, _TASKS // t.n))
        self._best: Trial | None = None
        orders: list[Sequence[int]] = [lazy(t, range(t.n)), lazy(t, range(t.n), hold_waits=True), range(t.n)]
        found = [candidate("lazy", order) for order in orders]
        self._references = [c for c in found if c.peak <= cap]
        if not self._references:
            found = [candidate("least-memory", order) for order in least_memory.orders(t)]
            self._references = sorted((c for c in found if c.peak <= cap), key=lambda c: (c.makespan, c.peak))

    @property
    def fastest(self) -> float:
        """Makespan in ns of the best so far; infinite when there is none."""
        return math.inf if self._best is None else self._best.makespan

    @property
    def done(self) -> bool:
        """Whether trying more is pointless or not allowed."""
        return self._left <= 0 or self.reached(self._enough, self._near)

    def reached(self, enough: int, near: Callable[[int], int]) -> bool:
        """Whether the best so far takes at most ``enough`` ns, or is ``near`` what no order within the cap can beat."""
        if self.fastest <= enough:
            return True
        # Asked only now: it takes longer than a bound that ignores memory.
        return self._best is not None and self.fastest <= near(within(self._t, self._cap) or 0)

    def attempt(self, ideal: Trial, timing: Timing, reference: Trial | None = None) -> bool:
        """One guarded schedule; whether it is the best so far. Without ``reference``: the closest one that fits."""
        if self.done:
            return False
        if reference is None:
            # The closer the reference, the less the guard has to correct.
            reference = self._candidate("lazy", lazy(self._t, ideal.order))
            if reference.peak > self._cap:
                if not self._references:
                    return False
                reference = self._references[0]
        self._left -= 1
        rule = just_in_time(self._t, ideal, timing)
        order = list_schedule(self._t, rule, Reach(reference.order, self._cap))
        found = self._candidate(rule.name, order)
        if self._best is not None and (found.makespan, found.peak) >= (self._best.makespan, self._best.peak):
            return False
        self._best = found
        return True

    def ranked(self, ideals: Sequence[Trial]) -> list[Trial]:
        """Those of ``ideals`` that differ, the most promising first.

        Without the guard a just-in-time schedule costs little, and tells how far from fitting the ideal is.
        """
        scored: dict[tuple[int, int, int], Trial] = {}
        for ideal in ideals:
            order = list_schedule(self._t, just_in_time(self._t, ideal, Timing()))
            loose = self._candidate(f"{ideal.name}{_SUFFIX}", order)
            score = loose.makespan * max(loose.peak, self._cap) // max(self._cap, 1)
            scored.setdefault((score, loose.makespan, loose.peak), ideal)
        return [scored[key] for key in sorted(scored)]

    def descend(self, ranked: Sequence[Trial]) -> None:
        """Coordinate descent over (ideal order, timing, reference), then again from the best order found."""
        ideal, timing = ranked[0], Timing()
        self.attempt(ideal, timing)
        for other in ranked[1:3]:
            if self.attempt(other, timing):
                ideal = other
        for option in (Timing(0, True), Timing(1, True), Timing(1, False)):
            if self.attempt(ideal, option):
                timing = option
        filling = replace(timing, fill=True)
        if self.attempt(ideal, filling):
            timing = filling
        for reference in self._references:
            self.attempt(ideal, timing, reference)
        self._repeat(timing)
        for other in ranked[3:]:
            self.attempt(other, timing)
        self._repeat(timing)

    def once_more(self, ranked: Sequence[Trial]) -> None:
        """A few schedules more, after an ideal order of another make; the best stays unless one is better."""
        self._left = max(self._left, _MORE)
        for timing in (Timing(), Timing(0, True), Timing(1, True)):
            self.attempt(ranked[0], timing)

    def _repeat(self, timing: Timing) -> None:
        while self._best is not None and self.attempt(self._best, timing, self._best):
            pass
