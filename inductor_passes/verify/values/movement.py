"""Operators that only move elements: for each, which element of its operand an element of its result is.

Written from the operators' documentation. Elements are counted by logical index, not by memory layout, except where an
operator reads memory as such (``as_strided``, views as another dtype).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from inductor_passes.operators import SENT
from inductor_passes.verify.values.access import Access, Constant, Rule, dim_of, reindexed
from inductor_passes.verify.values.affine import ZERO, Affine, Space
from inductor_passes.verify.values.bytes import reinterpreted
from inductor_passes.verify.values.program import Record, sizes, whole
from inductor_passes.verify.values.sizes import NoHintError, is_one, is_same, is_stretched
from inductor_passes.verify.values.strided import as_strided

_INF = 1 << 60


def _same(space: Space, a: Access) -> Access:
    return a.at(a.record.first, a.indices, a.path)


def _view(space: Space, a: Access) -> Access:
    if isinstance(a.record.arguments.get("dtype"), torch.dtype):
        return reinterpreted(space, a)
    source = a.record.first
    return a.at(source, reindexed(space, a.indices, a.shape, source.shape()))


def _permuted(a: Access, order: Sequence[int]) -> Access:
    index = [ZERO] * len(order)
    for place, origin in enumerate(order):
        index[origin] = a.indices[place]
    return a.at(a.record.first, tuple(index))


def _permute(space: Space, a: Access) -> Access:
    return _permuted(a, [dim_of(d, len(a.indices)) for d in a.record.arguments["dims"]])


def _transpose(space: Space, a: Access) -> Access:
    order = list(range(len(a.indices)))
    if len(order) < 2:
        return a.at(a.record.first, a.indices)
    given = a.record.arguments
    i, j = dim_of(given.get("dim0", 0), len(order)), dim_of(given.get("dim1", 1), len(order))
    order[i], order[j] = order[j], order[i]
    return _permuted(a, order)


def _bound(value: Any, extent: int, default: int) -> int:
    if value is None:
        return default
    found = whole(value)
    if found is None:
        raise NoHintError("a slice has a bound that is no number")
    if type(found) is int and found >= _INF:
        return extent
    return min(max(found + extent if found < 0 else found, 0), extent)


def slice_range(record: Record) -> tuple[int, int, int, int]:
    """(dimension, start, end, step) of a slice."""
    given, shape = record.arguments, record.first.shape()
    dim = dim_of(given.get("dim", 0), len(shape))
    step = whole(given.get("step", 1)) or 1
    return dim, _bound(given.get("start"), shape[dim], 0), _bound(given.get("end"), shape[dim], shape[dim]), step


def _has_length(record: Record, length: int, computed: int | None) -> None:
    """What is cut out has as many elements as its fake tensor says, which may be that of what it stands for.

    Raises:
        NoHintError: it has not for the whole range.
    """
    if computed is None or not is_same(length, computed):
        raise NoHintError(f"{record.name} takes {computed} elements in the place of {length}")


def _slice(space: Space, a: Access) -> Access:
    dim, start, end, step = slice_range(a.record)
    _has_length(a.record, a.shape[dim], end - start if is_one(step) else -(-(end - start) // step))
    return a.on_dim(a.record.first, dim, a.indices[dim].times(step).shifted(start))


def _narrow(space: Space, a: Access) -> Access:
    source = a.record.first
    dim = dim_of(a.record.arguments["dim"], len(a.indices))
    _has_length(a.record, a.shape[dim], whole(a.record.arguments["length"]))
    return a.on_dim(source, dim, a.indices[dim].shifted(_bound(a.record.arguments["start"], source.shape()[dim], 0)))


def _select(space: Space, a: Access) -> Access:
    source, given = a.record.first, a.record.arguments
    dim = dim_of(given["dim"], len(source.shape()))
    at = whole(given["index"])
    if at is None:
        raise NoHintError(f"{a.record.name} selects at an index that is no number")
    at = at + source.shape()[dim] if at < 0 else at
    return a.at(source, (*a.indices[:dim], Affine(at), *a.indices[dim:]))


def _unbind(space: Space, a: Access) -> Access:
    source = a.record.first
    dim = dim_of(a.record.arguments["dim"], len(source.shape()))
    return a.at(source, (*a.indices[:dim], Affine(a.path[0]), *a.indices[dim:]))


def starts_of(record: Record) -> tuple[int, list[int]]:
    """(dimension, first index of every piece) of an operator that cuts a tensor into a list."""
    if "starts" not in record.notes:
        dim = dim_of(record.arguments.get("dim", 0), len(record.first.shape()))
        pieces = [record.shape((i,))[dim] for i in range(len(record.value))]
        given = record.arguments.get("split_sizes", record.arguments.get("split_size", ()))
        wanted = given if isinstance(given, tuple) else (given,) * (len(pieces) - 1)
        for piece, size in zip(pieces, wanted):
            _has_length(record, piece, whole(size))
        record.notes["starts"] = dim, [0, *itertools.accumulate(pieces)][:-1]
    found: tuple[int, list[int]] = record.notes["starts"]
    return found


def _split(space: Space, a: Access) -> Access:
    dim, starts = starts_of(a.record)
    return a.on_dim(a.record.first, dim, a.indices[dim].shifted(starts[a.path[0]]), a.path[1:])


def _getitem(space: Space, a: Access) -> Access:
    source, at = a.record.arguments["0"], a.record.arguments["1"]
    return a.at(source, a.indices, (int(at), *a.path))


def _expand(space: Space, a: Access) -> Access:
    source = a.record.first
    shape = source.shape()
    own = a.indices[len(a.indices) - len(shape) :]
    wide = a.shape[len(a.shape) - len(shape) :]
    return a.at(source, tuple(ZERO if is_stretched(size, to) else i for size, to, i in zip(shape, wide, own)))


def _repeat(space: Space, a: Access) -> Access:
    source = a.record.first
    shape = source.shape()
    own = a.indices[len(a.indices) - len(shape) :]
    return a.at(source, tuple(space.remainder(i, size) for size, i in zip(shape, own)))


def _flip(space: Space, a: Access) -> Access:
    dims = {dim_of(d, len(a.indices)) for d in a.record.arguments["dims"]}
    index = [i.times(-1).shifted(a.shape[d] - 1) if d in dims else i for d, i in enumerate(a.indices)]
    return a.at(a.record.first, tuple(index))


def _roll(space: Space, a: Access) -> Access:
    source, shifts, dims = a.record.first, a.record.arguments["shifts"], a.record.arguments["dims"]
    if not dims:
        shape = source.shape()
        flat = tuple(reindexed(space, a.indices, shape, (math.prod(source.shape()),)))
        moved = space.remainder(flat[0].shifted(-(whole(shifts[0]) or 0)), math.prod(source.shape()))
        return a.at(source, reindexed(space, (moved,), (math.prod(source.shape()),), shape))
    for shift, d in zip(shifts, dims):
        dim = dim_of(d, len(a.indices))
        moved = space.remainder(a.indices[dim].shifted(-(whole(shift) or 0)), a.shape[dim])
        a = a.on_dim(a.record, dim, moved)
    return a.at(source, a.indices)


def _pad(space: Space, a: Access) -> Access | Constant:
    source, given = a.record.first, a.record.arguments
    pads, shape = sizes(given["pad"], a.record.name), source.shape()
    index = list(a.indices)
    for place in range(len(pads) // 2):
        dim = len(shape) - 1 - place
        inside, index[dim] = space.locate(index[dim].shifted(-pads[2 * place]), (0, shape[dim]))
        if inside:
            return Constant(given.get("value") or 0, a.dtype)
    return a.at(source, tuple(index))


def _slice_scatter(space: Space, a: Access) -> Access:
    source, given = a.record.first, a.record.arguments
    dim, start, end, step = slice_range(a.record)
    inside, offset = space.locate(a.indices[dim], (start, max(start, end)))
    if inside:
        return a.at(source, a.indices)
    quotient, rest = space.divide(offset, step)
    if rest.terms:
        raise space.points(rest.terms[0][0])
    return a.at(source, a.indices) if rest.const else a.on_dim(given["src"], dim, quotient)


def _select_scatter(space: Space, a: Access) -> Access:
    source, given = a.record.first, a.record.arguments
    dim = dim_of(given["dim"], len(a.indices))
    at = _bound(given["index"], source.shape()[dim], 0)
    inside, _ = space.locate(a.indices[dim], (at, at + 1))
    if inside:
        return a.at(source, a.indices)
    return a.at(given["src"], (*a.indices[:dim], *a.indices[dim + 1 :]))


def _copy(space: Space, a: Access) -> Access:
    source = a.record.arguments["src"]
    shape = source.shape()
    own, wide = a.indices[len(a.indices) - len(shape) :], a.shape[len(a.shape) - len(shape) :]
    return a.at(source, tuple(ZERO if is_stretched(size, to) else i for size, to, i in zip(shape, wide, own)))


def _filled(space: Space, a: Access) -> Access | Constant:
    for name in ("fill_value", "value", "s"):
        value = a.record.arguments.get(name)
        if isinstance(value, (bool, int, float, complex)):
            return Constant(value, a.dtype)
    raise NoHintError(f"{a.record.name} is filled with a value that the graph computes")


def _number(value: int) -> Rule:
    return lambda space, a: Constant(value, a.dtype)


#: Views that read the same elements in row-major order.
_IN_ORDER = (
    "view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "ravel", "view_as", "reshape_as",
    "squeeze", "unsqueeze",
)  # fmt: skip
#: The same elements, possibly as another dtype (see ``casts``), possibly in other memory.
_COPIES = ("clone", "contiguous", "_to_copy", "to", "type_as", "lift_fresh_copy", "lift_fresh", "lift")
_LISTS = (
    "split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "tensor_split",
)  # fmt: skip
#: Operators whose result is memory of their operand: who reads it reads the operand, when it reads.
ALIASES = frozenset(
    {
        "getitem",
        "_c10d_functional::wait_tensor",
        "_c10d_functional::wait_tensors",
        *(f"aten::{name}" for name in _IN_ORDER if name not in ("reshape", "flatten", "ravel", "reshape_as")),
        *(f"aten::{name}" for name in ("alias", "detach", "permute", "t", "transpose", "slice", "narrow", "select")),
        *(f"aten::{name}" for name in _LISTS),
        *(f"aten::{name}" for name in ("unbind", "expand")),
        *(f"aten::{name}" for name in ("as_strided", "view_as_real", "view_as_complex", "lift_fresh")),
        "prims::view_of",
    }
)

RULES: dict[str, Rule] = {
    "getitem": _getitem,
    "_c10d_functional::wait_tensor": _same,
    **{f"aten::{name}": _view for name in _IN_ORDER},
    **{f"aten::{name}": _same for name in (*_COPIES, "alias", "detach")},
    **{f"aten::{name}": _split for name in _LISTS},
    "prims::convert_element_type": _same,
    "prims::device_put": _same,
    # See ``kept``: what arrives is what is sent, but for a rounding that a certificate names.
    SENT: _same,
    "prims::view_of": _same,
    "aten::view_as_real": reinterpreted,
    "aten::view_as_complex": reinterpreted,
    "aten::as_strided": as_strided,
    "aten::permute": _permute,
    "aten::t": _transpose,
    "aten::transpose": _transpose,
    "aten::slice": _slice,
    "aten::narrow": _narrow,
    "aten::select": _select,
    "aten::unbind": _unbind,
    "aten::expand": _expand,
    "aten::repeat": _repeat,
    "aten::flip": _flip,
    "aten::roll": _roll,
    "aten::constant_pad_nd": _pad,
    "aten::slice_scatter": _slice_scatter,
    "aten::select_scatter": _select_scatter,
    "aten::copy": _copy,
    **{f"aten::{name}": _filled for name in ("full", "full_like", "new_full", "scalar_tensor", "fill")},
    **{f"aten::{name}": _number(0) for name in ("zeros", "zeros_like", "new_zeros")},
    **{f"aten::{name}": _number(1) for name in ("ones", "ones_like", "new_ones")},
}
