"""Values that were sent in a narrower type: which element an element that arrives is a rounding of, and how exact.

This module has its own idea of the forms in which numbers are narrowed. It is held against what the nodes of the graph
compute, from the node that widens what arrived, through the messages, to what was narrowed on the sending rank. A
*cast* rounds each element to bfloat16. In a *block* (a row) numbers share a scale::

    peak    = the largest |x| of the row; infinite where it is not below infinity
    level   = (the bits of max(peak * share, 2**-126) + 65535) >> 16
    scale   = the float32 number of the bits level << 16
    code    = uint8(round(x / scale) + 128)          share = 1 / 127
    code    = the bits of fp8(x / scale)             share = 1 / the largest number of that type
    arrives = (code - 128) * scale   or   fp8(code) * scale

The scale is the smallest bfloat16 number that is not below ``peak * share``, so less than 2**-7 of it above. It is
sent as the two digits of its level to base 256. Codes and scale have to come from one row on one rank, and the scale
from all of that row. Then the error is at most half a step of the code at the row's largest element. A row with an
element that is not finite arrives without a finite element.

A code may be said to travel over one group of ranks only, one rank per host. Then the rank on which it was made differs
from the one on which it arrives in that group's digits alone (see ``replicas``).

Where the row's largest element is below 2**-119, the error is below 2**-126 instead. What is above bfloat16's largest
number becomes infinite in a cast.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple, Protocol

import torch

from inductor_passes.verify.values.access import Access
from inductor_passes.verify.values.affine import ZERO, Affine, Space
from inductor_passes.verify.values.operators import signature
from inductor_passes.verify.values.program import Record
from inductor_passes.verify.values.replicas import replicas
from inductor_passes.verify.values.sizes import NoHintError

#: Error of one rounding, relative to the row's largest element: half a step there, for a scale that is rounded up.
ERRORS: dict[torch.dtype, Fraction] = {
    torch.bfloat16: Fraction(4, 1000),
    torch.uint8: Fraction(4, 1000),
    torch.float8_e4m3fn: Fraction(37, 1000),
    torch.float8_e5m2: Fraction(73, 1000),
}
_SHARES = {torch.uint8: 1 / 127, torch.float8_e4m3fn: 1 / 448, torch.float8_e5m2: 1 / 57344}
_CONVERT = "prims::convert_element_type"
_INFINITE = float("inf")


class NotNarrowedError(NoHintError):
    """What arrives is none of the forms; the message says which part is not."""


class Codes(NamedTuple):
    """What two elements have in common that are widened from one code and one scale.

    Attributes:
        kind: of the code.
        record: what is rounded to it: a quotient by the scale, or the number itself.
        rank / indices: which element of it.
    """

    kind: torch.dtype
    record: Record
    rank: Affine
    indices: tuple[Affine, ...]


class Rounded(NamedTuple):
    """``source`` on the sending rank, with an error of at most ``error``, as ``codes`` have it."""

    source: Access
    error: Fraction
    codes: Codes


class Cast(Protocol):
    """A rounding or widening."""

    @property
    def dtype(self) -> torch.dtype:
        """To which type."""
        ...

    @property
    def source(self) -> Access:
        """Of what."""
        ...


class Follows(Protocol):
    """What this module asks about a program, see ``heads.Resolver``."""

    def cast_behind(self, a: Access) -> Cast | None:
        """The cast that made an element, through messages and whatever else only moves it."""
        ...

    def is_constant(self, a: Access, value: float) -> bool:
        """Whether an element is this number."""
        ...

    def is_overwritten(self, a: Access) -> bool:
        """Whether a value is no longer what its node computes when it is read."""
        ...


class _Level(NamedTuple):
    """A scale's level: what makes it, on which rank, for which row."""

    record: Record
    rank: Affine
    row: tuple[Affine, ...]


def rounded(program: Follows, a: Access) -> Rounded:
    """What an element that arrives is a rounding of.

    Raises:
        NotNarrowedError: it is none, as far as this module understands.
        NeedsCut, NeedsBytes, NoHintError, NotRegularError: see ``Resolver.head``.
    """
    return _Reader(program).rounded(a)


def stays_on(space: Space, ranks: tuple[int, ...], sender: Affine, receiver: Affine) -> bool:
    """Whether two ranks are in one group that lies as ``ranks`` do. Raises ``NeedsCut``, see :class:`Space`."""
    group = replicas(ranks)
    return group is not None and group.base(space, sender) == group.base(space, receiver)


class _Reader:
    def __init__(self, program: Follows) -> None:
        self._program = program

    def rounded(self, a: Access) -> Rounded:
        if a.dtype is not torch.float32 or a.byte is not None:
            raise NotNarrowedError(f"{a.record.name} is no float32 that was narrowed")
        if a.record.called == _CONVERT:
            arrived = self._widened(a, torch.bfloat16)
            source = self._narrowed(arrived, torch.bfloat16)
            return Rounded(source, ERRORS[torch.bfloat16], _codes(torch.bfloat16, source))
        codes, scale = self._operands(a, "aten::mul", 2)
        sent = self._sent_level(scale)
        kind, quotient = self._quotient(codes)
        x, divisor = self._operands(quotient, "aten::div", 2)
        level = _level(self._bits_of(divisor))
        if level != sent:
            raise NotNarrowedError(f"{a.record.name}: codes and scale come from different rows")
        if level.rank != x.rank or level.row != (*x.indices[:-1], ZERO):
            raise NotNarrowedError(f"{quotient.record.name} divides by the scale of another row")
        self._covers(kind, level, x.record)
        return Rounded(x, ERRORS[kind], _codes(kind, quotient))

    def _quotient(self, codes: Access) -> tuple[torch.dtype, Access]:
        """Kind of code, and what was rounded to it on the sending rank."""
        if codes.record.called == "aten::sub":
            (shifted,) = self._operands(codes, "aten::sub", 1, 128.0)
            code = self._narrowed(self._widened(shifted, torch.uint8), torch.uint8)
            (whole,) = self._operands(code, "aten::add", 1, 128.0)
            (quotient,) = self._operands(whole, "aten::round", 1)
            return torch.uint8, quotient
        (arrived,) = self._operands(codes, _CONVERT, 1)
        kind = arrived.dtype
        if kind not in _SHARES or kind is torch.uint8:
            raise NotNarrowedError(f"{codes.record.name} widens {kind}")
        return kind, self._narrowed(arrived, kind)

    # -- scales ---------------------------------------------------------------------------------------------------

    def _sent_level(self, scale: Access) -> _Level:
        """The level of which the digits of a scale arrived."""
        shifted, low = self._operands(self._bits_of(scale), "aten::bitwise_or", 2, made=torch.int32)
        (high,) = self._operands(shifted, "aten::bitwise_left_shift", 1, 8, made=torch.int32)
        level = self._of_digit(self._digit(high))
        (number,) = self._operands(self._digit(low), "aten::bitwise_and", 1, 0xFF, made=torch.int32)
        if level != _level(number):
            raise NotNarrowedError(f"the digits of {scale.record.name} are not those of one scale")
        return level

    def _digit(self, wide: Access) -> Access:
        (arrived,) = self._operands(wide, _CONVERT, 1, made=torch.int32)
        if arrived.dtype is not torch.uint8:
            raise NotNarrowedError(f"{wide.record.name} widens {arrived.dtype}, not a digit")
        return self._narrowed(arrived, torch.uint8, torch.int32)

    def _of_digit(self, high: Access) -> _Level:
        """The level in ``level >> 8``."""
        (number,) = self._operands(high, "aten::bitwise_right_shift", 1, 8, made=torch.int32)
        return _level(number)

    def _bits_of(self, scale: Access) -> Access:
        """The level in the number of the bits ``level << 16``."""
        shifted = self._same_bits(scale, torch.float32, torch.int32)
        (level,) = self._operands(shifted, "aten::bitwise_left_shift", 1, 16, made=torch.int32)
        return level

    def _same_bits(self, a: Access, made: torch.dtype, of: torch.dtype) -> Access:
        """The element of type ``of`` whose bits a number of type ``made`` has."""
        record = a.record
        if record.called != "aten::view" or a.byte is not None or a.path or self._program.is_overwritten(a):
            raise NotNarrowedError(f"{record.name} is {record.called or record.op} where bits are read as {made}")
        source = record.arguments.get("self")
        if not isinstance(source, Record) or record.arguments.get("dtype") is not made:
            raise NotNarrowedError(f"{record.name} reads no bits as {made}")
        if record.dtype() is not made or source.dtype() is not of or source.shape() != record.shape():
            raise NotNarrowedError(f"{record.name} reads {source.dtype()} as {record.dtype()}")
        return Access(source, (), a.rank, a.indices, None, a.reader and record)

    def _covers(self, kind: torch.dtype, level: _Level, x: Record) -> None:
        """A level is that of the largest element of each row of ``x``."""
        up = Access(level.record, (), level.rank, level.row)
        (grown,) = self._operands(up, "aten::bitwise_right_shift", 1, 16, made=torch.int32)
        (bits,) = self._operands(grown, "aten::add", 1, 0xFFFF, made=torch.int32)
        least = self._same_bits(bits, torch.int32, torch.float32)
        (share,) = self._operands(least, "aten::clamp_min", 1, 2.0**-126)
        (peak,) = self._operands(share, "aten::mul", 1, _SHARES[kind])
        finite, largest, otherwise = self._operands(peak, "aten::where", 3)
        (compared,) = self._operands(finite, "aten::lt", 1, _INFINITE)
        made, given = largest.record, largest.record.arguments
        if not self._program.is_constant(otherwise, _INFINITE):
            raise NotNarrowedError(f"{peak.record.name} is not infinite where an element is not finite")
        if compared.record is not made or made.called != "aten::amax" or self._program.is_overwritten(largest):
            raise NotNarrowedError(f"{made.name} is not the largest element of a row")
        last = len(x.shape()) - 1
        if list(given["dim"]) not in ([last], [-1]) or given["keepdim"] is not True or made.dtype() != torch.float32:
            raise NotNarrowedError(f"{made.name} does not cover one row")
        absolute = given["self"]
        (source,) = self._operands(Access(absolute, (), level.rank, level.row), "aten::abs", 1)
        if source.record is not x:
            raise NotNarrowedError(f"{made.name} covers {source.record.name}, not {x.name}")

    # -- steps ----------------------------------------------------------------------------------------------------

    def _widened(self, a: Access, dtype: torch.dtype) -> Access:
        """The element of this type that a float32 number was made of."""
        (found,) = self._operands(a, _CONVERT, 1)
        if found.dtype is not dtype:
            raise NotNarrowedError(f"{a.record.name} widens {found.dtype}, not {dtype}")
        return found

    def _narrowed(self, arrived: Access, dtype: torch.dtype, of: torch.dtype = torch.float32) -> Access:
        """The number of type ``of`` that was made ``dtype`` where it was sent."""
        found = self._program.cast_behind(arrived)
        if found is None or found.dtype is not dtype or found.source.dtype is not of:
            raise NotNarrowedError(f"what arrives as {arrived.record.name} is no {of} that was made {dtype}")
        return found.source

    def _operands(
        self, a: Access, called: str, count: int, *numbers: float, made: torch.dtype = torch.float32
    ) -> list[Access]:
        """The reads of an operator's operands; these have to be its numbers."""
        record = a.record
        if record.called != called or a.byte is not None or a.path or self._program.is_overwritten(a):
            raise NotNarrowedError(f"{record.name} is {record.called or record.op} where {called} is expected")
        if record.dtype() is not (torch.bool if called == "aten::lt" else made):
            raise NotNarrowedError(f"{record.name} computes in {record.dtype()}")
        found = signature(a)
        if found is None or found.opaque or found.whole or found.summed or len(found.uses) != count:
            raise NotNarrowedError(f"{record.name} has other operands than {called} has here")
        given = {k: v for k, v in record.arguments.items() if not isinstance(v, (Record, torch.dtype))}
        if given.pop("alpha", 1) != 1 or given.pop("decimals", 0) != 0:
            raise NotNarrowedError(f"{record.name} scales its operand")
        if list(given.values()) != list(numbers):
            raise NotNarrowedError(f"{record.name} has the numbers {list(given.values())}, not {list(numbers)}")
        binding = found.binding(a)
        return [use.read(a, binding) for use in found.uses]


def _codes(kind: torch.dtype, a: Access) -> Codes:
    return Codes(kind, a.record, a.rank, a.indices)


def _level(a: Access) -> _Level:
    return _Level(a.record, a.rank, a.indices)
