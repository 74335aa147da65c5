"""One axis of a tensor cut into parts, and how that cut looks through layout changes.

Strip-mining replaces an operation on a whole tensor by operations on *slabs*. A slab need not be contiguous: a
gathered dimension of ``g`` shards, each of ``u`` units, is (``g``, ``u``, ``inner``), and a slab is ``[:, a:b, :]``.
So a cut is (dimension, outer, inner) with ``extent = outer * u * inner``. Views move the cut to another dimension,
split and cat change ``outer``; a view that tears ``inner`` apart has no cut.

How many units each part has (``Widths``) is the same for the whole region. Equal parts have one unit each. A size
without a small divisor is cut into parts of different widths.

Sizes may be symbolic. A symbolic dimension is cut where it is known to divide for every size of its range; such a cut
passes through operators that leave the dimension as it is, see ``rules.carries``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.rewriting.emit import Emitter

aten = torch.ops.aten

#: Units of each part; (1, 1) are two equal parts, (7, 6) those of a dimension of 13.
Widths = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """A cut: ``extent(dim) == outer * units * inner``; a part is some units ``[:, a:b, :]`` of the dimension seen so.

    ``inner`` may be symbolic, then all parts have one unit. Cuts are equal when they are equal for every size.
    """

    dim: int
    outer: int
    inner: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Slab):
            return NotImplemented
        same = (self.dim, self.outer) == (other.dim, other.outer)
        return same and _torch.same_size(self.inner, other.inner)

    def __hash__(self) -> int:
        return hash((self.dim, self.outer))

    @property
    def is_symbolic(self) -> bool:
        """Whether a part's size is only known at run time."""
        return not isinstance(self.inner, int)

    def on(self, dim: int) -> Slab:
        """The same cut of another dimension."""
        return Slab(dim, self.outer, self.inner)

    def fits(self, shape: Sequence[Any], units: int) -> bool:
        """Whether a tensor of ``shape`` can be cut so into ``units``."""
        if not 0 <= self.dim < len(shape):
            return False
        return _torch.same_size(shape[self.dim], self.outer * units * self.inner)


@dataclass(frozen=True, slots=True)
class Partial:
    """A result that is the SUM over the parts: the operation contracts the dimension that is cut.

    ``source`` is the cut of its first operand.
    """

    source: Slab


@dataclass(frozen=True, slots=True)
class Uniform:
    """A result that every part yields alike, whatever is cut (a generator's state, a size): any part's is the whole's.

    ``source`` is the cut of the operation that it belongs to.
    """

    source: Slab


Cut = Slab | Partial | Uniform


def cut_into(shape: Sequence[Any], dim: int, units: int, outer: int = 1) -> Slab | None:
    """The cut of ``dim`` into ``units`` below ``outer`` blocks; None when the size is not known to divide."""
    extent = shape[dim] if dim < len(shape) else 0
    if _torch.same_size(extent, 0) or not _torch.is_multiple(extent, outer * units):
        return None
    return Slab(dim, outer, extent // (outer * units))


def widths_for(extent: object, numbers: Sequence[int]) -> tuple[Widths, ...]:
    """How a dimension may be cut into one of these numbers of parts.

    Equal parts where a number divides ``extent``. Where none does, as many equal parts as its least divisor says, if
    that is not above the largest number. Else the least divisor is the number of units, and widths differ by one.
    Symbolic: the first number.
    """
    if not isinstance(extent, int):
        return (equal(numbers[0]),)
    found = tuple(equal(n) for n in numbers if extent % n == 0)
    if found or extent < 2:
        return found or (equal(numbers[0]),)
    units = next((d for d in range(2, math.isqrt(extent) + 1) if extent % d == 0), extent)
    if units <= max(numbers):
        return (equal(units),)
    return tuple(tuple(units // n + (part < units % n) for part in range(n)) for n in numbers)


def equal(parts: int) -> Widths:
    """Equal parts."""
    return (1,) * parts


def through_view(cut: Slab, before: Sequence[Any], after: Sequence[Any], units: int) -> Slab | None:
    """The cut of a tensor of shape ``before`` after ``view(after)``; None when the view tears it apart."""
    left = 0
    while left < min(len(before), len(after)) and str(before[left]) == str(after[left]):
        if left == cut.dim:
            return cut
        left += 1
    right = 0
    while right < min(len(before), len(after)) - left and str(before[-1 - right]) == str(after[-1 - right]):
        if len(before) - 1 - right == cut.dim:
            return cut.on(len(after) - 1 - right)
        right += 1
    old, new = list(before[left : len(before) - right]), list(after[left : len(after) - right])
    if not all(isinstance(size, int) for size in (*old, *new)):
        return None
    stride = cut.inner * math.prod(old[cut.dim - left + 1 :])
    below = 1
    for place in reversed(range(len(new))):
        size = new[place]
        if stride < below * size:
            if stride % below:
                return None
            inner = stride // below
            if size % (inner * units):
                return None
            return Slab(left + place, size // (inner * units), inner)
        below *= size
    return None


def take(emit: Emitter, tensor: torch.fx.Node, cut: Slab, widths: Widths, index: int) -> torch.fx.Node:
    """Part ``index`` of a tensor in its memory order; a view when ``outer`` is 1, else a copy."""
    step, units, width = cut.inner, sum(widths), widths[index]
    first = sum(widths[:index])
    if cut.outer == 1:
        return emit.cut(tensor, cut.dim, first * step, (first + width) * step)
    order = memory_order(tensor.meta["val"])
    if order != list(range(len(order))):
        # Some matmuls take columns that lie one after the other, and no others.
        plain = emit.call(aten.permute.default, tensor, order)
        part = take(emit, plain, cut.on(order.index(cut.dim)), widths, index)
        return emit.call(aten.permute.default, part, [order.index(d) for d in range(len(order))])
    shape = list(tensor.meta["val"].shape)
    if all(isinstance(size, int) for size in shape):
        split = [*shape[: cut.dim], cut.outer, units, step, *shape[cut.dim + 1 :]]
        apart = emit.call(aten.view.default, tensor, split)
        picked = emit.cut(apart, cut.dim + 1, first, first + width)
        copied = emit.call(aten.clone.default, picked, memory_format=torch.contiguous_format)
        shape[cut.dim] = cut.outer * width * step
        return emit.call(aten.view.default, copied, shape)
    rows = [(block * units + first) * step for block in range(cut.outer)]
    pieces = [emit.cut(tensor, cut.dim, row, row + width * step) for row in rows]
    return emit.call(aten.cat.default, pieces, cut.dim)


def scattered(tensor: torch.Tensor, cut: Slab, width: int) -> bool:
    """Whether a part that is a view touches so short runs of memory that a matmul had better read a copy of it.

    A run below 1 KiB fills a small share of a page: on CPUs, packing such an operand was measured at up to 1.6 times
    the whole matmul's time with a copy (2048 x 2560 x 128 out of 1024 columns, one thread).
    """
    if cut.outer > 1 or not all(isinstance(s, int) for s in (*tensor.shape, *tensor.stride())):
        return False
    run = cut.inner * width * int(tensor.stride(cut.dim))
    outside = [d for d in range(tensor.dim()) if d != cut.dim and tensor.stride(d) > tensor.stride(cut.dim)]
    return math.prod(tensor.shape[d] for d in outside) > 1 and run * tensor.element_size() < 1024


def assemble(
    emit: Emitter, pieces: Sequence[torch.fx.Node], cut: Slab, widths: Widths, like: torch.Tensor
) -> torch.fx.Node:
    """The whole tensor from its parts, with the shape and the (dense) memory order of ``like``."""
    order = memory_order(like)
    plain = order == list(range(like.dim()))
    if not plain:
        pieces = [emit.call(aten.permute.default, piece, order) for piece in pieces]
    dim = cut.dim if plain else order.index(cut.dim)
    if cut.outer == 1:
        whole = emit.call(aten.cat.default, list(pieces), dim)
    else:
        whole = _interleave(emit, pieces, cut.on(dim), widths, [like.shape[d] for d in order])
    if not plain:
        whole = emit.call(aten.permute.default, whole, [order.index(d) for d in range(like.dim())])
    if any(a is not b and str(a) != str(b) for a, b in zip(whole.meta["val"].stride(), like.stride())):
        # Dense either way: only the stride of a dimension with one element differs, which later views inherit.
        whole = emit.call(aten.as_strided.default, whole, list(like.shape), list(like.stride()))
    return whole


def _interleave(
    emit: Emitter, pieces: Sequence[torch.fx.Node], cut: Slab, widths: Widths, shape: list[Any]
) -> torch.fx.Node:
    step = cut.inner
    if all(isinstance(size, int) for size in shape):
        apart = []
        for piece, width in zip(pieces, widths):
            split = [*shape[: cut.dim], cut.outer, width, step, *shape[cut.dim + 1 :]]
            if not piece.meta["val"].is_contiguous():
                piece = emit.call(aten.clone.default, piece, memory_format=torch.contiguous_format)
            apart.append(emit.call(aten.view.default, piece, split))
        return emit.call(aten.view.default, emit.call(aten.cat.default, apart, cut.dim + 1), shape)
    rows = [
        emit.cut(piece, cut.dim, block * width * step, (block + 1) * width * step)
        for block in range(cut.outer)
        for piece, width in zip(pieces, widths)
    ]
    return emit.call(aten.cat.default, rows, cut.dim)


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Dimensions from the slowest to the fastest in memory; the plain order for a contiguous tensor."""
    if _torch.is_contiguous(tensor):
        return list(range(tensor.dim()))
    return sorted(range(tensor.dim()), key=lambda d: (-(_torch.size_hint(tensor.stride(d)) or 0), d))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a block of memory without gaps or overlap, in some order of dimensions."""
    if _torch.is_contiguous(tensor):
        return True
    if not all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):
        return False
    expected = 1
    for dim in reversed(memory_order(tensor)):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            return False
        expected *= tensor.shape[dim]
    return True

