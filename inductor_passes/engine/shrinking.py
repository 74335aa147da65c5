"""A step within a budget that may be below what it needs as it came: ``memory_budget="-30%"`` and ``"=12GiB"``.

The joint graph is separated once as Inductor would. On the two problems of that, ``step.recompute`` chooses which
saved activations backward computes again and which gathered parameters it keeps. The choice is made real by torch's own
tags on a fresh copy of the joint graph. What then comes out is held against the budget: torch's partitioner has the
last word on what is saved. Where that is above the budget the next state that needs less is taken.

A further variant of a function saves what the first one saves, if that is within the budget: one rank alone may compile
it, and need not wait for the others then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch.fx

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import agreeing, checkpointing, forecast, publish
from inductor_passes.engine.complain import warn_of_graph
from inductor_passes.engine.saved_alike import Alike
from inductor_passes.ir.canonical import UNEQUAL
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import FxProblem, build
from inductor_passes.report import PassReport, Reason
from inductor_passes.schedule.least_memory import least_peak
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.tables import tables
from inductor_passes.step import derived, keep, picture, recompute, saved, stored
from inductor_passes.step.merging import Merging, Proposal
from inductor_passes.step.recompute import Point
from inductor_passes.trace.files import AskedFile
from inductor_passes.trace.units import duration, size

Split = tuple[torch.fx.GraphModule, torch.fx.GraphModule]
Views = tuple[GraphView, GraphView]
#: How often a state that came out larger than planned is replaced by the next one that needs less.
_TRIES = 3
#: A point of the curve is worth naming where it is faster by this factor.
_CLEARLY = 1.1


def views_of(both: Split) -> Views:
    """A look at forward and at backward."""
    return GraphView(both[0].graph), GraphView(both[1].graph)


def copied(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A joint graph of its own with the same tensors: deep copies of constants and of fake tensors fail."""
    graph, twin = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for node in gm.graph.nodes:
        twin[node] = graph.node_copy(node, twin.__getitem__)
    result = _torch.graph_module(gm, graph)
    result.meta.update(gm.meta)
    return result


def problems(views: Views, settings: PassConfig, profile: CostProfile) -> tuple[FxProblem, FxProblem]:
    """The problems of forward and backward, with the memory of the code that is generated where that is known.

    Raises:
        NoHintError: a size is not known.
    """
    forward, backward = (build(view, profile, estimator=settings.estimator) for view in views)
    if settings.codegen != "inductor" or forward.generated is None or backward.generated is None:
        return forward, backward
    return replace(forward, problem=forward.generated), replace(backward, problem=backward.generated)


def apart(views: Views, fx: tuple[FxProblem, FxProblem], settings: PassConfig, profile: CostProfile) -> str:
    """Why ranks might come to different decisions about a step; "" where all compile the same forward and backward."""
    if not (fx[0].ranks_agree and fx[1].ranks_agree):
        return UNEQUAL
    verdicts = []
    for view, name in zip(views, ("step forward", "step backward")):
        one = agreeing.reach(view, settings, profile, name)
        agreeing.remember(one)
        verdicts.append(one)
        if one.settings_differ:
            # A rank with other settings may not ask this at all.
            break
    return next((one.why or "a rank compiles another step" for one in verdicts if not one.agreed), "")


@dataclass(frozen=True)
class Shrunk:
    """What came of it.

    Attributes:
        both: forward and backward.
        recompute, keep: reports; None where there was nothing to choose.
        step_peak_bytes: of the step as Inductor would run it; None where it is not known.
        notes: for the report.
        curve: (peak in bytes, planned step in ns) of what is possible, by memory.
        proposed: the messages that travel together in the step that was chosen, by graph.
        reached_bytes: what the step may need where the budget cannot be reached, else 0.
        files: that were written about it.
    """

    both: Split
    recompute: PassReport | None = None
    keep: PassReport | None = None
    step_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()
    curve: tuple[tuple[int, int], ...] = ()
    proposed: tuple[Proposal, Proposal] = ((), ())
    reached_bytes: int = 0
    files: tuple[AskedFile, ...] = ()


@dataclass(frozen=True)
class _Tried:
    """A state that has become two graphs.

    Attributes:
        made: their problems.
        needs: bytes that both can be run with.
        cap: bytes that the point was planned with, where they can be run with that; a little less may take longer.
    """

    point: Point
    both: Split
    made: tuple[FxProblem, FxProblem]
    needs: int
    cap: int = 0


@dataclass(frozen=True)
class Shrinking:
    """One joint graph and how it is separated.

    Attributes:
        gm: the joint graph, which is not changed.
        split: separates a joint graph, which it may change.
        outputs: how many results of forward are not saved values.
        alike: how a further variant is separated as the function's first graph.
        came: forward and backward as Inductor would have them, where it gathers something else then.
        before: as ``alike``, of the function before ``torch._dynamo.reset()``: other ranks may go on with that.
    """

    gm: torch.fx.GraphModule
    split: Callable[[torch.fx.GraphModule], Split]
    outputs: int
    settings: PassConfig
    profile: CostProfile
    alike: Alike | None = None
    came: Split | None = None
    before: Alike | None = None

    def run(self, base: Split) -> Shrunk:
        """Choose and separate again.

        Args:
            base: forward and backward as Inductor would have them; of a further variant, such that backward gathers
                what the first one's gathers, where that can be had.

        Raises:
            NoHintError: a size is not known.
        """
        views = views_of(base)
        if not any(view.collectives for view in views):
            return Shrunk(base)
        fx = problems(views, self.settings, self.profile)
        came = base if self.came is None else self.came
        as_came = fx if came is base else problems(views_of(came), self.settings, self.profile)
        peak = self._peak(as_came)
        like_first = self._like_first(self.alike, peak)
        if like_first is not None and not like_first.reached_bytes:
            return like_first
        if why := apart(views, fx, self.settings, self.profile):
            like_first = like_first or self._like_first(self.before, peak)
            if like_first is not None:
                return self._told(like_first)
            detail = f"{_DIFFER}: {why}"
            warn_of_graph(f"inductor_passes: memory_budget={self.settings.memory_budget!r}: {detail}")
            return Shrunk(base, PassReport(recompute.NAME, rolled_back=Reason.RANKS_DIFFER, detail=detail))
        tagged = {n.name for n in self.gm.graph.nodes if _torch.is_tagged(n)}
        found = saved.read(views, fx, self.outputs, tagged)
        derived.check(found.step)
        gathered = keep.candidates(*views, self.profile)
        parts = forecast.mergeable(forecast.lines_of(views, fx, self.settings, self.profile))
        files: tuple[AskedFile, ...] = ()
        if self.settings.dump_problem:
            messages = stored.messages_of(views[0]), stored.messages_of(views[1])
            mine, theirs = (stored.computed_in(*both, self.profile) for both in zip(views, fx))
            one = stored.StoredStep(found.step, tuple(gathered), messages, (mine, theirs), parts)
            files = (publish.step_of(one, self.settings.dump_problem),)
            files[0].write()
        merging = Merging(found.step.forward, found.step.backward, parts)
        possible = recompute.points(found.step, gathered, merging=merging)
        done = replace(self._best(base, found, gathered, possible, peak), files=files)
        if like_first is not None and self.alike is not None and not self.alike.fits(done.both):
            return self._told(like_first)
        return done

    def _peak(self, fx: tuple[FxProblem, FxProblem]) -> int:
        """Of the step as it came: what a budget is relative to."""
        return max(peak_bytes(one.problem) for one in fx)

    def _limit(self, peak: int) -> int:
        limit = self.settings.budget.limit_bytes(peak)
        assert limit is not None
        return limit

    def _told(self, like_first: Shrunk) -> Shrunk:
        """A graph that is like the function's first one, with a warning where it is above the budget."""
        if like_first.reached_bytes:
            assert like_first.step_peak_bytes is not None
            warn_of_graph(
                f"inductor_passes: memory_budget={self.settings.memory_budget!r} allows a graph "
                f"{size(self._limit(like_first.step_peak_bytes))}, and this variant of a function needs "
                f"{size(like_first.reached_bytes)}: it is {_FIRST}, which other ranks may go on with"
            )
        return like_first

    def _like_first(self, alike: Alike | None, peak: int) -> Shrunk | None:
        """A graph as the function's first one; None where none is known, or that cannot be had."""
        both = None if alike is None else alike.as_first
        if both is None:
            return None
        limit = self._limit(peak)
        needs = self._least(problems(views_of(both), self.settings, self.profile), limit)
        return Shrunk(
            both,
            PassReport(recompute.NAME, changed=True, detail=_FIRST),
            step_peak_bytes=peak,
            reached_bytes=needs if needs > limit else 0,
        )

    def _best(
        self,
        base: Split,
        found: saved.Saved,
        gathered: Sequence[keep.Gathered],
        possible: Sequence[Point],
        peak: int,
    ) -> Shrunk:
        """The fastest state that is within the budget when it has become two graphs."""
        limit = self._limit(peak)
        wanted, reached = limit, 0
        tried: list[_Tried] = []
        fits = False
        while len(tried) < _TRIES and not fits and (point := recompute.best(possible, wanted)) is not None:
            tried.append(self._tried(base, found, gathered, point, limit))
            fits = tried[-1].needs <= limit
            wanted = min(wanted, point.peak_bytes) - max(1, tried[-1].needs - limit)
        curve = recompute.curve(possible)
        if not fits:
            last = self._tried(base, found, gathered, recompute.least(possible), limit)
            if last.needs > limit:
                # Within a limit that cannot be reached no order is looked for: what the point was planned with can be.
                cap = max(limit, last.point.peak_bytes)
                planned = self._least(last.made, cap, lower=True)
                last = replace(last, needs=min(last.needs, planned), cap=cap if planned <= cap else 0)
            tried.append(last)
            fits = last.needs <= limit
        if not fits:
            saved_all = recompute.least([p for p in possible if not p.recomputed and not p.kept])
            tried.append(self._tried(base, found, gathered, saved_all, limit))
        chosen = tried[-1] if fits else min(tried, key=lambda one: one.needs)
        point, both, made = chosen.point, chosen.both, chosen.made
        if chosen.needs > limit:
            reached = max(chosen.needs, chosen.cap)
            self._complain(chosen.needs, reached, limit, peak, more_buys(point, curve, reached))
        said = recompute.report(found.step, point, recompute.saved_ns(possible), limit, found.refused)
        kept = keep.jointly(gathered, point.kept, limit) if gathered else None
        lines = (
            *picture.made(found.step, point, recompute.saved_ns(possible, point.kept)),
            *picture.curve(curve, peak, limit),
            *picture.at_peak(*(one.problem for one in made)),
        )
        known = tuple((p.peak_bytes, p.step_ns) for p in curve)
        return Shrunk(both, said, kept, peak, lines, known, point.proposed, reached)

    def _tried(
        self, base: Split, found: saved.Saved, gathered: Sequence[keep.Gathered], point: Point, limit: int
    ) -> _Tried:
        """A state as it comes out, and what it needs in an order that keeps ``limit``, where there is one."""
        both = self._made(base, found, gathered, point)
        made = problems(views_of(both), self.settings, self.profile)
        return _Tried(point, both, made, self._least(made, limit))

    def _made(
        self, base: Split, found: saved.Saved, gathered: Sequence[keep.Gathered], point: Point
    ) -> Split:
        """Forward and backward of a state."""
        if not point.recomputed and not point.kept:
            return base
        gm = copied(self.gm)
        keep.keep(keep.marked(gm.graph), {g.start for g in gathered[: point.kept]})
        if point.recomputed:
            again = {name for i in point.recomputed for name in found.step.candidates[i].nodes}
            _tag(gm.graph, again, found.names)
        both = self.split(gm)
        checkpointing.unwrap(*both, self.outputs)
        return both

    def _least(self, both: tuple[FxProblem, FxProblem], limit: int, lower: bool = False) -> int:
        """What forward and backward need in an order that keeps the limit, where there is one; else the least known.

        Args:
            lower: look for an order that needs less, also where the input's keeps the limit.
        """
        needs = 0
        for one in both:
            peak = peak_bytes(one.problem)
            if lower:
                peak = min(plan(one.problem, limit, slack=False).peak_bytes, least_peak(tables(one.problem)))
            elif peak > limit:
                found = plan(one.problem, limit, effort=0, thorough=False, slack=False).peak_bytes
                # Where no order keeps the limit it is the input's peak, which is not the least that is known.
                peak = found if found <= limit else min(found, least_peak(tables(one.problem)))
            needs = max(needs, peak)
        return needs

    def _complain(self, needs: int, allowed: int, limit: int, peak: int, told: str) -> None:
        """Warn of a budget that cannot be reached.

        Args:
            needs: the least that is known. ``allowed``: what the graphs may need.
        """
        # Rounded up: the share is one that can be asked for.
        share = -(-needs * 100 // max(1, peak)) - 100
        # From "+0%" on it is another kind of budget: per graph, and nothing is computed again for it.
        relative = f', or "{share}%" of what it needs as it came' if share < 0 else ""
        warn_of_graph(
            f"inductor_passes: memory_budget={self.settings.memory_budget!r} allows a graph {size(limit)}, and no plan "
            f'was found that needs less than {size(needs)} ("={needs}B"{relative}). The one that is used needs '
            f'{size(allowed)} ("={allowed}B") at most. {told}{self._counted()}'
        )

    def _counted(self) -> str:
        """What these bytes are."""
        if self.settings.codegen == "inductor":
            return "Memory is what generated code is expected to take; which kernels Inductor fuses is not known yet"
        return "Memory is that of the graph as it is executed, one operator after the other"


def more_buys(point: Point, curve: Sequence[Point], reached_bytes: int = 0) -> str:
    """What the next point of the curve that is clearly faster costs and gains; "" where there is none.

    Args:
        reached_bytes: what the point needs when its graphs are made, where that is more than was planned.
    """
    least = max(point.peak_bytes, reached_bytes)
    faster = [p for p in curve if p.peak_bytes > least and p.step_ns * _CLEARLY < point.step_ns]
    if not faster:
        return ""
    first = min(faster, key=lambda p: p.peak_bytes)
    now, then = duration(point.step_ns), duration(first.step_ns)
    more = f'{size(first.peak_bytes)} ("={first.peak_bytes}B")'
    return f"A first, simple schedule of its step takes {now}, and {then} with {more}. "


_FIRST = "saved and computed again as in the function's first graph"
_DIFFER = (
    "the budget is not kept, and everything is saved as by default. What a rank saves and computes again has to be the "
    "same on all ranks, and here it might not be (a rank whose memory_budget asks for no such choice does not answer)"
)


def _tag(graph: torch.fx.Graph, again: Collection[str], names: Collection[str]) -> None:
    """Tell torch's partitioner what to run again, and to go on saving everything else that it saved."""
    for node in graph.nodes:
        if node.op != "call_function" or _torch.is_tagged(node):
            continue
        if node.name in again:
            _torch.compute_again(node, again=True)
        elif node.name in names:
            _torch.compute_again(node, again=False)
