"""Which cut of a collective pays, if any: the cost gate.

A region's time before and after comes from the same small simulation (``timeline``) under one cost profile: smaller
matmuls at the rate of their size, a latency and an issue per part, copies for parts that are not contiguous and for
putting results together. What is gained can at most be what the schedule of the whole graph leaves exposed, because
communication that other work hides already is not worth smaller matmuls.

A pure function of shapes (by hint), group layout, settings and profile: all ranks decide alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp import matmul
from inductor_passes.async_tp.region import Region
from inductor_passes.async_tp.rules import shape_of
from inductor_passes.async_tp.slab import Partial, Slab, scattered
from inductor_passes.async_tp.timeline import Costs, Run, run
from inductor_passes.cost.compute import ComputeCosts, flops, library_shape
from inductor_passes.cost.profile import CostProfile
from inductor_passes.cost.values import dtype_name, value_bytes
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView


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
        exposed_ns: per start, what the schedule of the graph as it is leaves exposed; None: all of it counts.
    """

    def __init__(
        self,
        view: GraphView,
        profile: CostProfile,
        costs: ComputeCosts,
        exposed_ns: dict[torch.fx.Node, int] | None = None,
    ) -> None:
        self._view, self._profile, self._costs, self._exposed = view, profile, costs, exposed_ns
        self._kernel_ns = profile.compute_ns(0, 0, "float32", 1)

    def link_ns(self, start: torch.fx.Node, parts: int = 1) -> int:
        """Time on the link of a collective, or of one of its parts."""
        one = self._view.by_start[start]
        given, received = one.input_bytes or 0, one.output_bytes or 0
        return self._profile.communication_ns(one.kind, given // parts, received // parts, one.group.ranks)

    def price(self, region: Region) -> Priced:
        """See :class:`Priced`."""
        whole = run(region, self._view, 1, Costs(lambda n, _: self._whole_ns(n), self.link_ns))
        split = run(
            region,
            self._view,
            region.parts,
            Costs(lambda n, part: self._part_ns(region, n, part), lambda n: self.link_ns(n, region.parts)),
        )
        joining = self._joining_ns(region)
        after = split.makespan_ns + joining
        overhead = split.compute_ns + joining - whole.compute_ns
        gain = whole.makespan_ns - after
        if self._exposed is not None:
            exposed = sum(self._exposed.get(c.start, 0) for c in region.collectives)
            gain = min(gain, exposed - max(0, overhead))
        return Priced(region, whole.makespan_ns, after, overhead, gain, split)

    def _issue_ns(self, start: torch.fx.Node, parts: int) -> int:
        one = self._view.by_start[start]
        given, received = one.input_bytes or 0, one.output_bytes or 0
        return self._profile.issue_ns(one.kind, given // parts, received // parts, one.group.ranks)

    def _copy_ns(self, size_bytes: int) -> int:
        return self._profile.compute_ns(0, 2 * size_bytes, "float32", 1)

    def _whole_ns(self, node: torch.fx.Node) -> int:
        role = self._view.role(node)
        if role is Role.START:
            return self._issue_ns(node, 1)
        return 0 if role is Role.WAIT else self._costs.duration_ns(node)

    def _part_ns(self, region: Region, node: torch.fx.Node, part: int) -> int:
        role, parts = self._view.role(node), region.parts
        if role is Role.WAIT:
            return 0
        copies = 0
        for operand, wanted in region.needs[node].items():
            if wanted is None or operand in region.cuts:
                continue
            multiplies = matmul.canonical(node) is not None and scattered(operand.meta["val"], wanted)
            if wanted.outer > 1 or multiplies or (role is Role.START and not _leading(operand, wanted)):
                copies += self._copy_ns(value_bytes(operand.meta.get("val")) // parts)
        if role is Role.START:
            return self._issue_ns(node, parts) + copies
        if matmul.canonical(node) is not None:
            return self._matmul_ns(region, node) + copies
        whole = self._costs.duration_ns(node)
        if not whole:
            return copies
        return max(whole // parts, min(whole, self._kernel_ns)) + copies

    def _matmul_ns(self, region: Region, node: torch.fx.Node) -> int:
        count = flops(node) or 0
        moved = 0
        for operand in node.all_input_nodes:
            size = value_bytes(operand.meta.get("val"))
            moved += size if region.needs[node].get(operand) is None else size // region.parts
        out = value_bytes(node.meta["val"])
        moved += out if isinstance(region.cuts[node], Partial) else out // region.parts
        dtype = dtype_name(next(iter(node.all_input_nodes)).meta.get("val"))
        return self._profile.compute_ns(count / region.parts, moved, dtype, 1, self._part_shape(region, node))

    def _part_shape(self, region: Region, node: torch.fx.Node) -> tuple[str, int] | None:
        """The shape of a part of a matmul, for its price."""
        whole, cut = library_shape(node), region.cuts[node]
        form = matmul.canonical(node)
        if whole is None or form is None or not isinstance(cut, Slab) or form.dot_dim(cut) is matmul.DotDim.BATCH:
            return whole
        return whole[0], min(whole[1], cut.outer * (_torch.size_hint(cut.inner) or 1))

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


def _leading(node: torch.fx.Node, cut: Slab) -> bool:
    """Whether parts are contiguous: all dimensions outside of the cut have one element."""
    shape = shape_of(node)
    return cut.outer == 1 and math.prod(s if isinstance(s, int) else 2 for s in shape[: cut.dim]) == 1
