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

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp import norms
from inductor_passes.async_tp.gate import Priced
from inductor_passes.async_tp.lower_decompose import Lowered
from inductor_passes.async_tp.order import OrderKey, legal_order
from inductor_passes.async_tp.selection import Selection, refused
from inductor_passes.async_tp.slab import Widths, widths_for
from inductor_passes.async_tp.trials import Trials, Untouched
from inductor_passes.ir import ops
from inductor_passes.ir.canonical import UNEQUAL
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import Collective
from inductor_passes.problems.fx import NoHintError
from inductor_passes.report import PassReport, Reason
from inductor_passes.rewriting.arrange import arrange
from inductor_passes.rewriting.contract import NOT_AGREED, Facts, GroupOrder, Outcome, Solved
from inductor_passes.rewriting.split import split, splittable
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.settings.async_tp import AsyncTp, AsyncTpLowering
from inductor_passes.settings.errors import ConfigError
from inductor_passes.verify.certificate import Certificate
from inductor_passes.verify.values import Numerics

Mode = AsyncTp
MODES: tuple[Mode, ...] = get_args(AsyncTp)


@dataclass(frozen=True)
class AsyncTpPass:
    """See the module's docstring.

    Attributes:
        mode: ``auto`` applies what the cost gate says pays, ``force`` the best region of every collective whatever
            it costs, ``off`` nothing.
        parts: how many parts may be made; the cost model chooses among them. A dimension that none of them divides
            is cut into its least divisor up to the largest, and where it has none, into parts of different widths.
        groups: (name or description of a process group, mode) pairs that override ``mode`` for a group.
        sizes: (bytes, mode) pairs: ``mode`` for collectives whose full message has at least so many bytes; the
            largest matching size counts, and a group's override goes first.
        contracting: whether sums over a cut axis may be computed as sums of parts, which reassociates.
        lowering: how regions are carried out, see ``lowerings``; regions that one does not fit are decomposed.
        least_gain: gain below this share of the region's time is left alone in ``auto``.
        apart: names of the coalesced collectives to take apart; None: to be found out.
        trials: with how many regions the graph was planned; None: with none yet.
    """

    mode: Mode = "auto"
    parts: tuple[int, ...] = (2, 4, 8)
    groups: tuple[tuple[str, Mode], ...] = ()
    sizes: tuple[tuple[int, Mode], ...] = ()
    contracting: bool = True
    lowering: AsyncTpLowering = "auto"
    least_gain: float = 0.03
    apart: frozenset[str] | None = None
    trials: Trials | None = None
    name: str = "async_tp"
    group_order: ClassVar[GroupOrder] = "kept"
    numerics: ClassVar[Numerics] = "reassociate"
    #: Every trial of its regions plans the graph: see ``contract.plannings``.
    plannings: ClassVar[int] = 4

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

    def widths_of(self, extent: object) -> tuple[Widths, ...]:
        """Into which parts a dimension may be cut."""
        return widths_for(extent, self.parts)

    def run(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        """Rewrite the graph; one decision per collective."""
        left_alone = self._left_alone(facts)
        if left_alone is not None:
            return left_alone
        wholes = splittable(facts.view)
        if wholes and self.apart is None:
            return self._tried_apart(graph, facts, wholes)
        names_before = {n.name for n in graph.nodes}
        whole = _planned(facts) if wholes and self.trials is None else None
        splits = [split(graph, c) for c in wholes if c.start.name in (self.apart or ())]
        facts = facts.of(graph) if splits else facts
        normed = self._norms(graph, facts)
        facts = facts.of(graph) if normed.count else facts
        selection = Selection(self, facts, self.trials)
        chosen = selection.choose()
        lowered, apart = _lower(graph, selection, chosen)
        before = self._to_beat(selection, whole)
        after = planned = None
        if before is not None and (chosen if self.trials is None else not self.trials.settled):
            after = facts.of(graph)
            planned = plan(after.problem.problem, after.limit_bytes, effort=0)
            untouched = Untouched(before, selection.exposed_ns)
            tried = self.trials or Trials.of(selection.ranked(chosen), selection.decisions, untouched, selection.rival)
            following = tried.with_result(planned)
            if not (following.settled and following.recipes == tried.recipes):
                report = PassReport(self.name, changed=True)
                return Outcome(report, again=replace(self, trials=following))
        metrics = {
            "regions": float(len(lowered)),
            "gain_ns": float(sum(choice.priced.gain_ns for choice in selection.choices.values())),
            "fused_norms": float(normed.count),
        }
        changed = bool(lowered or splits or normed.count)
        decisions = [*normed.decisions, *selection.decisions]
        renamed = [one.replaced for one in splits]
        replaced = itertools.chain(normed.replaced, *renamed, *(one.replaced for one in lowered))
        return Outcome(
            PassReport(self.name, changed=changed, decisions=decisions, metrics=metrics),
            (_certificate(self.name, names_before, graph, tuple(replaced)),) if changed else (),
            before=before if lowered else None,
            solved=None if after is None or planned is None else Solved(after.problem.problem, planned),
            after=after,
            apart=apart,
            forced=self._is_forced(facts.view.collectives),
            insist='async_tp="force"',
        )

    def _left_alone(self, facts: Facts) -> Outcome | None:
        """The outcome when nothing may be done, None when something may."""
        found = facts.view.collectives
        if all(self.mode_of(c) == "off" for c in found):
            decisions = [refused(c, Reason.DISABLED, "", 'async_tp="auto"') for c in found]
        elif not facts.ranks_agree:
            # Prices differ with the pieces, and "force" chooses by price too.
            why = UNEQUAL if facts.agreed else NOT_AGREED
            decisions = [refused(c, Reason.RANKS_DIFFER, why) for c in found]
        else:
            return None
        return Outcome(PassReport(self.name, decisions=decisions))

    def _tried_apart(self, graph: torch.fx.Graph, facts: Facts, wholes: list[Collective]) -> Outcome:
        """Asks which coalesced collectives have members that become part of a region when all are taken apart.

        A coalesced collective cannot be cut into parts; its members can. The other members travel alone then, or with
        others of their kind: the whole graph is compared with the graph as it came, and bucketing runs later.
        """
        splits = [split(graph, c) for c in wholes]
        chosen = Selection(self, facts.of(graph)).members()
        names = frozenset(one.name for one in splits if not chosen.isdisjoint(one.starts))
        return Outcome(PassReport(self.name, changed=True), again=replace(self, apart=names))

    def _is_forced(self, collectives: Iterable[Collective]) -> bool:
        return any(self.mode_of(c) == "force" for c in collectives)

    def _to_beat(self, selection: Selection, whole: Plan | None) -> Plan | None:
        """The plan of the graph as it came; None where regions are forced, or sizes have no hint."""
        if self.trials is not None:
            return self.trials.before.plan
        if self._is_forced(selection.view.collectives) or selection.before is None:
            return None
        if whole is None:
            return selection.before
        # What has to be beaten is the graph with its coalesced collectives whole.
        return min(whole, selection.before, key=lambda p: (not p.feasible, p.makespan_ns))

    def _norms(self, graph: torch.fx.Graph, facts: Facts) -> norms.Fused:
        """All-reduces with residual and norm become one operator, where kernels may be used."""
        wanted: dict[Collective, Literal["auto", "force"]] = {}
        for collective in facts.view.collectives if self.lowering in ("auto", "kernels") else ():
            mode = self.mode_of(collective)
            if mode != "off":
                wanted[collective] = "force" if mode == "force" and self.lowering == "kernels" else "auto"
        return norms.fuse(graph, facts.view, facts.profile, wanted)


def _certificate(
    name: str, before: set[str], graph: torch.fx.Graph, replaced: tuple[tuple[str, str], ...]
) -> Certificate:
    """What became of the nodes that were called ``before``."""
    names = {n.name for n in graph.nodes}
    return Certificate(name, tuple(sorted(before - names)), tuple(sorted(names - before)), replaced)


def _planned(facts: Facts) -> Plan | None:
    """The plan of the graph as it came; None where sizes have no hint."""
    try:
        return plan(facts.problem.problem, facts.limit_bytes, effort=0)
    except NoHintError:
        return None


def _lower(
    graph: torch.fx.Graph, selection: Selection, chosen: list[Priced]
) -> tuple[list[Lowered], frozenset[str]]:
    """Carry out the selected regions, in place; what was done, and the starts that this made."""
    starts = {n.name for n in graph.nodes if ops.role(n) is Role.START}
    position = dict(selection.view.position)
    keys: dict[torch.fx.Node, OrderKey] = {}
    moved: dict[torch.fx.Node, torch.fx.Node] = {}
    lowered: list[Lowered] = []
    for priced in chosen:
        one = selection.choices[priced].lowering.lower(priced, selection.graph, position, moved)
        keys.update(one.keys)
        lowered.append(one)
    if chosen:
        arrange(graph, legal_order(graph, keys, position))
    return lowered, frozenset(n.name for n in graph.nodes if ops.role(n) is Role.START and n.name not in starts)
