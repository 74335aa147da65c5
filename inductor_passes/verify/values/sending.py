"""Proves that an all_to_all with unequal parts sends what is stated, see :mod:`inductor_passes.verify.messages`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inductor_passes.verify.messages import Part
from inductor_passes.verify.values.access import Access, Constant
from inductor_passes.verify.values.affine import Affine, NeedsCut
from inductor_passes.verify.values.bytes import NeedsBytes
from inductor_passes.verify.values.differences import describe
from inductor_passes.verify.values.heads import Head, Resolver, position_of
from inductor_passes.verify.values.program import Record
from inductor_passes.verify.values.replicas import FAR
from inductor_passes.verify.values.sizes import NoHintError
from inductor_passes.verify.values.unequal import inside, messages, unit_of


@dataclass(frozen=True)
class _Sent:
    """A run of the message.

    Attributes:
        element: number of an element of the part; ``byte`` of it, None: all of it.
        at: where the message has it; ``inner``: in which byte, None: all of what is there.
    """

    part: Part
    element: Affine
    byte: Affine | None
    at: Affine
    inner: Affine | None = None

    def put(self, variable: int, value: Affine) -> _Sent:
        byte, inner = (None if b is None else b.put(variable, value) for b in (self.byte, self.inner))
        element, at = self.element.put(variable, value), self.at.put(variable, value)
        return replace(self, element=element, byte=byte, at=at, inner=inner)


def wrongly_sent(resolver: Resolver, record: Record) -> str:
    """What an exchange sends that is not what it says; "" when it does as it says, or says nothing.

    Raises:
        NoHintError, NotRegularError: see ``Resolver.head``.
    """
    found = messages(record)
    group = resolver.groups.of(record)
    here = resolver.groups.here.const % FAR
    if found is None or here not in group.ranks:
        return ""
    said, source = found
    unit, space, at = unit_of(source, record), resolver.space, 0
    for peer in group.ranks:
        for part in said.parts(here, peer):
            count = part.end - part.begin
            element, byte = space.fresh(count), space.fresh(unit) if unit > 1 else None
            place = element.times(unit).shifted(at)
            run = _Sent(part, element, byte, place if byte is None else place.plus(byte))
            if count and (why := _differs(resolver, record, source, run)):
                return f"sends rank {peer} what it says it does not: {why}"
            at += count * unit
    shape = record.first.shape()
    return "" if shape == (at,) else f"sends {shape[0]} elements and says that it sends {at}"


def _differs(resolver: Resolver, record: Record, source: Record, run: _Sent) -> str:
    todo = [run]
    while todo:
        one = todo.pop()
        try:
            index = inside(resolver.space, one.part, one.element)
            told = Access(source, (), resolver.groups.here, index, one.byte, record)
            sent = Access(record.first, (), resolver.groups.here, (one.at,), one.inner, record)
            heads = resolver.head(sent), resolver.head(told)
        except NeedsCut as cut:
            todo += [one.put(cut.variable, piece) for piece in reversed(cut.pieces)]
            continue
        except NeedsBytes as why:
            if one.byte is not None:
                raise NoHintError(f"{record.name} sends parts of elements") from why
            byte = resolver.space.fresh(source.dtype().itemsize)
            todo.append(replace(one, byte=byte, inner=byte))
            continue
        if _plain(resolver, heads[0]) != _plain(resolver, heads[1]):
            return f"{describe(heads[0])} for {describe(heads[1])}"
    return ""


def _plain(resolver: Resolver, head: Head) -> object:
    """A head without who reads it, but with what was written to its memory before."""
    if isinstance(head, Access):
        version = resolver.memory.version(head.record.name, position_of(head.reader))
        return head._replace(reader=None), version
    return repr(head) if isinstance(head, Constant) else head
