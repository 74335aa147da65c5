"""Recognising a redistribution in a graph: gathers, exchanges and own slices, one after the other.

A chain is read as changes of a layout on a small mesh whose dimensions are the groups that occur in it. Nothing says
how the tensor is cut by other mesh dimensions, and nothing needs to: they stay as they are. Along each tensor dimension
cuts form a stack (the innermost cut last): a gather takes the innermost cut off, a slice puts one on. A gather of a cut
that no slice of the chain put there shows a cut of the source, outside of those that were shown before.

Which group a slice belongs to. The graph of one rank says "piece 2 of 4"; that this is the rank's own piece along some
mesh dimension is not in the graph. It is taken as proven when the slice was traced from one of DTensor's conversions
(which slice in no other way), when exactly one of the prepared groups has as many ranks as there are pieces, and when
the rank is that member of it. All three hold on all ranks or on none.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.view import behind
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.prepare import prepared_partitions
from inductor_passes.redistribute.spec import Layout, MeshCut
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import is_split, name_of
from inductor_passes.rewrites.origin import origin_of
from inductor_passes.rewrites.packing import static_shape
from inductor_passes.rewrites.permutation import unpack_ahead
from inductor_passes.rewrites.work import Work, refuse

Ranks = tuple[int, ...]


@dataclass
class Chain:
    """A chain so far.

    Attributes:
        source: what the first collective reads; ``node`` is what the last step made.
        nodes: all nodes, users last.
        cuts / source_cuts: groups that cut each tensor dimension, now and at the source, outermost first.
        groups: in order of occurrence.
        link_ns / copied_bytes: what the chain costs.
        steps: short names, e.g. ``gather 0 (4)``.
    """

    source: torch.fx.Node
    node: torch.fx.Node
    nodes: list[torch.fx.Node] = field(default_factory=list)
    cuts: list[list[Ranks]] = field(default_factory=list)
    source_cuts: list[list[Ranks]] = field(default_factory=list)
    groups: dict[Ranks, None] = field(default_factory=dict)
    link_ns: int = 0
    copied_bytes: int = 0
    steps: list[str] = field(default_factory=list)

    def gather(self, dim: int, group: Ranks) -> bool:
        """Take the innermost cut of ``dim`` off; False when it is another group's."""
        self.groups[group] = None
        if self.cuts[dim]:
            if self.cuts[dim][-1] != group:
                return False
            self.cuts[dim].pop()
        else:
            if any(group in cuts for cuts in self.source_cuts):
                return False
            self.source_cuts[dim].insert(0, group)
        self.steps.append(f"gather {dim} ({len(group)})")
        return True

    def slice(self, dim: int, group: Ranks) -> bool:
        """Cut ``dim`` by ``group``; False when that cuts something already."""
        if any(group in cuts for cuts in self.cuts):
            return False
        self.groups[group] = None
        self.cuts[dim].append(group)
        self.steps.append(f"slice {dim} ({len(group)})")
        return True

    def copy(self) -> Chain:
        """Independent of what is appended later."""
        return Chain(
            self.source,
            self.node,
            list(self.nodes),
            [list(c) for c in self.cuts],
            [list(c) for c in self.source_cuts],
            dict(self.groups),
            self.link_ns,
            self.copied_bytes,
            list(self.steps),
        )

    def mesh(self) -> Mesh:
        """The groups as dimensions of a mesh, slow ones first. Refuses groups that form no grid."""
        groups = sorted(self.groups, key=lambda g: (g[-1] - g[0], g), reverse=True)
        own = set(groups[0]).intersection(*groups[1:])
        if len(groups) > 1 and len(own) != 1:
            refuse(Reason.DIFFERENT_GROUP, "the groups form no grid")
        rank = min(own)
        ranks = [rank]
        for group in groups:
            ranks = [r + member - rank for r in ranks for member in group]
        if len(set(ranks)) != len(ranks) or min(ranks) < 0 or sorted(ranks) != ranks:
            refuse(Reason.DIFFERENT_GROUP, "the groups form no grid")
        self.groups = dict.fromkeys(groups)
        mesh = Mesh(tuple(map(len, groups)), tuple(ranks))
        for m, group in enumerate(groups):
            # The other ranks' groups are known from the partition only: they need not be shifted copies of this one.
            known = [set(p) for p in prepared_partitions() if group in p]
            if not any(p.issuperset(mesh.groups((m,))) for p in known):
                refuse(
                    Reason.DIFFERENT_GROUP,
                    "the groups of the other ranks are not known",
                    "inductor_passes.prepare_groups(mesh) before compiling",
                )
        return mesh

    def layouts(self, mesh: Mesh) -> tuple[Layout, Layout]:
        """Of the source and of the result, on the mesh of :meth:`mesh`."""
        number = {group: k for k, group in enumerate(self.groups)}
        local = static_shape(self.source) or []
        shape = list(local)
        for d, cuts in enumerate(self.source_cuts):
            for group in cuts:
                shape[d] *= len(group)

        def layout(cuts: list[list[Ranks]]) -> Layout:
            numbered: tuple[tuple[MeshCut, ...], ...] = tuple(tuple((number[g], 1) for g in groups) for groups in cuts)
            return Layout(mesh.shape, tuple(shape), numbered, ("",) * mesh.ndim)

        # Cuts of the source that the chain never touched are cuts of the result as well.
        return layout(self.source_cuts), layout(self.cuts)

    def as_pairs(self, layouts: tuple[Layout, Layout]) -> tuple[Layout, Layout]:
        """The layouts of :meth:`layouts` with complex elements read as pairs along one more dimension."""
        first, last = (replace(one, shape=(*one.shape, 2), cuts=(*one.cuts, ())) for one in layouts)
        return first, last


def chains_from(work: Work, root: torch.fx.Node) -> list[Chain]:
    """The chain that begins at a collective, as it is after each of its steps."""
    first = work.collective(root, CollectiveKind.ALL_GATHER)
    if first is None and name_of(root) != "_dtensor::shard_dim_alltoall":
        return []
    source = first.inputs[0] if first is not None else root.all_input_nodes[0]
    shape = static_shape(source)
    if shape is None or not shape:
        return []
    chain = Chain(source, source, cuts=[[] for _ in shape], source_cuts=[[] for _ in shape])
    found: list[Chain] = []
    step: torch.fx.Node | None = root
    while step is not None and _extend(work, chain, step):
        found.append(chain.copy())
        step = next(iter(chain.node.users)) if len(chain.node.users) == 1 else None
    return found


def _extend(work: Work, chain: Chain, step: torch.fx.Node) -> bool:
    """Append the step that begins at a node; False when it is none of a chain's."""
    gather = work.collective(step, CollectiveKind.ALL_GATHER)
    if gather is not None:
        return _gathered(work, chain, step)
    if name_of(step) == "_dtensor::shard_dim_alltoall":
        return _exchanged(chain, step)
    if name_of(step) == "aten::clone":
        chain.nodes.append(step)
        chain.node = step
        chain.copied_bytes += _bytes(step)
        return True
    return _sliced(work, chain, step) if is_split(step) else False


def _gathered(work: Work, chain: Chain, start: torch.fx.Node) -> bool:
    gather = work.collective(start, CollectiveKind.ALL_GATHER)
    assert gather is not None
    (wait,) = gather.waits
    nodes, node, dim = [start, wait], wait, 0
    unpack = unpack_ahead(wait, gather.group.size)
    if unpack is not None:
        dim, more = unpack
        nodes += more
        node = more[-1]
        chain.copied_bytes += _bytes(node)
    if not chain.gather(dim, tuple(sorted(gather.group.ranks))):
        return False
    chain.link_ns += work.price_ns(gather)
    chain.nodes += nodes
    chain.node = node
    return True


def _exchanged(chain: Chain, op: torch.fx.Node) -> bool:
    arguments = _torch.op_arguments(op)
    shape = static_shape(op)
    if shape is None:
        return False
    group = tuple(sorted(resolve(behind(arguments["group_name"])).ranks))
    gather_dim, shard_dim = arguments["gather_dim"] % len(shape), arguments["shard_dim"] % len(shape)
    source = static_shape(op.all_input_nodes[0])
    if not group or source is None or source[shard_dim] % len(group) or gather_dim == shard_dim:
        return False
    if not chain.gather(gather_dim, group) or not chain.slice(shard_dim, group):
        return False
    chain.copied_bytes += 2 * _bytes(op)
    chain.nodes.append(op)
    chain.node = op
    return True


def _sliced(work: Work, chain: Chain, split: torch.fx.Node) -> bool:
    used = [piece for piece in split.users if piece.users]
    if len(used) != 1 or used[0].target is not operator.getitem:
        return False
    (piece,) = used
    group = own_group(split, piece)
    if group is None or not chain.slice(int(_torch.op_arguments(split).get("dim", 0)) % piece.meta["val"].ndim, group):
        return False
    chain.nodes += [split, *split.users]
    chain.node = piece
    return True


def own_group(split: torch.fx.Node, piece: torch.fx.Node) -> Ranks | None:
    """The group of which a piece is the rank's own, proven as the module's docstring says; None without proof."""
    pieces = split.meta["val"]
    if not origin_of(split).explicit or len({str(p.shape) for p in pieces}) != 1 or len(pieces) < 2:
        return None
    rank = _torch.process_rank()
    candidates = [p for p in prepared_partitions() if len(p[0]) == len(pieces) and any(rank in g for g in p)]
    if len(candidates) != 1:
        return None
    (group,) = (g for g in candidates[0] if rank in g)
    return group if group.index(rank) == piece.args[1] else None


def _bytes(node: torch.fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel()) * int(value.dtype.itemsize)
