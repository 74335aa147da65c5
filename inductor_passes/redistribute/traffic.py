"""Who sends what to whom when only the arrangement of data changes.

Between two layouts without a change in pending reductions every rank needs its new block; part of it lies in its old
block, the rest is fetched. Blocks of one layout are equal or disjoint, so the old layout falls into *classes* of ranks
that hold the same block, and a rank needs, from every class, the intersection with its new block from ONE member. Its
own class serves itself. Among several members the nearest one is taken (fewest mesh dimensions crossed) as long as it
sends no more than the *cap*: what the neediest rank receives, or what a class must send when its members share evenly,
whichever is more. What is above the cap goes to the next member, if need be in the middle of a piece, so the busiest rank
moves exactly the least that any single exchange can.

Mesh dimensions that cannot matter are left out: those along which both layouts replicate or keep a pending reduction,
and those that cut both layouts first, evenly and alike. What remains is solved once and holds for all their
coordinates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .spec import Layout, intersect, length

_T = TypeVar("_T")
Matrix = npt.NDArray[np.int64]


#: (sending position, first element, end) of a piece.
Supply = tuple[int, int, int]


@dataclass(frozen=True)
class Traffic:
    """The transfers of one rearrangement, in elements.

    Attributes:
        active: mesh dims that take part, ascending; positions below are row-major over them.
        crossing: the subset along which data moves; () when every rank has all it needs.
        suppliers: per receiving position, in order of position, who sends (position, first, last): elements
            ``first:last`` of the intersection of the two blocks in row-major order. What a rank keeps is not in it.
        max_sent / max_received: of the busiest rank, without what it keeps.
    """

    active: tuple[int, ...]
    crossing: tuple[int, ...]
    suppliers: tuple[tuple[Supply, ...], ...]
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
        table = np.array([[length(intersect(a, b)) for b in columns] for a in rows], dtype=np.int64)
        result *= table[np.ix_(row_of, column_of)]
    _, classes = _unique(old_blocks)
    return result, classes


@lru_cache(maxsize=16384)
def missing(before: Layout, after: Layout) -> int:
    """Elements that some rank cannot do without receiving: a lower bound on any plan between the layouts."""
    coordinates = _positions(before, after)[1]
    worst = 0
    for c in coordinates:
        have, want = before.block(c), after.block(c)
        kept = math.prod(length(intersect(a, b)) for a, b in zip(have, want))
        worst = max(worst, math.prod(length(b) for b in want) - kept)
    return worst


@lru_cache(maxsize=16384)
def traffic(before: Layout, after: Layout) -> Traffic:
    """The transfers that turn ``before`` into ``after``; both must have the same pending reductions."""
    assert before.partial == after.partial, (before, after)
    active, coordinates = _positions(before, after)
    overlap, classes = overlap_matrix(before, after, coordinates)
    n = len(coordinates)
    members: dict[int, list[int]] = {}
    for p, c in enumerate(classes):
        members.setdefault(c, []).append(p)
    received = overlap.T[:, [m[0] for m in members.values()]].copy()
    own = {c: k for k, c in enumerate(members)}
    for q, c in enumerate(classes):
        received[q, own[c]] = 0
    max_received = int(received.sum(axis=1).max())
    shares = {c: -(-int(received[:, own[c]].sum()) // len(ranks)) for c, ranks in members.items()}
    cap = max(max_received, *shares.values())
    load = [0] * n
    suppliers: list[list[Supply]] = [[] for _ in range(n)]
    crossing: set[int] = set()
    for q, c in itertools.product(range(n), members):
        done, size = 0, int(received[q, own[c]])
        if not size:
            continue
        for p in sorted(members[c], key=lambda m: (_distance(coordinates[m], coordinates[q]), m)):
            take = min(size - done, cap - load[p])
            if take > 0:
                suppliers[q].append((p, done, done + take))
                crossing.update(m for m in active if coordinates[p][m] != coordinates[q][m])
                load[p] += take
                done += take
        assert done == size, (before, after, q)
    return Traffic(
        active, tuple(sorted(crossing)), tuple(tuple(sorted(x)) for x in suppliers), max(load), max_received
    )


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
