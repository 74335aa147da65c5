"""Matmuls in canonical form, and what a cut of one dimension means for them.

``mm``, ``addmm``, ``bmm``, ``baddbmm``, ``_int_mm``, ``_scaled_mm`` and ``_grouped_mm`` all compute
``out[b, m, n] = sum_k left[b, m, k] * right[b, k, n]`` plus what is added or scaled afterwards. Which of the four
dimensions of the dot a cut falls on decides everything: on ``m`` (free-left) or ``n`` (free-right) the parts of the
output are independent and the other operand is used whole; on ``b`` (batch) both operands are cut; on ``k``
(contracting) the parts are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp.slab import Cut, Partial, Slab
from inductor_passes.rewriting.emit import NARROW


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
        left / right: the operands.
        dims: what the dimensions of left, right and result are, a letter each: ``m`` and ``n`` (free), ``k``
            (contracting), ``b`` (batch), ``g`` (groups), ``r`` (divided among groups by offsets). The last two cannot
            be cut: where a group begins is known at run time only.
        added: what is added to the product (bias), broadcast to the output; None without.
        scales: (scale of left, scale of right), each a scalar or one value per row/column; empty without.
        offsets: where groups begin.
    """

    node: torch.fx.Node
    left: torch.fx.Node
    right: torch.fx.Node
    dims: tuple[str, str, str]
    added: torch.fx.Node | None = None
    scales: tuple[torch.fx.Node, ...] = ()
    offsets: torch.fx.Node | None = None

    def dot_dim(self, cut: Cut) -> DotDim:
        """Which dimension of the dot a cut of the output (or a sum over parts) is."""
        if isinstance(cut, Partial):
            return DotDim.CONTRACTING
        assert isinstance(cut, Slab)
        return _DOT_DIMS[self.dims[2][cut.dim]]

    def result(self, operand: torch.fx.Node, cut: Slab) -> Cut | None:
        """The output's cut when ``operand`` comes in parts; None when that cannot be computed part by part."""
        left, right, out = self.dims
        found: set[Cut | None] = set()
        for factor, dims in ((self.left, left), (self.right, right)):
            if operand is factor:
                letter = dims[cut.dim]
                if letter == "k":
                    found.add(Partial(cut.on(left.index("k"))))
                else:
                    found.add(cut.on(out.index(letter)) if letter in _CUTTABLE else None)
        if self.added is not None and operand is self.added:
            found.add(cut.on(cut.dim + len(out) - operand.meta["val"].dim()))
        for scale in self.scales:
            if operand is scale:
                found.add(cut)
        # One node in two roles is cut in two ways, which no single part satisfies.
        return found.pop() if len(found) == 1 else None

    def needs(self, cut: Cut) -> dict[torch.fx.Node, Slab | None] | None:
        """Per operand the part (None: the whole) that one part of the result needs; None: not computable so."""
        left, right, out = self.dims
        if isinstance(cut, Partial):
            if self.scales or "k" not in left or (self.added is not None and self.product is None):
                return None
            if rounds_parts(self.node):
                return None
            letter, part = "k", cut.source
        else:
            assert isinstance(cut, Slab)
            letter, part = out[cut.dim], cut
        if letter not in _CUTTABLE or not self._aligned(part):
            return None
        wanted = [
            (factor, part.on(dims.index(letter)) if letter in dims else None)
            for factor, dims in ((self.left, left), (self.right, right))
        ]
        if self.added is not None:
            # The sum of the parts gets it once.
            part_of_added = broadcast_part(self.added, cut, self.node) if isinstance(cut, Slab) else None
            wanted.append((self.added, part_of_added))
        if isinstance(cut, Slab):
            for scale, own in zip(self.scales, "mn"):
                whole = _torch.same_size(scale.meta["val"].numel(), 1) or letter != own
                wanted.append((scale, None if whole else cut))
        if self.offsets is not None:
            wanted.append((self.offsets, None))
        return merged(wanted)

    @property
    def product(self) -> Any:
        """The operator for the product alone, for a matmul that adds something to it once; None for others."""
        arguments = _torch.op_arguments(self.node)
        if self.added is None or arguments.get("beta", 1) != 1 or arguments.get("alpha", 1) != 1:
            return None
        return _PRODUCT.get(_torch.op_name(self.node.target))

    def _aligned(self, part: Slab) -> bool:
        """Kernels for groups want rows that begin at multiples of 16 bytes."""
        grouped = any("g" in dims or "r" in dims for dims in self.dims)
        return not grouped or _torch.is_multiple(part.inner * self.left.meta["val"].element_size(), 16)


_DOT_DIMS = {"m": DotDim.FREE_LEFT, "n": DotDim.FREE_RIGHT, "b": DotDim.BATCH, "g": DotDim.BATCH, "r": DotDim.BATCH}
_CUTTABLE = frozenset("mnkb")


def rounds_parts(node: torch.fx.Node) -> bool:
    """Whether a part of a sum would be rounded to a type narrower than float32.

    The library adds up the whole in float32. Parts that cancel would lose digits, and in float16 they may overflow.
    """
    return node.meta["val"].dtype in NARROW


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
        return Matmul(node, left, right, PLAIN, bias, scales=(values["scale_a"], values["scale_b"]))
    if name == "aten::_grouped_mm":
        ranks = left.meta["val"].dim(), right.meta["val"].dim()
        return Matmul(node, left, right, _GROUPED[ranks], bias, offsets=values.get("offs"))
    return Matmul(node, left, right, _BATCHED if name in ("aten::bmm", "aten::baddbmm") else PLAIN, bias)


#: ``mm`` and its like, in ``Matmul.dims``.
PLAIN = ("mk", "kn", "mn")
_BATCHED = ("bmk", "bkn", "bmn")
#: By the operands' numbers of dimensions (torch/_meta_registrations.py, ``_meta_grouped_mm_common``).
_GROUPED = {
    (2, 3): ("rk", "gkn", "rn"),
    (3, 3): _BATCHED,
    (2, 2): ("mr", "rn", "gmn"),
    (3, 2): ("gmk", "kr", "mr"),
}
#: A matmul that adds something to its product -> the product.
_PRODUCT = {"aten::addmm": torch.ops.aten.mm.default, "aten::baddbmm": torch.ops.aten.bmm.default}
#: op -> argument names of left, right and what is added
_FORMS: dict[str, tuple[str, str, str]] = {
    "aten::mm": ("self", "mat2", ""),
    "aten::bmm": ("self", "mat2", ""),
    "aten::_int_mm": ("self", "mat2", ""),
    "aten::addmm": ("mat1", "mat2", "self"),
    "aten::baddbmm": ("batch1", "batch2", "self"),
    "aten::_scaled_mm": ("self", "mat2", "bias"),
    "aten::_grouped_mm": ("self", "mat2", "bias"),
}
