"""What a data movement does to positions, in a form in which equal movements look alike.

Views, permutations, dense copies and splits that are joined again map the row-major position in the result to the
position in the source. Written as a mixed-radix number, slowest digit first, that map is a list of (stride, extent)
pairs: counting through the result in order steps the source's position by ``stride``, ``extent`` times, nested.
Neighbours that count on (``stride == next stride * next extent``) are one digit, and digits of extent 1 do not count:
so the list is the same however the movement was written. O(dimensions) per node, whatever the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.rewrites.movement import name_of, step_ahead
from inductor_passes.rewrites.packing import joined_split, static_shape

Digits = tuple[tuple[int, int], ...]
_VIEWS = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::unsqueeze", "aten::squeeze"})
_SAME = frozenset({"aten::clone", "aten::alias"})


def row_major(shape: Sequence[int]) -> list[Digits]:
    """The digits of every dimension of a tensor as it is."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return [((stride, extent),) for stride, extent in zip(strides, shape)]


def canonical(dims: Sequence[Digits]) -> Digits:
    """All digits, slowest first, as few as possible."""
    found: list[tuple[int, int]] = []
    for stride, extent in (digit for dim in dims for digit in dim):
        if extent == 1:
            continue
        if found and found[-1][0] == stride * extent:
            stride, extent = stride, found.pop()[1] * extent
        found.append((stride, extent))
    return tuple(found)


def regrouped(dims: Sequence[Digits], shape: Sequence[int]) -> list[Digits] | None:
    """The digits after a view as ``shape``; None when a dimension would cut through a digit unevenly, or of nothing."""
    left = list(canonical(dims))
    if 0 in shape:
        return None
    result: list[Digits] = []
    for extent in reversed(shape):
        mine: list[tuple[int, int]] = []
        while extent > 1:
            if not left:
                return None
            stride, count = left.pop()
            if extent % count == 0:
                mine.insert(0, (stride, count))
                extent //= count
            elif count % extent == 0:
                mine.insert(0, (stride, extent))
                left.append((stride * extent, count // extent))
                extent = 1
            else:
                return None
        result.insert(0, tuple(mine))
    return None if left else result


def _applied(dims: list[Digits], node: torch.fx.Node) -> list[Digits] | None:
    """The digits after one step that ends in ``node``."""
    name, shape = name_of(node), static_shape(node)
    if shape is None:
        return None
    arguments = _torch.op_arguments(node)
    if name in _SAME:
        return dims
    if name in _VIEWS:
        return regrouped(dims, shape)
    if name == "aten::permute":
        return [dims[d] for d in arguments["dims"]]
    if name in ("aten::transpose", "aten::t"):
        a, b = (0, len(dims) - 1) if name == "aten::t" else (arguments["dim0"], arguments["dim1"])
        order = list(range(len(dims)))
        order[a], order[b] = order[b], order[a]
        return [dims[d] for d in order]
    joined = joined_split(node)
    if joined is None or not joined.even or joined.padding:
        return None
    source = static_shape(joined.source)
    if source is None:
        return None
    size = source[joined.split_dim] // joined.pieces
    cut = regrouped(dims, [*source[: joined.split_dim], joined.pieces, size, *source[joined.split_dim + 1 :]])
    if cut is None:
        return None
    pieces = cut.pop(joined.split_dim)
    cut[joined.cat_dim] = (*pieces, *cut[joined.cat_dim])
    return cut


def unpack_ahead(wait: torch.fx.Node, pieces: int) -> tuple[int, list[torch.fx.Node]] | None:
    """The shortest movement behind a gather that puts its pieces side by side along another dimension than the first.

    Returns:
        (dimension, nodes, the last of which is the result); None when nothing of the kind follows.
    """
    shape = static_shape(wait)
    if shape is None or not shape or shape[0] % pieces:
        return None
    part = [shape[0] // pieces, *shape[1:]]
    grid = row_major([pieces, *part])
    wanted = {}
    for d in range(1, len(part)):
        moved = [*grid[1 : d + 1], grid[0], *grid[d + 1 :]]
        wanted[(*part[:d], pieces * part[d], *part[d + 1 :]), canonical(moved)] = d
    dims: list[Digits] | None = row_major(shape)
    node, nodes = wait, [wait]
    while dims is not None and (end := step_ahead(node)) is not None:
        dims = _applied(dims, end)
        joined = joined_split(end)
        if joined is not None and not joined.closed:
            return None
        nodes += [end] if joined is None else list(joined.nodes)
        node = end
        found = None if dims is None else wanted.get((tuple(static_shape(end) or ()), canonical(dims)))
        if found is not None:
            return found, nodes[1:]
    return None
