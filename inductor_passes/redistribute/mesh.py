"""Group algebra on plain data: which ranks talk to each other when a collective runs over dimensions of a mesh.

A *mesh* is an n-dimensional arrangement of ranks. A collective over a set of mesh dimensions runs in many process
groups at once: one per combination of coordinates on the other dimensions. Process groups order their members by
ascending global rank, whatever the mesh looks like, so the order in which mesh dimensions are flattened never creates
another group: it is a permutation of the slots of the same group (:meth:`Mesh.slots`).

A graph knows process groups only as tuples of ranks. :class:`Strided` reads such a tuple as ``offset + sum(c_i *
stride_i)`` (mixed-radix coordinates ``c_i < size_i``), which is the form every sub-mesh of a row-major mesh has;
:func:`product` joins two orthogonal groups into the flat group that one merged collective would use, and
:func:`nesting` says in which slot of that flat group each (outer, inner) pair of member numbers sits.

Everything here is a pure function of integers, so all ranks agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


class MeshError(ValueError):
    """A mesh or a rank set that breaks the rules of this module; the message names the value and what is allowed."""


@dataclass(frozen=True)
class Mesh:
    """Ranks on a grid: ``ranks[i]`` is the global rank at row-major position ``i`` of ``shape``.

    ``ranks`` defaults to ``0..n-1``. Raises :class:`MeshError` on sizes below 1, duplicate or missing ranks.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(s) for s in self.shape))
        if not self.shape or any(s < 1 for s in self.shape):
            raise MeshError(f"mesh shape {self.shape} is not allowed; expected one or more sizes >= 1")
        ranks = tuple(int(r) for r in self.ranks) or tuple(range(self.size))
        object.__setattr__(self, "ranks", ranks)
        if len(ranks) != self.size or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise MeshError(f"mesh of shape {self.shape} needs {self.size} different ranks >= 0; got {ranks}")

    @property
    def ndim(self) -> int:
        """Number of mesh dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @cached_property
    def _position_of(self) -> dict[int, int]:
        return {rank: i for i, rank in enumerate(self.ranks)}

    def position(self, coordinates: Sequence[int]) -> int:
        """Row-major position of ``coordinates``."""
        index = 0
        for c, size in zip(coordinates, self.shape):
            index = index * size + c
        return index

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Coordinates of a global rank. Raises :class:`MeshError` when the rank is not in the mesh."""
        if rank not in self._position_of:
            raise MeshError(f"rank {rank} is not in the mesh of ranks {self.ranks}")
        index = self._position_of[rank]
        result = []
        for size in reversed(self.shape):
            index, c = divmod(index, size)
            result.append(c)
        return tuple(reversed(result))

    def rank(self, coordinates: Sequence[int]) -> int:
        """Global rank at ``coordinates``."""
        return self.ranks[self.position(coordinates)]

    def check_dims(self, dims: Iterable[int]) -> tuple[int, ...]:
        """``dims`` as a tuple. Raises :class:`MeshError` on a repeated or unknown mesh dimension."""
        result = tuple(dims)
        if len(set(result)) != len(result) or any(not 0 <= d < self.ndim for d in result):
            raise MeshError(f"mesh dims {result} are not allowed; expected different ones in 0..{self.ndim - 1}")
        return result

    def group(self, rank: int, dims: Iterable[int]) -> tuple[int, ...]:
        """The process group of ``rank`` over ``dims``: global ranks, ascending, as every backend orders them."""
        return _group(self, rank, self.check_dims(dims))

    def flattened(self, rank: int, dims: Iterable[int]) -> tuple[int, ...]:
        """The same ranks in the order of the flattened dims: the first of ``dims`` varies slowest."""
        return _flattened(self, rank, self.check_dims(dims))

    def slots(self, rank: int, dims: Iterable[int]) -> tuple[int, ...]:
        """For every member of :meth:`flattened` its slot in :meth:`group`: the permutation that flattening costs."""
        order = self.flattened(rank, dims)
        slot = {r: i for i, r in enumerate(sorted(order))}
        return tuple(slot[r] for r in order)

    def groups(self, dims: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """All process groups over ``dims``: a partition of the ranks, ordered by smallest member."""
        dims = self.check_dims(dims)
        return tuple(sorted({self.group(r, dims) for r in self.ranks}))

    def group_size(self, dims: Iterable[int]) -> int:
        """Members of each group over ``dims``."""
        return math.prod(self.shape[d] for d in dims)


@lru_cache(maxsize=65536)
def _flattened(mesh: Mesh, rank: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    base = list(mesh.coordinates(rank))
    result = []
    for combination in itertools.product(*(range(mesh.shape[d]) for d in dims)):
        for d, c in zip(dims, combination):
            base[d] = c
        result.append(mesh.rank(base))
    return tuple(result)


@lru_cache(maxsize=65536)
def _group(mesh: Mesh, rank: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(_flattened(mesh, rank, dims)))


@dataclass(frozen=True)
class Strided:
    """A rank set ``{offset + sum(c_i * strides[i]) : 0 <= c_i < sizes[i]}``, outermost (largest stride) first.

    Normal form: strides descend, no size is 1, neighbours that can be one dimension are one.
    """

    offset: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(
            sorted(
                self.offset + sum(c * s for c, s in zip(combination, self.strides))
                for combination in itertools.product(*map(range, self.sizes))
            )
        )

    @staticmethod
    def of(ranks: Iterable[int]) -> Strided | None:
        """The normal form of a set of ranks; None when it is no strided set.

        Greedy from the smallest gap: the innermost dimension is the longest run with one stride; the rest must be
        the same run at other offsets.
        """
        ordered = sorted(ranks)
        if not ordered or len(set(ordered)) != len(ordered):
            return None
        offset = ordered[0]
        sizes: list[int] = []
        strides: list[int] = []
        while len(ordered) > 1:
            stride = ordered[1] - ordered[0]
            run = 1
            while run < len(ordered) and ordered[run] - ordered[run - 1] == stride:
                run += 1
            if len(ordered) % run:
                return None
            starts = ordered[::run]
            for k, start in enumerate(starts):
                if ordered[k * run : (k + 1) * run] != [start + i * stride for i in range(run)]:
                    return None
            sizes.append(run)
            strides.append(stride)
            ordered = starts
        return Strided(offset, tuple(reversed(sizes)), tuple(reversed(strides)))

    def at(self, offset: int) -> Strided:
        """The same pattern beginning at another rank."""
        return Strided(offset, self.sizes, self.strides)


def product(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    """The flat group that joins two orthogonal groups of one rank, ascending; None when they do not form a grid.

    ``a`` and ``b`` are the groups of the same rank: they share exactly one member. The joint group is ``{x + y - r}``
    for the shared rank r, and it is a grid when these are ``len(a) * len(b)`` different ranks.
    """
    shared = set(a) & set(b)
    if len(shared) != 1:
        return None
    (r,) = shared
    joint = {x + y - r for x in a for y in b}
    if len(joint) != len(a) * len(b) or min(joint) < 0:
        return None
    return tuple(sorted(joint))


def nesting(outer: Sequence[int], inner: Sequence[int]) -> tuple[int, ...] | None:
    """Where nested members sit in the joint group; None when the two groups do not form a grid.

    Entry ``j * len(inner) + i`` is the slot, in ``product(outer, inner)``, of the rank that is member ``j`` of its
    outer group and member ``i`` of its inner one: the permutation between "gather over inner, then over outer" and
    one gather over the joint group. The identity means that the merged collective needs no permutation.
    """
    joint = product(outer, inner)
    if joint is None:
        return None
    (r,) = set(outer) & set(inner)
    slot = {x: k for k, x in enumerate(joint)}
    return tuple(slot[x + y - r] for x in sorted(outer) for y in sorted(inner))
