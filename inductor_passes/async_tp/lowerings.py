"""The ways to carry out a region, behind one interface, and the choice among them.

A lowering says whether it fits a region, what it costs and how to put it into the graph. ``decompose`` fits every
region; the others replace each collective of a region and the matmuls next to it (``sites``) by one operator and
leave the region's other members as they are, so they fit where every collective of the region is a site.

The choice is a pure function of region, settings, cost profile and what was established about the process groups
(``availability``), all of them equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp import lower_decompose, lower_kernels, lower_op, lower_symm_mem
from inductor_passes.async_tp.gate import Priced
from inductor_passes.async_tp.lower_decompose import Lowered
from inductor_passes.async_tp.region import Region
from inductor_passes.async_tp.sites import Replacement, Site, sites
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.cost.fused import fused_ns, product_size
from inductor_passes.cost.profile import CostProfile
from inductor_passes.cost.values import dtype_name
from inductor_passes.groups.availability import UNKNOWN, Availability, availability
from inductor_passes.ir.view import GraphView
from inductor_passes.settings.async_tp import AsyncTpLowering


@dataclass(frozen=True, eq=False)
class Graph:
    """What lowerings need to know about the graph that the regions are from.

    Attributes:
        owned: nodes that belong to a region that is carried out.
        prepared: what makes shards of unequal size equal before they are gathered: some ranks need it, others do not.
    """

    view: GraphView
    profile: CostProfile
    costs: ComputeCosts
    owned: dict[torch.fx.Node, Region] = field(default_factory=dict)
    prepared: frozenset[torch.fx.Node] = frozenset()
    _sites: dict[Region, tuple[Site, ...] | str] = field(default_factory=dict)

    def sites(self, region: Region) -> tuple[Site, ...] | str:
        """The region's sites, found before anything is lowered."""
        if region not in self._sites:
            self._sites[region] = sites(region, self.view, self.owned)
        return self._sites[region]


class Lowering(Protocol):
    """One way to carry out regions."""

    @property
    def name(self) -> str:
        """As in the setting ``async_tp_lowering``."""

    def fits(self, region: Region, graph: Graph) -> str | None:
        """None when the region can be carried out so, else why not."""

    def price_ns(self, priced: Priced, graph: Graph) -> int:
        """Time of a region that fits, alone, like ``Priced.after_ns``."""

    def lower(
        self,
        priced: Priced,
        graph: Graph,
        position: dict[torch.fx.Node, int],
        moved: dict[torch.fx.Node, torch.fx.Node],
    ) -> Lowered:
        """Replace a region that fits, in place; arguments and result as ``lower_decompose.lower``."""


@dataclass(frozen=True)
class Decompose:
    """Parts as ordinary graph nodes."""

    name: str = "decompose"

    def fits(self, region: Region, graph: Graph) -> str | None:
        """Always."""
        return None

    def price_ns(self, priced: Priced, graph: Graph) -> int:
        """What the cost gate says."""
        return priced.after_ns

    def lower(
        self,
        priced: Priced,
        graph: Graph,
        position: dict[torch.fx.Node, int],
        moved: dict[torch.fx.Node, torch.fx.Node],
    ) -> Lowered:
        """See ``lower_decompose``."""
        return lower_decompose.lower(
            graph.view.graph, priced.region, priced.order.order, position, moved, graph.prepared
        )


@dataclass(frozen=True)
class Opaque:
    """One operator per collective.

    Attributes:
        unfit: why a site cannot be computed by the operator; "" when it can.
        put: puts the operator in the place of a site.
    """

    name: str
    unfit: Callable[[Site, Availability], str]
    put: Callable[[Replacement, Site, Region], None]

    def fits(self, region: Region, graph: Graph) -> str | None:
        """None when every collective is a site that the operator can compute."""
        found = graph.sites(region)
        if isinstance(found, str):
            return found
        for site in found:
            why = self.unfit(site, availability(site.collective.group.name))
            if why:
                return f"{site.collective.label}: {why}"
        return None

    def price_ns(self, priced: Priced, graph: Graph) -> int:
        """The region as it was, with the fused time of every site in the place of its matmuls and collective.

        Crude: nothing else of the region is taken to overlap with it.
        """
        region = priced.region
        found = graph.sites(region)
        assert not isinstance(found, str)
        total, least = priced.before_ns, 0
        for site in found:
            one, total_rows = site.collective, (_torch.size_hint(site.rows) or 0) * site.collective.group.size
            given, received, ranks = one.input_bytes or 0, one.output_bytes or 0, one.group.ranks
            left = site.products[0].left.meta["val"]
            products = [product_size(left, form.right.meta["val"], total_rows) for form in site.products]
            fused = fused_ns(
                self.name, graph.profile, one.kind, (given, received), products, dtype_name(left), ranks, region.parts
            )
            for form in site.products:
                whole = graph.costs.duration_ns(form.node)
                total -= whole
                least -= 0 if form.node in region.cuts else whole
            total -= graph.profile.communication_ns(one.kind, given, received, ranks)
            total -= graph.profile.issue_ns(one.kind, given, received, ranks)
            total += fused
            least += fused
        return max(total, least, 0)

    def lower(
        self,
        priced: Priced,
        graph: Graph,
        position: dict[torch.fx.Node, int],
        moved: dict[torch.fx.Node, torch.fx.Node],
    ) -> Lowered:
        """See ``sites.Replacement``."""
        into = Replacement(graph.view.graph, priced.region, graph.view, position, moved)
        found = graph.sites(priced.region)
        assert not isinstance(found, str)
        for site in found:
            self.put(into, site, priced.region)
        return into.result


DECOMPOSE = Decompose()
#: In the order in which equal prices are taken.
ALL: Mapping[str, Lowering] = MappingProxyType(
    {
        "decompose": DECOMPOSE,
        "kernels": Opaque("kernels", lower_kernels.unfit, lower_kernels.replace),
        "symm_mem": Opaque("symm_mem", lower_symm_mem.unfit, lower_symm_mem.replace),
        "op": Opaque("op", lower_op.unfit, lower_op.replace),
    }
)
#: What ``auto`` chooses among. ``op`` sends one message at a time and hides nothing else: it has to be asked for.
AUTOMATIC = ("decompose", "kernels", "symm_mem")


@dataclass(frozen=True, eq=False)
class LoweringChoice:
    """How a region is carried out.

    Attributes:
        priced: the region, at the price of the lowering.
        note: why it is not what was asked for; "" when it is.
    """

    lowering: Lowering
    priced: Priced
    note: str = ""


def others_fit_anything(setting: AsyncTpLowering, groups: Iterable[str]) -> bool:
    """Whether a lowering other than ``decompose`` can be had at all on one of these process groups."""
    if setting in ("decompose", "op"):
        return setting == "op"
    known = [availability(name) for name in groups]
    return any(not one.kernels or not one.symmetric_memory for one in known)


def choose_all(setting: AsyncTpLowering, regions: Sequence[Priced], graph: Graph) -> dict[Priced, LoweringChoice]:
    """The lowering of every region that is carried out; together, because matmuls of no region go to one of them."""
    graph.owned.update({node: p.region for p in regions for node in p.region.cuts})
    found = {}
    for priced in regions:
        found[priced] = choose_lowering(setting, priced, graph)
        taken = graph.sites(priced.region)
        if found[priced].lowering is not DECOMPOSE and not isinstance(taken, str):
            graph.owned.update({form.node: priced.region for site in taken for form in site.products})
    return found


def choose_lowering(setting: AsyncTpLowering, priced: Priced, graph: Graph) -> LoweringChoice:
    """The lowering of a region: the cheapest one that fits (``auto``), or the one asked for where it fits."""
    if setting != "auto":
        asked = ALL[setting]
        why = asked.fits(priced.region, graph)
        if why is not None:
            return LoweringChoice(DECOMPOSE, priced, f"{setting} does not fit: {why}")
        return LoweringChoice(asked, _at(priced, asked.price_ns(priced, graph)))
    best = LoweringChoice(DECOMPOSE, priced)
    for name in AUTOMATIC[1:]:
        why = ALL[name].fits(priced.region, graph)
        if why is not None:
            if why.endswith(UNKNOWN) and _on_accelerator(priced.region):
                best = replace(best, note=f"kernels and symm_mem: {UNKNOWN}")
            continue
        after = ALL[name].price_ns(priced, graph)
        if after < best.priced.after_ns:
            best = LoweringChoice(ALL[name], _at(priced, after))
    return best


def _at(priced: Priced, after_ns: int) -> Priced:
    return replace(priced, after_ns=after_ns, gain_ns=priced.gain_ns + priced.after_ns - after_ns)


def _on_accelerator(region: Region) -> bool:
    value = region.collectives[0].inputs[0].meta["val"]
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"
