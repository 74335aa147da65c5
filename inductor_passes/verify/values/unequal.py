"""An all_to_all with unequal parts: what arrives is what the peers are stated to send.

See :mod:`inductor_passes.verify.messages`; ``sending`` proves that this rank sends what is stated. Without such a
statement nothing is known about what arrives.
"""

from __future__ import annotations

import itertools

from inductor_passes.verify.messages import KEY, Messages, Part
from inductor_passes.verify.values.access import Access, unravelled
from inductor_passes.verify.values.affine import Affine, Space
from inductor_passes.verify.values.program import Record
from inductor_passes.verify.values.replicas import FAR, Replicas
from inductor_passes.verify.values.sizes import NoHintError


def messages(record: Record) -> tuple[Messages, Record] | None:
    """(what an exchange says, the tensor whose elements travel)."""
    said = record.meta.get(KEY)
    if not isinstance(said, Messages) or len(record.first.shape()) != 1:
        return None
    source = record.program.records.get(said.source)
    return None if source is None or source.position >= record.position else (said, source)


def arrived(space: Space, group: Replicas, a: Access) -> Access | None:
    """The peer's element that an element of the result is; None without a statement.

    Raises:
        NeedsCut: parts have to be looked at one by one.
    """
    found = messages(a.record)
    if found is None or not group.ranks:
        return None
    said, source = found
    if a.rank.terms:
        raise space.points(a.rank.terms[0][0])
    here = _member(space, group, a.rank)
    unit = unit_of(source, a.record)
    parts = [(peer, part) for peer in group.ranks for part in said.parts(peer, here)]
    edges = [0, *itertools.accumulate((part.end - part.begin) * unit for _, part in parts)]
    place, inner = space.locate(a.indices[0], edges)
    if not 0 <= place < len(parts):
        raise NoHintError(f"{a.record.name} holds more than the peers send")
    peer, part = parts[place]
    element, byte = space.divide(inner, unit)
    rank = a.rank.shifted(peer - here)
    return Access(source, (), rank, inside(space, part, element), byte if unit > 1 else a.byte, a.reader)


def _member(space: Space, group: Replicas, rank: Affine) -> int:
    """The member of this process's group in the place of ``rank``, which may be in a group parallel to it.

    The ranks of a parallel group send each other what their counterparts here do, as everywhere in a proof.
    """
    here = rank.const % FAR
    return here if here in group.ranks else group.ranks[group.position(space, rank).const]


def unit_of(source: Record, sent: Record) -> int:
    """How many elements of the message an element of the source is: it may travel as bytes."""
    own, other = source.dtype().itemsize, sent.dtype().itemsize
    if own != other and other != 1:
        raise NoHintError(f"{sent.name} sends elements of {source.name} in another size")
    return own // other


def inside(space: Space, part: Part, element: Affine) -> tuple[Affine, ...]:
    """The index in the sender's tensor of a part's element."""
    index = unravelled(space, element.shifted(part.begin), part.shape)
    return tuple(i.shifted(first) for i, first in zip(index, part.first))
