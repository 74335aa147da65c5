"""What a read leads to when all operators that only move elements are followed back: its *head*.

A head is a number, an element of a node that computes or of a graph input, a cast of such an element, or a reduction
over ranks. Casts collapse: a cast to a type that holds every value exactly, followed by the cast back, is no cast, and
a rounding after such a cast is that rounding alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

import torch

from inductor_passes.verify.certificate import Narrowed
from inductor_passes.verify.values import definitions, narrowed
from inductor_passes.verify.values.access import Access, Constant
from inductor_passes.verify.values.affine import Affine, NeedsCut, Space
from inductor_passes.verify.values.bytes import NeedsBytes
from inductor_passes.verify.values.communication import COLLECTIVES, Groups, Reduction
from inductor_passes.verify.values.memory import Memory
from inductor_passes.verify.values.movement import ALIASES, starts_of
from inductor_passes.verify.values.moves import CASTS, MOVES
from inductor_passes.verify.values.own import CUTS, Own
from inductor_passes.verify.values.program import Record
from inductor_passes.verify.values.sizes import NoHintError
from inductor_passes.verify.values.strided import NotRegularError


class Cast(NamedTuple):
    """An element rounded, or widened, to ``dtype``; ``byte`` of it, or all."""

    dtype: torch.dtype
    source: Access
    byte: Affine | None = None


Head = Access | Constant | Reduction | Cast


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of ``narrow`` is one of ``wide``."""
    if wide == narrow:
        return True
    if narrow is torch.bool:
        return True
    if wide.is_complex or narrow.is_complex:
        parts = wide.to_real() if wide.is_complex else wide
        return wide.is_complex and holds(parts, narrow.to_real() if narrow.is_complex else narrow)
    if wide.is_floating_point and narrow.is_floating_point:
        a, b = torch.finfo(wide), torch.finfo(narrow)
        return a.eps <= b.eps and a.max >= b.max and a.smallest_normal <= b.smallest_normal
    if wide.is_floating_point:
        return False if wide is torch.bool else 2 / torch.finfo(wide).eps >= torch.iinfo(narrow).max
    if narrow.is_floating_point or wide is torch.bool:
        return False
    return torch.iinfo(wide).min <= torch.iinfo(narrow).min and torch.iinfo(wide).max >= torch.iinfo(narrow).max


class Resolver:
    """Follows reads of one program.

    Attributes:
        stands: names of values -> the value of the other program that they were shown to be on this rank. Every rank
            shows that of its own, so they are followed there, on whatever rank they are read.
        other: the resolver of the other program.
        rounds: names of nodes that arrive rounded -> what is said of them. They are followed to what they are a
            rounding of, which has to be in one of the forms that ``narrowed`` knows.
        roundings: how many such nodes have been followed.
    """

    def __init__(
        self, space: Space, groups: Groups, memory: Memory, own: Own, rounds: Mapping[str, Narrowed] | None = None
    ) -> None:
        self.space, self.groups, self.memory, self.own = space, groups, memory, own
        self.rounds = rounds or {}
        self.roundings = 0
        self.stands: dict[str, Record] = {}
        self.other: Resolver | None = None

    def head(self, a: Access) -> Head:
        """See the module's docstring.

        Raises:
            NeedsCut, NeedsBytes: the question has to be asked for parts.
            NoHintError, NotRegularError: it cannot be answered.
        """
        if self.other is not None and a.record.program is self.other.own.program is not self.own.program:
            return self.other.head(a)
        try:
            return self._followed(a)
        except NeedsBytes:
            if a.byte is not None:
                raise
        # Bytes that travelled as bytes and are put together again are the element that they were.
        byte = self.space.fresh(a.dtype.itemsize)
        try:
            whole = self._followed(a._replace(byte=byte))
        except NeedsCut as cut:
            if (cut.variable, 1) in byte.terms:
                raise NeedsBytes from cut
            raise
        if isinstance(whole, Constant) or whole.byte != byte or whole.dtype != a.dtype:
            raise NeedsBytes
        element = whole._replace(byte=None)
        if any(v in variables(element) for v, _ in byte.terms):
            raise NeedsBytes
        return element

    def _followed(self, a: Access) -> Head:
        while True:
            if self.other is not None and a.record.name in self.stands:
                return self.other.head(a._replace(record=self.stands[a.record.name], reader=None))
            if self.is_overwritten(a):
                return a
            step = self._step(a)
            if step is None:
                return a
            if isinstance(step, Cast):
                collapsed = self._collapsed(step)
                if isinstance(collapsed, Access):
                    a = collapsed
                    continue
                return collapsed
            if not isinstance(step, Access):
                return step
            a = step

    def trail(self, a: Access) -> list[Access]:
        """Where an element is read that is only moved, from ``a`` on: as far as it is understood, and not rounded."""
        if self.other is not None and a.record.program is self.other.own.program is not self.own.program:
            return self.other.trail(a)
        found = [a]
        # Nothing is concluded from where it ends.
        with contextlib.suppress(NeedsCut, NeedsBytes, NoHintError, NotRegularError):
            while not self.is_overwritten(found[-1]) and found[-1].record.name not in self.rounds:
                step = self._step(found[-1])
                if not isinstance(step, Access):
                    break
                found.append(step)
        return found

    def cast_behind(self, a: Access) -> Cast | None:
        """The cast that made an element, through whatever moves it; None where it was made otherwise.

        Raises:
            NeedsCut, NeedsBytes, NoHintError, NotRegularError: see :meth:`head`.
        """
        while not self.is_overwritten(a):
            step = self._step(a)
            if not isinstance(step, Access):
                return step if isinstance(step, Cast) else None
            a = step
        return None

    def arrival(self, a: Access) -> narrowed.Rounded | None:
        """What an element that was only moved since it arrived is a rounding of; None where it did not arrive rounded.

        Raises:
            NeedsCut, NeedsBytes, NoHintError, NotRegularError: see :meth:`head`.
        """
        while not self.is_overwritten(a):
            if a.record.name in self.rounds:
                return narrowed.rounded(self, a)
            step = self._step(a)
            if not isinstance(step, Access):
                return None
            a = step
        return None

    def taken_here(self, a: Access) -> Access | None:
        """Where this rank reads an element of a cut that may be elsewhere on other ranks; None for all other reads.

        It tells reads apart, and says nothing of what they are worth on another rank.

        Raises:
            NeedsCut, NeedsBytes, NoHintError, NotRegularError: see :meth:`head`.
        """
        if a.record.called not in CUTS or self.is_overwritten(a) or not self.own.may_be_elsewhere(a):
            return None
        found = MOVES[a.record.called](self.space, a)
        assert isinstance(found, Access)
        return self._reads(a, found)

    def is_constant(self, a: Access, value: float) -> bool:
        """Whether an element is this number."""
        found = self.head(a)
        return isinstance(found, Constant) and found.value == value

    def is_overwritten(self, a: Access) -> bool:
        """Whether a value is no longer what its definition says when it is read; a view is read at its source."""
        if not self.memory.any or a.record.called in ALIASES:
            return False
        return bool(self.memory.version(a.record.name, position_of(a.reader)))

    def _step(self, a: Access) -> Head | None:
        called = a.record.called
        if a.record.name in self.rounds:
            return self._rounded(a)
        if called in definitions.DEFINED and called not in definitions.ROUND_FREELY:
            meaning = definitions.meaning(a.record, a.path)
            return None if meaning is None else a._replace(record=meaning, path=(), reader=a.record)
        if called in COLLECTIVES:
            found = COLLECTIVES[called](self.groups, a)
            return None if found is None else self._read_by(a, found)
        if called not in MOVES:
            return None
        if called in CASTS and a.dtype != (source := _cast_source(a)).dtype():
            inner = MOVES[called](self.space, a._replace(byte=None))
            assert isinstance(inner, Access) and inner.record is source
            return Cast(a.dtype, self._reads(a, inner), a.byte)
        found = self._own_piece(a) if len(a.path) == 1 else None
        if found is None and self.own.may_be_elsewhere(a):
            # It is what it is there: equal to itself, and to nothing that is read past it.
            return None
        return self._read_by(a, found or MOVES[called](self.space, a))

    def _rounded(self, a: Access) -> Access:
        """What was rounded to be sent, and arrives as ``a``."""
        found, stated = narrowed.rounded(self, a), self.rounds[a.record.name]
        if found.error > stated.error:
            said = f"{float(found.error):g} of the largest, where {float(stated.error):g} is allowed"
            raise narrowed.NotNarrowedError(f"{a.record.name} is rounded by up to {said}")
        if stated.over and not narrowed.stays_on(self.space, stated.over, found.source.rank, a.rank):
            raise narrowed.NotNarrowedError(f"{a.record.name} arrives from ranks that are not at its place of a host")
        self.roundings += 1
        return found.source

    def _own_piece(self, a: Access) -> Access | None:
        """A piece of a split that every rank takes at its own position."""
        group = self.own.group(a.record, a.path[0])
        if group is None:
            return None
        dim, starts = starts_of(a.record)
        first = group.position(self.space, a.rank).times(starts[1])
        return a.on_dim(a.record.first, dim, first.plus(a.indices[dim]))

    def _read_by(self, a: Access, found: Head) -> Head:
        if not self.memory.any:
            return found
        if isinstance(found, Access):
            return self._reads(a, found)
        if isinstance(found, Reduction):
            return found._replace(term=self._reads(a, found.term))
        return found

    def _reads(self, a: Access, found: Access) -> Access:
        """Copies read when they run; a view is read when its reader runs."""
        return found if not self.memory.any or a.record.called in ALIASES else found._replace(reader=a.record)

    def _collapsed(self, cast: Cast) -> Head:
        try:
            inner = self.head(cast.source)
        except NeedsBytes:
            return cast
        if isinstance(inner, Constant):
            return Constant(torch.tensor(inner.value, dtype=inner.dtype).to(cast.dtype).item(), cast.dtype)
        if isinstance(inner, Cast) and holds(inner.dtype, inner.source.dtype):
            if inner.source.dtype == cast.dtype:
                return inner.source._replace(byte=cast.byte)
            return self._collapsed(Cast(cast.dtype, inner.source, cast.byte))
        return cast


def variables(head: Access | Reduction | Cast) -> set[int]:
    """Those that a head depends on, the byte aside."""
    if isinstance(head, Cast):
        return head.source.variables()
    return head.term.variables() if isinstance(head, Reduction) else head.variables()


def position_of(reader: Record | None) -> int | None:
    """When somebody reads; None where nobody is named."""
    return None if reader is None else reader.position


def _cast_source(a: Access) -> Record:
    found: Record = a.record.arguments["src"] if a.record.called == "aten::copy" else a.record.first
    return found
