"""How numbers are narrowed: the nodes in front of a message and behind it.

bf16 casts each element. The others give each block (a row) one scale, and each element a code of one byte::

    peak    = amax(|x|), infinite where any element is not finite
    level   = (bits(max(peak * share, 2**-126)) + 65535) >> 16
    scale   = float32 of the bits level << 16
    code    = round(x / scale) + 128           or the bits of fp8(x / scale)
    message = [code ..., low digit of level, high digit]

The level is the upper half of a float32's bits, rounded up: the scale is the next bfloat16, at most 0.8% above, so
codes do not overflow. It travels as two digits to base 256 behind the block's codes: a message is one tensor of bytes,
whose parts are views. Kernels make the scale again for each vector of codes, so it is a shift, not a power, which
compilers call a function for. Nothing is read at an address that has to be aligned. Whole numbers and bits are exact,
so all ranks that read a message compute the same bits.

A block with an element that is not finite has an infinite scale: no element of it arrives finite. A block of zeros gets
the smallest scale, and zeros arrive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.fx

from inductor_passes.rewriting.emit import Emitter

aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Form:
    """A narrower type for messages.

    Attributes:
        name: as in the settings.
        dtype: of what is sent, or of what its bytes are.
        error: largest error of an element, relative to the largest element of its block.
        share: 1 / the largest code; 0: elements are cast, without scales.
        block: elements that share a scale.
    """

    name: str
    dtype: torch.dtype
    error: Fraction
    share: float = 0.0
    block: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a block in a message."""
        return self.block + 2 if self.share else self.dtype.itemsize

    def blocks(self, elements: int) -> int:
        """Blocks that hold so many elements."""
        return -(-elements // self.block)

    def message_bytes(self, elements: int) -> int:
        """Bytes of a message of so many elements."""
        return self.blocks(elements) * self.row_bytes

    def narrowed(self, emit: Emitter, rows: torch.fx.Node) -> torch.fx.Node:
        """What is sent of ``rows`` ([blocks, block] in float32): [blocks, ...] in bytes, or in bfloat16."""
        if not self.share:
            return emit.call(_cast, rows, self.dtype)
        peak = emit.call(aten.amax.default, emit.call(aten.abs.default, rows), [1], True)
        finite = emit.call(aten.lt.Scalar, peak, math.inf)
        infinite = emit.call(aten.full.default, [], math.inf, dtype=torch.float32, device=peak.meta["val"].device)
        share = emit.call(aten.mul.Tensor, emit.call(aten.where.self, finite, peak, infinite), self.share)
        least = emit.call(aten.clamp_min.default, share, 2.0**-126)
        bits = emit.call(aten.add.Tensor, emit.call(aten.view.dtype, least, torch.int32), 0xFFFF)
        level = emit.call(aten.bitwise_right_shift.Tensor_Scalar, bits, 16)
        quotient = emit.call(aten.div.Tensor, rows, _scale(emit, level))
        if self.dtype is torch.uint8:
            whole = emit.call(aten.add.Tensor, emit.call(aten.round.default, quotient), 128.0)
            codes = emit.call(_cast, whole, torch.uint8)
        else:
            codes = emit.call(aten.view.dtype, emit.call(_cast, quotient, self.dtype), torch.uint8)
        low = emit.call(aten.bitwise_and.Scalar, level, 0xFF)
        high = emit.call(aten.bitwise_right_shift.Tensor_Scalar, level, 8)
        digits = [emit.call(_cast, digit, torch.uint8) for digit in (low, high)]
        return emit.call(aten.cat.default, [codes, *digits], 1)

    def widened(self, emit: Emitter, message: torch.fx.Node) -> torch.fx.Node:
        """[blocks, block] in float32 of a message that arrived; the last node made is the one that rounds."""
        if not self.share:
            return emit.call(_cast, message, torch.float32)
        codes, low, high = (
            emit.cut(message, 1, first, first + width)
            for first, width in ((0, self.block), (self.block, 1), (self.block + 1, 1))
        )
        upper = emit.call(aten.bitwise_left_shift.Tensor_Scalar, emit.call(_cast, high, torch.int32), 8)
        scale = _scale(emit, emit.call(aten.bitwise_or.Tensor, upper, emit.call(_cast, low, torch.int32)))
        if self.dtype is torch.uint8:
            numbers = emit.call(aten.sub.Tensor, emit.call(_cast, codes, torch.float32), 128.0)
        else:
            numbers = emit.call(_cast, emit.call(aten.view.dtype, codes, self.dtype), torch.float32)
        return emit.call(aten.mul.Tensor, numbers, scale)


def _scale(emit: Emitter, level: torch.fx.Node) -> torch.fx.Node:
    bits = emit.call(aten.bitwise_left_shift.Tensor_Scalar, level, 16)
    return emit.call(aten.view.dtype, bits, torch.float32)


def form_of(name: str, block: int) -> Form:
    """The form of a setting's name."""
    if name == "bf16":
        return Form(name, torch.bfloat16, Fraction(4, 1000))
    dtype, error, share = {
        "int8": (torch.uint8, Fraction(4, 1000), 1 / 127),
        "e4m3": (torch.float8_e4m3fn, Fraction(37, 1000), 1 / 448),
        "e5m2": (torch.float8_e5m2, Fraction(73, 1000), 1 / 57344),
    }[name]
    return Form(name, dtype, error, share, block)
