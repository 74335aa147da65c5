"""``as_strided``: elements by their place in memory."""

from __future__ import annotations

from inductor_passes.verify.values.access import Access
from inductor_passes.verify.values.affine import ZERO, Affine, Space
from inductor_passes.verify.values.program import sizes, whole
from inductor_passes.verify.values.sizes import NoHintError


class NotRegularError(Exception):
    """Memory that is read by address does not hold one tensor's elements in a plain order."""


def as_strided(space: Space, a: Access) -> Access:
    """The element of the operand that lies where the result looks.

    Raises:
        NotRegularError: the operand's elements do not fill a block of memory, or the result looks beyond them.
    """
    source, given = a.record.first, a.record.arguments
    tensor = source.tensor()
    strides = sizes(given["stride"], a.record.name)
    begin = whole(tensor.storage_offset())
    offset = begin if given.get("storage_offset") is None else whole(given["storage_offset"])
    if begin is None or offset is None:
        raise NoHintError(f"{a.record.name} has an offset that is no number")
    place = Affine(offset - begin)
    for i, stride in zip(a.indices, strides):
        place = place.plus(i.times(stride))
    shape, own = source.shape(), sizes(tensor.stride(), source.name)
    index = [ZERO] * len(shape)
    extent = 1
    for dim in sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: own[d]):
        if own[dim] != extent:
            raise NotRegularError(f"{a.record.name} reads {source.name} by address, which is not dense")
        extent *= shape[dim]
    inside, rest = space.locate(place, (0, extent))
    if inside:
        raise NotRegularError(f"{a.record.name} reads memory beyond {source.name}")
    for dim in sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -own[d]):
        index[dim], rest = space.divide(rest, own[dim])
    return a.at(source, tuple(index))
