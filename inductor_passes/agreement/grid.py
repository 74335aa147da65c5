"""Which ranks have to agree: the smallest set of ranks that a graph's process groups never leave.

A rank knows only its own groups. Where these are the lines of a grid through that rank, as those of a device mesh are,
the set is the whole grid: :func:`participants`. It suffices that every member computes the same set by itself:

    Let every member of P have computed P from its own groups, all of which lie inside P by construction. Then every
    group that any member uses for this graph lies inside P, so no collective of the graph has a participant outside
    of P. If all of P get one answer, all ranks of every group involved get it.

A rank that computes another set asks under another key. No other rank votes there, so it gets no agreement. The others
do not get one either, because they wait for its vote. So a wrong guess costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

#: (stride, size) of the dimensions of a grid of ranks, fast ones first.
Axes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Grid:
    """A set of ranks.

    Attributes:
        ranks: sorted.
        axes: ``rank = ranks[0] + sum(coordinate * stride)``; None where the ranks are no regular grid: then they are a
            single dimension, numbered in order.
    """

    ranks: tuple[int, ...]
    axes: Axes | None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a member is, one number per axis.

        Raises:
            ValueError: the rank is not a member.
        """
        if self.axes is None:
            return (self.ranks.index(rank),)
        offset = rank - self.ranks[0]
        found = tuple(offset // stride % size for stride, size in self.axes)
        if sum(c * stride for c, (stride, _) in zip(found, self.axes)) != offset:
            raise ValueError(f"rank {rank} is not in the grid {self.axes} from rank {self.ranks[0]}")
        return found

    @property
    def corners(self) -> tuple[int, ...]:
        """The first rank and its neighbour along each axis: what varies evenly over the grid is known from these."""
        if self.axes is None:
            return self.ranks[:2]
        return (self.ranks[0], *(self.ranks[0] + stride for stride, _ in self.axes))

    def alike(self, group: Sequence[int], rank: int) -> int | None:
        """The position that ``rank`` has in its own group, where ``group`` is another rank's; None when unknown.

        The two groups are lines of the grid in one direction, in the same order.
        """
        if self.axes is None:
            return group.index(rank) if rank in group and len(group) == self.size else None
        places = [self.coordinates(member) for member in group]
        varies = [len({place[a] for place in places}) > 1 for a in range(len(self.axes))]
        wanted = self.coordinates(rank)
        for position, place in enumerate(places):
            if all(not moves or place[a] == wanted[a] for a, moves in enumerate(varies)):
                return position
        return None


def segments(offsets: Sequence[int]) -> Axes | None:
    """The axes of a sorted set of offsets that begins with 0; None when it is no regular grid."""
    found: list[tuple[int, int]] = []
    block = 1
    while block < len(offsets):
        stride, count = offsets[block], 1
        while all(
            (count * block + j) < len(offsets) and offsets[count * block + j] == offsets[j] + count * stride
            for j in range(block)
        ):
            count += 1
        if count == 1:
            return None
        found.append((stride, count))
        block *= count
    return tuple(found) if block == len(offsets) else None


def participants(groups: Iterable[Sequence[int]], rank: int, world_size: int) -> Grid | str:
    """The ranks that must agree about a graph which uses ``groups`` on ``rank``; else the reason why none are known.

    The grid that the groups span; where they are no lines of one grid, the largest of them if it holds the others, or
    all ranks of the default group if the groups reach them all.
    """
    sets = {frozenset(group) for group in groups if len(group) > 1}
    outside = next((one for one in sets if rank not in one), None)
    if outside is not None:
        return f"the graph uses a process group of ranks {_shown(outside)}, which rank {rank} is not in"
    if not sets:
        return Grid((rank,), ())
    grid = _spanned(sets, rank)
    if grid is not None and grid.ranks[0] >= 0 and grid.ranks[-1] < world_size:
        return grid
    largest = max(sets, key=len)
    if all(one <= largest for one in sets):
        return _whole(largest)
    if len(frozenset().union(*sets)) == world_size:
        return _whole(frozenset(range(world_size)))
    return f"the process groups of rank {rank} ({'; '.join(sorted(map(_shown, sets)))}) are no lines of one grid"


def _whole(ranks: frozenset[int]) -> Grid:
    ordered = tuple(sorted(ranks))
    return Grid(ordered, segments([r - ordered[0] for r in ordered]))


def _spanned(sets: Iterable[frozenset[int]], rank: int) -> Grid | None:
    """The grid of which the sets are lines (or planes) through ``rank``."""
    regular: list[tuple[int, Axes]] = []
    for one in sets:
        first = min(one)
        axes = segments([r - first for r in sorted(one)])
        if axes is None:
            return None
        regular.append((first, axes))
    axes = _common_axes([axes for _, axes in regular])
    if axes is None:
        return None
    own: dict[tuple[int, int], int] = {}
    for first, theirs in regular:
        for stride, size in axes:
            if any(s <= stride and stride * size <= s * n for s, n in theirs):
                coordinate = (rank - first) // stride % size
                if own.setdefault((stride, size), coordinate) != coordinate:
                    return None
    base = rank - sum(coordinate * stride for (stride, _), coordinate in own.items())
    for first, theirs in regular:
        # Each set begins where the rank's coordinates along its own axes are 0.
        inside = sum(c * s for (s, n), c in own.items() if any(t <= s and s * n <= t * m for t, m in theirs))
        if first != rank - inside:
            return None
    steps = [[c * stride for c in range(size)] for stride, size in axes]
    return Grid(tuple(sorted(base + sum(parts) for parts in product(*steps))), axes)


def _common_axes(many: Sequence[Axes]) -> Axes | None:
    """The finest axes of which all given ones are made, fast ones first; None when they do not fit together."""
    edges = sorted({edge for axes in many for stride, size in axes for edge in (stride, stride * size)})
    if any(high % low for low, high in pairwise(edges)):
        return None
    covered = {(low, high) for axes in many for s, n in axes for low, high in pairwise(edges) if s <= low < s * n}
    return tuple((low, high // low) for low, high in pairwise(edges) if (low, high) in covered)


def _shown(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    axes = segments([r - ordered[0] for r in ordered])
    if len(ordered) <= 8 or axes is None or len(axes) != 1:
        return str(ordered) if len(ordered) <= 16 else f"[{ordered[0]}, ... {ordered[-1]}] ({len(ordered)} ranks)"
    return f"{ordered[0]} to {ordered[-1]} in steps of {axes[0][0]}"

