"""Matmuls in canonical form, and what a cut of one dimension means for them.

``mm``, ``addmm``, ``bmm``, ``baddbmm``, ``_scaled_mm`` and ``_grouped_mm`` all compute ``out[b, m, n] = sum_k
left[b, m, k] * right[b, k, n]`` plus what is added or scaled afterwards. Which of the four dimensions of the dot a cut
falls on decides everything: on ``m`` (free-left) or ``n`` (free-right) the parts of the output are independent and the
other operand is used whole; on ``b`` (batch) both operands are cut; on ``k`` (contracting) the parts are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp.slab import Cut, Partial, Slab


class DotDim(str, Enum):
    """Which dimension of a dot product is cut."""

    FREE_LEFT = "free-left"
    FREE_RIGHT = "free-right"
    BATCH = "batch"
    CONTRACTING = "contracting"


@dataclass(frozen=True, eq=False)
class Matmul:
    """A matmul node in canonical form.

    Attributes:
        left / right: the operands, ([b,] m, k) and ([b,] k, n).
        added: what is added to the product (bias), broadcast to the output; None without.
        scales: (scale of left, scale of right), each a scalar or one value per row/column; empty without.
        batched: the operands have a leading batch dimension.
        groups: the operands are ragged along m or have groups (``_grouped_mm``): only cuts of n are understood.
    """

    node: torch.fx.Node
    left: torch.fx.Node
    right: torch.fx.Node
    added: torch.fx.Node | None = None
    scales: tuple[torch.fx.Node, ...] = ()
    batched: bool = False
    groups: bool = False
    offsets: torch.fx.Node | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions of the output."""
        return int(self.node.meta["val"].dim())

    def dot_dim(self, cut: Cut) -> DotDim:
        """Which dimension of the dot a cut of the output (or a sum over parts) is."""
        if isinstance(cut, Partial):
            return DotDim.CONTRACTING
        assert isinstance(cut, Slab)
        if cut.dim == self.rank - 1:
            return DotDim.FREE_RIGHT
        if cut.dim == self.rank - 2:
            return DotDim.FREE_LEFT
        return DotDim.BATCH

    def result(self, operand: torch.fx.Node, cut: Slab) -> Cut | None:
        """The output's cut when ``operand`` comes in parts; None when that cannot be computed part by part."""
        rank = self.rank
        found: set[Cut] = set()
        if operand is self.left and not self.groups:
            left_rank = self.left.meta["val"].dim()
            found.add(Partial(cut) if cut.dim == left_rank - 1 else cut.on(cut.dim + rank - left_rank))
        if operand is self.right:
            right_rank = self.right.meta["val"].dim()
            if cut.dim == right_rank - 2:
                found.add(Partial(cut.on(self.left.meta["val"].dim() - 1)))
            elif cut.dim == right_rank - 1:
                found.add(cut.on(rank - 1))
            elif not self.groups:
                found.add(cut)
        if self.added is not None and operand is self.added:
            value = operand.meta["val"]
            found.add(cut.on(cut.dim + rank - value.dim()))
        for scale in self.scales:
            if operand is scale:
                found.add(cut)
        # One node in two roles is cut in two ways, which no single part satisfies.
        return found.pop() if len(found) == 1 else None

    def needs(self, cut: Cut) -> dict[torch.fx.Node, Slab | None] | None:
        """Per operand the part (None: the whole) that one part of the result needs; None: not computable so."""
        wanted: list[tuple[torch.fx.Node, Slab | None]] = []
        left_rank, right_rank = self.left.meta["val"].dim(), self.right.meta["val"].dim()
        dot = self.dot_dim(cut)
        if self.groups and dot is not DotDim.FREE_RIGHT:
            return None
        if isinstance(cut, Partial):
            if self.scales or self.added is not None:
                return None
            wanted = [(self.left, cut.source.on(left_rank - 1)), (self.right, cut.source.on(right_rank - 2))]
        else:
            assert isinstance(cut, Slab)
            wanted.append((self.left, None if dot is DotDim.FREE_RIGHT else cut.on(cut.dim + left_rank - self.rank)))
            if dot is DotDim.FREE_LEFT:
                wanted.append((self.right, None))
            else:
                wanted.append((self.right, cut.on(right_rank - 1) if dot is DotDim.FREE_RIGHT else cut))
            if self.added is not None:
                wanted.append((self.added, broadcast_part(self.added, cut, self.node)))
            for scale, dims in zip(self.scales, (DotDim.FREE_LEFT, DotDim.FREE_RIGHT)):
                whole = scale.meta["val"].numel() == 1 or dot is not dims
                wanted.append((scale, None if whole else cut))
            if self.offsets is not None:
                wanted.append((self.offsets, None))
        return merged(wanted)


def broadcast_part(operand: torch.fx.Node, cut: Slab, result: torch.fx.Node) -> Slab | None:
    """The part of an operand that is broadcast to ``result``: None when the cut dimension is broadcast."""
    value, out = operand.meta["val"], result.meta["val"]
    dim = cut.dim - (out.dim() - value.dim())
    if dim < 0 or str(value.shape[dim]) != str(out.shape[cut.dim]):
        return None
    return cut.on(dim)


def merged(wanted: list[tuple[torch.fx.Node, Slab | None]]) -> dict[torch.fx.Node, Slab | None] | None:
    """Needs as a mapping; None when one node is needed in two ways."""
    needs: dict[torch.fx.Node, Slab | None] = {}
    for node, part in wanted:
        if node in needs and needs[node] != part:
            return None
        needs[node] = part
    return needs


def canonical(node: torch.fx.Node) -> Matmul | None:
    """The matmul that a node computes, None for any other node."""
    if node.op != "call_function" or not _torch.is_op(node.target):
        return None
    name = _torch.op_name(node.target)
    if name not in _FORMS:
        return None
    values = _torch.op_arguments(node)
    left, right, added = (values.get(key) for key in _FORMS[name])
    if not isinstance(left, torch.fx.Node) or not isinstance(right, torch.fx.Node):
        return None
    bias = added if isinstance(added, torch.fx.Node) else None
    if name == "aten::_scaled_mm":
        if values.get("scale_result") is not None:
            return None
        return Matmul(node, left, right, bias, scales=(values["scale_a"], values["scale_b"]))
    if name == "aten::_grouped_mm":
        return Matmul(node, left, right, bias, groups=True, offsets=values.get("offs"))
    return Matmul(node, left, right, bias, batched=name in ("aten::bmm", "aten::baddbmm"))


#: op -> argument names of left, right and what is added
_FORMS: dict[str, tuple[str, str, str]] = {
    "aten::mm": ("self", "mat2", ""),
    "aten::bmm": ("self", "mat2", ""),
    "aten::addmm": ("mat1", "mat2", "self"),
    "aten::baddbmm": ("batch1", "batch2", "self"),
    "aten::_scaled_mm": ("self", "mat2", "bias"),
    "aten::_grouped_mm": ("self", "mat2", "bias"),
}
