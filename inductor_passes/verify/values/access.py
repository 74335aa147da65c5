"""Where a value is read: one element of a node's result, for all values of some variables at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from inductor_passes.verify.values.affine import ZERO, Affine, Space
from inductor_passes.verify.values.program import Record
from inductor_passes.verify.values.sizes import is_at_most, is_one, is_same


class Access(NamedTuple):
    """An element of a result.

    Attributes:
        record: whose result; ``path`` picks from a list of results.
        rank: the global rank that holds it.
        indices: one entry per dimension.
        byte: which byte of the element, None: all of it.
        reader: who reads the memory behind it; None for the end of a read, or when nothing is ever written to.
    """

    record: Record
    path: tuple[int, ...]
    rank: Affine
    indices: tuple[Affine, ...]
    byte: Affine | None = None
    reader: Record | None = None

    def at(self, record: Record, index: tuple[Affine, ...], path: tuple[int, ...] = ()) -> Access:
        """The same kind of read elsewhere."""
        return Access(record, path, self.rank, index, self.byte, self.reader)

    def on_dim(self, record: Record, dim: int, value: Affine, path: tuple[int, ...] = ()) -> Access:
        """Elsewhere with another index in one dimension."""
        return self.at(record, (*self.indices[:dim], value, *self.indices[dim + 1 :]), path)

    def put(self, variable: int, value: Affine) -> Access:
        """With a variable replaced."""
        return Access(
            self.record,
            self.path,
            self.rank.put(variable, value),
            tuple(i.put(variable, value) for i in self.indices),
            None if self.byte is None else self.byte.put(variable, value),
            self.reader,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole result."""
        return self.record.shape(self.path)

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.record.dtype(self.path)

    def functions(self) -> tuple[Affine, ...]:
        """Everything about it that depends on variables."""
        return (self.rank, *self.indices) if self.byte is None else (self.rank, *self.indices, self.byte)

    def variables(self) -> set[int]:
        """Those it depends on."""
        return {v for f in self.functions() for v, _ in f.terms}


class Constant(NamedTuple):
    """A number that the graph writes down."""

    value: complex | float | int | bool
    dtype: torch.dtype


#: What one operator does to a read of its result.
Rule = Callable[[Space, Access], "Access | Constant"]


def dim_of(value: object, rank: int) -> int:
    """A dimension counted from the front."""
    if not isinstance(value, int):
        raise TypeError(f"a dimension is {value!r}")
    return value + rank if value < 0 else value


@functools.lru_cache(maxsize=4096)
def _blocks(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[tuple[int, int, int, int], ...]:
    """Runs of dimensions [i0, i1) of ``before`` and [j0, j1) of ``after`` that hold the same elements."""
    found = []
    i = j = 0
    symbolic = any(type(size) is not int for size in (*before, *after))
    while i < len(before) or j < len(after):
        # A dimension of size 1 stands alone where sizes cannot be compared with it.
        alone = [symbolic and place < len(sizes) and is_one(sizes[place]) for sizes, place in ((before, i), (after, j))]
        if any(alone):
            found.append((i, i + alone[0], j, j + alone[1]))
            i, j = i + alone[0], j + alone[1]
            continue
        i0, j0, left, right = i, j, 1, 1
        if i < len(before):
            left, i = before[i], i + 1
        if j < len(after):
            right, j = after[j], j + 1
        while not is_same(left, right):
            if i < len(before) and (j == len(after) or is_at_most(left, right)):
                left, i = left * before[i], i + 1
            elif j < len(after):
                right, j = right * after[j], j + 1
            else:
                raise ValueError(f"a view of {before} as {after}")
        found.append((i0, i, j0, j))
    return tuple(found)


def reindexed(
    space: Space, index: tuple[Affine, ...], shape: tuple[int, ...], source: tuple[int, ...]
) -> tuple[Affine, ...]:
    """The index in ``source`` of the element at ``index`` of the same elements in the shape ``shape``.

    Raises:
        NeedsCut: see :class:`~inductor_passes.verify.values.affine.Space`.
    """
    if len(shape) == len(source) and all(map(is_same, shape, source)):
        return index
    result: list[Affine] = []
    for i0, i1, j0, j1 in _blocks(shape, source):
        if i1 - i0 == 1 and j1 - j0 == 1:
            result.append(index[i0])
            continue
        linear = ZERO
        for size, place in zip(shape[i0:i1], index[i0:i1]):
            linear = linear.times(size).plus(place)
        result += unravelled(space, linear, source[j0:j1])
    return tuple(result)


def unravelled(space: Space, linear: Affine, shape: tuple[int, ...]) -> list[Affine]:
    """The index of an element given by its number in row-major order; the first dimension is not checked."""
    found: list[Affine] = []
    for place in range(len(shape) - 1, -1, -1):
        if place == 0 or is_one(math.prod(shape[:place])):
            found.append(linear)
            linear = ZERO
        else:
            linear, digit = space.divide(linear, shape[place])
            found.append(digit)
    return found[::-1]
