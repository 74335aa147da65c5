"""Ordered passes over one graph: run, verify, check the cap, keep or drop, report.

A pass changes the graph and returns an :class:`~inductor_passes.rewriting.contract.Outcome`. Only the pipeline takes
snapshots and restores them. It keeps an outcome as a whole or drops it as a whole (``engine.judge`` decides). If a pass
is dropped, the graph is restored, the report says why, and compilation goes on. Findings and exceptions are warned
about once; with ``verify="strict"`` they raise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch.fx

from inductor_passes import verify
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import judge
from inductor_passes.engine.compilation import Compilation, Known, named, new_report, phase_of
from inductor_passes.engine.complain import VerificationError, complain, warn_of_graph
from inductor_passes.engine.passes import NO_REWRITES, PARTED, REWRITES
from inductor_passes.engine.snapshot import Snapshot
from inductor_passes.ir.view import GraphView
from inductor_passes.pin.file import PlanFileError
from inductor_passes.pin.pins import GivenUp, Pins
from inductor_passes.problems.fx import NoHintError
from inductor_passes.report import GraphReport, PassReport, Reason
from inductor_passes.rewriting import rungs
from inductor_passes.rewriting.contract import (
    Beaten,
    Cap,
    Facts,
    InParts,
    Look,
    Outcome,
    Pass,
    Scheduled,
    may_shorten,
    plannings,
)
from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.simulate import simulate
from inductor_passes.trace import spans
from inductor_passes.trace.artifacts import emit_failure

log = logging.getLogger("inductor_passes")
#: How many nodes may be planned in all while alternatives are tried: 8 times a graph of 150 nodes, none above 1200; a
#: quarter of that where async TP, which plans the graph itself, cut something. Parts of a pass that is better left out
#: are not counted: there are as many as it applied kinds of rewrites.
#: On larger graphs each try doubles the time of planning, and on models it finds nothing. One that is made on every
#: graph: without async TP, see ``_without_plannings``.
ALTERNATIVES_NODES = 1200
#: The same where the user wants more effort: everything below the budget up to 6000 nodes, one try up to 24,000.
PATIENT = 20
#: A pass that plans the graph itself has to gain one part in so many of the step. Fusion makes other kernels of parts
#: than of the whole: what plans a little faster before fusion can be slower behind it.
UNSURE = 50
#: Number of a pass -> what runs in its place; None: nothing.
Instead: TypeAlias = Mapping[int, Pass | None]
#: Why a pass does not run.
SLOWER, PINNED = "the graph plans faster without it", "the pinned plan leaves it out"
#: The same for a pass that plans the graph itself.
NOT_WORTH_IT = f"the graph does not plan {100 // UNSURE}% faster with it"
#: How often one pass may ask to be run again on the graph as it was.
MAX_ATTEMPTS = 64


def run_passes(
    graph: torch.fx.Graph,
    passes: Sequence[Pass],
    config: PassConfig | None = None,
    profile: CostProfile | None = None,
    *,
    known: Known | None = None,
    report: GraphReport | None = None,
    view: GraphView | None = None,
) -> Compilation:
    """Run passes over one graph, in order and in place; each one is verified, and kept or dropped as a whole.

    Args:
        graph: a functional FX graph with fake tensors in ``meta["val"]``.
        config: settings; default: all defaults.
        profile: costs; default: a CPU's.
        known: what is known from outside of the graph; default: that all ranks compile it.
        report: to be filled; default: a new one.
        view: of the graph as it is, when there is one already.

    Raises:
        VerificationError: with ``verify="strict"``, when a pass failed or broke a rule.
        PlanFileError: a pinned plan does not fit or asks for what is not allowed.
    """
    config = config or PassConfig()
    profile = profile or CostProfile.default("cpu")
    known = known or Known(phase_of(graph, is_inference=False))
    report = report or new_report(graph, known.phase, config, profile)
    compilation = Compilation(config, profile, report, known, pins=known.pins)
    view = view or GraphView(graph)
    nodes = ALTERNATIVES_NODES * (1 if config.effort == "normal" else PATIENT)
    run = _Run(graph, compilation, view, passes)
    # Where ranks have other problems they would find other alternatives better.
    may_try = known.pins is None and run.facts.ranks_agree
    tries = nodes // max(1, len(view.nodes)) if may_try else 0
    came = _copied(graph) if tries or (may_try and any(plannings(one) > 1 for one in passes)) else None
    came_ns = run.step_ns()
    run.rest()
    _settle(run)
    tries //= max([plannings(step.one) for step in run.steps if step.changed], default=1)
    if came is not None and (tries or _without_plannings(run)):
        _compare(run, _Run(came, compilation, GraphView(came), passes, run.cap), tries)
    compilation.cap, compilation.least_peak_bytes = run.cap, run.least_peak_bytes()
    compilation.left_out = run.left_out()
    costs = named(profile)
    for step in run.steps:
        report.passes.append(step.report)
        if step.asked and step.report.rolled_back in judge.BY_COST:
            warn_of_graph(
                f"inductor_passes: pass {step.report.name!r} was undone in the {report.phase} graph although a setting "
                f"asks for it: {step.report.detail}; raise memory_budget"
            )
        if step.outcome is not None:
            outcome = _of_budget(step.outcome, run.cap, came_ns, costs if costs != report.cost_profile else "")
            compilation.enter(outcome)
            for complaint in step.outcome.complaints:
                warn_of_graph(f"inductor_passes: {complaint}")
    return compilation


def _of_budget(outcome: Outcome, cap: Cap, came_ns: int, costs: str) -> Outcome:
    """The outcome with the user's budget in its plan, which may have been found with less, and the step as it came.

    Args:
        costs: see ``ScheduleReport.costs``.
    """
    found = outcome.scheduled
    if found is None:
        return outcome
    plan = dataclasses.replace(found.plan, budget_bytes=cap.limit_bytes)
    record = dataclasses.replace(
        found.record,
        budget_bytes=cap.limit_bytes,
        came_ns=came_ns,
        came_peak_bytes=cap.input_peak_bytes or 0,
        costs=costs,
    )
    return dataclasses.replace(outcome, scheduled=dataclasses.replace(found, plan=plan, record=record))


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph to try things on, with the names of the original."""
    copy = torch.fx.Graph(owning_module=graph.owning_module)
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = (torch.fx.node.map_arg(a, nodes.__getitem__) for a in (node.args, node.kwargs))
        new = nodes[node] = copy.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        new.meta = dict(node.meta)
    return copy


def _compare(done: _Run, run: _Run, tries: int) -> None:
    """Try what else there is: fewer passes, and less memory than is allowed; for as long as that is cheap.

    So no pass makes a small graph slower than it is with that pass switched off, and a larger budget does not make it
    slower than one of ``rungs.RUNGS`` below it, passes left out there included. On larger graphs passes are held to
    what is known of the graph before. On graphs of every size async TP is held to the graph with buckets in its place:
    it has to be the faster one by ``UNSURE``, so a graph may plan up to that much slower than with it.

    Args:
        done: what was made of the graph. It is made anew in the best way that is found.
        run: the same passes over a copy of the graph as it came.
    """
    if done.scheduled() is None:
        return  # nothing says in which order the graph will run
    try:
        best, least, forced = done.tried, done.standing(), done.forced()
        beaten_ns: int | None = None
        first = [(run.cap, one) for one in _without_plannings(done)]
        # Buckets that fit into less memory can be the better ones, however close to its own bound the graph is.
        lower = list(rungs.lower(run.cap))
        others: list[tuple[Cap, Instead]] = [(cap, {}) for cap in lower]
        others += [(cap, one) for cap in (run.cap, *lower) for one in _combinations(done)]

        def better(cap: Cap, instead: Instead, least: tuple[bool, int, int]) -> bool:
            # What was asked for whatever it gains is not given up for a faster step.
            return run.again(cap, instead, least[1]) and run.forced() >= forced and run.standing() < least

        for cap, instead in first:
            unsure = least[0], least[1] + least[1] // UNSURE, sys.maxsize
            if better(cap, instead, unsure):
                best, least, beaten_ns = run.tried, run.standing(), unsure[1]
        others = [other for other in others if other not in first]
        for cap, instead in others[: max(0, tries - len(first))]:
            if better(cap, instead, least):
                best, least, beaten_ns = run.tried, run.standing(), least[1]
        # Where a pass is better left out, a part of it may be all that costs.
        cap, without = best
        for part in _smaller(done):
            if without.keys() >= part.keys() and better(cap, {**without, **part}, least):
                best, least, beaten_ns = run.tried, run.standing(), least[1]
    except NoHintError:
        return
    # What had to be beaten says which partitions were planned: without it another one may look better, and end worse.
    if best != done.tried and not done.again(*best, beaten_ns):
        done.again(*best)


def _optional(run: _Run) -> dict[int, Outcome]:
    """The passes that changed the graph and may be left out."""
    outcomes = ((k, step.outcome) for k, step in enumerate(run.steps))
    return {k: o for k, o in outcomes if o is not None and o.report.changed and o.scheduled is None and not o.forced}


def _without_plannings(run: _Run) -> list[Instead]:
    """What is tried on graphs of every size: without the pass that plans the graph itself, where that cut something.

    It does so before the buckets are made, and pieces of collectives are merged less than whole ones: regions that pay
    by themselves can gain less than buckets would have.
    """
    found = {k for k in _optional(run) if plannings(run.steps[k].one) > 1}
    return [dict.fromkeys(found)] if found else []


def _combinations(run: _Run) -> list[Instead]:
    """Passes that may be left out, in every combination but none."""
    changed = _optional(run)
    found = chain.from_iterable(itertools.combinations(changed, n) for n in range(1, len(changed) + 1))
    return [dict.fromkeys(one) for one in found]


def _smaller(run: _Run) -> list[Instead]:
    """Passes that may do a part of what they did, one at a time."""
    return [{k: one} for k, outcome in _optional(run).items() for one in outcome.smaller]


def _settle(run: _Run) -> None:
    """Hold the graph as it is left to the cap and to what is known of the graphs before.

    What was kept on the way could be scheduled within the cap; if it was not, the last change goes, then the one
    before. The same for a change behind which the graph plans slower than it did before, as far as that is known.
    """
    for number in reversed(range(len(run.steps))):
        step = run.steps[number]
        if not step.changed:
            continue
        while step.changed and (over := judge.over_cap(run.facts)):
            run.drop(number, Reason.OVER_BUDGET, over)
            step = run.steps[number]
        if not step.changed:
            continue
        slower = judge.slower(step.facts, step.outcome, run.scheduled())
        if slower:
            run.drop(number, Reason.SLOWER, slower)


def _objection(left_out: Sequence[str], passes: Sequence[Pass]) -> str:
    """What is wrong with the names of a plan file's ``left_out``; "" where nothing is."""
    # A pass that is switched off has a name and parts, too.
    known: dict[str, Pass | None] = dict.fromkeys(REWRITES)
    known |= {one.name: one for one in (*PARTED, *passes) if not isinstance(one, NO_REWRITES)}
    for said in left_out:
        name, _, part = said.partition("/")
        if name not in known:
            return f" names {said!r}; expected some of {', '.join(known)}"
        one = known[name]
        if part and not isinstance(one, InParts):
            return f": {name} has no parts; expected {name!r}"
        try:
            if part and isinstance(one, InParts):
                one.without((part,))
        except ValueError as error:
            return f": {error}"
    return ""


@dataclass
class _Step:
    """One pass that was run: what it got, and what it did if that was kept.

    ``asked``: it was undone although a setting asks for it whatever it gains.
    """

    one: Pass
    facts: Facts
    snapshot: Snapshot
    report: PassReport
    outcome: Outcome | None = None
    asked: bool = False

    @property
    def changed(self) -> bool:
        """Whether the graph is another one since."""
        return self.outcome is not None and self.outcome.report.changed


class _Run:
    """The passes of one graph, the facts for the next one, and a snapshot of the graph as it is."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        to: Compilation,
        view: GraphView,
        passes: Sequence[Pass],
        cap: Cap | None = None,
    ) -> None:
        self.graph = graph
        self.passes = passes
        self.config, self.about = to.config, to.report
        known = to.known
        look = Look(view, to.config, to.profile, known.phase, known.agreed, known.compared)
        self.freed = judge.freed_inputs(graph, known.phase)
        self.verified = verify.Known()
        self.reference: verify.ReferenceSnapshot | None = None
        self.snapshot: Snapshot | None = None
        #: The same for every copy of a graph, so a run over a copy is told.
        self.cap = cap or judge.cap(look, known.step, self._snapshot().reference.peak_bytes)
        self.facts = Facts(look, self.cap, self._usable(known.pins), sums=known.sums)
        self.steps: list[_Step] = []
        self.tried: tuple[Cap, Instead] = self.cap, {}

    def standing(self) -> tuple[bool, int, int]:
        """How good the graph is as it stands: above the cap, makespan in ns, peak in bytes; the less the better."""
        timeline = simulate(self.facts.problem.problem)
        limit = self.cap.limit_bytes
        return limit is not None and timeline.peak_bytes > limit, timeline.makespan_ns, timeline.peak_bytes

    def step_ns(self) -> int:
        """Makespan of the graph as it stands; 0 where a size has no hint."""
        with contextlib.suppress(NoHintError):
            return self.standing()[1]
        return 0

    def bound_ns(self) -> int:
        """What no order of the graph as it stands can beat."""
        return lower_bound(self.facts.problem.problem)

    def least_peak_bytes(self) -> int | None:
        """What the graph needs as it stands; None where nothing limits it."""
        with contextlib.suppress(NoHintError):
            return None if self.cap.limit_bytes is None else self.facts.look.least_peak_bytes
        return None

    def again(self, cap: Cap, instead: Instead, beat_ns: int | None = None) -> bool:
        """Run everything once more from the graph as it came, under a cap and with less than all passes.

        Args:
            instead: what runs in the place of passes.
            beat_ns: stop before the last pass, and return False, where no order can be faster than that.
        """
        self.tried = cap, instead
        if self.steps:
            self.back_to(0)
        self.facts = dataclasses.replace(self.facts, cap=cap)
        if beat_ns is not None:
            try:
                self.rest(until=len(self.passes) - 1, beat_ns=beat_ns)
            except Beaten:
                return False
            if self.bound_ns() > beat_ns:
                return False
            self.facts = dataclasses.replace(self.facts, beat_ns=None)
        self.rest()
        _settle(self)
        return True

    def rest(self, until: int | None = None, beat_ns: int | None = None) -> None:
        """Run the passes that have not been run, up to number ``until``.

        Raises:
            Beaten: one of them shows that no order will be as fast as ``beat_ns``.
        """
        for number in range(len(self.steps), len(self.passes) if until is None else until):
            one = self.passes[number]
            if beat_ns is not None and not any(may_shorten(later, self.facts) for later in self.passes[number + 1 :]):
                self.facts = dataclasses.replace(self.facts, beat_ns=beat_ns)
            pinned = self._pinned(one)
            smaller = self.tried[1].get(number, pinned)
            if smaller is None:
                slower = SLOWER if plannings(one) == 1 else NOT_WORTH_IT
                why = (Reason.PLAN_PINNED, PINNED) if pinned is None else (Reason.SLOWER, slower)
                report = PassReport(one.name, rolled_back=why[0], detail=why[1])
                self.steps.append(_Step(one, self.facts, self._snapshot(), report))
                continue
            self.steps.append(self._timed(smaller))

    def _pinned(self, one: Pass) -> Pass | None:
        """A pass with as much as the plan file leaves to it; None: with nothing."""
        pins = self.facts.pins
        parts = () if pins is None else pins.left_out_of(one.name)
        if not parts:
            return None if parts is None else one
        assert isinstance(one, InParts), "checked before"
        return one.without(parts)

    def _usable(self, pins: Pins | None) -> Pins | None:
        """The pinned plan, without what it leaves out where there is no such thing.

        Raises:
            PlanFileError: that is so, and the settings do not allow to plan anew.
        """
        if pins is None or pins.given_up:
            return None
        why = _objection(pins.graph.left_out or (), self.passes)
        if not why:
            return pins
        with contextlib.suppress(GivenUp):
            pins.refuse(f"`left_out`{why}")
        return dataclasses.replace(pins, graph=dataclasses.replace(pins.graph, left_out=None))

    def left_out(self) -> tuple[str, ...]:
        """What rewriting passes did not do, see ``GraphPlan.left_out``."""
        found: list[str] = []
        for step in self.steps:
            if isinstance(step.one, NO_REWRITES):
                continue
            if step.report.rolled_back is not None:
                found.append(step.one.name)
            elif isinstance(step.one, InParts):
                found += [f"{step.one.name}/{part}" for part in step.one.left_out]
        return tuple(found)

    def back_to(self, number: int) -> None:
        """The graph as it was before the pass of that number; the passes from there on count as not run."""
        step = self.steps[number]
        self._restore(step.snapshot, dataclasses.replace(step.facts, beat_ns=None))
        self.snapshot = step.snapshot
        del self.steps[number:]

    def drop(self, number: int, reason: Reason, detail: str) -> None:
        """Undo the pass of that number, and run those behind it again without it, or with its other way to go."""
        step = self.steps[number]
        assert step.outcome is not None
        self.back_to(number)
        if step.outcome.pinned:
            self.steps.append(self._timed(self._unpinned(step.one, step.outcome, detail)))
        elif step.outcome.otherwise is not None:
            self.steps.append(self._timed(step.outcome.otherwise))
        else:
            report = judge.refused(step.outcome, judge.Judgement(self.facts, reason, detail))
            self.steps.append(_Step(step.one, self.facts, self._snapshot(), report, asked=step.outcome.forced))
        self.rest()

    def forced(self) -> set[int]:
        """The passes whose changes the settings ask for whatever they gain."""
        return {k for k, s in enumerate(self.steps) if s.outcome is not None and s.changed and s.outcome.forced}

    def scheduled(self) -> Scheduled | None:
        """The order that the graph has; None when nothing ordered it since it was changed last."""
        for step in reversed(self.steps):
            if step.outcome is not None and step.outcome.scheduled is not None:
                return step.outcome.scheduled
            if step.changed:
                return None
        return None

    def _timed(self, one: Pass) -> _Step:
        with spans.span(one.name):
            began = time.perf_counter_ns()
            step = self._run(one)
            step.report.duration_ns = time.perf_counter_ns() - began
            return step

    def _run(self, one: Pass) -> _Step:
        """Run a pass until an outcome is kept or it names no other way to go."""
        for _ in range(MAX_ATTEMPTS):
            snapshot, facts = self._snapshot(), self.facts
            try:
                judge.look_before(facts)
                outcome = one.run(self.graph, facts)
                if outcome.again is not None:
                    self._restore(snapshot, facts)
                    one = outcome.again
                    continue
                judgement = judge.judge(self.graph, one, outcome, facts, snapshot.reference, self.verified)
            except (PlanFileError, VerificationError, Beaten):
                raise
            except Exception as error:
                log.debug("pass %s failed", one.name, exc_info=True)
                detail = f"{type(error).__name__}: {error}"
                report = PassReport(one.name, rolled_back=Reason.EXCEPTION, detail=detail)
                return self._undone(one, report, snapshot, error)
            if judgement.objection is None:
                return self._kept(one, outcome, judgement, snapshot)
            if outcome.pinned and judgement.objection in judge.BY_COST:
                self._restore(snapshot, facts)
                one = self._unpinned(one, outcome, judgement.detail)
                continue
            if outcome.otherwise is not None and judgement.objection in judge.BY_COST:
                self._restore(snapshot, facts)
                one = outcome.otherwise
                continue
            return self._undone(one, judge.refused(outcome, judgement), snapshot, None, asked=outcome.forced)
        raise AssertionError(f"pass {one.name!r} asked to be run more than {MAX_ATTEMPTS} times")

    def _unpinned(self, one: Pass, outcome: Outcome, detail: str) -> Pass:
        """The pass without what a plan file asked for, which is above the cap.

        Raises:
            PlanFileError: the settings do not allow to plan anew.
        """
        assert self.facts.pins is not None
        try:
            self.facts.pins.refuse(
                f"`{outcome.pinned}` is above the memory budget: {detail}; raise memory_budget or pin fewer"
            )
        except GivenUp as error:
            unpinned: Pass = dataclasses.replace(one, given_up=str(error))  # type: ignore[type-var]
            return unpinned

    def _snapshot(self) -> Snapshot:
        """Of the graph as it is: a pass that changed nothing leaves the one before it good for the next.

        The verifier has just seen what a pass left, so it does not look at that again.
        """
        if self.snapshot is None:
            reference = self.reference or verify.snapshot(
                self.graph, donated=self.freed, for_ranks=False, known=self.verified
            )
            self.snapshot = Snapshot(self.graph, reference)
        return self.snapshot

    def _restore(self, snapshot: Snapshot, facts: Facts) -> None:
        """The graph as it was. Its nodes may be other objects now, so everything is looked at anew."""
        snapshot.restore()
        self.facts = facts.put_back(self.graph)

    def _undone(
        self, one: Pass, report: PassReport, snapshot: Snapshot, error: BaseException | None, asked: bool = False
    ) -> _Step:
        emit_failure(self.about, report, lambda: str(self.graph))
        before = self.facts
        self._restore(snapshot, before)
        if report.rolled_back in (Reason.VERIFIER, Reason.EXCEPTION):
            what = f"pass {report.name!r} was undone in the {self.about.phase} graph"
            complain(what, report, self.config, error)
        return _Step(one, before, snapshot, report, asked=asked)

    def _kept(self, one: Pass, outcome: Outcome, judgement: judge.Judgement, snapshot: Snapshot) -> _Step:
        before = self.facts
        if outcome.report.changed:
            self.snapshot, self.reference = None, judgement.reference
        self.facts = dataclasses.replace(
            judgement.facts,
            pins=None if outcome.given_up else before.pins,
            apart=before.apart | outcome.apart,
        )
        return _Step(one, before, snapshot, outcome.report, outcome)
