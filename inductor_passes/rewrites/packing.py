"""Splits that are joined again: what DTensor does around collectives on dimensions other than the first.

``cat(split(x, dim=k), dim=j)`` puts the pieces of dimension k behind each other along dimension j. It is a permutation
(pieces become a dimension of their own that moves in front of j), a copy in the worst case and a view in the best.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.rewrites.movement import is_split, is_zero_padding, name_of
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import dense


@dataclass(frozen=True)
class Joined:
    """A split with all its pieces joined.

    Attributes:
        source: what is split.
        cat: the node that joins.
        split_dim / cat_dim: dimensions of the source and of the result.
        pieces: number of pieces.
        padding: rows of zeros that the last piece gets.
        copied: whether pieces are copied or padded on their own.
        nodes: all nodes, the cat last.
    """

    source: torch.fx.Node
    cat: torch.fx.Node
    split_dim: int
    cat_dim: int
    pieces: int
    padding: int
    copied: bool
    nodes: tuple[torch.fx.Node, ...]

    @property
    def closed(self) -> bool:
        """Whether nobody else reads the pieces."""
        inside = set(self.nodes)
        return all(inside.issuperset(n.users) for n in self.nodes if n is not self.cat)

    @property
    def even(self) -> bool:
        """Whether all pieces have one size, padding included."""
        size = self.source.meta["val"].shape[self.split_dim] + self.padding
        return isinstance(size, int) and size % self.pieces == 0

    @property
    def keeps_memory_order(self) -> bool:
        """Whether the result's row-major memory is the source's: nothing but extents of 1 before either dimension."""
        before = math.prod(self.source.meta["val"].shape[: self.split_dim])
        after = math.prod(self.cat.meta["val"].shape[: self.cat_dim])
        return before == after == 1


#: A size, possibly symbolic.
Size: TypeAlias = int | torch.SymInt


def sizes(node: torch.fx.Node) -> list[Size] | None:
    """The node's shape, symbolic sizes included; None when it is no tensor."""
    value = node.meta.get("val")
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def static_shape(node: torch.fx.Node) -> list[int] | None:
    """The node's shape; None when it is symbolic or no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(type(s) is int for s in value.shape):
        return None
    return list(value.shape)


def joined_split(cat: torch.fx.Node) -> Joined | None:
    """The split that ``cat`` joins; None for any other node, symbolic shapes included."""
    if name_of(cat) != "aten::cat" or static_shape(cat) is None:
        return None
    arguments = _torch.op_arguments(cat)
    pieces = arguments["tensors"]
    nodes: list[torch.fx.Node] = []
    split: torch.fx.Node | None = None
    padding = 0
    copied = False
    for index, piece in enumerate(pieces):
        own: list[torch.fx.Node] = []
        pad = 0
        while isinstance(piece, torch.fx.Node) and piece.target is not operator.getitem:
            if is_zero_padding(piece):
                pad += _padded_rows(piece)
            elif name_of(piece) != "aten::clone":
                return None
            own.append(piece)
            piece = piece.all_input_nodes[0]
        if not isinstance(piece, torch.fx.Node) or piece.args[1] != index:
            return None
        source = piece.args[0]
        if not isinstance(source, torch.fx.Node) or not is_split(source) or (split is not None and source is not split):
            return None
        if pad and index < len(pieces) - 1:
            return None
        split, padding, copied = source, pad, copied or bool(own)
        nodes += [piece, *reversed(own)]
    if split is None or len(split.meta["val"]) != len(pieces):
        return None
    whole = split.all_input_nodes[0]
    if static_shape(whole) is None:
        return None
    rank = whole.meta["val"].ndim
    split_dim = int(_torch.op_arguments(split).get("dim", 0)) % rank
    if any(_pad_dims(n) - {split_dim} for n in nodes if is_zero_padding(n)):
        return None
    cat_dim = int(arguments.get("dim", 0)) % rank
    return Joined(whole, cat, split_dim, cat_dim, len(pieces), padding, copied, (split, *nodes, cat))


def _padded_rows(pad: torch.fx.Node) -> int:
    return sum(_torch.op_arguments(pad)["pad"])


def zero_padded_dims(node: torch.fx.Node) -> set[int]:
    """Dimensions at the end of which a node adds zeros; none for what is no padding."""
    return _pad_dims(node) - {-1} if is_zero_padding(node) else set()


def _pad_dims(pad: torch.fx.Node) -> set[int]:
    """Dimensions that are padded at their end; -1 for one that is padded at its beginning."""
    amounts = _torch.op_arguments(pad)["pad"]
    rank = pad.meta["val"].ndim
    ends = {rank - 1 - k // 2 for k in range(1, len(amounts), 2) if amounts[k]}
    return ends | ({-1} if any(amounts[::2]) else set())


def padded(emit: Emitter, tensor: torch.fx.Node, dim: int, rows: int) -> torch.fx.Node:
    """``rows`` of zeros behind dimension ``dim``; the tensor itself when there are none."""
    if not rows:
        return tensor
    after = tensor.meta["val"].ndim - 1 - dim
    return emit.call(torch.ops.aten.constant_pad_nd.default, tensor, [0, 0] * after + [0, rows], 0.0)


def packed(emit: Emitter, tensor: torch.fx.Node, dim: int, pieces: int) -> torch.fx.Node:
    """Dense: the equal pieces of dimension ``dim`` behind each other along dimension 0."""
    shape = list(tensor.meta["val"].shape)
    part = [*shape[:dim], shape[dim] // pieces, *shape[dim + 1 :]]
    grid = emit.view(tensor, [*shape[:dim], pieces, *part[dim:]])
    order = [dim, *(d for d in range(len(shape) + 1) if d != dim)]
    moved = emit.call(torch.ops.aten.permute.default, grid, order)
    return emit.view(dense(emit, moved), [pieces * part[0], *part[1:]])


def unpacked(emit: Emitter, tensor: torch.fx.Node, dim: int, pieces: int) -> torch.fx.Node:
    """Dense: the equal pieces of dimension 0 behind each other along dimension ``dim``."""
    shape = list(tensor.meta["val"].shape)
    part = [shape[0] // pieces, *shape[1:]]
    grid = emit.view(tensor, [pieces, *part])
    rest = list(range(1, len(part) + 1))
    moved = emit.call(torch.ops.aten.permute.default, grid, [*rest[:dim], 0, *rest[dim:]])
    return emit.view(dense(emit, moved), [*part[:dim], pieces * part[dim], *part[dim + 1 :]])
