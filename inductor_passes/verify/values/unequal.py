"""An all_to_all with unequal parts: what arrives is what the peers are stated to send.

See :mod:`inductor_passes.verify.messages`; ``sending`` proves that this rank sends what is stated. Without such a
statement nothing is known about what arrives.
"""

from __future__ import annotations

import functools
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
    here, peers = _ends(space, group, a.rank)
    unit = unit_of(source, a.record)
    try:
        parts, ends = _told(said, peers, here)
    except ValueError as why:
        raise NoHintError(f"{a.record.name} does not say what rank {here} gets: {why}") from why
    edges = [0, *ends] if unit == 1 else [0, *(end * unit for end in ends)]
    place, inner = space.locate(a.indices[0], edges)
    if not 0 <= place < len(parts):
        raise NoHintError(f"{a.record.name} holds more than the peers send")
    peer, part = parts[place]
    element, byte = space.divide(inner, unit)
    rank = a.rank.shifted(peer - here)
    return Access(source, (), rank, inside(space, part, element), byte if unit > 1 else a.byte, a.reader)


@functools.lru_cache(maxsize=4096)
def _told(said: Messages, peers: tuple[int, ...], here: int) -> tuple[list[tuple[int, Part]], list[int]]:
    """What arrives at a rank, and how many elements up to the end of each part: asked for every element."""
    parts = [(peer, part) for peer in peers for part in said.parts(peer, here)]
    return parts, list(itertools.accumulate(part.end - part.begin for _, part in parts))


def _ends(space: Space, group: Replicas, rank: Affine) -> tuple[int, tuple[int, ...]]:
    """A rank, and the ranks that send to it: this process's group, or one parallel to it.

    What travels is stated for any two ranks. In a parallel group it may be something else than here: which piece of a
    tensor is sent depends on where the ranks stand along the other dimensions of a mesh, too.
    """
    here = rank.const % FAR
    if here in group.ranks:
        return here, group.ranks
    return here, tuple(group.member(space, rank, Affine(position)).const % FAR for position in range(group.size))


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
