"""The best of several partitions, by the planner's own evaluation.

Every partition becomes a problem of its own (merged tasks, copies, messages in memory) and is planned under the same
memory budget as the graph as it is. The fastest plan within the budget wins; the graph as it is wins ties, so merging
never makes the planned step slower. All are planned quickly first, and the fastest few again with their orders as the
input: a search ends below a quick plan, and not by the same for two partitions. The winner is then planned as
``reorder`` plans.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from inductor_passes.bucket.candidates import Candidate, GroupKey
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.bucket.fitted import fitted
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.bucket.greedy import greedy
from inductor_passes.bucket.merged import merged, with_durations
from inductor_passes.bucket.planned import planned
from inductor_passes.bucket.question import Partition, Question
from inductor_passes.bucket.room import Capped, Room
from inductor_passes.bucket.sized import sized
from inductor_passes.report import Reason
from inductor_passes.rewriting.contract import Beaten, Solved
from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.construct import SMALL, near
from inductor_passes.schedule.effort import again, plan_with_effort
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.partition_bound import partition_bound, shares
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import Kind, Problem

#: Appetites for latency, and shares of the memory for when buckets overlap in time or what they take is misjudged. The
#: first one is best on most large graphs, where no others are tried once a plan is near the bound.
_GREEDY = ((16.0, 1.0), (1.0, 1.0), (16.0, 0.25), (16.0, 0.0625))
#: Sizes of buckets, as shares of the graph's peak: one over these.
_SIZED = (128, 32, 8)
#: Tried by default: these with the memory that there is and with as little as there may be, the planner's own,
#: neighbours up to a size, and large ones where they fit.
PARTITIONS: tuple[Partition, ...] = (
    *(functools.partial(greedy, spread=spread, share=share) for spread, share in _GREEDY),
    *(functools.partial(greedy, spread=spread, share=share, tight=True) for spread, share in _GREEDY),
    planned,
    *(functools.partial(sized, share=share) for share in _SIZED),
    fitted,
)
#: Above this many tasks no more partitions are tried once one is near what any could reach.
_LARGE_TASKS = 6000
#: Above this many tasks partitions are compared by quick plans.
QUICK_TASKS = 500
#: How many partitions are planned again, and by what share of its time the last one may be behind: one over this.
_FINALISTS, _BEHIND = 3, 6


#: Buckets of names of starts.
Proposal = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Choice:
    """What came of it.

    Attributes:
        buckets: to be merged; empty when nothing is.
        tried: the first partition's buckets, for the reasons of a refusal.
        before, after: plans of the graph as it is and of the chosen (or, refused, of the best other) partition.
        bound_ns: no order of any partition is faster.
        objection: why nothing is merged although ``tried`` is not empty, else None.
        problem, plan: of what was decided, merged or not.
        searched: ``plan`` is what ``plan_with_effort`` finds.
    """

    buckets: list[list[Candidate]]
    tried: list[list[Candidate]]
    before: Plan
    problem: Problem
    bound_ns: int
    after: Plan | None = None
    objection: Reason | None = None
    searched: bool = False

    @property
    def plan(self) -> Plan:
        """See the class."""
        return self.before if not self.buckets or self.after is None else self.after


@dataclass(frozen=True)
class _Trial:
    """A partition, the problem that it makes of the graph's, and a plan."""

    buckets: list[list[Candidate]]
    problem: Problem
    plan: Plan


def choose(
    problem: Problem,
    found: Sequence[Candidate],
    dependencies: Dependencies,
    costs: BucketCosts,
    partitions: Sequence[Partition],
    limit_bytes: int | None,
    *,
    effort: int = 0,
    start: Solved | None = None,
    generated: Capped | None = None,
    dropped: Collection[Proposal] = (),
    beat_ns: int | None = None,
    settle: bool = True,
) -> Choice:
    """The partition whose plan is fastest within ``limit_bytes``; see the module's docstring.

    Args:
        generated: the memory of generated code; what is merged has to fit its cap too.
        start: a plan of ``problem`` that is known already: what is compared with is no worse.
        dropped: what is not to be proposed again.
        beat_ns: partitions of which no order is that fast are not planned, unless the graph as it is may be.
        settle: plan what is chosen as ``reorder`` plans; else the plan is the one that it was compared by.

    Raises:
        Beaten: no partition, nor the graph as it is, can be as fast as ``beat_ns``.
    """
    least_ns = bound_ns(problem, found, costs)
    if beat_ns is not None and least_ns > beat_ns:
        raise Beaten
    compared = beat_ns is not None and lower_bound(problem) > beat_ns
    before = plan(problem, limit_bytes, effort=effort, thorough=len(problem) <= QUICK_TASKS)
    if start is not None and start.problem is problem:
        before = min(before, start.plan, key=lambda p: (not p.feasible, p.makespan_ns))
    room, tight = _rooms(problem, limit_bytes, generated)
    question = Question(problem, before, found, dependencies, costs, limit_bytes, room, tight)

    held = _Held(generated, costs)
    proposals = _proposed(partitions, question, dropped)
    tried = next(proposals, [])
    proposals = itertools.chain([tried] if tried else [], proposals)
    trials = _planned(proposals, question, held, least_ns, beat_ns if compared else None, effort)
    if len(trials) > 1:
        trials = _planned_again(trials, effort)
        if lower_bound(problem) < min(trial.plan.makespan_ns for trial in trials):
            before = again(problem, before, effort=effort, thorough=True)
    refused: tuple[_Trial, Reason] | None = None
    for trial in sorted(trials, key=_standing):
        objection = _objection(before, trial.plan) or held.objection(trial)
        if objection is None:
            choice = Choice(trial.buckets, tried, before, trial.problem, least_ns, trial.plan)
            return _settled(choice, trial, held, problem) if settle else choice
        refused = refused or (trial, objection)
    if refused is None:
        return Choice([], tried, before, problem, least_ns)
    if compared:
        raise Beaten
    return Choice([], tried, before, problem, least_ns, refused[0].plan, refused[1])


def _planned(
    proposals: Iterable[list[list[Candidate]]],
    question: Question,
    held: _Held,
    least_ns: int,
    beat_ns: int | None,
    effort: int,
) -> list[_Trial]:
    """Quick plans of what was proposed and may be the fastest, or as fast as ``beat_ns``.

    Args:
        least_ns: no order of any partition is faster.
    """
    problem, limit_bytes = question.problem, question.limit_bytes
    trials = []
    best_ns = beat_ns
    for buckets in proposals:
        other = merged(problem, buckets, question.costs)
        # What cannot win is not planned: planning takes most of the time.
        if best_ns is not None and lower_bound(other) > best_ns:
            continue
        found = plan(other, limit_bytes, effort=effort, thorough=len(problem) <= QUICK_TASKS)
        trial = _Trial(buckets, other, found)
        trials.append(trial)
        # Only what beats the others is worth the question.
        faster = best_ns is None or found.makespan_ns < best_ns
        if faster and (_objection(question.before, found) or held.objection(trial)) is None:
            best_ns = found.makespan_ns
            if len(problem) > _LARGE_TASKS and near(best_ns, least_ns):
                break
    return trials


def _settled(choice: Choice, trial: _Trial, held: _Held, problem: Problem) -> Choice:
    """The choice with the plan that ``reorder`` would make, unless there is an objection to that one.

    Where the graph as it is could be as fast it is planned like that, too: then it may turn out to be.
    """
    found = _searched(trial.problem, trial.plan)
    if _objection(choice.before, found) or held.objection(replace(trial, plan=found)):
        return choice
    choice = replace(choice, after=found, searched=True)
    if found.makespan_ns < lower_bound(problem):
        return choice
    before = _searched(problem, choice.before)
    objection = _objection(before, found)
    if objection is None:
        return replace(choice, before=before)
    return replace(choice, buckets=[], before=before, problem=problem, objection=objection)


def _searched(problem: Problem, known: Plan) -> Plan:
    """The plan that ``reorder`` makes where one is known."""
    # On a large problem the known plan is where planning again would begin.
    start = known if len(problem) > SMALL else None
    return plan_with_effort(problem, known.budget_bytes, "normal", start=start, known=known)


def _planned_again(trials: Sequence[_Trial], effort: int) -> list[_Trial]:
    """The trials, the few that may turn out to be the fastest with better plans."""
    ranked = sorted(trials, key=_standing)
    most_ns = ranked[0].plan.makespan_ns
    most_ns += most_ns // _BEHIND
    found = []
    for place, trial in enumerate(ranked):
        if place < _FINALISTS and trial.plan.makespan_ns <= most_ns:
            trial = replace(trial, plan=again(trial.problem, trial.plan, effort=effort, thorough=True))
        found.append(trial)
    return found


def _proposed(
    partitions: Sequence[Partition], question: Question, dropped: Collection[Proposal]
) -> Iterator[list[list[Candidate]]]:
    """What partitions answer, each answer once; not what was dropped, nor that nothing is merged."""
    seen: list[list[list[Candidate]]] = []
    for partition in partitions:
        buckets = partition(question)
        if buckets and buckets not in seen and proposal(buckets) not in dropped:
            seen.append(buckets)
            yield buckets


def proposal(buckets: Sequence[Sequence[Candidate]]) -> Proposal:
    """The buckets by the names of their members' starts: these outlive the graph's nodes."""
    return tuple(tuple(member.collective.start.name for member in bucket) for bucket in buckets)


def _rooms(problem: Problem, limit_bytes: int | None, generated: Capped | None) -> tuple[Room | None, Room]:
    """The memory that buckets may take, None when it is unlimited, and the least that there is."""
    peak = peak_bytes(problem)
    others = (None, None) if generated is None else (generated.tight(), generated.room())
    tight = Room(problem, peak if limit_bytes is None else min(limit_bytes, peak), others[0])
    if limit_bytes is None:
        return None, tight
    same = limit_bytes <= peak and (generated is None or generated.limit_bytes <= peak_bytes(generated.problem))
    return tight if same else Room(problem, limit_bytes, others[1]), tight


class _Held:
    """Whether the code that is generated for a partition's plan keeps within a cap of its own.

    Args:
        generated: None where there is no such cap.
    """

    def __init__(self, generated: Capped | None, costs: BucketCosts) -> None:
        self._generated = generated
        self._costs = costs
        self._last: tuple[Problem, Problem] | None = None

    def objection(self, trial: _Trial) -> Reason | None:
        """``OVER_BUDGET`` where it does not."""
        if self._generated is None:
            return None
        second = self._merged(self._generated.problem, trial)
        # Other storages are other dependencies, and these decide how the tasks are numbered.
        number = {task.name: i for i, task in enumerate(second.tasks)}
        order = [number[trial.problem.tasks[i].name] for i in trial.plan.order]
        return None if self._generated.fits(second, order) else Reason.OVER_BUDGET

    def _merged(self, problem: Problem, trial: _Trial) -> Problem:
        if self._last is None or self._last[0] is not trial.problem:
            self._last = trial.problem, merged(problem, trial.buckets, self._costs)
        return self._last[1]


def bound_ns(problem: Problem, found: Sequence[Candidate], costs: BucketCosts) -> int:
    """What no order of any partition of ``found`` into buckets can beat, whatever memory it uses.

    Time per byte does not grow with a message's size, so no bucket sends cheaper than one of all members of its key.
    What makes a message's parts counts as if it were fused with the copy into one.
    """
    number = {task.name: i for i, task in enumerate(problem.tasks) if task.kind is Kind.START}
    by_key: dict[GroupKey, list[Candidate]] = {}
    for candidate in found:
        by_key.setdefault(candidate.key, []).append(candidate)
    share_ns: dict[int, int] = {}
    for members in by_key.values():
        loads = {number[member.collective.start.name]: costs.load([member]) for member in members}
        # Own estimates of the members' durations carry over to buckets.
        stated = [(problem.tasks[s].duration_ns, costs.transfer_ns(load)) for s, load in loads.items()]
        least = min((Fraction(own, modelled) for own, modelled in stated if modelled), default=Fraction(0))
        # One less, because durations are rounded.
        together = int((costs.transfer_ns(costs.load(members)) - 1) * least)
        sizes = {s: max(load.sent_bytes, load.received_bytes) for s, load in loads.items()}
        share_ns |= shares(sizes, max(0, together))
    return partition_bound(with_durations(problem, costs.producers_ns(found)), share_ns)


def _standing(trial: _Trial) -> tuple[bool, int, int, int]:
    return trial.plan.value


def _objection(before: Plan, after: Plan) -> Reason | None:
    """Why the merged graph must not be kept, None when it may."""
    if before.feasible and not after.feasible:
        return Reason.OVER_BUDGET
    if not before.feasible and after.peak_bytes > before.peak_bytes:
        return Reason.OVER_BUDGET
    if after.makespan_ns >= before.makespan_ns:
        return Reason.SLOWER
    # A bucket ties its members' times together: what it saves by the estimates it must not lose when they are wrong.
    lost_ns = after.disturbed_ns - before.disturbed_ns
    return Reason.FRAGILE if lost_ns > before.makespan_ns - after.makespan_ns else None
