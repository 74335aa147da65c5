"""Recognising a redistribution in a graph: gathers, exchanges, own slices and reductions, one after the other.

A chain is read as changes of a layout on a small mesh whose dimensions are the groups that occur in it. Nothing says
how the tensor is cut by other mesh dimensions, and nothing needs to: they stay as they are. Along each tensor dimension
cuts form a stack (the innermost cut last): a gather takes the innermost cut off, a slice puts one on. A gather of a cut
that no slice of the chain put there shows a cut of the source, outside of those that were shown before. A reduction
shows that the source was pending along its group; one that scatters puts a cut on.

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
from inductor_passes.ir.view import Collective, behind
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.prepare import prepared_partitions
from inductor_passes.redistribute.spec import REDUCE_OPS, Layout, MeshCut
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import is_split, name_of, pieces_read
from inductor_passes.rewrites.origin import origin_of
from inductor_passes.rewrites.packing import Joined, joined_split, static_shape, zero_padded_dims
from inductor_passes.rewrites.permutation import unpack_ahead
from inductor_passes.rewrites.work import EXCHANGE, Work, refuse

Ranks = tuple[int, ...]
_REDUCTIONS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)


@dataclass
class Chain:
    """A chain so far.

    Attributes:
        source: what the first collective reads; ``node`` is what the last step made.
        nodes: all nodes, users last.
        cuts / source_cuts: groups that cut each tensor dimension, now and at the source, outermost first.
        pending: groups along which the source is pending reduction, with the reduce op.
        reductions: their collectives.
        groups: in order of occurrence.
        collectives_ns / copied_bytes: what the chain costs.
        steps: short names, e.g. ``gather 0 (4)``.
    """

    source: torch.fx.Node
    node: torch.fx.Node
    nodes: list[torch.fx.Node] = field(default_factory=list)
    cuts: list[list[Ranks]] = field(default_factory=list)
    source_cuts: list[list[Ranks]] = field(default_factory=list)
    groups: dict[Ranks, None] = field(default_factory=dict)
    pending: dict[Ranks, str] = field(default_factory=dict)
    reductions: list[Collective] = field(default_factory=list)
    collectives_ns: int = 0
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
            # Ranks that reduced together, or gathered, hold the same: a gather of that repeats it.
            if group in self.pending or any(group in cuts for cuts in self.source_cuts):
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

    def reduce(self, group: Ranks, op: str, dim: int | None) -> bool:
        """Reduce along ``group``, and cut ``dim`` by it if given; False when the group did anything here before."""
        if any(len(set(group) & set(other)) > 1 for other in self.groups):
            return False
        self.groups[group] = None
        self.pending[group] = op
        if dim is not None:
            self.cuts[dim].append(group)
        self.steps.append(f"{op} ({len(group)})" if dim is None else f"{op} to {dim} ({len(group)})")
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
            dict(self.pending),
            list(self.reductions),
            self.collectives_ns,
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

        def layout(cuts: list[list[Ranks]], pending: dict[Ranks, str]) -> Layout:
            numbered: tuple[tuple[MeshCut, ...], ...] = tuple(tuple((number[g], 1) for g in groups) for groups in cuts)
            return Layout(mesh.shape, tuple(shape), numbered, tuple(pending.get(g, "") for g in self.groups))

        # Cuts of the source that the chain never touched are cuts of the result as well.
        return layout(self.source_cuts, self.pending), layout(self.cuts, {})

    def as_pairs(self, layouts: tuple[Layout, Layout]) -> tuple[Layout, Layout]:
        """The layouts of :meth:`layouts` with complex elements read as pairs along one more dimension."""
        first, last = (replace(one, shape=(*one.shape, 2), cuts=(*one.cuts, ())) for one in layouts)
        return first, last


def chains_from(work: Work, root: torch.fx.Node) -> list[Chain]:
    """The chain that begins at a collective, as it is after each of its steps."""
    first = work.collective(root, CollectiveKind.ALL_GATHER, *_REDUCTIONS)
    if first is None and name_of(root) != EXCHANGE:
        return []
    source = first.inputs[0] if first is not None else root.all_input_nodes[0]
    step: torch.fx.Node | None = root
    if first is not None and first.kind is CollectiveKind.REDUCE_SCATTER:
        packed = _packed_by(source, first)
        if packed is not None:
            source, step = packed.source, packed.nodes[0]
    shape = static_shape(source)
    if shape is None or not shape:
        return []
    chain = Chain(source, source, cuts=[[] for _ in shape], source_cuts=[[] for _ in shape])
    found: list[Chain] = []
    padded = zero_padded_dims(source)
    while step is not None and _extend(work, chain, step):
        found.append(chain.copy())
        if any(cuts for d, cuts in enumerate(chain.cuts) if d in padded):
            # Some rank trims the padding off here: no rank goes on.
            break
        step = next(iter(chain.node.users)) if len(chain.node.users) == 1 else None
    return found


def _extend(work: Work, chain: Chain, step: torch.fx.Node) -> bool:
    """Append the step that begins at a node; False when it is none of a chain's."""
    gather = work.collective(step, CollectiveKind.ALL_GATHER)
    if gather is not None:
        return _gathered(work, chain, step)
    if work.collective(step, *_REDUCTIONS) is not None:
        return _reduced(work, chain, step)
    if name_of(step) == EXCHANGE:
        return _exchanged(chain, step)
    if name_of(step) == "aten::clone":
        chain.nodes.append(step)
        chain.node = step
        chain.copied_bytes += _bytes(step)
        return True
    if not is_split(step):
        return False
    return _sliced(work, chain, step) or _scattered(work, chain, step)


def _reduced(work: Work, chain: Chain, start: torch.fx.Node, packed: Joined | None = None) -> bool:
    """An all_reduce, or a reduce_scatter of dimension 0 or of the one that was packed."""
    reduction = work.collective(start, *_REDUCTIONS)
    assert reduction is not None
    dim = None if reduction.kind is CollectiveKind.ALL_REDUCE else packed.split_dim if packed is not None else 0
    if reduction.reduce_op not in REDUCE_OPS or {*chain.pending.values()} - {reduction.reduce_op}:
        return False
    if not chain.reduce(tuple(sorted(reduction.group.ranks)), reduction.reduce_op, dim):
        return False
    (wait,) = reduction.waits
    if packed is not None:
        chain.copied_bytes += _bytes(packed.cat)
        chain.nodes += packed.nodes
    chain.nodes += [start, wait]
    chain.node = wait
    chain.collectives_ns += work.price_ns(reduction)
    chain.reductions.append(reduction)
    return True


def _scattered(work: Work, chain: Chain, split: torch.fx.Node) -> bool:
    """A reduce_scatter whose pack begins with a split."""
    last = next(reversed(split.users), None)
    cat = next(iter(last.users), None) if last is not None else None
    start = next(iter(cat.users), None) if cat is not None and len(cat.users) == 1 else None
    scatter = work.collective(start, CollectiveKind.REDUCE_SCATTER) if start is not None else None
    if cat is None or start is None or scatter is None:
        return False
    packed = _packed_by(cat, scatter)
    return packed is not None and packed.source is chain.node and _reduced(work, chain, start, packed)


def _packed_by(cat: torch.fx.Node, scatter: Collective) -> Joined | None:
    """The pieces of another dimension than the first, side by side along that: what a reduce_scatter sends."""
    packed = joined_split(cat)
    if packed is None or not packed.closed or packed.padding or not packed.even or len(cat.users) != 1:
        return None
    return packed if packed.cat_dim == 0 and packed.pieces == scatter.group.size else None


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
    chain.collectives_ns += work.price_ns(gather)
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
    if pieces_read(split) != {piece.args[1]}:
        return None
    rank = _torch.process_rank()
    groups = [g for p in prepared_partitions() if len(p[0]) == len(pieces) for g in p if rank in g]
    if len(groups) != 1:
        return None
    return groups[0] if groups[0].index(rank) == piece.args[1] else None


def refuse_ambiguous(chain: Chain) -> None:
    """Refuse where a chain ends at a slice that may be the rank's own along one of several groups."""
    split = next(iter(chain.node.users)) if len(chain.node.users) == 1 else None
    if split is None or not is_split(split) or not origin_of(split).explicit:
        return
    count, rank = len(split.meta["val"]), _torch.process_rank()
    groups = sum(len(p[0]) == count and any(rank in g for g in p) for p in prepared_partitions())
    if groups > 1 and sum(bool(piece.users) for piece in split.users) == 1:
        refuse(Reason.DIFFERENT_GROUP, f"one of {count} pieces may be the rank's own in {groups} groups of that size")


def _bytes(node: torch.fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel()) * int(value.dtype.itemsize)
