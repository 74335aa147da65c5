"""One redistribution in a graph, found by the call that it was traced from, with the layouts at both of its ends.

All nodes that torch traced from one call, forward or backward, carry the call's note (``redistribute/noted.py``). They
are one redistribution when they read one tensor, when others read one result of theirs, and when they do nothing but
communicate and move elements. How they do it does not matter, and mesh dimensions of equal size need no case of their
own.

Forward, the note says both layouts. Backward it says the last one (the gradient is brought to where the operand was),
and the first is read from the collectives, from the last to the first: since the layout behind each of them is known,
so is the one before it. A slice took off the innermost cut of its dimension, a gather put one on, a reduction removed a
pending sum. What is read has to fit the sizes of this rank's tensor.

Every layout on the way has to cut evenly. Where one does not, ranks pad and trim differently, and this rank's graph
does not show what another one has.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.layouts import Noted, noted
from inductor_passes.ir.view import Collective, behind
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.noted import ends
from inductor_passes.redistribute.spec import REDUCE_OPS, Layout, Partial, Placement, Replicate, Shard, Spec
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import is_split, is_zero_padding, name_of, pieces_read
from inductor_passes.rewrites.origin import origin_of
from inductor_passes.rewrites.packing import static_shape
from inductor_passes.rewrites.permutation import unpack_ahead
from inductor_passes.rewrites.work import EXCHANGE, Work, refuse

UNEVEN = "sizes that the mesh does not divide"
_KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "clone", "alias",
        "slice", "split", "split_with_sizes", "chunk", "cat",
    )
)  # fmt: skip
_COPIES = frozenset({"aten::clone", "aten::cat", "aten::constant_pad_nd"})


@dataclass(frozen=True)
class Redistributed:
    """A redistribution as it stands in the graph.

    Attributes:
        source / result: the tensor that it reads, not among ``nodes``, and the one that others read of it.
        nodes: all of them, in graph order.
        before / after: layouts; along a mesh dimension that stays pending both say so.
        reductions: those among its collectives.
        collectives_ns / copied_bytes: what it costs as it is.
        steps: short names of its collectives, e.g. ``all_gather (4)``.
    """

    source: torch.fx.Node
    result: torch.fx.Node
    nodes: tuple[torch.fx.Node, ...]
    before: Spec
    after: Spec
    reductions: tuple[Collective, ...]
    collectives_ns: int
    copied_bytes: int
    steps: tuple[str, ...]

    def followed_by(self, other: Redistributed) -> Redistributed:
        """Both as one, where ``other`` reads this one's result."""
        return replace(
            self,
            result=other.result,
            nodes=self.nodes + other.nodes,
            after=other.after,
            reductions=self.reductions + other.reductions,
            collectives_ns=self.collectives_ns + other.collectives_ns,
            copied_bytes=self.copied_bytes + other.copied_bytes,
            steps=self.steps + other.steps,
        )


def redistributed(work: Work, root: torch.fx.Node) -> Redistributed | None:
    """The redistribution whose first collective is ``root``; None when its call is not known or it is another's.

    Raises:
        Refusal: the call is known, and what was traced from it is not what its layouts say.
    """
    note = noted(root.meta)
    if note is None:
        return None
    nodes = _traced_from(root, note)
    collectives = [node for node in nodes if _communicates(work, node)]
    if not collectives or collectives[0] is not root:
        return None
    source, result = _ends(nodes)
    value = source.meta["val"]
    shape, last = static_shape(source), static_shape(result)
    if shape is None or last is None or value.dtype != result.meta["val"].dtype:
        refuse(Reason.UNSUPPORTED, "symbolic sizes, or a cast inside of the redistribution")
    first, end = ends(note)
    mesh = first.mesh
    backward = origin_of(root).backward
    dims = {node: _dims(work, mesh, node) for node in collectives}
    steps = tuple(f"{name_of(node).partition('::')[2]} ({mesh.group_size(dims[node])})" for node in collectives)
    found = [work.collective(node, *_KINDS) for node in collectives]
    reductions = tuple(c for c in found if c is not None and c.kind is not CollectiveKind.ALL_GATHER)
    if any(c.reduce_op not in REDUCE_OPS for c in reductions):
        refuse(Reason.MIXED_REDUCE_OP, ", ".join(c.reduce_op for c in reductions))
    after = _pending(first, set().union(*dims.values())) if backward else end
    ways = list(_ways(work, nodes, dims, after))
    if backward:
        here = mesh.coordinates(_torch.process_rank())
        ways = [way for way in ways if way[-1].local_shape(here) == tuple(shape)]
    else:
        ways = [way for way in ways if way[-1] == first.layout]
    begins = {way[-1] for way in ways}
    # What another rewrite has changed may go no way that is known here. Forward, both ends are known all the same.
    even = not begins and all(size % math.prod(mesh.shape) == 0 for size in after.shape)
    if len(begins) != 1 and (backward or not even):
        refuse(Reason.UNSUPPORTED, f"{len(begins)} layouts that its collectives may come from")
    if not all(layout.is_even for way in ways for layout in way):
        refuse(Reason.UNSUPPORTED, UNEVEN)
    before = _spec_of(after, begins.pop()) if backward else first
    _fits(before, shape)
    _fits(after, last)
    dtype, itemsize = str(value.dtype).removeprefix("torch."), int(value.dtype.itemsize)
    before, after = (replace(s, dtype=dtype, itemsize=itemsize) for s in (before, after))
    collectives_ns = sum(_price_ns(work, node, c) for node, c in zip(collectives, found))
    copied = sum(_torch.tensor_bytes(n.meta["val"]) or 0 for n in nodes if name_of(n) in _COPIES)
    return Redistributed(source, result, nodes, before, after, reductions, collectives_ns, copied, steps)


def _fits(spec: Spec, shape: Sequence[int]) -> None:
    here = spec.mesh.coordinates(_torch.process_rank())
    if spec.layout.local_shape(here) != tuple(shape):
        refuse(Reason.UNSUPPORTED, f"a tensor of {list(shape)} where {spec} of {list(spec.shape)} was expected")


def _traced_from(root: torch.fx.Node, note: Noted) -> tuple[torch.fx.Node, ...]:
    """All nodes of the call's forward or backward, in graph order."""
    backward = origin_of(root).backward
    found, todo = {root}, [root]
    while todo:
        node = todo.pop()
        for near in (*node.all_input_nodes, *node.users):
            if near in found or noted(near.meta) != note or origin_of(near).backward != backward:
                continue
            found.add(near)
            todo.append(near)
    return tuple(sorted(found))


def _ends(nodes: tuple[torch.fx.Node, ...]) -> tuple[torch.fx.Node, torch.fx.Node]:
    inside = set(nodes)
    read = {n: None for node in nodes for n in node.all_input_nodes if n not in inside and _is_tensor(n)}
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    if len(read) != 1 or len(results) != 1:
        refuse(Reason.DATA_DEPENDENCY, f"reads {len(read)} tensors, and others read {len(results)} results of it")
    return next(iter(read)), results[0]


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _communicates(work: Work, node: torch.fx.Node) -> bool:
    """Whether a node is a collective. Refuses what neither communicates as DTensor does nor moves elements."""
    if work.collective(node, *_KINDS) is not None or name_of(node) == EXCHANGE:
        return True
    if node.target is operator.getitem or work.is_wait(node) or name_of(node) in _MOVES or is_zero_padding(node):
        return False
    refuse(Reason.UNSUPPORTED, f"{name_of(node) or node.op} inside of the redistribution")


def _group(work: Work, node: torch.fx.Node) -> tuple[int, ...]:
    collective = work.collective(node, *_KINDS)
    if collective is not None:
        return tuple(sorted(collective.group.ranks))
    return tuple(sorted(resolve(behind(_torch.op_arguments(node)["group_name"])).ranks))


def _dims(work: Work, mesh: Mesh, node: torch.fx.Node) -> tuple[int, ...]:
    """The mesh dimensions that a collective communicates along."""
    ranks, rank = _group(work, node), _torch.process_rank()
    if rank in mesh.ranks and set(ranks) <= set(mesh.ranks):
        own = mesh.coordinates(rank)
        dims = tuple(m for m in range(mesh.ndim) if any(mesh.coordinates(other)[m] != own[m] for other in ranks))
        if mesh.group(rank, dims) == ranks:
            return dims
    refuse(Reason.DIFFERENT_GROUP, "a group that is none of the mesh")


def _price_ns(work: Work, node: torch.fx.Node, collective: Collective | None) -> int:
    if collective is not None:
        return work.price_ns(collective)
    size = _torch.tensor_bytes(node.meta["val"])
    # The operator packs and unpacks by itself.
    return work.collective_ns(CollectiveKind.ALL_TO_ALL, size, size, _group(work, node)) + 2 * work.copy_ns(size or 0)


def _pending(spec: Spec, touched: set[int]) -> Spec:
    """Where a gradient is brought that has the layout ``spec`` in forward: what is pending there is replicated,
    or, along dimensions on which nobody communicates, is whatever it is."""
    return replace(
        spec,
        placements=tuple(
            Replicate() if isinstance(p, Partial) and m in touched else p for m, p in enumerate(spec.placements)
        ),
    )


def _ways(
    work: Work, nodes: tuple[torch.fx.Node, ...], dims: dict[torch.fx.Node, tuple[int, ...]], after: Spec
) -> Iterator[tuple[Layout, ...]]:
    """The layouts through which the nodes may come to ``after``, from the last to the first."""
    here = after.mesh.coordinates(_torch.process_rank())
    ways: dict[tuple[Layout, ...], None] = {(after.layout,): None}
    for node in reversed(nodes):
        ways = {
            way if earlier == way[-1] else (*way, earlier): None
            for way in ways
            for earlier in _before(work, node, dims.get(node, ()), way[-1], here)
        }
    yield from ways


def _before(
    work: Work, node: torch.fx.Node, dims: tuple[int, ...], layout: Layout, here: tuple[int, ...]
) -> Iterator[Layout]:
    """The layouts in front of a node whose result has ``layout``."""
    if is_split(node):
        yield from _unsliced(node, layout, here)
    elif not dims:
        yield layout
    elif name_of(node) == EXCHANGE:
        arguments, rank = _torch.op_arguments(node), len(layout.shape)
        whole = _uncut(layout, arguments["shard_dim"] % rank, dims)
        if whole is not None:
            yield from _cut(whole, arguments["gather_dim"] % rank, dims)
    else:
        collective = work.collective(node, *_KINDS)
        assert collective is not None
        if collective.kind is CollectiveKind.ALL_GATHER:
            for dim in _gathered_dims(collective, layout):
                yield from _cut(layout, dim, dims)
        else:
            if collective.kind is CollectiveKind.REDUCE_SCATTER:
                found = [w for d in range(len(layout.shape)) if (w := _uncut(layout, d, dims)) is not None]
                if not found:
                    return
                (layout,) = found
            if set(dims) <= set(layout.replicate_dims):
                pending = tuple(collective.reduce_op if m in dims else op for m, op in enumerate(layout.partial))
                yield replace(layout, partial=pending)


def _unsliced(split: torch.fx.Node, layout: Layout, here: tuple[int, ...]) -> Iterator[Layout]:
    used = pieces_read(split)
    if len(used) != 1 or len(split.meta["val"]) == 1:
        yield layout
        return
    dim = int(_torch.op_arguments(split).get("dim", 0)) % len(layout.shape)
    cuts = layout.cuts[dim]
    if cuts and here[cuts[-1][0]] in used and cuts[-1][1] == 1:
        yield _with(layout, dim, cuts[:-1])


def _gathered_dims(gather: Collective, layout: Layout) -> list[int]:
    """Tensor dimensions along which a gather may put its pieces side by side, by what is done with its result."""
    (wait,) = gather.waits
    unpack = unpack_ahead(wait, gather.group.size)
    if unpack is not None:
        return [unpack[0]]
    several = any(is_split(user) and len(pieces_read(user)) > 1 for user in wait.users)
    return list(range(len(layout.shape))) if several else [0]


def _cut(layout: Layout, dim: int, dims: tuple[int, ...]) -> Iterator[Layout]:
    if set(dims) <= set(layout.replicate_dims):
        yield _with(layout, dim, layout.cuts[dim] + tuple((m, 1) for m in dims))


def _uncut(layout: Layout, dim: int, dims: tuple[int, ...]) -> Layout | None:
    inner = tuple((m, 1) for m in dims)
    cuts = layout.cuts[dim]
    return _with(layout, dim, cuts[: -len(inner)]) if cuts[-len(inner) :] == inner else None


def _with(layout: Layout, dim: int, cuts: tuple[tuple[int, int], ...]) -> Layout:
    return replace(layout, cuts=(*layout.cuts[:dim], cuts, *layout.cuts[dim + 1 :]))


def _spec_of(like: Spec, layout: Layout) -> Spec:
    """The layout as placements on the mesh of ``like``."""
    placements: list[Placement] = [Partial(op) if op else Replicate() for op in layout.partial]
    for dim, cuts in enumerate(layout.cuts):
        for m, factor in cuts:
            placements[m] = Shard(dim, factor)
    order = tuple((dim, tuple(m for m, _ in cuts)) for dim, cuts in enumerate(layout.cuts) if cuts)
    return Spec(like.mesh, tuple(placements), layout.shape, like.dtype, like.itemsize, order)
