"""Constructions: where the planner's first orders come from.

Without a cap: list schedules by several priorities, each refined by forward-backward improvement. Under a cap the best
of these tell what would be ideal, and *guarded* list schedules come as close as memory allows: they repeat an ideal
order's priorities, issue gathers just in time (prefetching early everywhere leaves no room where it matters) and never
leave the reach of a reference order that fits. Guarded schedules cost most of the planning time, so their number
shrinks with the problem; they are chosen by coordinate descent over (ideal order, reference, margin).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inductor_passes.schedule.bounds import tails
from inductor_passes.schedule.justify import improve
from inductor_passes.schedule.list_schedule import Rule, list_schedule
from inductor_passes.schedule.memory import Continuation, replay
from inductor_passes.schedule.reference import lazy
from inductor_passes.schedule.simulate import replay_time
from inductor_passes.schedule.slack import as_progress, latest_issue, relieves
from inductor_passes.schedule.tables import Tables

#: Guarded schedules: about this many tasks scheduled in all, at least and at most that many schedules.
_GUARDED_TASKS, _GUARDED_LEAST, _GUARDED_MOST = 64_000, 4, 24
#: Rounds of forward-backward improvement per rule.
_ROUNDS = 2
#: Above this many tasks work is saved: one round, and what is within a thousandth of the bound is good enough.
_SMALL = 4000
_SUFFIX = "/just-in-time"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An order with its name and its value."""

    name: str
    order: Sequence[int]
    makespan: int
    peak: int


def rules(t: Tables) -> list[Rule]:
    """The list-scheduling rules, in the order in which they are tried."""
    position = list(range(t.n))
    by_tail = [-q for q in tails(t)[0]]
    return [
        Rule("list/input-compute", position, by_tail, strict=True),
        Rule("list/critical-path", by_tail, by_tail),
        Rule("list/input-collectives", position, position),
        Rule("list/critical-path-input-collectives", by_tail, position),
    ]


@dataclass(frozen=True, slots=True)
class Timing:
    """When a guarded schedule issues collectives.

    Attributes:
        margin: how many of its own durations before its latest time a gather may be issued.
        relief: collectives that free at least as much memory as they take go first, whatever their due date.
    """

    margin: int = 0
    relief: bool = False


def just_in_time(t: Tables, ideal: Candidate, timing: Timing) -> Rule:
    """A rule that repeats the order of ``ideal`` with gathers issued no earlier than they are needed."""
    order = ideal.order
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
    name = ideal.name.removesuffix(_SUFFIX) + _SUFFIX
    return Rule(name, position, latest, release=release)


def construct(t: Tables, cap_bytes: int | None, bound: int, offer: Callable[[Candidate], object]) -> None:
    """Pass candidate orders to ``offer``; work is saved once one reaches ``bound`` within ``cap_bytes``."""

    def candidate(name: str, order: Sequence[int]) -> Candidate:
        found = Candidate(name, order, replay_time(t, order).makespan, max(replay(t, order), default=t.live0))
        offer(found)
        return found

    def done(c: Candidate) -> bool:
        return c.makespan <= bound and (cap_bytes is None or c.peak <= cap_bytes)

    ideals: list[Candidate] = []
    for rule in rules(t):
        ideals.append(candidate(rule.name, list_schedule(t, rule)))
        for order in improve(t, ideals[-1].order, _ROUNDS if t.n <= _SMALL else 1):
            if ideals[-1].makespan <= bound:
                break
            ideals.append(candidate(f"{rule.name}/justified", order))
        if t.n > _SMALL and ideals[-1].makespan <= bound and (cap_bytes is None or done(ideals[-1])):
            break
    if cap_bytes is not None:
        _guarded(t, cap_bytes, bound, ideals, candidate)
        return
    fastest = min(c.makespan for c in ideals)
    for ideal in [c for c in ideals if c.makespan == fastest][: 1 if t.n > _SMALL else None]:
        # As fast with luck, and then with less memory.
        for timing in (Timing(), Timing(1, True)):
            candidate(f"{ideal.name}{_SUFFIX}", list_schedule(t, just_in_time(t, ideal, timing)))


def _guarded(
    t: Tables,
    cap: int,
    bound: int,
    ideals: list[Candidate],
    candidate: Callable[[str, Sequence[int]], Candidate],
) -> None:
    """Coordinate descent over (ideal order, reference, timing), then again from the best order found."""
    scored: dict[tuple[int, int, int], Candidate] = {}
    for ideal in ideals:
        # Without the guard this costs little, and tells how far from fitting the ideal is.
        loose = candidate(f"{ideal.name}{_SUFFIX}", list_schedule(t, just_in_time(t, ideal, Timing())))
        score = loose.makespan * max(loose.peak, cap) // max(cap, 1)
        scored.setdefault((score, loose.makespan, loose.peak), ideal)
    ranked = [scored[key] for key in sorted(scored)]
    references = [
        c
        for c in (
            candidate("lazy", lazy(t, range(t.n))),
            candidate("lazy", lazy(t, range(t.n), hold_waits=True)),
            candidate("input", range(t.n)),
        )
        if c.peak <= cap
    ]
    if t.n > _SMALL:
        bound += bound // 1000
    left = max(_GUARDED_LEAST, min(_GUARDED_MOST, _GUARDED_TASKS // t.n))
    best: Candidate | None = None

    def attempt(ideal: Candidate, timing: Timing, reference: Candidate | None = None) -> bool:
        nonlocal best, left
        if left <= 0 or (best is not None and best.makespan <= bound):
            return False
        if reference is None:
            # The closer the reference, the less the guard has to correct.
            reference = candidate("lazy", lazy(t, ideal.order))
            if reference.peak > cap:
                if not references:
                    return False
                reference = references[0]
        left -= 1
        rule = just_in_time(t, ideal, timing)
        found = candidate(rule.name, list_schedule(t, rule, Continuation(t, reference.order, cap)))
        if best is not None and (found.makespan, found.peak) >= (best.makespan, best.peak):
            return False
        best = found
        return True

    ideal, timing = ranked[0], Timing()
    attempt(ideal, timing)
    for other in ranked[1:3]:
        if attempt(other, timing):
            ideal = other
    for option in (Timing(1, True), Timing(1, False), Timing(3, True)):
        if attempt(ideal, option):
            timing = option
    for reference in references:
        attempt(ideal, timing, reference)
    while best is not None and attempt(best, timing, best):
        pass
    for other in ranked[3:]:
        attempt(other, timing)
    while best is not None and attempt(best, timing, best):
        pass
