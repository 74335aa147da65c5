"""Async tensor parallelism: communication inside the matmuls next to it, on any backend.

before::

    AG0 W0 mm        mm RS0 W0

after (two parts)::

    AG0 AG0' W0 mm W0' mm'        mm RS0 mm' RS0' W0 W0'

For every collective the pass looks for regions (``region``) that can be computed in parts, prices them (``gate``) and
replaces the best ones (``lower_decompose``). Every collective yields one decision. Correct because each operator of a
region maps over the axis that is cut; saves what the schedule leaves exposed of the communication, for the price of
smaller matmuls, more latencies and copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, get_args

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp import norms
from inductor_passes.async_tp.gate import Priced, Pricer
from inductor_passes.async_tp.gathers import merge_identical
from inductor_passes.async_tp.lower_decompose import Lowered
from inductor_passes.async_tp.lowerings import Choice, Graph, choose, choose_all, others_fit_anything
from inductor_passes.async_tp.members import taken_apart
from inductor_passes.async_tp.order import Key, legal_order
from inductor_passes.async_tp.region import Grower, Reach, Refusal, Region, axes, unsupported
from inductor_passes.async_tp.rules import shape_of
from inductor_passes.bucket.split import splittable
from inductor_passes.budget import exceeds, gathers_twice, graph_peak_bytes
from inductor_passes.config import AsyncTpLowering, ConfigError
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.ir import ops
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.pipeline import Context, arrange
from inductor_passes.reorder.canonical import UNEQUAL, shards
from inductor_passes.reorder.problem import NoHintError, build
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.simulate import simulate
from inductor_passes.verify.certificate import Certificate

Mode = Literal["auto", "force", "off"]
MODES: tuple[Mode, ...] = ("auto", "force", "off")
#: How many collectives downstream may join, tried one after the other while more join.
_FURTHER = (0, 1, 4, 32)


@dataclass(frozen=True)
class AsyncTpPass:
    """See the module's docstring.

    Attributes:
        mode: ``auto`` applies what the cost gate says pays, ``force`` the best region of every collective whatever
            it costs, ``off`` nothing.
        parts: how many parts may be made; the cost model chooses among them. A dimension that none of them divides
            is cut into its least divisor up to the largest.
        groups: (name or description of a process group, mode) pairs that override ``mode`` for a group.
        sizes: (bytes, mode) pairs: ``mode`` for collectives whose full message has at least so many bytes; the
            largest matching size counts, and a group's override goes first.
        contracting: whether sums over a cut axis may be computed as sums of parts, which reassociates.
        lowering: how regions are carried out, see ``lowerings``; regions that one does not fit are decomposed.
        least_gain: gain below this share of the region's time is left alone in ``auto``.
    """

    mode: Mode = "auto"
    parts: tuple[int, ...] = (2, 4, 8)
    groups: tuple[tuple[str, Mode], ...] = ()
    sizes: tuple[tuple[int, Mode], ...] = ()
    contracting: bool = True
    lowering: AsyncTpLowering = "auto"
    least_gain: float = 0.03
    name: str = "async_tp"
    group_order: ClassVar[Literal["kept", "any"]] = "kept"

    def __post_init__(self) -> None:
        for mode in (self.mode, *(m for _, m in self.groups), *(m for _, m in self.sizes)):
            if mode not in MODES:
                raise ConfigError("async_tp", mode, " or ".join(f'"{m}"' for m in MODES))
        if self.lowering not in get_args(AsyncTpLowering):
            allowed = " or ".join(f'"{name}"' for name in get_args(AsyncTpLowering))
            raise ConfigError("async_tp lowering", self.lowering, allowed)
        if not self.parts or any(not isinstance(p, int) or p < 2 for p in self.parts):
            raise ConfigError("async_tp parts", self.parts, "a tuple of integers of at least 2")

    def mode_of(self, collective: Collective) -> Mode:
        """The mode that applies to a collective."""
        own = (collective.group.name, _torch.group_descriptions().get(collective.group.name))
        for name, mode in self.groups:
            if name in own:
                return mode
        size = max(collective.input_bytes or 0, collective.output_bytes or 0)
        fitting = [entry for entry in self.sizes if entry[0] <= size]
        return max(fitting)[1] if fitting else self.mode

    def parts_of(self, extent: object) -> tuple[int, ...]:
        """Into how many parts a dimension may be cut: those of ``parts`` that divide it, else its least divisor."""
        if not isinstance(extent, int):
            return self.parts[:1]
        found = tuple(p for p in self.parts if extent % p == 0)
        least = next((p for p in range(2, max(self.parts) + 1) if extent % p == 0), None)
        return found or (self.parts[:1] if least is None else (least,))

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Rewrite the graph; one decision per collective."""
        report = PassReport(self.name)
        view = context.view(graph)
        if not any(self.mode_of(c) != "off" for c in view.collectives):
            report.decisions = [_refused(c, Reason.DISABLED, "", 'async_tp="auto"') for c in view.collectives]
            return report
        if not shards(view).ranks_agree:
            # Prices differ with the pieces, and "force" chooses by price too.
            report.decisions = [_refused(c, Reason.RANKS_DIFFER, UNEQUAL) for c in view.collectives]
            return report
        names_before = {n.name for n in graph.nodes}
        whole = self._planned_whole(context, graph) if splittable(view) else None
        splits = taken_apart(graph, context, lambda view: _Planner(self, view, context).members())
        view = context.view(graph)
        peak = graph_peak_bytes(graph, context) if gathers_twice(view) else None
        merged, replaced = merge_identical(graph, view)
        if merged and context.snapshot is not None and exceeds(graph, context, peak):
            context.snapshot.restore()
            context.forget_view()
            report.decisions += [_above_budget(decision) for decision in merged]
            merged, replaced, splits = [], [], []
        elif merged:
            context.forget_view()
            report.decisions += merged
        normed = self._norms(graph, context)
        report.decisions += normed.decisions
        view = context.view(graph)
        planner = _Planner(self, view, context)
        chosen = planner.choose()
        if splits and whole is not None and planner.before is not None:
            # What has to be beaten is the graph with its coalesced collectives whole.
            planner.before = min(whole, planner.before, key=lambda p: (not p.feasible, p.makespan_ns))
        report.decisions += planner.decisions
        position = dict(view.position)
        keys: dict[torch.fx.Node, Key] = {}
        moved: dict[torch.fx.Node, torch.fx.Node] = {}
        lowered: list[Lowered] = []
        for priced in chosen:
            one = planner.choices[priced].lowering.lower(priced, planner.graph, position, moved)
            keys.update(one.keys)
            lowered.append(one)
        if chosen:
            arrange(graph, legal_order(graph, keys, position))
        report.changed = bool(chosen or merged or splits or normed.count)
        if chosen and planner.before is not None and not any(self.mode_of(c) == "force" for c in view.collectives):
            worse = planner.worse_than_before(graph)
            if worse is not None:
                report.rolled_back, report.detail = worse.reason, worse.detail
                report.decisions = [_undone(d, worse) for d in report.decisions]
                return report
        if report.changed:
            names = {n.name for n in graph.nodes}
            context.certificates.append(
                Certificate(
                    self.name,
                    removed=tuple(sorted(names_before - names)),
                    added=tuple(sorted(names - names_before)),
                    replaced=(
                        *replaced,
                        *normed.replaced,
                        *(pair for one in splits for pair in one.replaced),
                        *(pair for one in lowered for pair in one.replaced),
                    ),
                )
            )
        report.metrics = {
            "regions": float(len(chosen)),
            "gain_ns": float(sum(planner.choices[p].priced.gain_ns for p in chosen)),
            "merged_gathers": float(len(merged)),
            "fused_norms": float(normed.count),
        }
        return report

    def _planned_whole(self, context: Context, graph: torch.fx.Graph) -> Plan | None:
        """The plan of the graph as it came; None where nobody asks what a region is worth, or sizes have no hint."""
        try:
            fx = context.problem(graph)
        except NoHintError:
            return None
        return plan(fx.problem, context.limit_bytes(simulate(fx.problem).peak_bytes), effort=0)

    def _norms(self, graph: torch.fx.Graph, context: Context) -> norms.Fused:
        """All-reduces with residual and norm become one operator, where kernels may be used."""
        view = context.view(graph)
        wanted: dict[Collective, Literal["auto", "force"]] = {}
        for collective in view.collectives if self.lowering in ("auto", "kernels") else ():
            mode = self.mode_of(collective)
            if mode != "off":
                wanted[collective] = "force" if mode == "force" and self.lowering == "kernels" else "auto"
        found = norms.fuse(graph, view, context.profile, wanted)
        if found.count:
            context.forget_view()
        return found


def _refused(c: Collective, reason: Reason, detail: str, setting: str = "") -> Decision:
    return Decision(
        "async_tp",
        c.start.name,
        Verdict.REFUSED,
        reason,
        f"{c.label}: {detail}" if detail else c.label,
        source=ops.source_line(c.start),
        group=c.group.name,
        setting=setting,
    )


def _above_budget(decision: Decision) -> Decision:
    return replace(
        decision,
        verdict=Verdict.REFUSED,
        reason=Reason.MEMORY_BUDGET,
        detail=f"{decision.detail}, which lives for longer",
        setting='memory_budget="unlimited"',
    )


@dataclass
class _Planner:
    """Finds the regions to apply in one graph."""

    settings: AsyncTpPass
    view: GraphView
    context: Context
    decisions: list[Decision] = field(default_factory=list)
    before: Plan | None = None
    """How the graph as it is was scheduled, where the gate needed to know."""
    choices: dict[Priced, Choice] = field(default_factory=dict)
    """How each region that is applied is carried out."""
    in_parts: dict[Priced, Priced] = field(default_factory=dict)
    """What options that another lowering makes cheaper cost in parts."""

    @cached_property
    def graph(self) -> Graph:
        """What lowerings need to know."""
        costs = ComputeCosts(self.view, self.context.profile, self.context.config.estimator)
        return Graph(self.view, self.context.profile, costs)

    @cached_property
    def _asked(self) -> Graph | None:
        """To ask lowerings what an option would cost, before anybody owns anything; None where there are only parts."""
        names = {c.group.name for c in self.view.collectives}
        if not others_fit_anything(self.settings.lowering, names):
            return None
        return Graph(self.view, self.context.profile, self.graph.costs)

    def _option(self, priced: Priced) -> Priced:
        """A region at the price of the lowering that would be chosen for it alone."""
        if self._asked is None:
            return priced
        cheapest = choose(self.settings.lowering, priced, self._asked).priced
        self.in_parts[cheapest] = priced
        return cheapest

    def choose(self) -> list[Priced]:
        """The regions to apply, disjoint, in graph order; leaves one decision per collective."""
        grower = Grower(self.view)
        pricer = self._pricer()
        options: list[tuple[Collective, list[Priced]]] = []
        refusals: dict[Collective, Refusal] = {}
        for collective in self.view.collectives:
            mode = self.settings.mode_of(collective)
            refusal = unsupported(collective, self.view)
            if mode == "off":
                refusals[collective] = Refusal(Reason.DISABLED, "")
            elif refusal is not None:
                refusals[collective] = refusal
            elif pricer is None:
                refusals[collective] = Refusal(Reason.NO_HINT, "a symbolic size has no hint")
            else:
                found, why = self._options(grower, pricer, collective)
                options.append((collective, found))
                if why is not None:
                    refusals[collective] = why
        chosen = [self.in_parts.get(p, p) for p in self._disjoint(options)]
        self.choices = choose_all(self.settings.lowering, chosen, self.graph)
        # A matmul between two of them goes to one, and the other may have to come in parts after all.
        chosen = [p for p in chosen if self._asked is None or self._worth(self.choices[p].priced)]
        self._decide(chosen, dict(options), refusals)
        return sorted(chosen, key=lambda p: self.view.position[next(iter(p.region.cuts))])

    def members(self) -> set[torch.fx.Node]:
        """Starts of the collectives of all regions that would be applied."""
        return {c.start for priced in self.choose() for c in priced.region.collectives}

    def _pricer(self) -> Pricer | None:
        costs = ComputeCosts(self.view, self.context.profile, self.context.config.estimator)
        if any(c.input_bytes is None or c.output_bytes is None for c in self.view.collectives):
            return None
        exposed: dict[torch.fx.Node, int] | None = None
        if any(self.settings.mode_of(c) == "auto" for c in self.view.collectives):
            try:
                exposed = self._exposed()
            except NoHintError:
                return None
        return Pricer(self.view, self.context.profile, costs, exposed)

    def _exposed(self) -> dict[torch.fx.Node, int]:
        """What remains exposed of every collective when the graph as it is has been scheduled."""
        fx = self.context.problem(self.view.graph)
        limit = self.context.limit_bytes(simulate(fx.problem).peak_bytes)
        self.before = plan(fx.problem, limit, effort=0)
        timeline = simulate(fx.problem, self.before.order)
        return {
            node: timeline.exposed_ns[task]
            for task, members in enumerate(fx.members)
            for node in members
            if node in self.view.by_start
        }

    def worse_than_before(self, graph: torch.fx.Graph) -> Refusal | None:
        """Why the rewritten graph is no improvement once it is scheduled as a whole within the same budget."""
        before = self.before
        assert before is not None
        fx = build(GraphView(graph), self.context.profile, estimator=self.context.config.estimator)
        after = plan(fx.problem, before.budget_bytes, effort=0)
        if before.feasible and not after.feasible:
            peaks = f"{after.peak_bytes} bytes; the budget is {before.budget_bytes}"
            return Refusal(Reason.OVER_BUDGET, f"in parts the graph peaks at {peaks}")
        if after.makespan_ns >= before.makespan_ns:
            return Refusal(Reason.SLOWER, f"the whole graph: {before.makespan_ns} -> {after.makespan_ns} ns")
        return None

    def _options(
        self, grower: Grower, pricer: Pricer, collective: Collective
    ) -> tuple[list[Priced], Refusal | None]:
        """All regions around a collective, the best first, and why there is none."""
        grow = [grower.forward] if collective.kind == "all_gather" else [grower.backward]
        if collective.kind == "all_to_all":
            grow.append(grower.forward)
        found: list[Priced] = []
        why: Refusal | None = None
        seen: set[tuple[object, ...]] = set()
        tries = [
            (dim, parts, contracting, direction)
            for dim in axes(collective)
            for parts in self.settings.parts_of(shape_of(collective.inputs[0])[dim])
            for contracting in (True, False)[not self.settings.contracting :]
            for direction in grow
        ]
        for dim, parts, contracting, direction in tries:
            joined = 0
            for further in _FURTHER:
                region = direction(collective, dim, parts, Reach(contracting, further))
                if isinstance(region, Refusal):
                    why = _clearer(why, region)
                    break
                key = (parts, tuple(region.cuts.items()))
                if key not in seen:
                    seen.add(key)
                    found.append(self._option(pricer.price(region)))
                if further > 1 and len(region.collectives) == joined:
                    break
                joined = len(region.collectives)
        found.sort(key=lambda p: -p.gain_ns)
        return found, None if found else why

    def _worth(self, priced: Priced) -> bool:
        modes = [self.settings.mode_of(c) for c in priced.region.collectives]
        if "off" in modes:
            return False
        return "force" in modes or priced.gain_ns > self.settings.least_gain * priced.before_ns

    def _disjoint(self, options: list[tuple[Collective, list[Priced]]]) -> list[Priced]:
        """Profitable regions that do not share members: greedily by gain, or by gain per collective if that is more."""
        ranked = [
            (self.view.position[c.start], number, p)
            for c, found in options
            for number, p in enumerate(found)
            if self._worth(p)
        ]

        def greedy(gain: Callable[[Priced], float]) -> list[Priced]:
            taken: set[torch.fx.Node] = set()
            chosen: list[Priced] = []
            for _, _, priced in sorted(ranked, key=lambda entry: (-gain(entry[2]), *entry[:2])):
                if taken.isdisjoint(priced.region.cuts):
                    taken.update(priced.region.cuts)
                    chosen.append(priced)
            return chosen

        def value(chosen: list[Priced]) -> tuple[int, int, int]:
            gain = sum(p.gain_ns for p in chosen)
            # Where everything loses (``force``), the more collectives are in, the better.
            return max(gain, 0), sum(len(p.region.collectives) for p in chosen), gain

        return max(greedy(lambda p: p.gain_ns / len(p.region.collectives)), greedy(lambda p: p.gain_ns), key=value)

    def _decide(
        self, chosen: list[Priced], options: dict[Collective, list[Priced]], refusals: dict[Collective, Refusal]
    ) -> None:
        of: dict[Collective, Priced] = {c: p for p in chosen for c in p.region.collectives}
        for collective in self.view.collectives:
            if collective in of:
                self.decisions.append(_applied(collective, self.choices[of[collective]]))
            elif collective in refusals:
                why = refusals[collective]
                setting = 'async_tp="auto"' if why.reason is Reason.DISABLED else ""
                self.decisions.append(_refused(collective, why.reason, why.detail, setting))
            else:
                self.decisions.append(self._not_worth(collective, options[collective]))

    def _not_worth(self, collective: Collective, found: list[Priced]) -> Decision:
        best = found[0]
        if self._worth(best):
            return _refused(collective, Reason.DATA_DEPENDENCY, "its matmul is part of another, better region")
        exposed = best.before_ns - best.after_ns > best.gain_ns
        reason = Reason.HIDDEN if exposed else Reason.NOT_PROFITABLE
        detail = f"best cut {describe(best)}: {best.before_ns} -> {best.after_ns} ns, gain {best.gain_ns} ns"
        return _refused(collective, reason, detail, 'async_tp="force"')


def _undone(decision: Decision, why: Refusal) -> Decision:
    """An applied decision after the pass was undone."""
    if decision.verdict is not Verdict.APPLIED:
        return decision
    setting = 'memory_budget="unlimited"' if why.reason is Reason.OVER_BUDGET else 'async_tp="force"'
    return replace(decision, verdict=Verdict.REFUSED, reason=why.reason, detail=why.detail, gain_ns=0, setting=setting)


def _clearer(old: Refusal | None, new: Refusal) -> Refusal:
    """The refusal that says more: about the surroundings rather than about one axis."""
    if old is None or (old.reason is not Reason.NO_INDEPENDENT_COMPUTE and new.reason is Reason.NO_INDEPENDENT_COMPUTE):
        return new
    return old


def describe(priced: Priced) -> str:
    """``2 parts along dimension 0 of AG0: mm free-left, mm_1 free-left, with RS1``."""
    region: Region = priced.region
    dots = ", ".join(f"{node.name} {dot.value}" for node, dot in region.matmuls.items())
    label, dim = region.axis
    others = [c.label for c in region.collectives if c.label != label]
    joined = f", with {', '.join(others)}" if others else ""
    return f"{region.parts} parts along dimension {dim} of {label}: {dots}{joined}"


def _applied(c: Collective, choice: Choice) -> Decision:
    priced = choice.priced
    note = f" ({choice.note})" if choice.note else ""
    return Decision(
        "async_tp",
        c.start.name,
        Verdict.APPLIED,
        Reason.PROFITABLE,
        f"{choice.lowering.name}{note}, {describe(priced)}; region {priced.before_ns} -> {priced.after_ns} ns",
        source=ops.source_line(c.start),
        group=c.group.name,
        gain_ns=priced.gain_ns,
        setting='async_tp="off"',
    )
