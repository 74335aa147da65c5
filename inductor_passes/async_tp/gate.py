"""Which cut of a collective pays, if any: the cost gate.

A region's time before and after comes from the same small simulation (``timeline``) under one cost profile: smaller
matmuls at the rate of their size, a latency and an issue per part, copies for parts that are not contiguous and for
putting results together. What is gained can at most be what the schedule of the whole graph leaves exposed, because
communication that other work hides already is not worth smaller matmuls.

A pure function of shapes (by hint), group layout, settings and profile: all ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp import matmul
from inductor_passes.async_tp.region import Region
from inductor_passes.async_tp.rules import shape_of
from inductor_passes.async_tp.slab import Partial, Slab, scattered
from inductor_passes.async_tp.timeline import Costs, Instance, Run, run
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.cost.flops import flops, library_shape
from inductor_passes.cost.profile import CostProfile
from inductor_passes.cost.values import dtype_name, value_bytes
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import Collective, GraphView


@dataclass(frozen=True, eq=False)
class Priced:
    """A region with what it costs and saves.

    Attributes:
        before_ns / after_ns: makespan of the region alone, whole and in parts (with putting together).
        overhead_ns: work that the compute lane has in addition.
        gain_ns: what the graph gains; at most what is exposed in it.
        order: of the parts.
    """

    region: Region
    before_ns: int
    after_ns: int
    overhead_ns: int
    gain_ns: int
    order: Run


class Pricer:
    """Prices regions of one graph.

    Args:
        exposed_ns: per start's name, what the schedule of the graph as it is leaves exposed; None: all of it counts.
    """

    def __init__(
        self,
        view: GraphView,
        profile: CostProfile,
        costs: ComputeCosts,
        exposed_ns: Mapping[str, int] | None = None,
    ) -> None:
        self._view, self._profile, self._costs, self._exposed = view, profile, costs, exposed_ns
        self._kernel_ns = profile.compute_ns(0, 0, "float32", 1)

    def link_ns(self, start: torch.fx.Node, width: int = 1, units: int = 1) -> int:
        """Time on the link of a collective, or of a part of it."""
        one = self._view.by_start[start]
        given, received = _share(one.input_bytes or 0, width, units), _share(one.output_bytes or 0, width, units)
        return self._profile.communication_ns(one.kind, given, received, one.group.ranks)

    def is_hidden(self, collective: Collective) -> bool:
        """Whether nothing of it is exposed in the graph as it is, so that parts of it hide nothing."""
        return self._exposed is not None and not self._exposed.get(collective.start.name, 0)

    def price(self, region: Region) -> Priced:
        """See :class:`Priced`."""
        widths, units = region.widths, region.units
        # Parts of one width cost the same.
        part_ns = cache(lambda n, width: self._part_ns(region, n, width))
        whole = run(region, self._view, 1, Costs(lambda n, _: self._whole_ns(n), lambda n, _: self.link_ns(n)))
        split = run(
            region,
            self._view,
            region.parts,
            Costs(
                lambda n, part: part_ns(n, widths[part]),
                lambda n, part: self.link_ns(n, widths[part], units),
            ),
        )
        joining = self._joining_ns(region)
        after = split.makespan_ns + joining
        overhead = split.compute_ns + joining - whole.compute_ns
        gain = self._gain_ns(region, whole.makespan_ns - after, overhead)
        return Priced(region, whole.makespan_ns, after, overhead, gain, split)

    def like(self, priced: Priced, region: Region, order: tuple[Instance, ...]) -> Priced:
        """The price of a region that differs from another one in nothing but what is exposed of its collectives.

        Args:
            order: of the other one's parts, in the nodes of this one.
        """
        gain = self._gain_ns(region, priced.before_ns - priced.after_ns, priced.overhead_ns)
        return replace(priced, region=region, gain_ns=gain, order=replace(priced.order, order=order))

    def duration_ns(self, node: torch.fx.Node) -> int:
        """Time of a node on the compute lane, where it computes."""
        return self._costs.duration_ns(node)

    def _gain_ns(self, region: Region, alone_ns: int, overhead_ns: int) -> int:
        """What the graph gains of what a region gains alone."""
        if self._exposed is None:
            return alone_ns
        exposed = sum(self._exposed.get(c.start.name, 0) for c in region.collectives)
        return min(alone_ns, exposed - max(0, overhead_ns))

    def _issue_ns(self, start: torch.fx.Node, width: int = 1, units: int = 1) -> int:
        one = self._view.by_start[start]
        given, received = _share(one.input_bytes or 0, width, units), _share(one.output_bytes or 0, width, units)
        return self._profile.issue_ns(one.kind, given, received, one.group.ranks)

    def _copy_ns(self, size_bytes: int) -> int:
        return self._profile.compute_ns(0, 2 * size_bytes, "float32", 1)

    def _whole_ns(self, node: torch.fx.Node) -> int:
        role = self._view.role(node)
        if role is Role.START:
            return self._issue_ns(node)
        return 0 if role is Role.WAIT else self._costs.duration_ns(node)

    def _part_ns(self, region: Region, node: torch.fx.Node, width: int) -> int:
        role, units = self._view.role(node), region.units
        if role is Role.WAIT:
            return 0
        copies = 0
        for operand, wanted in region.needs[node].items():
            if wanted is None or operand in region.cuts:
                continue
            multiplies = matmul.canonical(node) is not None and scattered(operand.meta["val"], wanted, width)
            if wanted.outer > 1 or multiplies or (role is Role.START and not _leading(operand, wanted)):
                copies += self._copy_ns(_share(value_bytes(operand.meta.get("val")), width, units))
        if role is Role.START:
            return self._issue_ns(node, width, units) + copies
        if matmul.canonical(node) is not None:
            return self._matmul_ns(region, node, width) + copies
        whole = self._costs.duration_ns(node)
        if not whole:
            return copies
        return max(_share(whole, width, units), min(whole, self._kernel_ns)) + copies

    def _matmul_ns(self, region: Region, node: torch.fx.Node, width: int) -> int:
        count, units = flops(node) or 0, region.units
        moved = 0
        for operand in node.all_input_nodes:
            size = value_bytes(operand.meta.get("val"))
            moved += size if region.needs[node].get(operand) is None else _share(size, width, units)
        out = value_bytes(node.meta["val"])
        moved += out if isinstance(region.cuts[node], Partial) else _share(out, width, units)
        dtype = dtype_name(next(iter(node.all_input_nodes)).meta.get("val"))
        return self._profile.compute_ns(count * width / units, moved, dtype, 1, self._part_shape(region, node, width))

    def _part_shape(self, region: Region, node: torch.fx.Node, width: int) -> tuple[str, int] | None:
        """The shape of a part of a matmul, for its price."""
        whole, cut = library_shape(node), region.cuts[node]
        form = matmul.canonical(node)
        if whole is None or form is None or not isinstance(cut, Slab) or form.dot_dim(cut) is matmul.DotDim.BATCH:
            return whole
        return whole[0], min(whole[1], cut.outer * width * (_torch.size_hint(cut.inner) or 1))

    def _joining_ns(self, region: Region) -> int:
        total = 0
        for node in region.joined():
            size = value_bytes(node.meta["val"])
            cut = region.cuts[node]
            if isinstance(cut, Partial):
                total += region.parts * self._copy_ns(size)
            elif isinstance(cut, Slab) and (matmul.canonical(node) is None or not _leading(node, cut)):
                # A matmul writes its part of the result in place where parts are blocks of rows.
                total += self._copy_ns(size)
        return total


def _share(whole: int, width: int, units: int) -> int:
    return whole * width // units


def _leading(node: torch.fx.Node, cut: Slab) -> bool:
    """Whether parts are contiguous: all dimensions outside of the cut have one element."""
    shape = shape_of(node)
    return cut.outer == 1 and math.prod(s if isinstance(s, int) else 2 for s in shape[: cut.dim]) == 1
