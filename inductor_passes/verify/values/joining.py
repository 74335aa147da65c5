"""``cat`` and ``stack``: which of the joined tensors an element comes from.

If pieces of one tensor are joined in regular order (as when a gather along another dimension is unpacked), all of them
are one case, however many ranks there are.
"""

from __future__ import annotations

import itertools

from inductor_passes.verify.values.access import Access, dim_of
from inductor_passes.verify.values.affine import Space
from inductor_passes.verify.values.movement import slice_range, starts_of
from inductor_passes.verify.values.program import Record
from inductor_passes.verify.values.sizes import UndecidedError

_COPIES = frozenset({"aten::clone", "aten::contiguous", "aten::alias"})
#: (tensor, dimension, first index): a run of a tensor's indices, everything else whole.
Piece = tuple[Record, int, int]


def joined(space: Space, a: Access) -> Access:
    """An element of a ``cat``."""
    parts, dim, edges = _parts(a.record)
    extent = parts[0].shape()[dim]
    if (family := _family(a.record, parts)) is not None and edges[-1] == extent * len(parts):
        source, along, first, step = family
        which, inner = space.divide(a.indices[dim], extent)
        if which.terms:
            own = a.on_dim(source, dim, inner)
            return own.on_dim(source, along, own.indices[along].plus(which.times(step)).shifted(first))
    place, inner = space.locate(a.indices[dim], edges)
    return a.on_dim(parts[place], dim, inner)


def stacked(space: Space, a: Access) -> Access:
    """An element of a ``stack``."""
    parts = a.record.arguments["tensors"]
    dim = dim_of(a.record.arguments.get("dim", 0), len(a.indices))
    indices = (*a.indices[:dim], *a.indices[dim + 1 :])
    which = a.indices[dim]
    if which.terms and (family := _family(a.record, parts)) is not None:
        source, along, first, step = family
        own = a.at(source, indices)
        return own.on_dim(source, along, own.indices[along].plus(which.times(step)).shifted(first))
    place, _ = space.locate(which, range(len(parts) + 1))
    return a.at(parts[place], indices)


def _parts(record: Record) -> tuple[tuple[Record, ...], int, list[int]]:
    """(tensors, dimension, where each begins and the last one ends); an empty vector among them does not count."""
    if "parts" not in record.notes:
        rank = len(record.shape())
        dim = dim_of(record.arguments.get("dim", 0), rank)
        parts = tuple(p for p in record.arguments["tensors"] if p.shape() != (0,) or rank == 1)
        record.notes["parts"] = parts, dim, [0, *itertools.accumulate(p.shape()[dim] for p in parts)]
    found: tuple[tuple[Record, ...], int, list[int]] = record.notes["parts"]
    return found


def _family(record: Record, parts: tuple[Record, ...]) -> tuple[Record, int, int, int] | None:
    """(tensor, dimension, first index, step) when the parts are equal runs of one tensor at equal distances."""
    if "family" not in record.notes:
        try:
            record.notes["family"] = _regular(parts)
        except UndecidedError:
            # Parts that are not known to be equal are looked at one by one.
            record.notes["family"] = None
    found: tuple[Record, int, int, int] | None = record.notes["family"]
    return found


def _regular(parts: tuple[Record, ...]) -> tuple[Record, int, int, int] | None:
    if len(parts) < 2 or any(p.shape() != parts[0].shape() for p in parts):
        return None
    pieces = [_piece(p) for p in parts]
    if pieces[0] is None or pieces[1] is None:
        return None
    source, dim, first = pieces[0]
    step = pieces[1][2] - first
    for place, piece in enumerate(pieces):
        if piece is None or piece[0] is not source or piece[1:] != (dim, first + place * step):
            return None
    return source, dim, first, step


def _piece(part: Record) -> Piece | None:
    while part.called in _COPIES:
        part = part.first
    if part.called == "getitem":
        cut = part.arguments["0"]
        if cut.called in ("aten::split", "aten::split_with_sizes", "aten::chunk"):
            dim, starts = starts_of(cut)
            return cut.first, dim, starts[part.arguments["1"]]
    if part.called == "aten::slice":
        dim, start, _, step = slice_range(part)
        return (part.first, dim, start) if step == 1 else None
    return None
