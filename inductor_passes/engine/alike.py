"""Runs the passes so that all ranks send the same: those that compile the graph, and those that run another variant."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx

from inductor_passes import _torch, agreement
from inductor_passes.agreement import Agreement
from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.bucket.candidates import refusal
from inductor_passes.compress.pass_ import CompressPass
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import agreeing, following, variants
from inductor_passes.engine.backup import Backup
from inductor_passes.engine.barrier import guarded
from inductor_passes.engine.compilation import Compilation, Known, new_report
from inductor_passes.engine.complain import warn_of_graph, warn_once
from inductor_passes.engine.judge import graph_limits
from inductor_passes.engine.passes import NO_REWRITES, passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.pin.pins import GivenUp
from inductor_passes.report import PassReport, Reason
from inductor_passes.rewriting import rungs
from inductor_passes.rewriting.contract import Pass
from inductor_passes.rewriting.messages import all_carry_parameters, messages, without_sizes
from inductor_passes.schedule.least_memory import least_peak
from inductor_passes.schedule.tables import tables
from inductor_passes.settings.errors import ConfigError
from inductor_passes.trace.units import size

_FIRST = "this variant of a function sends what the function's first graph sends"
#: What to do about a variant that is above its memory budget; where it is an evaluation.
_INSTEAD = (
    "With batches of one size, or dynamic=True, there is one graph and no such need",
    "A function of its own, compiled beside this one (def evaluate(x): return model(x)), keeps to the budget",
)
UNLIKE = (
    "inductor_passes: two variants of a function send different messages ({earlier} and {this}). Ranks that run both "
    "at the same time may hang: {instead}"
)
_TOGETHER = (
    "let all ranks change sizes, dtypes and settings at the same step (pad inputs to equal sizes), or compile with "
    "dynamic=True if it is sizes alone",
    "evaluate on all ranks at the same time, or compile a function of its own for it "
    "(def evaluate(x): return model(x))",
)
#: It is said of the program: it is so under plain torch.compile, too.
_OTHER_MESSAGES = (
    "inductor_passes: graphs differ between ranks, and it is not known that they send the same messages. Ranks that "
    "send different ones may wait for each other for ever, or take each other's data, under any compiler: {why}"
)
LIMIT = (
    "inductor_passes: this function was compiled {count} times, and torch stops at recompile_limit={limit}: what is "
    "new from now on runs without compiling, on this rank. Ranks that then send other messages than compiled ones "
    "hang: compile with dynamic=True, or raise torch._dynamo.config.recompile_limit on all ranks"
)
#: Ranks that wait for the first rank's plan wait for so many times ``rank_agreement``.
_PATIENCE = 30
#: Passes that have a decision for each collective.
_OF_EACH = (AsyncTpPass, CompressPass)
_ONLY_ORDER = "another rank's graph has to send the same: messages are merged and reordered, and nothing else"


def rewritten(compilation: Compilation) -> bool:
    """Whether a pass changed collectives in other ways than merging and reordering."""
    rewrites = _rewrites(compilation.config)
    return any(one.changed and one.name in rewrites for one in compilation.report.passes)


def _rewrites(settings: PassConfig) -> set[str]:
    return {one.name for one in passes_of(settings) if not isinstance(one, NO_REWRITES)}


def _left_out(view: GraphView, passes: Sequence[Pass]) -> list[PassReport]:
    """What is said of the passes that a graph is compiled without, because it has to send what others send.

    Those that a setting asks for, message by message, say it of each.
    """
    found = []
    for one in passes:
        if not isinstance(one, NO_REWRITES):
            said = view.collectives if isinstance(one, _OF_EACH) else ()
            decisions = [replace(refusal(c, Reason.RANKS_DIFFER, _ONLY_ORDER), subject=one.name) for c in said]
            found.append(PassReport(one.name, detail=_ONLY_ORDER, decisions=decisions))
    return found


@dataclass(frozen=True)
class Job:
    """What the passes of one graph are run with.

    Attributes:
        begun: what was done to it before.
        costs: by which the passes decide, where a plan file brings them. What kernels are predicted to take, and what
            ``tune`` corrects, are the costs in ``profile``.
    """

    graph: torch.fx.Graph
    settings: PassConfig
    profile: CostProfile
    known: Known
    agreed: Agreement
    begun: list[PassReport]
    costs: CostProfile | None = None

    def run(
        self,
        view: GraphView | None = None,
        like: tuple[tuple[str, ...], ...] = (),
        *,
        rewrite: bool = True,
        **known: Any,
    ) -> Compilation:
        """Run the passes, with a report of its own.

        Args:
            view: of the graph as it is, when there is one.
            like: messages in the order in which the graph has to send them, see ``messages.order_like``.
            rewrite: whether collectives may be changed in other ways than merging and reordering.
            **known: fields of what is known that are other ones.
        """
        report = new_report(self.graph, self.known.phase, self.settings, self.profile)
        report.passes = list(self.begun)
        passes, about = passes_of(self.settings, like), replace(self.known, **known)
        if not rewrite:
            report.passes += _left_out(view or GraphView(self.graph), passes)
            passes = [one for one in passes if isinstance(one, NO_REWRITES)]
        costs = self.costs or self.profile
        found = run_passes(self.graph, passes, self.settings, costs, known=about, report=report, view=view)
        found.profile = self.profile
        return found

    def run_like(
        self, earlier: following.Earlier, why: str = _FIRST, *, above: bool = True
    ) -> Compilation | None:
        """Run the passes so that the graph sends what an earlier variant sends; None, and no change, where it cannot.

        Where it cannot within the memory budget it takes the least that is enough: ranks that send something else hang.

        Args:
            why: for the report, why it has to.
            above: whether it may take more than the memory budget.
        """
        backup = Backup(self.graph)
        larger = rungs.larger(self.settings.budget) if above else ()
        for budget in (self.settings.memory_budget, *larger):
            found = replace(self, settings=replace(self.settings, memory_budget=budget))._run_like(earlier)
            if found is not None:
                break
            backup.restore()
        else:
            return None
        if budget != self.settings.memory_budget:
            # That budget was one of a few. Now it is known what the graph needs with these messages.
            less = self._with_less(earlier, found, budget, backup)
            if less is None:
                backup.restore()
                return None
            found, budget = less
            if self._fits(found):
                # It had to be looked for with more, on the way to a graph that needs no more.
                asked = self.settings.memory_budget
                why = f"{why}. It was planned within {budget!r}, and keeps memory_budget={asked!r}"
            else:
                why = f"{why}. {self._above(found, budget)}"
                warn_of_graph(f"inductor_passes: {why}")
            self._enter(found, budget)
        found.config, found.pins = self.settings, None
        found.report.config = self.settings.to_json()
        found.report.notes.append(why)
        return found

    def run_pinned(self, view: GraphView | None) -> Compilation:
        """Run the passes, by the costs and within the budget that a plan file gives the graph, if it does.

        Raises:
            PlanFileError: it is no budget, and the settings do not allow to plan anew.
        """
        pins = self.known.pins
        if pins is None or pins.given_up or (self.costs is None and pins.graph.memory_budget is None):
            return self.run(view)
        backup = Backup(self.graph)
        found = self._run_pinned(view)
        if found.pins is None or not found.pins.given_up:
            return found
        # It was given up in the middle. What is planned anew is planned by the settings.
        backup.restore()
        return replace(self, costs=None, known=replace(self.known, pins=found.pins)).run()

    def _run_pinned(self, view: GraphView | None) -> Compilation:
        pins = self.known.pins
        larger = None if pins is None or pins.given_up else pins.graph.memory_budget
        if pins is None or larger is None:
            return self.run(view)
        try:
            settings = replace(self.settings, memory_budget=larger)
        except ConfigError as error:
            with contextlib.suppress(GivenUp):
                pins.refuse(str(error).removeprefix("inductor_passes: "))
            return self.run(view)
        found = replace(self, settings=settings).run(view)
        self._enter(found, larger)
        found.config, found.report.config = self.settings, self.settings.to_json()
        found.report.notes.append(f"the plan file gives it the memory budget {larger!r}")
        return found

    def _enter(self, found: Compilation, budget: str) -> None:
        """Enter that the graph took a larger budget; the report holds it to its own one."""
        allowed = self._allowed(found)
        found.larger_budget = budget
        found.report.schedules = [replace(one, budget_bytes=allowed) for one in found.report.schedules]

    def _with_less(
        self, earlier: following.Earlier, found: Compilation, budget: str, backup: Backup
    ) -> tuple[Compilation, str] | None:
        """The graph with the same messages and what it needs with them, or as it is; and the budget that it took.

        None where the passes do not do again what they did (an estimator of the user's that is no function).
        """
        least, needed, scheduled = found.cap.least_peak_bytes, found.least_peak_bytes, found.scheduled
        if needed is None and scheduled is not None:
            needed = least_peak(tables(scheduled.fx.problem))
        if least is None or needed is None:
            return found, budget
        exact = f"+0% or {max(1, needed - least)}B"
        backup.restore()
        less = replace(self, settings=replace(self.settings, memory_budget=exact))._run_like(earlier)
        if less is not None:
            return less, exact
        backup.restore()
        again = replace(self, settings=replace(self.settings, memory_budget=budget))._run_like(earlier)
        return None if again is None else (again, budget)

    def _allowed(self, found: Compilation) -> int | None:
        """What the graph's own memory budget allows, in bytes."""
        least, generated = found.cap.least_peak_bytes, found.cap.generated_least_peak_bytes
        return None if least is None else graph_limits(least, generated, self.known.step, self.settings)[0]

    def _fits(self, found: Compilation) -> bool:
        """Whether a graph needs no more than its own memory budget allows."""
        allowed, scheduled = self._allowed(found), found.scheduled
        return allowed is not None and scheduled is not None and scheduled.plan.peak_bytes <= allowed

    def _above(self, found: Compilation, budget: str) -> str:
        """How far a graph is above its memory budget, and what to do about it."""
        asked, least, scheduled = self.settings.memory_budget, found.cap.least_peak_bytes, found.scheduled
        if least is None or scheduled is None:
            return f"It takes the memory budget {budget!r}: within {asked!r} it cannot."
        allowed = self._allowed(found)
        return (
            f"The {self.known.phase} graph of {found.report.compile_id or 'this function'} needs "
            f"{size(scheduled.plan.peak_bytes)} for that, memory_budget={asked!r} allows "
            f"{'any' if allowed is None else size(allowed)}. {_INSTEAD[self.known.phase == 'inference']}"
        )

    def _run_like(self, earlier: following.Earlier) -> Compilation | None:
        backup = Backup(self.graph)
        for way in earlier.ways(GraphView(self.graph), _torch.rank_and_world_size()[0]):
            # A rewrite of what one rank alone reads must not make this rank send something else than the others.
            compared = self.agreed.agreed
            found = self.run(like=way.like, rewrite=way.rewrite, agreed=True, compared=compared, pins=way.pins)
            if earlier.is_sent(messages(GraphView(self.graph))):
                return found
            backup.restore()
        return None


def warn_of_limit(about: variants.About) -> None:
    """Warn where a function has as many variants as torch compiles."""
    count, limit = about.number + 1, _torch.recompile_limit()
    if limit is not None and 1 < limit <= count:
        warn_once(LIMIT.format(count=count, limit=limit))


def run_alike(
    job: Job, view: GraphView | None, earlier: following.Earlier | None, *, first: bool = False
) -> Compilation:
    """Run the passes; where the ranks that agreed on the graph did not all do the same, start again without them.

    Args:
        view: see :meth:`Job.run`.
        earlier: a variant whose messages are taken over where the ranks agree.
        first: the graph is its function's first one. What another function sends is taken over within the budget.
    """
    graph, agreed = job.graph, job.agreed
    backup, began = Backup(graph), time.perf_counter_ns()
    compilation = None
    if earlier is not None and agreed.agreed and job.known.pins is None:
        if agreed.again:
            # The same graph gets the same plan, with nothing given: one that has to send the same may need more memory.
            compilation = job.run(view)
            if not earlier.is_sent(messages(GraphView(graph))):
                backup.restore()
                compilation = None
        # Ranks that meet other sizes run two variants at the same time.
        compilation = compilation or job.run_like(earlier, above=not first)
    compilation = compilation or job.run_pinned(view)
    if earlier is not None and not first and not earlier.is_sent(messages(GraphView(graph))):
        phases = earlier.phase or "another", job.known.phase
        evaluates = "inference" in phases and phases[0] != phases[1]
        warn_of_graph(UNLIKE.format(earlier=phases[0], this=phases[1], instead=_TOGETHER[evaluates]))
    if not agreed.agreed:
        return compilation
    # Merging and reordering show in the messages, and a pass that changed nothing in nothing. So a graph that is
    # compiled a second time, to send what it sent, gets the answer that it had: the others need not be there.
    rewrites = _rewrites(job.settings)
    done = [one for one in compilation.report.passes[len(job.begun) :] if one.changed and one.name in rewrites]
    did = agreeing.confirm(agreed, graph, done, job.settings, time.perf_counter_ns() - began)
    if did is not agreed:
        agreeing.attach(graph, did)
    if did.agreed:
        return compilation
    backup.restore()
    undone = PassReport(agreeing.NAME, detail=f"undone on all ranks: {did.why}")
    return replace(job, begun=[*job.begun, undone]).run(agreed=False, pins=None)


def run_as_led(job: Job) -> Compilation | None:
    """Run the passes as the first rank does, on ranks whose graphs differ and whose collectives do not.

    The first rank plans for its graph, without rewrites, and the others put theirs into the same form. Either all ranks
    do it or none: None, and no change, where one cannot.
    """
    graph, settings = job.graph, job.settings
    if settings.plan or not job.agreed.differs:
        return None
    view = GraphView(graph)
    came = messages(view)
    # Tensor parallel groups with batches of their own size send the same otherwise.
    kinds = following.kinds_of(tuple(map(without_sizes, came)), all_carry_parameters(view))
    compared = [text for kind in kinds.values() for text in kind]
    found = agreeing.compare_messages(job.agreed, compared, settings, job.profile, job.known.phase)
    if not found.agreed:
        if found.why:
            warn_once(_OTHER_MESSAGES.format(why=found.why))
        return None
    backup, began = Backup(graph), time.perf_counter_ns()
    led: list[tuple[str, Compilation]] = []

    def plan() -> str:
        done = job.run(rewrite=False, agreed=True, pins=None)
        buckets = following.places(view.collectives, done.buckets)
        text = following.Variant(came, messages(GraphView(graph)), buckets).text()
        led.append((text, done))
        return text

    note = f"planned as rank {found.participants[0]} plans: graphs differ between ranks, their collectives do not"
    text = compilation = None
    with guarded("planning for all ranks", "collectives stay as they are", settings):
        text = agreement.share(found, plan, _PATIENCE * (settings.rank_timeout_s or 0))
    if text is None:
        backup.restore()
        return None
    with guarded("planning like the first rank", "collectives stay as they are", settings):
        if led and led[0][0] == text:
            compilation = led[0][1]
            compilation.report.notes.append(note)
        else:
            # What was shared before about the same collectives stands, also for the rank that shared it.
            backup.restore()
            leader = following.Earlier.of(following.Variant.of_text(text), sizes=False)
            compilation = job.run_like(leader, note)
    sent = tuple(map(without_sizes, messages(GraphView(graph)))) if compilation is not None else ()
    did = agreeing.confirm_messages(found, sent, settings, time.perf_counter_ns() - began)
    if compilation is None or not did.agreed:
        backup.restore()
        return None
    agreeing.attach_for_either(graph, job.agreed)
    compilation.report.passes.insert(len(job.begun), PassReport(agreeing.NAME, detail=f"{note} ({job.agreed.why})"))
    return compilation


def run_as_before(job: Job, earlier: following.Earlier) -> Compilation | None:
    """Run the passes so that the graph sends what an earlier variant sends; None, and no change, where it would not.

    For a graph on which ranks are not known to agree: this rank alone may have it.
    """
    backup, agreed = Backup(job.graph), job.agreed
    with guarded("compiling a variant like an earlier one", "its collectives stay as they are", job.settings):
        found = job.run_like(earlier)
        if found is not None:
            agreeing.attach_for_either(job.graph, agreed)
            found.report.notes.append(
                f"ranks are not known to agree on this variant ({agreed.why}): they may run both at the same time"
            )
        return found
    backup.restore()
    return None
