"""Which part of a global tensor each rank holds.

A layout is separable: along every tensor dimension a rank holds an ascending list of index intervals, and its local
tensor is the Cartesian product of these lists. The intervals come from *cuts*, applied one after the other. A cut by
mesh dimension ``m`` with split factor ``f`` chunks the current index list into ``f`` chunks, each of them into
``shape[m]`` pieces (both with the sizes of ``torch.chunk``: all pieces are ``ceil(n / k)`` long until the indices run
out), and hands piece ``coordinate[m]`` of every chunk to the rank. ``Shard`` is ``f = 1``; ``_StridedShard`` is
``f > 1``; a shard order is the order of the cuts. Two ranks hold either the same block or disjoint ones.

``Partial(op)`` on a mesh dimension means that the value is the reduction of what the ranks along it hold.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from inductor_passes.redistribute.mesh import Mesh

#: Reductions that a Partial placement may name.
REDUCE_OPS = ("sum", "avg", "min", "max", "product")

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
#: Per tensor dimension the indices that a rank holds.
Block = tuple[Intervals, ...]


class SpecError(ValueError):
    """A placement or spec that cannot be planned; the message names the value and what is allowed."""


@dataclass(frozen=True)
class Shard:
    """Tensor dimension ``dim`` is cut by this mesh dimension; ``split_factor`` > 1 is torch's ``_StridedShard``."""

    dim: int
    split_factor: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.split_factor == 1 else f"_S({self.dim}, {self.split_factor})"


@dataclass(frozen=True)
class Replicate:
    """All ranks along this mesh dimension hold the same."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """The value is the reduction, by ``reduce_op``, over the ranks along this mesh dimension."""

    reduce_op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


Placement = Shard | Replicate | Partial

_TEXT = re.compile(r"(?:_?S\((\d+)(?:, ?(\d+))?\)|S(\d+)|P\((\w+)\)|(P)|(R))")


def placement(value: Any) -> Placement:
    """A placement from ours, torch's, or text: ``S(0)``, ``S0``, ``_S(0, 2)``, ``R``, ``P``, ``P(max)``.

    Raises:
        SpecError: a placement that cannot be planned (such as a masked partial of an embedding).
    """
    if isinstance(value, (Shard, Replicate, Partial)):
        result: Placement = value
    elif isinstance(value, str):
        match = _TEXT.fullmatch(value.strip())
        if match is None:
            raise SpecError(f'placement {value!r} is not allowed; expected "S(0)", "_S(0, factor)", "R" or "P(op)"')
        strided_dim, factor, dim, op, bare, _ = match.groups()
        if strided_dim is not None or dim is not None:
            result = Shard(int(strided_dim or dim or 0), int(factor or 1))
        else:
            result = Partial(op or "sum") if op or bare else Replicate()
    else:
        name = type(value).__name__
        if name in ("Shard", "_StridedShard", "StridedShard"):
            result = Shard(int(value.dim), int(getattr(value, "split_factor", 1)))
        elif name == "Replicate":
            result = Replicate()
        elif name == "Partial":
            result = Partial(str(value.reduce_op))
        else:
            raise SpecError(f"{value!r} cannot be planned; expected Shard, _StridedShard, Replicate or Partial")
    if isinstance(result, Partial) and result.reduce_op not in REDUCE_OPS:
        raise SpecError(f"Partial({result.reduce_op!r}) cannot be planned; expected one of {', '.join(REDUCE_OPS)}")
    return result


@dataclass(frozen=True)
class Spec:
    """A distributed tensor as plain data.

    Attributes:
        mesh: the ranks.
        placements: one per mesh dimension.
        shape: global shape.
        dtype: name without ``torch.``, e.g. ``float32``.
        itemsize: bytes per element.
        shard_order: ``((tensor_dim, mesh_dims), ...)`` where it differs from left to right; () elsewhere.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"
    itemsize: int = 4
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        mesh = self.mesh if isinstance(self.mesh, Mesh) else Mesh(tuple(self.mesh))
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "shape", tuple(int(s) for s in self.shape))
        values = tuple(placement(p) for p in self.placements)
        if len(values) != mesh.ndim:
            raise SpecError(f"{len(values)} placements for a mesh of {mesh.ndim} dimensions; expected one for each")
        ndim = len(self.shape)
        normal = []
        for p in values:
            if isinstance(p, Shard):
                if not -ndim <= p.dim < ndim or p.split_factor < 1:
                    raise SpecError(f"{p} does not fit a tensor of shape {self.shape}; expected dims 0..{ndim - 1}")
                p = replace(p, dim=p.dim % ndim)
            normal.append(p)
        object.__setattr__(self, "placements", tuple(normal))
        ops = {p.reduce_op for p in normal if isinstance(p, Partial)}
        if len(ops) > 1 and ops != {"sum", "avg"}:
            raise SpecError(f"mixed partial placements {sorted(ops)} have no defined value; only sum and avg may mix")
        order = {dim: tuple(dims) for dim, dims in self.shard_order}
        for dim, dims in order.items():
            expected = [m for m, p in enumerate(normal) if isinstance(p, Shard) and p.dim == dim]
            if sorted(dims) != expected:
                raise SpecError(f"shard order {dims} of tensor dim {dim} must name the mesh dims {tuple(expected)}")
        changed = tuple((dim, dims) for dim, dims in sorted(order.items()) if list(dims) != sorted(dims))
        object.__setattr__(self, "shard_order", changed)

    @staticmethod
    def of(value: Any, mesh: Mesh | None = None) -> Spec:
        """A spec from ours, a torch ``DTensorSpec`` (with tensor meta) or a ``DTensor``.

        Raises:
            SpecError: no tensor meta, symbolic sizes, or a placement that cannot be planned.
        """
        if isinstance(value, Spec):
            return value
        inner = getattr(value, "_spec", value)
        meta = getattr(inner, "tensor_meta", None)
        if meta is None or not hasattr(inner, "placements"):
            raise SpecError(f"{type(value).__name__} has no tensor meta; expected Spec, DTensorSpec or DTensor")
        if any(type(s) is not int for s in meta.shape):
            raise SpecError(f"shape {tuple(meta.shape)} is symbolic; expected integers")
        if mesh is None:
            device_mesh = inner.mesh
            mesh = Mesh(tuple(device_mesh.mesh.shape), tuple(device_mesh.mesh.flatten().tolist()))
        order: tuple[Any, ...] = ()
        if not getattr(inner, "use_strided_shard_as_shard_order", False):
            order = tuple(
                (int(e.tensor_dim), tuple(e.mesh_dims)) for e in (getattr(inner, "shard_order", None) or ())
            )
        return Spec(
            mesh=mesh,
            placements=tuple(placement(p) for p in inner.placements),
            shape=tuple(meta.shape),
            dtype=str(meta.dtype).removeprefix("torch."),
            itemsize=int(meta.dtype.itemsize),
            shard_order=order,
        )

    @property
    def layout(self) -> Layout:
        """The layout without the tensor's dtype and the ranks' names."""
        return layout_of(self.mesh.shape, self.placements, self.shape, self.shard_order)

    def __str__(self) -> str:
        order = "".join(f" order of dim {d}: {list(m)}" for d, m in self.shard_order)
        return "[" + ", ".join(map(str, self.placements)) + "]" + order


#: (mesh dimension, split factor).
MeshCut = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """Cuts per tensor dimension and pending reductions per mesh dimension; mesh dimensions in neither replicate.

    Mesh dimensions of size 1 appear nowhere, so layouts that mean the same compare equal more often.
    """

    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    cuts: tuple[tuple[MeshCut, ...], ...]
    partial: tuple[str, ...]

    def __hash__(self) -> int:
        return hash((self.cuts, self.partial, self.shape))

    @property
    def partial_dims(self) -> tuple[int, ...]:
        """Mesh dims with a pending reduction."""
        return tuple(m for m, op in enumerate(self.partial) if op)

    @property
    def shard_dims(self) -> tuple[int, ...]:
        """Mesh dims that cut some tensor dim."""
        return tuple(sorted(m for cuts in self.cuts for m, _ in cuts))

    @property
    def replicate_dims(self) -> tuple[int, ...]:
        """Mesh dims of size > 1 along which all ranks hold the same."""
        used = set(self.shard_dims) | set(self.partial_dims)
        return tuple(m for m, size in enumerate(self.mesh_shape) if size > 1 and m not in used)

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold equally much."""
        return _is_even(self)

    def block(self, coordinates: Sequence[int]) -> Block:
        """What the rank at ``coordinates`` holds."""
        return tuple(
            intervals(self.shape[d], tuple((self.mesh_shape[m], f, coordinates[m]) for m, f in cuts))
            for d, cuts in enumerate(self.cuts)
        )

    def local_shape(self, coordinates: Sequence[int]) -> tuple[int, ...]:
        """Shape of the local tensor at ``coordinates``."""
        return tuple(length(i) for i in self.block(coordinates))

    @property
    def max_numel(self) -> int:
        """Elements of the largest local tensor.

        Plain chunks come largest first, so it is at coordinate 0; strided ones may have it anywhere. A mesh dimension
        cuts one tensor dimension, so each of these is maximised by itself.
        """
        largest = 1
        for d, cuts in enumerate(self.cuts):
            strided = any(f != 1 for _, f in cuts)
            ranges = [range(self.mesh_shape[m]) if strided else range(1) for m, _ in cuts]
            largest *= max(
                length(intervals(self.shape[d], tuple((self.mesh_shape[m], f, c) for (m, f), c in zip(cuts, at))))
                for at in itertools.product(*ranges)
            )
        return largest

    def text(self) -> str:
        """Short form, e.g. ``[S0, R, P(sum)]`` with the order of the cuts where it is not left to right."""
        words = ["R"] * len(self.mesh_shape)
        notes = []
        for d, cuts in enumerate(self.cuts):
            for m, f in cuts:
                words[m] = f"S{d}" if f == 1 else f"S{d}/{f}"
            if list(cuts) != sorted(cuts):
                notes.append(f" S{d} by {','.join(str(m) for m, _ in cuts)}")
        for m in self.partial_dims:
            words[m] = "P" if self.partial[m] == "sum" else f"P({self.partial[m]})"
        return "[" + " ".join(words) + "]" + "".join(notes)


def layout_of(
    mesh_shape: tuple[int, ...],
    placements: Sequence[Placement],
    shape: tuple[int, ...],
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] = (),
) -> Layout:
    """The layout of placements: cuts from left to right unless ``shard_order`` says otherwise."""
    cuts: list[list[MeshCut]] = [[] for _ in shape]
    for m, p in enumerate(placements):
        if isinstance(p, Shard) and mesh_shape[m] > 1:
            cuts[p.dim].append((m, p.split_factor))
    for dim, dims in shard_order:
        factors = dict(cuts[dim])
        cuts[dim] = [(m, factors[m]) for m in dims if m in factors]
    normal = (_without_strides(mesh_shape, size, tuple(c)) for size, c in zip(shape, cuts))
    partial = tuple(
        p.reduce_op if isinstance(p, Partial) and mesh_shape[m] > 1 else "" for m, p in enumerate(placements)
    )
    return Layout(mesh_shape, shape, tuple(normal), partial)


@lru_cache(maxsize=16384)
def _is_even(layout: Layout) -> bool:
    for size, cuts in zip(layout.shape, layout.cuts):
        for m, factor in cuts:
            if size % (layout.mesh_shape[m] * factor):
                return False
            size //= layout.mesh_shape[m]
    return True


@lru_cache(maxsize=4096)
def _without_strides(mesh_shape: tuple[int, ...], size: int, cuts: tuple[MeshCut, ...]) -> tuple[MeshCut, ...]:
    """The plain cuts, in another order, that give every rank the same indices as strided ones; else ``cuts``.

    A split factor that is the product of the sizes of mesh dims says that those cut first, so a cut is inserted where
    the product of the cuts before it is its factor. For sizes that do not divide, the two may differ: it is checked.
    """
    if all(factor == 1 for _, factor in cuts):
        return cuts
    order: list[int] = []
    for m, factor in reversed(cuts):
        for at in range(len(order) + 1):
            if math.prod(mesh_shape[i] for i in order[:at]) == factor:
                order.insert(at, m)
                break
        else:
            return cuts
    plain = tuple((m, 1) for m in order)
    for coordinates in itertools.product(*(range(mesh_shape[m]) for m, _ in cuts)):
        at_dim = dict(zip((m for m, _ in cuts), coordinates))
        old, new = (intervals(size, tuple((mesh_shape[m], f, at_dim[m]) for m, f in c)) for c in (cuts, plain))
        if old != new:
            return cuts
    return plain


@lru_cache(maxsize=65536)
def intervals(size: int, cuts: tuple[tuple[int, int, int], ...]) -> Intervals:
    """Indices of ``range(size)`` that remain after the cuts ``(pieces, split_factor, coordinate)``, ascending."""
    result: Intervals = ((0, size),) if size else ()
    for pieces, factor, coordinate in cuts:
        parts: list[Interval] = []
        for k in range(factor):
            parts.extend(_chunk(_chunk(result, factor, k), pieces, coordinate))
        result = _merge(parts)
    return result


def length(part: Iterable[Interval]) -> int:
    """Number of indices."""
    return sum(stop - start for start, stop in part)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Indices in both, ascending."""
    result = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            result.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(result)


def _chunk(part: Intervals, pieces: int, index: int) -> Intervals:
    """Piece ``index`` of ``pieces``, with the sizes of torch.chunk; empty where the indices have run out."""
    total = length(part)
    step = -(-total // pieces)
    first, last = min(index * step, total), min((index + 1) * step, total)
    result = []
    passed = 0
    for start, stop in part:
        lo, hi = max(first - passed, 0), min(last - passed, stop - start)
        if lo < hi:
            result.append((start + lo, start + hi))
        passed += stop - start
    return tuple(result)


def _merge(parts: Iterable[Interval]) -> Intervals:
    result: list[Interval] = []
    for start, stop in sorted(parts):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)
