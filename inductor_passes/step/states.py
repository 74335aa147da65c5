"""Which sets of activations are looked at: each could be computed again as a whole.

There are four series. Two are prefixes of rankings: by time per byte, and from the first layer on (what forward saves
first lives longest, and is computed again last, when most memory has been freed). Two look at the peak of the set
before (:func:`from_peak_to_peak`): one begins with everything saved and computes again what is in the way there, the
other one begins with everything computed again and saves what makes others run too early.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from inductor_passes.schedule.memory import profile
from inductor_passes.schedule.problem import Problem
from inductor_passes.step.derived import Step, derived

#: Sets that the descent may look at, per set of a series; and tasks in them, where that is more than one set per set.
_TRIALS, _LOOKED_AT_TASKS = 8, 120_000
#: How many values are tried before one is saved again.
_AHEAD = 4
#: Of equal values every so many are saved where all of them are too many.
_EVERY = (2, 4, 8, 16)
#: Sets of candidates, ascending within, with what :func:`derived` gives for them.
Made: TypeAlias = dict[tuple[int, ...], tuple[Problem, Problem]]


def rankings(step: Step) -> tuple[tuple[int, ...], ...]:
    """Two orders in which candidates are taken: by time per byte, the first layers first, and by position alone."""

    def cost(i: int) -> int:
        one = step.candidates[i]
        spent = sum(step.forward.tasks[t].duration_ns for t in one.chain)
        # Equal operators of other layers tie, so that position decides between them.
        return (spent * 1024 // max(1, one.size_bytes)).bit_length()

    numbers = range(len(step.candidates))
    return tuple(sorted(numbers, key=lambda i: (cost(i), i))), tuple(numbers)


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
    for everything in (False, True):
        found.update(dict.fromkeys(from_peak_to_peak(step, most, made, everything=everything)))
    return list(found)


def from_peak_to_peak(
    step: Step, most: int, made: Made | None = None, *, everything: bool = False
) -> list[tuple[int, ...]]:
    """A series of sets of candidates, each with a lower peak than the one before.

    Steps down take some more of those that are in the way at the peak, by time per byte, where work that a chain shares
    with those taken counts once. What makes the peak higher is left out: a chain that runs long before its values are
    read holds more than it frees. Where nothing helps any more, something is saved again
    (:meth:`_Descent.saved_again`). The series ends where that does not help either. At most ``most`` sets, evenly
    spaced, the last one among them. O(``most`` * (tasks + candidates)).

    Args:
        made: filled for the sets of the series.
        everything: begin with everything computed again, and save what makes the most others run early: that finds the
            ends of a model's blocks, as somebody does who checkpoints them.
    """
    descent = _Descent(step, most)
    if everything and not descent.begins_with(range(len(step.candidates))):
        return []
    ways = (descent.taken_more, descent.saved_again)
    ways = (*(reversed(ways) if everything else ways), descent.exchanged)
    while descent.left > 0 and any(way() for way in ways):
        pass
    # Each set costs schedules. Where sets had to be small there are more than that.
    result = descent.found
    kept = min(most, len(result))
    series = [result[(k + 1) * len(result) // kept - 1] for k in range(kept)]
    if made is not None:
        made.update((state, descent.problems[state]) for state in series)
    return series


@dataclass(frozen=True)
class _Looked:
    """A set of candidates, its problems, and what lives at its peak."""

    state: tuple[int, ...]
    problems: tuple[Problem, Problem]
    at_peak: _AtPeak


class _Descent:
    """From everything saved to sets of candidates with lower and lower peaks.

    Attributes:
        left: how many sets may still be looked at.
        found: sets that were gone to, and ``problems`` of them.
    """

    def __init__(self, step: Step, most: int) -> None:
        self.step = step
        trials = _LOOKED_AT_TASKS // max(1, len(step.forward) + len(step.backward))
        self.left = max(most, min(_TRIALS * most, trials))
        self.whole = self.several = -(-len(step.candidates) // max(1, most))
        self.taken, self.left_out = frozenset[int](), set[int]()
        #: The sets from which saving something again, and exchanging it, was tried in vain.
        self.stuck: frozenset[int] | None = None
        self.kept: frozenset[int] | None = None
        self.problems: Made = {}
        self.found: list[tuple[int, ...]] = []
        self.at_peak = _at_peak(step, (step.forward, step.backward))
        #: Candidates of equal layers have one kind.
        self.kinds = [
            (one.size_bytes, len(one.chain), sum(step.forward.tasks[t].duration_ns for t in one.chain), one.source)
            for one in step.candidates
        ]

    def _looked_at(self, ones: Collection[int]) -> _Looked | None:
        """A set; None where no order of backward can do it."""
        self.left -= 1
        state = tuple(sorted(ones))
        both = derived(self.step, state)
        return None if both is None else _Looked(state, both, _at_peak(self.step, both, frozenset(state)))

    def begins_with(self, ones: Collection[int]) -> bool:
        """Begin with a set, whatever its peak is; whether it can be computed again."""
        looked = self._looked_at(ones)
        if looked is None:
            return False
        self._go_on(looked)
        return True

    def _go_to(self, looked: _Looked | None) -> bool:
        """Go on from a set if its peak is lower; whether it is."""
        if looked is None or looked.at_peak.bytes >= self.at_peak.bytes:
            return False
        self._go_on(looked)
        return True

    def _go_on(self, looked: _Looked) -> None:
        self.taken, self.at_peak = frozenset(looked.state), looked.at_peak
        self.found.append(looked.state)
        self.problems[looked.state] = looked.problems

    def taken_more(self) -> bool:
        """Whether there is something else to be computed again; it is tried."""
        helping = [i for i in self.at_peak.saved if i not in self.left_out]
        if not helping:
            return False
        some = _cheapest(self.step, self.taken, helping)[: self.several]
        if self._go_to(self._looked_at(self.taken.union(some))):
            self.several = self.whole
        elif len(some) > 1:
            self.several = len(some) // 2
        else:
            self.left_out.update(some)
        return True

    def saved_again(self) -> bool:
        """Whether a lower peak was found with less computed again.

        A value that is computed again at the peak may have needed others that are only read after the peak. They run
        later once it is saved. Those of equal layers are saved together if that helps, or every second or fourth of
        them, or one alone.
        """
        if self.stuck == self.taken:
            return False
        early = self._early()
        kinds = list(dict.fromkeys(self.kinds[one] for one in early))[:_AHEAD]
        alike = [sorted(i for i in self.taken if self.kinds[i] == kind) for kind in kinds]
        spaced = [ones[every - 1 :: every] for ones in alike for every in _EVERY if every < len(ones)]
        alone = [[one] for one in early[:_AHEAD]]
        for ones in (alike + spaced, alone):
            tried = [self._looked_at(self.taken.difference(some)) for some in ones[: max(0, self.left)]]
            if self._go_to(min((t for t in tried if t), key=lambda t: t.at_peak.bytes, default=None)):
                # What was too much before may be enough now.
                self.left_out = set()
                return True
        self.stuck = self.taken
        return False

    def exchanged(self) -> bool:
        """Whether a lower peak was found with a value saved at the peak computed again, and what that reads saved.

        Alone neither helps: computed again, a value makes what it reads live as early as itself, and saved, that is one
        more value there. The end of a block takes the place of what is wide inside of it.
        """
        if self.kept == self.taken:
            return False
        candidates, reads = self.step.candidates, self.step.reads
        owner = {b: i for i in self.taken for b in candidates[i].backward_storages}
        tried = []
        for one in _cheapest(self.step, self.taken, self.at_peak.saved)[:_AHEAD]:
            alike = [i for i in self.at_peak.saved if self.kinds[i] == self.kinds[one]]
            for ones in ([one], alike) if len(alike) > 1 else ([one],):
                read = {owner[b] for i in ones for t in candidates[i].chain for b in reads.get(t, ()) if b in owner}
                if read and self.left > 0:
                    tried.append(self._looked_at(self.taken.union(ones) - read))
        if self._go_to(min((t for t in tried if t), key=lambda t: t.at_peak.bytes, default=None)):
            self.left_out = set()
            return True
        self.kept = self.taken
        return False

    def _early(self) -> list[int]:
        """Values computed again that live at the peak, by what lives there because of them, most first."""
        there, candidates = self.at_peak.again, self.step.candidates
        of_task: dict[int, int] = {candidates[i].maker: k for k, i in enumerate(there)}
        edges = self.step.forward.edges()
        # Task -> the bits of what it needs of ``there``, itself among them.
        needs: dict[int, int] = {}
        for task in sorted({t for i in self.taken for t in candidates[i].chain}):
            needs[task] = 1 << of_task[task] if task in of_task else 0
            for before in edges[task]:
                needs[task] |= needs.get(before, 0)

        sizes = [candidates[i].size_bytes for i in there]
        because = {}
        for i in there:
            bits = bin(needs[candidates[i].maker])[:1:-1]
            # One of these is the value itself, and saved it lives there, too.
            because[i] = sum(size for size, bit in zip(sizes, bits) if bit == "1") - 2 * candidates[i].size_bytes
        return sorted((i for i in there if because[i] > 0), key=lambda i: (-because[i], i))


def _cheapest(step: Step, taken: Collection[int], helping: Sequence[int]) -> list[int]:
    """Candidates by the time that they add per byte; equal ones, as in equal layers, by position."""
    spent = {t for i in taken for t in step.candidates[i].chain}

    def cost(i: int) -> tuple[int, int]:
        one = step.candidates[i]
        added = sum(step.forward.tasks[t].duration_ns for t in one.chain if t not in spent)
        return (added * 1024 // max(1, one.size_bytes)).bit_length(), i

    return sorted(helping, key=cost)


@dataclass(frozen=True)
class _AtPeak:
    """The higher peak of the two graphs of a set.

    Attributes:
        bytes: of the peak.
        saved: candidates that live across it from forward, and would not when computed again.
        again: candidates that were computed again in front of it and are read behind it.
    """

    bytes: int
    saved: tuple[int, ...] = ()
    again: tuple[int, ...] = ()


def _at_peak(step: Step, both: tuple[Problem, Problem], taken: Collection[int] = ()) -> _AtPeak:
    """What lives at the peak when the candidates ``taken`` are computed again."""
    peaks = [profile(p) for p in both]
    where = max((0, 1), key=lambda graph: max(peaks[graph], default=0))
    live, storages = peaks[where], both[where].storages
    if not live:
        return _AtPeak(0)
    place = live.index(max(live))
    saved, again = [], []
    for i, one in enumerate(step.candidates):
        if where == 0:
            block = storages[one.forward_storage]
            if i not in taken and block.producer <= place and max((block.producer, *block.readers)) < place:
                saved.append(i)
            continue
        readers = [r for b in one.backward_storages for r in storages[b].readers]
        if not readers:
            continue
        if i not in taken and min(readers) > place:
            saved.append(i)
        elif i in taken and storages[one.backward_storages[0]].producer <= place < max(readers):
            again.append(i)
    return _AtPeak(max(live), tuple(saved), tuple(again))
