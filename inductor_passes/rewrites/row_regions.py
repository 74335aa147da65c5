"""Regions behind all_reduces that can be computed on each rank's share of the rows.

All_reduces of sums over one group with as many rows have one sweep over the graph; what is connected is one region.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.rewrites.movement import name_of
from inductor_passes.rewrites.packing import Size, sizes
from inductor_passes.rewrites.replicas import equal_and_own, tensor_operands
from inductor_passes.rewrites.rows import REDUCTIONS, Leads, Shares, adds_rows, is_free, lead_behind
from inductor_passes.rewrites.work import Work

Ranks = tuple[int, ...]


@dataclass
class Region:
    """One region.

    Attributes:
        shares: rows, and over how many ranks.
        sources: waits of the all_reduces that it begins at.
        leads: its nodes, sources included, with their leads; in graph order.
        sums: nodes that add up all rows of one of them.
        unknown: operands that may differ between ranks, at which it ends -> whether a rank's own numbers are in them.
        inputs: operands of every node as they were when it was found.
    """

    shares: Shares
    sources: dict[torch.fx.Node, Collective] = field(default_factory=dict)
    leads: Leads = field(default_factory=dict)
    sums: dict[torch.fx.Node, None] = field(default_factory=dict)
    unknown: dict[torch.fx.Node, bool] = field(default_factory=dict)
    inputs: dict[torch.fx.Node, list[torch.fx.Node]] = field(default_factory=dict)

    @property
    def start(self) -> torch.fx.Node:
        """The first all_reduce."""
        return min(source.start for source in self.sources.values())

    @property
    def reduces(self) -> bool:
        """Whether anything reduces a row: a norm."""
        return any(name_of(node) in REDUCTIONS for node in self.leads)

    def intact(self, work: Work) -> bool:
        """Whether its nodes are as they were found."""
        return all(work.alive(n) and n.all_input_nodes == inputs for n, inputs in self.inputs.items())

    def outside(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Who reads a node as a whole."""
        return [user for user in node.users if user not in self.leads and user not in self.sums]

    def handed_out(self) -> list[torch.fx.Node]:
        """The nodes that something else reads as a whole."""
        return [node for node in self.leads if self.outside(node)]

    def brought(self) -> Iterator[tuple[torch.fx.Node, torch.fx.Node]]:
        """(operand, reader) for what the region reads that is not in it."""
        for node in self.leads:
            if node not in self.sources:
                yield from ((o, node) for o in tensor_operands(node) if o not in self.leads)


def found(work: Work, *, implied: bool) -> list[Region]:
    """All regions of the graph as it is, in order of their first all_reduce; O(nodes + edges) per group.

    Args:
        implied: see :func:`~inductor_passes.rewrites.replicas.equal_values`.
    """
    sweep = _Sweep(work, implied)
    for start in work.collectives(CollectiveKind.ALL_REDUCE):
        reduction = work.collective(start, CollectiveKind.ALL_REDUCE)
        if reduction is not None:
            sweep.add(reduction)
    return sorted(sweep.run(), key=lambda region: region.start)


class _Sweep:
    """One walk over the graph behind all of its all_reduces."""

    def __init__(self, work: Work, implied: bool) -> None:
        self._work, self._implied = work, implied
        self._sources: dict[torch.fx.Node, Collective] = {}
        self._equal: dict[Ranks, set[torch.fx.Node]] = {}
        self._own: dict[Ranks, set[torch.fx.Node]] = {}
        #: node -> where its rows come from: nodes of one kind may be in one region
        self._kind: dict[torch.fx.Node, tuple[Ranks, Shares]] = {}
        self._leads: Leads = {}
        self._sums: dict[torch.fx.Node, None] = {}
        self._ends: list[tuple[torch.fx.Node, torch.fx.Node, bool]] = []
        self._parts = _Parts()

    def add(self, reduction: Collective) -> None:
        """Take an all_reduce as a source if it adds up rows of a known number."""
        (wait,), ranks = reduction.waits, reduction.group.ranks
        shape = sizes(wait)
        if shape is None or len(shape) < 2 or reduction.reduce_op not in ("sum", "avg") or self._work.is_written(wait):
            return
        if ranks not in self._equal:
            self._equal[ranks], self._own[ranks] = equal_and_own(self._work, ranks, implied=self._implied)
        self._sources[wait] = reduction
        rows: Size = math.prod(shape[:-1])
        self._kind[wait] = ranks, Shares(rows, len(ranks))

    def run(self) -> list[Region]:
        """The regions."""
        for node in self._work.graph.nodes if self._sources else ():
            if node in self._sources:
                self._leads[node] = self._kind[node][1].lead_of(sizes(node) or [])
            elif node.op == "call_function":
                self._follow(node)
        regions: dict[torch.fx.Node, Region] = {}
        for node in (*self._leads, *self._sums):
            kind = self._kind[node]
            region = regions.setdefault(self._parts.root(node), Region(kind[1]))
            region.inputs[node] = list(node.all_input_nodes)
            if node in self._sums:
                region.sums[node] = None
                continue
            region.leads[node] = self._leads[node]
            if node in self._sources:
                region.sources[node] = self._sources[node]
        for unknown, node, own in self._ends:
            regions[self._parts.root(node)].unknown[unknown] = own
        return list(regions.values())

    def _follow(self, node: torch.fx.Node) -> None:
        operands = tensor_operands(node)
        read = [o for o in operands if o in self._leads]
        if not read:
            return
        kind = self._kind[read[0]]
        if len(read) == 1 and adds_rows(node, self._leads[read[0]]):
            self._sums[node] = None
        else:
            lead = lead_behind(kind[1], node, self._leads)
            if not lead or any(self._kind[o] != kind for o in read):
                return
            equal = self._equal[kind[0]]
            unknown = [o for o in operands if o not in equal]
            # An implied value may be made of values of which nothing is known.
            if unknown or node not in equal or self._work.is_written(node):
                self._ends += [(o, read[0], o in self._own[kind[0]]) for o in unknown]
                return
            self._leads[node] = lead
        self._kind[node] = kind
        for operand in read:
            self._parts.join(node, operand)


class _Parts:
    """Sets that are joined: which nodes are connected."""

    def __init__(self) -> None:
        self._above: dict[torch.fx.Node, torch.fx.Node] = {}

    def root(self, node: torch.fx.Node) -> torch.fx.Node:
        """The one that stands for a node's set."""
        path = []
        while node in self._above:
            path.append(node)
            node = self._above[node]
        for one in path:
            self._above[one] = node
        return node

    def join(self, a: torch.fx.Node, b: torch.fx.Node) -> None:
        """Make two sets one."""
        a, b = self.root(a), self.root(b)
        if a is not b:
            self._above[max(a, b)] = min(a, b)


def pruned(work: Work, region: Region) -> Region:
    """The region without what costs less behind a gather: views, wider types, what is made of values that are gathered
    anyway. Sources that nothing is left of are no sources any more."""
    kept = Region(
        region.shares, dict(region.sources), dict(region.leads), dict(region.sums), region.unknown, region.inputs
    )
    for node in sorted(region.leads, reverse=True):
        users = list(node.users)
        if node in region.sources or not users or node.target is operator.getitem:
            continue
        if len(kept.outside(node)) == len(users) and _cheaper_whole(work, kept, node):
            del kept.leads[node]
    for wait in region.sources:
        if not any(user in kept.leads or user in kept.sums for user in wait.users):
            del kept.leads[wait], kept.sources[wait]
    return kept


def _cheaper_whole(work: Work, region: Region, node: torch.fx.Node) -> bool:
    """Whether a node that is read as a whole, and as nothing else, costs no more where its operands are gathered."""
    operands = [o for o in tensor_operands(node) if o in region.leads]
    if any(not isinstance(o.meta["val"], torch.Tensor) for o in operands):
        return False
    whole = sum(gather_ns(work, region, o) for o in operands if not region.outside(o))
    if not is_free(node):
        ranks = region.shares.ranks
        whole += work.facts.profile.compute_ns(0, 2 * size_bytes(node), "float32", 0) * (ranks - 1) // ranks
    return whole <= gather_ns(work, region, node)


def gather_ns(work: Work, region: Region, node: torch.fx.Node) -> int:
    """Time of gathering a node."""
    size, (source, *_) = size_bytes(node), region.sources.values()
    return work.collective_ns(CollectiveKind.ALL_GATHER, size // region.shares.ranks, size, source.group.ranks)


def size_bytes(node: torch.fx.Node) -> int:
    """Bytes of a node's whole result; symbolic sizes by their hints, 0 without any."""
    return _torch.tensor_bytes(node.meta["val"]) or 0
