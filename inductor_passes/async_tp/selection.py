"""Which regions of a graph are computed in parts: all candidates, priced, and the best disjoint ones.

Every collective yields one decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch.fx

from inductor_passes.async_tp.gate import Priced, Pricer
from inductor_passes.async_tp.lowerings import Graph, LoweringChoice, choose_all, choose_lowering, others_fit_anything
from inductor_passes.async_tp.region import Recipe, Refusal, Region, unsupported
from inductor_passes.async_tp.search import Cutting, Search
from inductor_passes.async_tp.trials import Trials
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.ir import ops
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.problems.fx import NoHintError
from inductor_passes.report import Decision, Reason, Verdict
from inductor_passes.rewriting.contract import Facts
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.simulate import simulate
from inductor_passes.settings.async_tp import AsyncTpLowering

#: What would change a refusal.
_SETTINGS = {Reason.DISABLED: 'async_tp="auto"', Reason.HIDDEN: 'async_tp="force"'}


class Settings(Cutting, Protocol):
    """What the selection asks of the pass's options."""

    @property
    def lowering(self) -> AsyncTpLowering:
        """How regions are carried out."""

    @property
    def least_gain(self) -> float:
        """Share of a region's time that ``auto`` asks for."""

    def mode_of(self, collective: Collective) -> str:
        """``auto``, ``force`` or ``off``."""


#: The share of the best regions' gain that fewer, longer ones must have for the graph to be planned with them, too.
RIVAL = 0.75


@dataclass
class Selection:
    """Finds the regions to apply in one graph."""

    settings: Settings
    facts: Facts
    trials: Trials | None = None
    """Which regions may be carried out; None: all."""
    decisions: list[Decision] = field(default_factory=list)
    before: Plan | None = None
    """How the graph as it is was scheduled, where the gate needed to know."""
    exposed_ns: dict[str, int] = field(default_factory=dict)
    """What that leaves exposed of every collective, by the name of its start."""
    choices: dict[Priced, LoweringChoice] = field(default_factory=dict)
    """How each region that is applied is carried out."""
    in_parts: dict[Priced, Priced] = field(default_factory=dict)
    """What options that another lowering makes cheaper cost in parts."""
    recipes: dict[Region, Recipe] = field(default_factory=dict)
    """How every region was grown."""
    rival: list[Recipe] = field(default_factory=list)
    """Fewer regions than those chosen that are nearly as good by their prices; [] where there are none."""

    @property
    def view(self) -> GraphView:
        """The graph's roles and collectives."""
        return self.facts.view

    @cached_property
    def graph(self) -> Graph:
        """What lowerings need to know."""
        costs = ComputeCosts(self.view, self.facts.profile, self.facts.config.estimator)
        shards = self.facts.shards
        padding = {c.start for c in shards.uneven if c.kind is CollectiveKind.ALL_GATHER}
        prepared = frozenset(node for node, start in shards.owner.items() if start in padding)
        return Graph(self.view, self.facts.profile, costs, prepared=prepared)

    @cached_property
    def _asked(self) -> Graph | None:
        """To ask lowerings what an option would cost, before anybody owns anything; None where there are only parts."""
        names = {c.group.name for c in self.view.collectives}
        if not others_fit_anything(self.settings.lowering, names):
            return None
        return Graph(self.view, self.facts.profile, self.graph.costs)

    def _option(self, priced: Priced) -> Priced:
        """A region at the price of the lowering that would be chosen for it alone."""
        if self._asked is None:
            return priced
        cheapest = choose_lowering(self.settings.lowering, priced, self._asked).priced
        self.in_parts[cheapest] = priced
        return cheapest

    def choose(self) -> list[Priced]:
        """The regions to apply, disjoint, in graph order; leaves one decision per collective."""
        pricer = self._pricer()
        search = None if pricer is None else Search(self.settings, self.view, pricer)
        if self.trials is not None and search is not None:
            return self._again(search, self.trials)
        options: list[tuple[Collective, list[Priced]]] = []
        refusals: dict[Collective, Refusal] = {}
        for collective in self.view.collectives:
            mode = self.settings.mode_of(collective)
            refusal = unsupported(collective, self.view)
            if mode == "off":
                refusals[collective] = Refusal(Reason.DISABLED, "")
            elif refusal is not None:
                refusals[collective] = refusal
            elif pricer is None or search is None:
                refusals[collective] = Refusal(Reason.NO_HINT, "a symbolic size has no hint")
            elif mode == "auto" and pricer.is_hidden(collective):
                # Whatever else a region with it would hide, one without it hides too.
                refusals[collective] = Refusal(Reason.HIDDEN, "other work hides all of it")
            else:
                found, why = self._options(search, collective)
                options.append((collective, found))
                if why is not None:
                    refusals[collective] = why
        return self._carried_out([self.in_parts.get(p, p) for p in self._disjoint(options)], dict(options), refusals)

    def _again(self, search: Search, trials: Trials) -> list[Priced]:
        """The regions of a trial, grown as they were."""
        by_name = {c.start.name: c for c in self.view.collectives}
        chosen = []
        for recipe in trials.recipes:
            chosen.append(search.again(recipe, by_name[recipe.start]))
            self.recipes[chosen[-1].region] = recipe
        return self._carried_out(chosen, {}, {})

    def _carried_out(
        self,
        chosen: list[Priced],
        options: dict[Collective, list[Priced]],
        refusals: dict[Collective, Refusal],
    ) -> list[Priced]:
        """Chosen regions with a lowering each, in graph order; leaves the decisions."""
        self.choices = choose_all(self.settings.lowering, chosen, self.graph)
        # A matmul between two of them goes to one, and the other may have to come in parts after all.
        chosen = [p for p in chosen if self._asked is None or self._worth(self.choices[p].priced)]
        self._decide(chosen, options, refusals)
        return sorted(chosen, key=lambda p: self.view.position[next(iter(p.region.cuts))])

    def ranked(self, chosen: list[Priced]) -> list[Recipe]:
        """How regions that are carried out were grown, the one of largest gain by its lowering first."""
        best = sorted(chosen, key=lambda p: -self.choices[p].priced.gain_ns)
        return [self.recipes[p.region] for p in best]

    def members(self) -> set[torch.fx.Node]:
        """Starts of the collectives of all regions that would be applied."""
        return {c.start for priced in self.choose() for c in priced.region.collectives}

    def _pricer(self) -> Pricer | None:
        costs = self.graph.costs
        if any(c.input_bytes is None or c.output_bytes is None for c in self.view.collectives):
            return None
        exposed: Mapping[str, int] | None = None
        if self.trials is not None:
            exposed = self.trials.before.exposed_ns
        elif any(self.settings.mode_of(c) == "auto" for c in self.view.collectives):
            try:
                exposed = self._exposed()
            except NoHintError:
                return None
        return Pricer(self.view, self.facts.profile, costs, exposed)

    def _exposed(self) -> Mapping[str, int]:
        """What remains exposed of every collective when the graph as it is has been scheduled."""
        fx = self.facts.problem
        self.before = plan(fx.problem, self.facts.limit_bytes, effort=0)
        timeline = simulate(fx.problem, self.before.order)
        self.exposed_ns = {
            node.name: timeline.exposed_ns[task]
            for task, members in enumerate(fx.members)
            for node in members
            if node in self.view.by_start
        }
        return self.exposed_ns

    def _options(self, search: Search, collective: Collective) -> tuple[list[Priced], Refusal | None]:
        """All regions around a collective, the best first, and why there is none."""
        around = search.around(collective)
        self.recipes.update((priced.region, recipe) for recipe, priced in around.options)
        found = [self._option(priced) for _, priced in around.options]
        return sorted(found, key=lambda p: -p.gain_ns), around.refusal

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

        def greedy(gain: Callable[[Priced], tuple[float, ...]]) -> list[Priced]:
            taken: set[torch.fx.Node] = set()
            chosen: list[Priced] = []
            for _, _, priced in sorted(ranked, key=lambda entry: (*(-g for g in gain(entry[2])), *entry[:2])):
                if taken.isdisjoint(priced.region.cuts):
                    taken.update(priced.region.cuts)
                    chosen.append(priced)
            return chosen

        def value(chosen: list[Priced]) -> tuple[int, int, int]:
            gain = sum(p.gain_ns for p in chosen)
            # Where everything loses (``force``), the more collectives are in, the better.
            return max(gain, 0), sum(len(p.region.collectives) for p in chosen), gain

        orders: tuple[Callable[[Priced], tuple[float, ...]], ...] = (
            lambda p: (p.gain_ns / len(p.region.collectives),),
            lambda p: (p.gain_ns,),
            lambda p: (len(p.region.collectives), p.gain_ns),
        )
        found = [greedy(order) for order in orders]
        best = max(found, key=value)
        longer = min(found, key=lambda chosen: (len(chosen), [-v for v in value(chosen)]))
        if 0 < len(longer) < len(best) and value(longer)[0] >= RIVAL * value(best)[0]:
            self.rival = [self.recipes[self.in_parts.get(p, p).region] for p in longer]
        return best

    def _decide(
        self, chosen: list[Priced], options: dict[Collective, list[Priced]], refusals: dict[Collective, Refusal]
    ) -> None:
        of: dict[Collective, Priced] = {c: p for p in chosen for c in p.region.collectives}
        for collective in self.view.collectives:
            if collective in of:
                self.decisions.append(_applied(collective, self.choices[of[collective]]))
            elif collective in refusals:
                why = refusals[collective]
                setting = _SETTINGS.get(why.reason, "")
                self.decisions.append(refused(collective, why.reason, why.text, setting))
            elif self.trials is not None and collective not in options:
                self.decisions.append(_left_out(self.trials.first[collective.start.name]))
            else:
                self.decisions.append(self._not_worth(collective, options[collective]))

    def _not_worth(self, collective: Collective, found: list[Priced]) -> Decision:
        if not found:
            return refused(collective, Reason.NO_INDEPENDENT_COMPUTE, "no dimension of it can be cut")
        best = found[0]
        if self._worth(best):
            return refused(collective, Reason.DATA_DEPENDENCY, "its matmul is part of another, better region")
        exposed = best.before_ns - best.after_ns > best.gain_ns
        reason = Reason.HIDDEN if exposed else Reason.NOT_PROFITABLE
        detail = f"best cut {region_text(best)}: {best.before_ns} -> {best.after_ns} ns, gain {best.gain_ns} ns"
        return refused(collective, reason, detail, 'async_tp="force"')


def refused(c: Collective, reason: Reason, detail: str, setting: str = "") -> Decision:
    """The decision to leave a collective whole."""
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


def _left_out(first: Decision) -> Decision:
    """The decision about a collective whose region is none of those to carry out."""
    if first.verdict is not Verdict.APPLIED:
        return first
    return replace(
        first,
        verdict=Verdict.REFUSED,
        reason=Reason.NOT_PROFITABLE,
        detail=f"the whole graph plans no faster with this, or not when durations differ: {first.detail}",
        gain_ns=0,
        setting='async_tp="force"',
    )


def region_text(priced: Priced) -> str:
    """``2 parts along dimension 0 of AG0: mm free-left, mm_1 free-left, with RS1``."""
    region: Region = priced.region
    dots = ", ".join(f"{node.name} {dot.value}" for node, dot in region.matmuls.items())
    label, dim = region.axis
    others = [c.label for c in region.collectives if c.label != label]
    joined = f", with {', '.join(others)}" if others else ""
    return f"{region.parts} parts along dimension {dim} of {label}: {dots}{joined}"


def _applied(c: Collective, choice: LoweringChoice) -> Decision:
    priced = choice.priced
    note = f" ({choice.note})" if choice.note else ""
    return Decision(
        "async_tp",
        c.start.name,
        Verdict.APPLIED,
        Reason.PROFITABLE if priced.gain_ns > 0 else Reason.ASKED,
        f"{choice.lowering.name}{note}, {region_text(priced)}; region {priced.before_ns} -> {priced.after_ns} ns",
        source=ops.source_line(c.start),
        group=c.group.name,
        gain_ns=priced.gain_ns,
        setting='async_tp="off"',
    )
