"""Which activations backward computes again instead of reading what forward saved, together with which parameters it
keeps: one choice for the peak of the whole step.

The problem is that of rematerialisation under a memory cap (Checkmate, Jain et al., 2020; MONeT, Shah et al., 2021),
with communication: time is the simulated makespan of forward and backward, so work that runs while the link is busy
anyway costs nothing, and bytes that are gone before the peak are worth nothing.

A *state* is a set of saved values to compute again and a number of gathered parameters to keep. Both problems of a
state are derived from those of the step as it came (:func:`derived`), without a graph. States are prefixes of two
rankings: by time per byte, and from the first layer on (what forward saves first lives longest, and is computed again
last, when most memory has been freed). A third series looks at the peak of each state and takes what is cheapest per
byte of what would be gone there (:func:`from_peak_to_peak`). Each state is planned within its own memory and within
somewhat more, with the messages that could be merged (``merging``) and without. That gives points (peak, time). Those
that none beats are planned better (:func:`refined`). No point depends on the budget: so more budget never chooses a
slower step, and the points are the curve of the step over the budget as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.schedule.bounds import urgency, work_alone
from inductor_passes.schedule.list_schedule import PriorityRule, Reach, list_schedule
from inductor_passes.schedule.memory import peak_bytes, profile
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import INPUT, Kind, Problem, ProblemError, Storage, Task
from inductor_passes.schedule.simulate import value
from inductor_passes.schedule.tables import Tables, tables
from inductor_passes.step import keep
from inductor_passes.step.merging import Mergeable, Merging, Proposal, Way

NAME = "recompute"
#: Added to the names of tasks that run again in backward.
AGAIN = ".again"
#: Tasks that may be scheduled in all: how many states are tried follows from it.
_SCHEDULED_TASKS = 150_000
#: Series of states: two rankings, and what is in the way at the peak.
_SERIES = 3
#: States per series, at most and at least.
_MOST_STATES, _FEWEST_STATES = 16, 3
#: Sets that the third series may look at, per state; and tasks in them, where that is more than one set per state.
_TRIALS, _LOOKED_AT_TASKS = 4, 60_000
#: Memory with which a state is planned: its own peak, and so many percent more.
_APPETITES = (100, 110, 130, 200)
#: Tasks that may be planned in all to refine points, and points that are refined, at most.
_PLANNED_TASKS, _MOST_REFINED = 20_000, 8
#: Shares of the gathered parameters, in quarters, that a state may keep.
_KEPT_QUARTERS = (0, 2, 4)


@dataclass(frozen=True)
class Candidate:
    """A block of memory that forward saves and backward could compute again.

    Attributes:
        name: of the saved value.
        size_bytes: what it holds from forward to its last reader in backward.
        chain: forward's tasks that would run again, in order; where they read another saved value they end.
        forward_storage: index of the block among forward's storages.
        backward_storages: indices of backward's inputs that are the block.
        nodes: names of the FX nodes of ``chain``.
        source: the user's ``file:line``, or "".
        readers: backward's tasks that read the value. Its memory may be used elsewhere: where kernels compute these.
            Empty: those that use the memory.
    """

    name: str
    size_bytes: int
    chain: tuple[int, ...]
    forward_storage: int
    backward_storages: tuple[int, ...]
    nodes: tuple[str, ...] = ()
    source: str = ""
    readers: tuple[int, ...] = ()

    @property
    def maker(self) -> int:
        """The task of forward that makes the value: everything else in its chain comes before. Its memory may be
        allocated earlier, by the first part of a concatenation."""
        return max(self.chain)


@dataclass(frozen=True)
class Step:
    """Both problems of a step as Inductor would separate it, and what backward could compute again.

    Attributes:
        forward, backward: everything that was saved is saved, every parameter is gathered again.
        candidates: in the order in which forward makes them.
        needs: forward's task -> tasks that are in backward already and that it needs there (gathers).
        reads: forward's task -> storages that are in backward already and that it reads there.
        callers: forward's inputs that backward does not have; chains that read them make it hold them.
        latent: backward's storage -> bytes that it takes once a chain reads it too: a value that kernels compute where
            it is read, as long as nobody else reads it.
    """

    forward: Problem
    backward: Problem
    candidates: tuple[Candidate, ...]
    needs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    reads: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    callers: tuple[int, ...] = ()
    latent: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """A state within some memory.

    Attributes:
        recomputed: numbers of the candidates that are computed again, ascending.
        kept: how many of the gathered parameters are kept, best first.
        peak_bytes, step_ns: of both graphs in a simple schedule; the passes plan them again.
        spent_ns: of compute that is added.
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


def derived(step: Step, again: Sequence[int]) -> tuple[Problem, Problem] | None:
    """Forward and backward when the candidates ``again`` are not saved; None where no order of backward can do it.

    Chains run directly before their first reader, as torch places them, and what they need is brought forward.
    """
    chosen = [step.candidates[i] for i in sorted(again)]
    if not chosen:
        return step.forward, step.backward
    gone = {c.forward_storage for c in chosen}
    storages = [
        Storage(s.size_bytes, s.producer, s.readers, False, s.name, s.workspace) if i in gone else s
        for i, s in enumerate(step.forward.storages)
    ]
    taken = set(again)
    others = {c.maker for i, c in enumerate(step.candidates) if i not in taken}
    forward = _without_unread(dataclasses.replace(step.forward, storages=tuple(storages)), chosen, others)
    backward = _Backward(step, chosen)
    order = backward.order()
    return None if order is None else (forward, backward.problem(order))


def _without_unread(forward: Problem, chosen: Sequence[Candidate], others: Collection[int]) -> Problem:
    """Forward without what it computed only to save it: such tasks keep their numbers, and take no time or memory.

    Args:
        others: tasks that make what is saved all the same.
    """
    needed = {s.producer for s in forward.storages if s.pinned}.union(others)
    needed.update(i for i, task in enumerate(forward.tasks) if task.kind is not Kind.COMPUTE or task.fence)
    readers: list[list[int]] = [[] for _ in forward.tasks]
    for i, before in enumerate(forward.edges()):
        for p in before:
            readers[p].append(i)
    unread: set[int] = set()
    for i in sorted({t for c in chosen for t in c.chain}, reverse=True):
        if i not in needed and unread.issuperset(readers[i]):
            unread.add(i)
    if not unread:
        return forward
    storages = []
    for s in forward.storages:
        gone = s.producer in unread
        if gone or not unread.isdisjoint(s.readers):
            left = tuple([r for r in s.readers if r not in unread])
            s = Storage(0 if gone else s.size_bytes, s.producer, left, s.pinned, s.name, s.workspace)
        storages.append(s)
    return dataclasses.replace(
        forward,
        tasks=tuple(
            [dataclasses.replace(t, duration_ns=0) if i in unread else t for i, t in enumerate(forward.tasks)]
        ),
        storages=tuple(storages),
    )


class _Backward:
    """Backward's tasks and, with numbers above them, forward's tasks that run again."""

    def __init__(self, step: Step, chosen: Sequence[Candidate]) -> None:
        self.step = step
        self.first = len(step.backward)
        self.again = sorted({t for c in chosen for t in c.chain})
        self.number = {t: self.first + k for k, t in enumerate(self.again)}
        self.producer = {b: self._allocated_by(c) for c in chosen for b in c.backward_storages}
        self.maker = {b: self.number[c.maker] for c in chosen for b in c.backward_storages}
        # Where nobody noted that several inputs are one block they count for themselves. Made again they are one.
        self.whole = {b: c.backward_storages[0] for c in chosen for b in c.backward_storages[1:]}
        self.twin = {c.forward_storage for c in chosen}
        self.preds = step.backward.edges() + [self._preds(t) for t in self.again]
        for c in chosen:
            users = [r for b in c.backward_storages for r in step.backward.storages[b].readers]
            for reader in dict.fromkeys((*c.readers, *users)):
                self.preds[reader].append(self.number[c.maker])
        self.readers: dict[int, list[int]] = {}
        for t in self.again:
            for b in step.reads.get(t, ()):
                self.readers.setdefault(b, []).append(self.number[t])
                if b in self.maker and self.maker[b] != self.number[t]:
                    self.preds[self.number[t]].append(self.maker[b])

    def _allocated_by(self, candidate: Candidate) -> int:
        return self.number[self.step.forward.storages[candidate.forward_storage].producer]

    def _preds(self, task: int) -> list[int]:
        forward = self.step.forward
        before = {self.number[p] for p in forward.preds[task] if p in self.number}
        return sorted({*before, *self.step.needs.get(task, ())})

    def order(self) -> list[int] | None:
        """All tasks in backward's order, each chain as late as its first reader allows; None for a circle."""
        done, result = [0] * len(self.preds), []
        for root in range(self.first):
            stack = [root]
            while stack:
                one = stack[-1]
                if done[one] == 2:
                    stack.pop()
                    continue
                waiting = [p for p in self.preds[one] if done[p] != 2]
                if not waiting:
                    done[one] = 2
                    result.append(one)
                    stack.pop()
                    continue
                if done[one] == 1 and any(done[p] == 1 for p in waiting):
                    return None
                done[one] = 1
                # The last one pushed comes first.
                stack.extend(sorted(set(waiting), reverse=True))
        return result if len(result) == len(self.preds) else None

    def problem(self, order: Sequence[int]) -> Problem:
        """The problem with its tasks renumbered in ``order``."""
        backward, forward = self.step.backward, self.step.forward
        # One more, because ``INPUT`` is the last index.
        place = [INPUT] * (len(order) + 1)
        for k, one in enumerate(order):
            place[one] = k
        tasks = []
        for one in order:
            if one >= self.first:
                task = forward.tasks[self.again[one - self.first]]
                tasks.append(Task(task.name + AGAIN, task.kind, task.duration_ns, label=task.label, source=task.source))
            else:
                task = backward.tasks[one]
                tasks.append(task if task.start < 0 else dataclasses.replace(task, start=place[task.start]))
        preds = [*backward.preds, *self.preds[self.first :]]
        return dataclasses.replace(
            backward,
            tasks=tuple(tasks),
            preds=tuple([_places(place, preds[one]) for one in order]),
            storages=(*self._moved(place), *self._inside(place)),
        )

    def _moved(self, place: Sequence[int]) -> list[Storage]:
        """Backward's own memory, with its tasks renumbered."""
        of_whole: dict[int, list[int]] = {}
        for view, whole in self.whole.items():
            of_whole.setdefault(whole, []).append(view)
        storages = self.step.backward.storages
        result = []
        for b, s in enumerate(storages):
            producer = self.producer.get(b, s.producer)
            readers: Collection[int] = s.readers
            if b in self.readers or b in of_whole:
                blocks = [b, *of_whole.get(b, ())]
                everyone = {r for one in blocks for r in (*storages[one].readers, *self.readers.get(one, ()))}
                readers = everyone - {producer}
            size_bytes = 0 if b in self.whole else s.size_bytes
            if b in self.readers:
                size_bytes = self.step.latent.get(b, size_bytes)
            moved = place[producer], _places(place, readers)
            result.append(Storage(size_bytes, *moved, s.pinned, s.name, s.workspace))
        return result

    def _inside(self, place: Sequence[int]) -> list[Storage]:
        """Memory that only the chains need."""
        found = []
        for i in self.step.callers:
            s = self.step.forward.storages[i]
            readers = tuple(sorted(place[self.number[r]] for r in s.readers if r in self.number))
            if readers:
                found.append(Storage(s.size_bytes, INPUT, readers, True, s.name))
        for i, s in enumerate(self.step.forward.storages):
            if s.producer not in self.number or i in self.twin:
                continue
            made = place[self.number[s.producer]]
            # Who comes before reads what was saved of it: a value that may share this memory, as dropout's result may.
            readers = tuple(sorted(p for r in s.readers if r in self.number and (p := place[self.number[r]]) > made))
            found.append(Storage(s.size_bytes, made, readers, False, s.name + AGAIN))
        return found


def _places(place: Sequence[int], ones: Collection[int]) -> tuple[int, ...]:
    """Where tasks are, each once, ascending."""
    if len(ones) < 2:
        return tuple([place[one] for one in ones])
    return tuple(sorted({place[one] for one in ones}))


def rankings(step: Step) -> tuple[tuple[int, ...], ...]:
    """Two orders in which candidates are taken: by time per byte, the first layers first, and by position alone."""

    def cost(i: int) -> int:
        one = step.candidates[i]
        spent = sum(step.forward.tasks[t].duration_ns for t in one.chain)
        # Equal operators of other layers tie, so that position decides between them.
        return (spent * 1024 // max(1, one.size_bytes)).bit_length()

    numbers = range(len(step.candidates))
    return tuple(sorted(numbers, key=lambda i: (cost(i), i))), tuple(numbers)


#: Sets of candidates, ascending within, with what :func:`derived` gives for them.
Made: TypeAlias = dict[tuple[int, ...], tuple[Problem, Problem]]


def states(step: Step, most: int, made: Made | None = None) -> list[tuple[int, ...]]:
    """Sets of candidates, ascending within; at most ``most`` per series, none of them twice, nothing at all first.

    Args:
        made: filled for sets whose problems were derived on the way.
    """
    found: dict[tuple[int, ...], None] = {(): None}
    for ranking in rankings(step):
        total, taken, level = sum(step.candidates[i].size_bytes for i in ranking), 0, 1
        for k, i in enumerate(ranking, 1):
            taken += step.candidates[i].size_bytes
            if taken * most >= total * level or k == len(ranking):
                found[tuple(sorted(ranking[:k]))] = None
                level = taken * most // total + 1 if total else level
    found.update(dict.fromkeys(from_peak_to_peak(step, most, made)))
    return list(found)


def from_peak_to_peak(step: Step, most: int, made: Made | None = None) -> list[tuple[int, ...]]:
    """A series of sets of candidates, each with some more of those that are in the way at the peak of the last one.

    Candidates come by time per byte, where work that a chain shares with those taken counts once. What makes the peak
    higher is left out: a chain that runs long before its values are read holds more than it frees. The series ends
    where nothing that could be computed again lives at the peak. At most ``most`` sets, evenly spaced, the last one
    among them. O(``most`` * (tasks + candidates)).

    Args:
        made: filled for the sets of the series.
    """
    whole = -(-len(step.candidates) // max(1, most))
    several, taken, left_out = whole, frozenset[int](), set[int]()
    problems: Made = {}
    at_peak = _at_peak(step, (step.forward, step.backward))
    result = []
    trials = _LOOKED_AT_TASKS // max(1, len(step.forward) + len(step.backward))
    for _ in range(max(most, min(_TRIALS * most, trials))):
        helping = [i for i in at_peak[1] if i not in taken and i not in left_out]
        if not helping:
            break
        some = _cheapest(step, taken, helping)[:several]
        more = tuple(sorted(taken.union(some)))
        both = derived(step, more)
        tried = None if both is None else _at_peak(step, both)
        if both is not None and tried is not None and tried[0] < at_peak[0]:
            taken, at_peak, several = frozenset(more), tried, whole
            result.append(more)
            problems[more] = both
        elif len(some) > 1:
            several = len(some) // 2
        else:
            left_out.update(some)
    # Each set costs schedules. Where sets had to be small there are more than that.
    kept = min(most, len(result))
    series = [result[(k + 1) * len(result) // kept - 1] for k in range(kept)]
    if made is not None:
        made.update((state, problems[state]) for state in series)
    return series


def _cheapest(step: Step, taken: Collection[int], helping: Sequence[int]) -> list[int]:
    """Candidates by the time that they add per byte; equal ones, as in equal layers, by position."""
    spent = {t for i in taken for t in step.candidates[i].chain}

    def cost(i: int) -> tuple[int, int]:
        one = step.candidates[i]
        added = sum(step.forward.tasks[t].duration_ns for t in one.chain if t not in spent)
        return (added * 1024 // max(1, one.size_bytes)).bit_length(), i

    return sorted(helping, key=cost)


def _at_peak(step: Step, both: tuple[Problem, Problem]) -> tuple[int, list[int]]:
    """The higher peak of the two graphs of a state, and what is saved across it and would not be when computed again.
    """
    peaks = [profile(p) for p in both]
    where = max((0, 1), key=lambda graph: max(peaks[graph], default=0))
    live, storages = peaks[where], both[where].storages
    if not live:
        return 0, []
    place = live.index(max(live))
    found = []
    for i, one in enumerate(step.candidates):
        if where == 0:
            block = storages[one.forward_storage]
            there = block.producer <= place and max((block.producer, *block.readers)) < place
        else:
            readers = [r for b in one.backward_storages for r in storages[b].readers]
            there = bool(readers) and min(readers) > place
        if there:
            found.append(i)
    return max(live), found


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
    for state in states(step, most, made):
        both = made.pop(state, None) or derived(step, state)
        if both is None:
            continue
        spent = sum(step.forward.tasks[t].duration_ns for t in {t for i in state for t in step.candidates[i].chain})
        for count in counts:
            for way in merging.ways(_keeping(both, gathered, count)):
                found += _within(Point(state, count, 0, 0, spent, way.proposed), way, found)
    found += refined(step, _no_faster(found), gathered, merging)
    return _no_faster(found)


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


def peak_of(step: Step) -> int:
    """The peak of the step as it came: what a budget is relative to."""
    return max(peak_bytes(step.forward), peak_bytes(step.backward))


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


def report(step: Step, point: Point, fastest_ns: int, limit: int | None, refused: Mapping[str, str]) -> PassReport:
    """What is computed again, and what is not.

    Args:
        fastest_ns: see :func:`saved_ns`.
        refused: saved values that cannot be computed again -> why.
    """
    chosen = set(point.recomputed)
    decisions = []
    for i, one in enumerate(step.candidates):
        spent = sum(step.forward.tasks[t].duration_ns for t in one.chain)
        detail = f"{one.size_bytes} bytes from forward to backward, or {spent} ns of compute in backward"
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
    again = {t for i in chosen for t in step.candidates[i].chain}
    metrics: dict[str, float] = {
        "recomputed": len(chosen),
        "recomputed_bytes": sum(step.candidates[i].size_bytes for i in chosen),
        "recomputed_ns": sum(step.forward.tasks[t].duration_ns for t in again),
        "step_saved_ns": fastest_ns,
        "step_ns": point.step_ns,
        "peak_saved_bytes": peak_of(step),
        "peak_bytes": point.peak_bytes,
    }
    if limit is not None:
        metrics["limit_bytes"] = limit
    return PassReport(NAME, changed=bool(chosen), decisions=decisions, metrics=metrics)


def check(step: Step) -> None:
    """Raise :class:`ProblemError` unless the numbers in ``step`` are numbers of its tasks and storages."""
    for one in step.candidates:
        producer = step.forward.storages[one.forward_storage].producer
        if producer not in one.chain:
            raise ProblemError(f"{step.forward.name}: the chain of {one.name} does not make it")
        for b in one.backward_storages:
            if step.backward.storages[b].producer != INPUT:
                raise ProblemError(f"{step.backward.name}: {step.backward.storages[b].name} is not saved")
