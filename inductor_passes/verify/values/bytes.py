"""Views of memory as elements of another size: read byte by byte where sizes differ."""

from __future__ import annotations

from inductor_passes.verify.values.access import Access
from inductor_passes.verify.values.affine import Space


class NeedsBytes(Exception):
    """The question has to be asked byte by byte: both sides read one byte of an element of ``size`` bytes."""


def reinterpreted(space: Space, a: Access) -> Access:
    """``view`` as another dtype, ``view_as_real``, ``view_as_complex``: the byte of the operand that is read.

    Raises:
        NeedsBytes: whole elements are asked for, and the operand's are of another size.
    """
    source = a.record.first
    own, other = a.dtype.itemsize, source.dtype().itemsize
    shape = source.shape()
    if own == other:
        return a.at(source, a.indices)
    if a.byte is None:
        raise NeedsBytes
    leading = min(len(shape), len(a.indices))
    if len(shape) == len(a.indices):
        leading -= 1
    # What the result has as its last dimension, and the operand as its: one number of a byte within a run.
    byte = a.byte
    for place, (i, size) in enumerate(zip(a.indices[leading:], a.shape[leading:])):
        del place, size
        byte = i.times(own).plus(byte)
    index = list(a.indices[:leading])
    if len(shape) > leading:
        element, byte = space.divide(byte, other)
        index.append(element)
    return Access(source, (), a.rank, tuple(index), byte, a.reader)
