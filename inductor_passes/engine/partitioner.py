"""A partitioner around Inductor's (or the user's own), which separates the joint graph into forward and backward.

It decides which gathered parameters are kept for backward, where ``simple_fsdp(reshard_after_forward="auto")`` leaves
that to us, and tells both graphs the peak memory of the whole step. The inner partitioner decides what else is saved.
What it makes of checkpointed regions, and of inputs that forward writes to, is mended (``checkpointing``,
``entry_values``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.engine import (
    checkpointing,
    dynamic_plans,
    entry_values,
    first_saved,
    forecast,
    garbage,
    identity,
    naming,
    saved_alike,
    shrinking,
    stand_ins,
)
from inductor_passes.engine.barrier import guarded
from inductor_passes.engine.complain import warn_of_graph
from inductor_passes.ir import results
from inductor_passes.pin import pins
from inductor_passes.problems.fx import FxProblem, NoHintError
from inductor_passes.problems.graph_memory import mark_saved_blocks, mark_views_of_inputs
from inductor_passes.records.errors import MeantError
from inductor_passes.report import PassReport, Reason
from inductor_passes.rewriting.step_facts import StepFacts
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.step import keep, recompute
from inductor_passes.step.merging import Merging

Split = tuple[torch.fx.GraphModule, torch.fx.GraphModule]


@dataclass(frozen=True)
class Separation:
    """One joint graph on its way to two.

    Attributes:
        current: reads the settings, where an error in that is caught.
        inner: the user's own partitioner, None for Inductor's.
    """

    current: Callable[[], PassConfig]
    inner: Any

    @property
    def settings(self) -> PassConfig:
        """What this compilation runs with."""
        return self.current()

    def run(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]) -> Split:
        """Forward and backward graph of a joint one."""
        names: dict[str, str] = {}
        with guarded("noting the operators of the joint graph", _APART, lambda: self.settings):
            names = first_saved.operators(gm.graph)
        both = self._run(gm, joint_inputs, kwargs)
        with guarded("noting what is saved", _APART, lambda: self.settings):
            first_saved.note(names, both, kwargs["num_fwd_outputs"], self.settings)
        return both

    def _run(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]) -> Split:
        naming.note(gm.graph, lambda: self.settings)
        with guarded("reading the settings", "one plan is made for all sizes", lambda: self.settings):
            dynamic_plans.divide(gm.graph, self.settings, inference=False)
        settled: PassReport | None = None
        with guarded("reading what the first variant keeps", _APART, lambda: self.settings):
            settled = self._settle(gm.graph)
        shrinks = False
        with guarded("reading the memory budget", "nothing is computed again", lambda: self.settings):
            shrinks = self.settings.budget.shrinks
        if shrinks:
            return self._shrunk(gm, joint_inputs, kwargs)
        if settled is not None:
            both = self._split(gm, joint_inputs, kwargs)
            self._attach(both, settled, None)
            return both
        marked: list[torch.fx.Node] = []
        with guarded("looking for gathers to keep", "everything is gathered again", lambda: self.settings):
            marked = keep.marked(gm.graph)
        if not marked:
            with guarded("reading what the plan file keeps", "everything is gathered again", lambda: self.settings):
                self._look_for_kept()
            both = self._split(gm, joint_inputs, kwargs)
            self._attach(both, None, None)
            return both
        again = self._split(shrinking.copied(gm), joint_inputs, kwargs)
        decided, done = None, False
        with guarded("choosing what to keep for backward", "everything is gathered again", lambda: self.settings):
            try:
                decided = self._decide(again)
            except MeantError:
                raise
            except Exception as error:
                detail = f"{type(error).__name__}: {error}"
                decided = _Decided(PassReport(keep.NAME, rolled_back=Reason.EXCEPTION, detail=detail))
                raise
            if decided.kept:
                keep.keep(marked, decided.kept)
                done = True
        if done:
            # Where nothing is kept the graphs of the copy are those that are wanted.
            again = self._split(gm, joint_inputs, kwargs)
        elif decided is not None and decided.apart:
            with guarded("gathering what was gathered before a reset", _APART, lambda: self.settings):
                again = self._as_before(gm, again, joint_inputs, kwargs)
        if decided is None:
            self._attach(again, None, None)
        else:
            self._attach(again, decided.report, decided.step_peak_bytes)
        return again

    def _shrunk(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]) -> Split:
        """Forward and backward within a budget that may be below what they need as they come."""
        alike = self._alike(gm, joint_inputs, kwargs)
        came = base = self._split_once(shrinking.copied(gm), joint_inputs, kwargs)
        if alike is not None:
            with guarded("gathering what the first variant gathers", _APART, lambda: self.settings):
                base = alike.made(came)
        if self.inner is not None:
            said = PassReport(recompute.NAME, rolled_back=Reason.UNSUPPORTED, detail=_OWN_PARTITIONER)
            done = shrinking.Shrunk(base, said)
            warn_of_graph(f"inductor_passes: memory_budget={self.settings.memory_budget!r}: {_OWN_PARTITIONER}")
        else:
            done = shrinking.Shrunk(base)
            with (
                guarded("choosing what to compute again", "everything is saved", lambda: self.settings),
                garbage.paused(),
            ):
                settings = self.settings
                profile = identity.load_profile(settings)

                def split(another: torch.fx.GraphModule) -> Split:
                    return self._split(another, joint_inputs, kwargs)

                try:
                    outputs = kwargs["num_fwd_outputs"]
                    before = None if alike is not None else self._alike(gm, joint_inputs, kwargs, reset=True)
                    done = shrinking.Shrinking(gm, split, outputs, settings, profile, alike, came, before).run(base)
                except NoHintError as error:
                    said = PassReport(recompute.NAME, rolled_back=Reason.NO_HINT, detail=str(error))
                    done = shrinking.Shrunk(base, said)
        self._attach(done.both, done.keep, done.step_peak_bytes, done)
        return done.both

    def _split(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]) -> Split:
        """What the inner partitioner makes of a joint graph; a further variant gathers what the first one gathers."""
        alike = self._alike(gm, joint_inputs, kwargs)
        both = self._split_once(gm, joint_inputs, kwargs)
        if alike is not None:
            with guarded("gathering what the first variant gathers", _APART, lambda: self.settings):
                both = alike.made(both)
        return both

    def _alike(
        self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any], *, reset: bool = False
    ) -> saved_alike.Alike | None:
        """How to separate a further variant as the function's first graph; None where it is the first.

        Args:
            reset: see :func:`saved_alike.wanted`.
        """
        with guarded("reading what the first variant gathers", _APART, lambda: self.settings):
            theirs = saved_alike.wanted(self.settings, reset=reset)
            if theirs is not None:
                spare = shrinking.copied(gm)

                def again(another: torch.fx.GraphModule) -> Split:
                    return self._split_once(another, joint_inputs, kwargs)

                first = first_saved.known(self.settings, reset=reset)
                return saved_alike.Alike(lambda: shrinking.copied(spare), again, theirs, first)
        return None

    def _split_once(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]) -> Split:
        with guarded("evening out what ranks pad", "ranks may save different values", lambda: self.settings):
            stand_ins.insert(gm.graph)
        both: Split = (self.inner or _torch.default_partitioner())(gm, joint_inputs, **kwargs)
        results.note(both[0], kwargs["num_fwd_outputs"])
        with guarded("taking away what evened out ranks", "it stays", lambda: self.settings):
            stand_ins.erase(module.graph for module in both)
        with guarded("ordering what is saved for backward", "torch's order stays", lambda: self.settings):
            checkpointing.put_right(*both, kwargs["num_fwd_outputs"])
        with guarded("saving what forward overwrites", "backward may read what was written", lambda: self.settings):
            entry_values.copy_what_is_overwritten(*both, kwargs["num_fwd_outputs"])
        with guarded("describing random operators", "collectives do not cross their readers", lambda: self.settings):
            for module in both:
                checkpointing.describe(module.graph)
        with guarded("looking for saved views of parameters", "backward counts them as its own", lambda: self.settings):
            mark_views_of_inputs(both[0].graph, both[1].graph)
        with guarded("looking for saved views of one value", "backward counts each of them", lambda: self.settings):
            mark_saved_blocks(both[0].graph, both[1].graph)
        return both

    @garbage.paused()
    def _decide(self, again: Split) -> _Decided:
        """Choose what backward reuses.

        Args:
            again: the graphs when everything is gathered again.
        """
        settings = self.settings
        profile = identity.load_profile(settings)
        views = shrinking.views_of(again)
        try:
            forward, backward = shrinking.problems(views, settings, profile)
        except NoHintError as error:
            return _Decided(PassReport(keep.NAME, rolled_back=Reason.NO_HINT, detail=str(error)))
        step_peak = max(peak_bytes(fx.problem) for fx in (forward, backward))
        found = keep.candidates(*views, profile)
        if not found:
            return _Decided(None, step_peak)
        if shrinking.apart(views, (forward, backward), settings, profile):
            return _Decided(keep.refused(found), apart=True)
        names = naming.names(again[0].graph, settings)
        choice = self._pinned(forward, backward, found, names, step_peak)
        if choice is None:
            both = forward, backward
            lines = forecast.lines_of(views, both, settings, profile)
            planned: keep.Planned = keep.Planned()
            if lines is not None:
                merging = Merging(forward.problem, backward.problem, forecast.mergeable(lines))
                planned = forecast.Forecast(views, both, lines, merging, settings, step_peak)
            choice = keep.choose_kept(forward.problem, backward.problem, found, settings.budget, step_peak, planned)
        return _Decided(choice.report, step_peak, choice.kept)

    def _as_before(
        self, gm: torch.fx.GraphModule, both: Split, joint_inputs: Sequence[object], kwargs: dict[str, Any]
    ) -> Split:
        """A graph that this rank has alone, with what the function of its name kept before ``torch._dynamo.reset()``.

        Other ranks may go on with that. As it is where there was none, or that cannot be had.
        """
        theirs = saved_alike.wanted(self.settings, reset=True)
        if theirs is None or saved_alike.gathers(both[1].graph) == theirs:
            return both
        other = shrinking.copied(gm)
        marked = keep.marked(other.graph)
        keep.keep(marked, saved_alike.not_gathered(other.graph, marked, theirs))
        found = self._split_once(other, joint_inputs, kwargs)
        return found if saved_alike.gathers(found[1].graph) == theirs else both

    def _settle(self, graph: torch.fx.Graph) -> PassReport | None:
        """Leave no gather of a further variant open: each is kept for backward, or not, as in the first one.

        Other ranks may run that one meanwhile, so there is nothing to choose, and nobody to ask.
        """
        marked = keep.marked(graph)
        theirs = saved_alike.wanted(self.settings) if marked else None
        if theirs is None:
            return None
        kept = saved_alike.not_gathered(graph, marked, theirs)
        keep.keep(marked, kept)
        for node in marked:
            _torch.settle(node)
        return PassReport(keep.NAME, changed=bool(kept), detail=f"{len(kept)} kept, as in the function's first graph")

    def _pinned(
        self,
        forward: FxProblem,
        backward: FxProblem,
        found: Sequence[keep.Gathered],
        names: Mapping[str, tuple[str, ...]],
        step_peak: int,
    ) -> keep.KeepChoice | None:
        """What the plan file says, None when it says nothing or was given up."""
        settings = self.settings
        plans = identity.load_plan(settings)
        if plans is None:
            return None
        pin = pins.find_kept(
            plans,
            _graph_index(),
            sorted(g.start for g in found),
            names,
            replan=settings.plan_mismatch == "replan",
        )
        if pin is None or pin.given_up:
            return None
        limit = settings.budget.limit_bytes(step_peak)
        choice = keep.pinned(forward.problem, backward.problem, found, pin.graph.kept or (), limit)
        if isinstance(choice, keep.KeepChoice):
            return choice
        try:
            pin.refuse(choice)
        except pins.GivenUp:
            return None

    def _look_for_kept(self) -> None:
        """Refuse, or warn of, a plan file that keeps parameters of a graph in which none may be kept."""
        plans = identity.load_plan(self.settings)
        if plans is not None:
            replan = self.settings.plan_mismatch == "replan"
            if why := pins.nothing_to_keep(plans, _graph_index(), replan=replan):
                warn_of_graph(f"inductor_passes: {why}: it is planned anew")

    def _attach(
        self,
        both: Split,
        report: PassReport | None,
        step_peak: int | None,
        shrunk: shrinking.Shrunk | None = None,
    ) -> None:
        """Tell both graphs what the step takes, where that matters to them."""
        peaks = [0, 0]
        what = "looking at the memory of the step"
        with (
            guarded(what, "forward and backward are budgeted one by one", lambda: self.settings),
            contextlib.suppress(NoHintError),
            garbage.paused(),
        ):
            budget = self.settings.budget
            if report is None and (budget.unlimited or budget.fraction == 0):
                return
            views = shrinking.views_of(both)
            if any(v.collectives for v in views):
                found = shrinking.problems(views, self.settings, identity.load_profile(self.settings))
                if all(fx.ranks_agree for fx in found):
                    peaks = [peak_bytes(fx.problem) for fx in found]
                else:
                    step_peak = None
        with guarded(what, "forward and backward are budgeted one by one", lambda: self.settings):
            higher = max(peaks) if step_peak is None else step_peak
            facts = StepFacts(peaks[0], higher, report)
            if shrunk is not None:
                facts = replace(facts, recompute=shrunk.recompute, notes=shrunk.notes, curve=shrunk.curve)
                facts = replace(facts, proposed=shrunk.proposed[0], reached_bytes=shrunk.reached_bytes)
                facts = replace(facts, files=shrunk.files)
            facts.attach(both[0])
            theirs = () if shrunk is None else shrunk.proposed[1]
            facts = replace(facts, own_peak_bytes=peaks[1], keep=None, recompute=None, notes=(), proposed=theirs)
            facts = replace(facts, files=())
            facts.attach(both[1])


@dataclass(frozen=True)
class _Decided:
    """What became of the choice.

    Attributes:
        report: None where there was nothing to choose.
        step_peak_bytes: the higher peak of both graphs when everything is gathered again; None where it is not known.
        kept: names of the gathers that backward reuses.
        apart: nothing was chosen because ranks are not known to have this graph.
    """

    report: PassReport | None = None
    step_peak_bytes: int | None = None
    kept: frozenset[str] = frozenset()
    apart: bool = False


_APART = "ranks with batches of other sizes may gather others"
_OWN_PARTITIONER = "a partitioner of your own decides what is saved: a memory budget below the peak needs torch's"


def _graph_index() -> int | None:
    """The number of the graph that is being compiled, as plan files have it; None where it is not known yet."""
    name = _torch.aot_graph_name().rsplit("_", 1)[-1]
    return int(name) if name.isdigit() else None
