"""Who sends what to whom when only the arrangement of data changes.

Between two layouts without a change in pending reductions every rank needs its new block; part of it lies in its old
block, the rest is fetched. Blocks of one layout are equal or disjoint, so the old layout falls into *classes* of ranks
that hold the same block, and a rank needs, from every class, the intersection with its new block ONCE. Its own class
serves itself. Among several members the nearest one is taken (fewest mesh dimensions crossed) as long as it sends no
more than the *cap*: what the neediest rank receives, or what a class must send when its members share evenly,
whichever is more. What is above the cap goes to the next member, if need be in the middle of a piece, so the busiest
rank moves exactly the least that any single exchange can.

Mesh dimensions that cannot matter are left out: those along which both layouts replicate or keep a pending reduction,
and those that cut both layouts first, evenly and alike. What remains is solved once and holds for all their
coordinates.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from inductor_passes.redistribute.spec import Intervals, Layout, intersect, intervals, length

_T = TypeVar("_T")
Matrix = npt.NDArray[np.int64]


#: (sending position, first, end): elements ``first:end`` of the intersection of the two blocks in row-major order.
Supply = tuple[int, int, int]


@dataclass(frozen=True)
class Traffic:
    """The transfers of one rearrangement, in elements.

    Attributes:
        active: mesh dims that take part, ascending; positions below are row-major over them.
        crossing: the subset along which data moves; () when every rank has all it needs.
        max_sent / max_received: of the busiest rank, without what it keeps.
    """

    active: tuple[int, ...]
    crossing: tuple[int, ...]
    max_sent: int
    max_received: int

    @property
    def busiest(self) -> int:
        """Elements on the busier direction of the busiest rank's link."""
        return max(self.max_sent, self.max_received)


def inactive_dims(before: Layout, after: Layout) -> set[int]:
    """Mesh dims whose coordinate does not change who talks to whom."""
    idle = set(before.replicate_dims) & set(after.replicate_dims)
    idle |= set(before.partial_dims) & set(after.partial_dims)
    idle |= {m for m, size in enumerate(before.mesh_shape) if size == 1}
    for size, old, new in zip(before.shape, before.cuts, after.cuts):
        for a, b in zip(old, new):
            pieces = before.mesh_shape[a[0]]
            if a != b or a[1] != 1 or size % pieces:
                break
            idle.add(a[0])
            size //= pieces
    return idle


def overlap_matrix(before: Layout, after: Layout, coordinates: Sequence[tuple[int, ...]]) -> tuple[Matrix, list[int]]:
    """``[p, q]`` = elements of p's old block in q's new one; and the class (same old block) of every position."""
    n = len(coordinates)
    result: Matrix = np.ones((n, n), dtype=np.int64)
    old_blocks = [before.block(c) for c in coordinates]
    new_blocks = [after.block(c) for c in coordinates]
    for d in range(len(before.shape)):
        rows, row_of = _unique([b[d] for b in old_blocks])
        columns, column_of = _unique([b[d] for b in new_blocks])
        result *= _overlaps(rows, columns)[np.ix_(row_of, column_of)]
    _, classes = _unique(old_blocks)
    return result, classes


def _overlaps(rows: list[Intervals], columns: list[Intervals]) -> Matrix:
    if all(len(part) <= 1 for part in (*rows, *columns)):
        a = np.array([r[0] if r else (0, 0) for r in rows], dtype=np.int64)
        b = np.array([c[0] if c else (0, 0) for c in columns], dtype=np.int64)
        stop = np.minimum(a[:, None, 1], b[None, :, 1])
        return np.maximum(stop - np.maximum(a[:, None, 0], b[None, :, 0]), 0)
    return np.array([[length(intersect(a, b)) for b in columns] for a in rows], dtype=np.int64)


@lru_cache(maxsize=16384)
def missing(before: Layout, after: Layout) -> int:
    """Elements that some rank cannot do without receiving: a lower bound on any plan between the layouts."""
    idle = inactive_dims(before, after)
    kept: Matrix = np.ones((1,) * len(before.mesh_shape), dtype=np.int64)
    wanted: Matrix = kept
    for size, old, new in zip(before.shape, before.cuts, after.cuts):
        used = {m for m, _ in (*old, *new)} - idle
        grid = tuple(s if m in used else 1 for m, s in enumerate(before.mesh_shape))
        have, want = np.empty(grid, dtype=np.int64), np.empty(grid, dtype=np.int64)
        for c in itertools.product(*map(range, grid)):
            a, b = (intervals(size, tuple((before.mesh_shape[m], f, c[m]) for m, f in cuts)) for cuts in (old, new))
            have[c], want[c] = length(intersect(a, b)), length(b)
        kept, wanted = kept * have, wanted * want
    return int((wanted - kept).max())


@lru_cache(maxsize=16384)
def traffic(before: Layout, after: Layout) -> Traffic:
    """The transfers that turn ``before`` into ``after``; both must have the same pending reductions."""
    assert before.partial == after.partial, (before, after)
    active, coordinates = _positions(before, after)
    received, members = _received(before, after, coordinates)
    if all(len(ranks) == 1 for ranks in members):
        places = np.array(coordinates, dtype=np.int64)
        receiver, column = np.nonzero(received)
        differ = places[receiver] != places[np.array([ranks[0] for ranks in members])[column]]
        crossing = tuple(int(m) for m in np.nonzero(differ.any(axis=0))[0]) if len(receiver) else ()
        return Traffic(active, crossing, int(received.sum(axis=0).max()), int(received.sum(axis=1).max()))
    load = [0] * len(coordinates)
    crossed: set[int] = set()
    for q, served in enumerate(suppliers(before, after)):
        for p, first, end in served:
            load[p] += end - first
            crossed.update(m for m in active if coordinates[p][m] != coordinates[q][m])
    return Traffic(active, tuple(sorted(crossed)), max(load), int(received.sum(axis=1).max()))


@lru_cache(maxsize=1024)
def suppliers(before: Layout, after: Layout) -> tuple[tuple[Supply, ...], ...]:
    """Per receiving position, in order of position, who sends what; what a rank keeps is not in it."""
    _, coordinates = _positions(before, after)
    received, members = _received(before, after, coordinates)
    shares = [-(-int(total) // len(ranks)) for total, ranks in zip(received.sum(axis=0), members)]
    cap = max(int(received.sum(axis=1).max()), *shares)
    load = [0] * len(coordinates)
    result: list[list[Supply]] = [[] for _ in coordinates]
    for q, c in zip(*np.nonzero(received)):
        done, size = 0, int(received[q, c])
        for p in sorted(members[c], key=lambda m: (_distance(coordinates[m], coordinates[q]), m)):
            take = min(size - done, cap - load[p])
            if take > 0:
                result[q].append((p, done, done + take))
                load[p] += take
                done += take
        assert done == size, (before, after, q)
    return tuple(tuple(sorted(served)) for served in result)


def _received(
    before: Layout, after: Layout, coordinates: list[tuple[int, ...]]
) -> tuple[Matrix, list[list[int]]]:
    """``[q, c]`` = elements that position q needs of class c (0 of its own), and the classes' members."""
    overlap, classes = overlap_matrix(before, after, coordinates)
    members: list[list[int]] = [[] for _ in range(max(classes) + 1)]
    for p, c in enumerate(classes):
        members[c].append(p)
    received = overlap.T[:, [ranks[0] for ranks in members]].copy()
    received[np.arange(len(classes)), classes] = 0
    return received, members


def _positions(before: Layout, after: Layout) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Active mesh dims, and full mesh coordinates (0 on idle dims) of every position over them."""
    idle = inactive_dims(before, after)
    active = tuple(m for m in range(len(before.mesh_shape)) if m not in idle)
    ranges = [range(s) if m in active else range(1) for m, s in enumerate(before.mesh_shape)]
    return active, list(itertools.product(*ranges))


def _unique(values: Sequence[_T]) -> tuple[list[_T], list[int]]:
    index: dict[_T, int] = {}
    of = [index.setdefault(v, len(index)) for v in values]
    return list(index), of


def _distance(a: Sequence[int], b: Sequence[int]) -> tuple[int, tuple[bool, ...]]:
    """Fewest dims crossed first, then the outer dims (usually the slower links) not crossed."""
    crossed = tuple(x != y for x, y in zip(a, b))
    return sum(crossed), crossed
