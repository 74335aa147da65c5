"""Which activations backward computes again instead of reading what forward saved, together with which parameters it
keeps: one choice for the peak of the whole step.

The problem is that of rematerialisation under a memory cap (Checkmate, Jain et al., 2020; MONeT, Shah et al., 2021),
with communication: time is the simulated makespan of forward and backward, so work that runs while the link is busy
anyway costs nothing, and bytes that are gone before the peak are worth nothing.

A *state* is a set of saved values to compute again and a number of gathered parameters to keep. Both problems of a
state are derived from those of the step as it came (``derived``), without a graph. Which states are looked at is
``states``' business. Each one is planned within its own memory and within somewhat more, with the messages that could
be merged (``merging``) and without. That gives points (peak, time). Those that none beats are planned better
(:func:`refined`). No point depends on the budget: so more budget never chooses a slower step, and the points are the
curve of the step over the budget as well.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.schedule.bounds import urgency, work_alone
from inductor_passes.schedule.list_schedule import PriorityRule, Reach, list_schedule
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import value
from inductor_passes.schedule.tables import Tables, tables
from inductor_passes.step import keep
from inductor_passes.step.derived import Step, derived, peak_of
from inductor_passes.step.merging import Mergeable, Merging, Proposal, Way
from inductor_passes.step.states import Made, rankings, states

NAME = "recompute"
#: Tasks that may be scheduled in all: how many states are tried follows from it.
_SCHEDULED_TASKS = 150_000
#: Series of states: two rankings, and two that look at the peak.
_SERIES = 4
#: States per series, at most and at least.
_MOST_STATES, _FEWEST_STATES = 16, 3
#: Memory with which a state is planned: its own peak, and so many percent more.
_APPETITES = (100, 110, 130, 200)
#: Tasks that may be planned in all to refine points, and points that are refined, at most.
_PLANNED_TASKS, _MOST_REFINED = 20_000, 8
#: States that are looked at between others, at most: where these are further apart than the largest peak over this.
_MOST_BETWEEN, _FAR = 4, 20
#: Shares of the gathered parameters, in quarters, that a state may keep.
_KEPT_QUARTERS = (0, 2, 4)


@dataclass(frozen=True)
class Point:
    """A state within some memory.

    Attributes:
        recomputed: numbers of the candidates that are computed again, ascending.
        kept: how many of the gathered parameters are kept, best first.
        peak_bytes, step_ns: of both graphs in a simple schedule; the passes plan them again.
        spent_ns: of compute and communication that is added.
        proposed: the messages that travel together in that schedule, by graph.
    """

    recomputed: tuple[int, ...]
    kept: int
    peak_bytes: int
    step_ns: int
    spent_ns: int = 0
    proposed: tuple[Proposal, Proposal] = field(default=((), ()), repr=False)

    @property
    def rank(self) -> tuple[int, int, int, int, tuple[int, ...]]:
        """Less is better. Of equally fast steps the one that adds least wins: its estimate relies on least."""
        return self.step_ns, self.spent_ns, self.peak_bytes, self.kept, self.recomputed


def points(
    step: Step,
    gathered: Sequence[keep.Gathered] = (),
    kept: Sequence[int] | None = None,
    merging: Merging | None = None,
) -> list[Point]:
    """What is possible: the states with what they take; the same for every budget.

    Args:
        gathered: parameters that could be kept, best first (:func:`keep.candidates`).
        kept: how many of them may be kept; default: none, half, all.
        merging: buckets that the step as it came could have.
    """
    counts = sorted({len(gathered) * q // 4 for q in _KEPT_QUARTERS}) if kept is None else list(kept)
    size = max(1, len(step.forward) + len(step.backward))
    if merging is None:
        merging = Merging(step.forward, step.backward, (Mergeable(), Mergeable()))
    found: list[Point] = []
    sizes = 1 + merging.sizes
    most = max(_FEWEST_STATES, min(_MOST_STATES, _SCHEDULED_TASKS // (_SERIES * len(counts) * sizes * size)))
    made: Made = {}
    probes, others = _probes(step, states(step, most, made))
    #: Points by how many parameters are kept and the size of the buckets.
    of_way: dict[tuple[int, int], list[Point]] = {}

    def look_at(state: tuple[int, ...], ways: Collection[tuple[int, int]]) -> None:
        both = made.pop(state, None) or derived(step, state)
        if both is None:
            return
        if state in probes:
            made[state] = both
        spent = sum(step.added_ns(state))
        for count in counts:
            numbers = [number for number in range(sizes) if (count, number) in ways]
            for number, way in merging.ways(_keeping(both, gathered, count), numbers) if numbers else ():
                more = _within(Point(state, count, 0, 0, spent, way.proposed), way, found)
                of_way.setdefault((count, number), []).extend(more)
                found.extend(more)

    def worth() -> set[tuple[int, int]]:
        best = {id(p) for p in curve(found)}
        return {way for way, ones in of_way.items() if any(id(p) in best for p in ones)}

    # Merging takes longer than scheduling what is merged, and what wins at both ends wins between them.
    for state in probes:
        look_at(state, {(counts[0], number) for number in range(sizes)})
    some = {number for _, number in worth()}
    for state in probes:
        look_at(state, {(count, number) for count in counts[1:] for number in some})
    chosen = worth()
    for state in others:
        look_at(state, chosen)
    for state in _between(step, curve(found)):
        look_at(state, chosen)
    found += refined(step, _no_faster(found), gathered, merging)
    return _no_faster(found)


def _probes(step: Step, everyone: Sequence[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The states for which buckets of every size are tried: of least, middle and most bytes, and the last of a series.

    Returns:
        These, and the others, each in their order.
    """
    by_bytes = sorted(everyone, key=lambda state: sum(step.candidates[i].size_bytes for i in state))
    taken = {by_bytes[0], by_bytes[len(by_bytes) // 2], by_bytes[-1], everyone[-1]}
    return [state for state in everyone if state in taken], [state for state in everyone if state not in taken]


def _between(step: Step, best: Sequence[Point]) -> list[tuple[int, ...]]:
    """States between neighbours on the curve of which the least memory is far apart: one computes again half of what
    the other one does on top.
    """
    place = {i: k for k, i in enumerate(rankings(step)[0])}
    least: dict[tuple[int, ...], int] = {}
    for point in best:
        # The first one of a state needs least.
        least.setdefault(point.recomputed, point.peak_bytes)
    gaps = []
    for more, fewer in itertools.pairwise(least):
        apart = sorted({*more} - {*fewer}, key=place.__getitem__)
        gap = least[fewer] - least[more]
        if gap * _FAR > best[-1].peak_bytes and len(apart) > 1 and {*fewer} <= {*more}:
            gaps.append((-gap, fewer, apart))
    found: dict[tuple[int, ...], None] = {}
    for _, fewer, apart in sorted(gaps)[:_MOST_BETWEEN]:
        left = sum(step.candidates[i].size_bytes for i in apart) // 2
        state = [*fewer]
        for i in apart[:-1]:
            if left <= 0:
                break
            state.append(i)
            left -= step.candidates[i].size_bytes
        found[tuple(sorted(state))] = None
    return list(found)


def _keeping(
    both: tuple[Problem, Problem], gathered: Sequence[keep.Gathered], count: int
) -> tuple[Problem, Problem]:
    """Forward and backward of a state that keeps so many parameters."""
    names = {g.start for g in gathered[:count]}
    return keep.holding(both[0], names), keep.without_gathers(both[1], names)


def _within(blank: Point, way: Way, known: Sequence[Point]) -> list[Point]:
    """The points of a state: those of more memory only where that makes the step shorter.

    Args:
        blank: the state's, without figures.
        known: where one of them beats the best that the state could be, its points are not looked for.
    """
    flat = [tables(p) for p in way.problems]
    came = [value(t, range(t.n)) for t in flat]
    peak = max(own for _, own in came)
    if blank.recomputed:
        least_ns = sum(work_alone(t) for t in flat)
        if any(p.peak_bytes <= peak and p.step_ns <= least_ns for p in known):
            return []
    result = [dataclasses.replace(blank, peak_bytes=peak, step_ns=sum(ns for ns, _ in came))]
    for percent in _APPETITES:
        cap = peak * percent // 100
        found = [min((own, *_quick(t, cap))) for t, own in zip(flat, came)]
        highest, step_ns = max(own for _, own in found), sum(ns for ns, _ in found)
        if step_ns < result[-1].step_ns:
            result.append(dataclasses.replace(blank, peak_bytes=highest, step_ns=step_ns))
    return result


def refined(
    step: Step, found: Sequence[Point], gathered: Sequence[keep.Gathered], merging: Merging
) -> list[Point]:
    """More points of the states that no other one beats: planned within their memory, with buckets that fit there.

    A list schedule is a poor plan close to the least memory, and buckets of one size fit everywhere or nowhere. None
    for large steps: each plan takes as long as one of the final ones.
    """
    size = max(1, len(step.forward) + len(step.backward)) * (2 if merging.sizes else 1)
    best = curve(found)
    most = min(_MOST_REFINED, len(best), _PLANNED_TASKS // size)
    if most < 2:
        return []
    result = []
    for k in range(most):
        point = best[k * (len(best) - 1) // (most - 1)]
        both = derived(step, point.recomputed)
        if both is None:
            continue
        problems, cap = _keeping(both, gathered, point.kept), point.peak_bytes
        ways = [merging.way(problems, point.proposed), *([merging.fitting(problems, cap)] if merging.sizes else [])]
        for way in ways:
            plans = [plan(p, cap, effort=0, thorough=False) for p in way.problems]
            if all(p.feasible for p in plans):
                peak, step_ns = max(p.peak_bytes for p in plans), sum(p.makespan_ns for p in plans)
                result.append(dataclasses.replace(point, peak_bytes=peak, step_ns=step_ns, proposed=way.proposed))
    return result


def _quick(t: Tables, cap_bytes: int) -> list[tuple[int, int]]:
    """(makespan, peak) of a few list schedules within a cap that the input order keeps: cheap where many are asked."""
    by_tail = urgency(t)
    position = range(t.n)
    rules = (
        PriorityRule("list/input", position, position),
        PriorityRule("list/input-compute", position, by_tail, strict=True),
        PriorityRule("list/critical-path", by_tail, by_tail),
    )
    orders = (list_schedule(t, rule, Reach(position, cap_bytes)) for rule in rules)
    return [(ns, peak) for ns, peak in (value(t, order) for order in orders) if peak <= cap_bytes]


def _no_faster(found: Sequence[Point]) -> list[Point]:
    """The same points, none faster than the step as it came: what is added to a step does not make it faster.

    Where a schedule says so, the schedules of the step as it came were not the best ones.
    """
    saved: dict[int, int] = {}
    for p in found:
        if not p.recomputed:
            saved[p.kept] = min(p.step_ns, saved.get(p.kept, p.step_ns))
    return [dataclasses.replace(p, step_ns=max(p.step_ns, saved[p.kept])) for p in found]


def saved_ns(found: Sequence[Point], kept: int = 0) -> int:
    """The fastest step in which everything is saved and ``kept`` parameters are kept, whatever it needs."""
    return min(p.step_ns for p in found if not p.recomputed and p.kept == kept)


def best(found: Sequence[Point], limit: int | None) -> Point | None:
    """The fastest point within ``limit``; None where there is none."""
    return min((p for p in found if limit is None or p.peak_bytes <= limit), key=lambda p: p.rank, default=None)


def least(found: Sequence[Point]) -> Point:
    """The point that needs least; the fastest of several."""
    return min(found, key=lambda p: (p.peak_bytes, *p.rank))


def curve(found: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both memory and time, by memory."""
    result: list[Point] = []
    for one in sorted(found, key=lambda p: (p.peak_bytes, *p.rank)):
        if not result or one.step_ns < result[-1].step_ns:
            result.append(one)
    return result


def added(step: Step, again: Collection[int]) -> str:
    """What candidates add to backward, in words."""
    computed_ns, sent_ns = step.added_ns(again)
    return f"{computed_ns} ns of compute" + (f" and {sent_ns} ns of gathers" if sent_ns else "")


def report(step: Step, point: Point, fastest_ns: int, limit: int | None, refused: Mapping[str, str]) -> PassReport:
    """What is computed again, and what is not.

    Args:
        fastest_ns: see :func:`saved_ns`.
        refused: saved values that cannot be computed again -> why.
    """
    chosen = set(point.recomputed)
    decisions = []
    for i, one in enumerate(step.candidates):
        detail = f"{one.size_bytes} bytes from forward to backward, or {added(step, [i])} in backward"
        applied = i in chosen
        decisions.append(
            Decision(
                NAME,
                one.name,
                Verdict.APPLIED if applied else Verdict.REFUSED,
                Reason.PROFITABLE if applied else Reason.NOT_PROFITABLE,
                detail if applied else f"saved: {detail}; the planned step fits without it, or is faster so",
                source=one.source,
                setting="" if applied else "memory_budget",
            )
        )
    decisions += [
        Decision(NAME, name, Verdict.REFUSED, Reason.UNSUPPORTED, why) for name, why in sorted(refused.items())
    ]
    computed_ns, sent_ns = step.added_ns(chosen)
    metrics: dict[str, float] = {
        "recomputed": len(chosen),
        "recomputed_bytes": sum(step.candidates[i].size_bytes for i in chosen),
        "recomputed_ns": computed_ns,
        "step_saved_ns": fastest_ns,
        "step_ns": point.step_ns,
        "peak_saved_bytes": peak_of(step),
        "peak_bytes": point.peak_bytes,
    }
    if sent_ns:
        metrics["gathered_again_ns"] = sent_ns
    if limit is not None:
        metrics["limit_bytes"] = limit
    return PassReport(NAME, changed=bool(chosen), decisions=decisions, metrics=metrics)
