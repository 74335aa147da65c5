"""Bytes of our redistribution plans against DTensor's two planners and one all-to-all, for all pairs of placements.

Bytes are those of ``inductor_passes.redistribute.steps``: per rank, ring model, the busiest rank. DTensor's plans are
taken from the installed torch and counted step by step with the padding that torch applies. "one-shot" is a lower bound
on any single all_to_all on the flat group: what the neediest rank must receive, and what the holders of a block must
send when they share the work evenly; it is computed on index sets, without the planner's own code.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner
from torch.distributed.tensor.placement_types import _StridedShard

from inductor_passes.redistribute.execute import torch_placement
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.plan import plan_redistribution
from inductor_passes.redistribute.spec import Partial, Placement, Replicate, Shard, Spec, intervals, length
from tests.support.world import fake_world
from tools.shared.record import RESULTS, markdown_table, write

CASES: list[tuple[tuple[int, ...], tuple[int, int]]] = [
    (mesh, shape) for mesh in ((8,), (2, 4), (4, 2), (2, 2, 2)) for shape in ((64, 32), (61, 29))
]


def layouts(mesh: tuple[int, ...]) -> list[tuple[Placement, ...]]:
    """All placements on two tensor dims: Shard, Replicate, Partial sum, strided shards that encode a shard order."""
    result: list[tuple[Placement, ...]] = []
    single: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial("sum"))
    for placements in itertools.product(single, repeat=len(mesh)):
        per_dim = [[m for m, p in enumerate(placements) if p == Shard(d)] for d in range(2)]
        for orders in itertools.product(*(itertools.permutations(dims) for dims in per_dim)):
            strided: list[Placement] = list(placements)
            for d, order in enumerate(orders):
                for k, m in enumerate(order):
                    strided[m] = Shard(d, math.prod(mesh[i] for i in order[:k] if i > m))
            result.append(tuple(strided))
    return result


def torch_bytes(source: Spec, target: Spec, device_mesh: DeviceMesh, graph: bool) -> int | None:
    """Bytes of one of DTensor's planners (``graph`` or greedy); None when it has no plan for the pair."""
    shape = torch.Size(source.shape)
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), torch.float32)
    specs = [
        DTensorSpec(device_mesh, tuple(torch_placement(p) for p in s.placements), tensor_meta=meta)
        for s in (source, target)
    ]
    strided = any(isinstance(p, _StridedShard) for s in specs for p in s.placements)
    if strided and not graph:
        return None
    planner = DTensorRedistributePlanner(device_mesh, meta)
    try:
        if graph:
            infos = planner.generate_graph_based_transform_infos(specs[0], specs[1], shape)
        else:
            infos = planner.generate_greedy_transform_infos(specs[0], specs[1])
        return walk(source, infos)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError):
        return None


def walk(source: Spec, infos: list[Any]) -> int:
    """Bytes of DTensor's transforms on rank 0, which holds the largest shard throughout.

    Raises:
        NotImplementedError: a transform that torch itself refuses to run (Shard to Partial).
    """
    local = list(source.layout.local_shape((0,) * source.mesh.ndim))
    total = 0
    for info in infos:
        old, new = info.src_dst_placements
        group = source.mesh.shape[info.mesh_dim]
        logical = [int(s) for s in info.logical_shape]
        if old.is_partial():
            if not new.is_shard():
                total += -(-2 * (group - 1) * math.prod(local) // group)
            else:
                local[new.dim] = -(-local[new.dim] // group)
                total += (group - 1) * math.prod(local)
                continue
        elif isinstance(old, (TorchShard, _StridedShard)) and not isinstance(new, TorchReplicate):
            if new.is_partial():
                raise NotImplementedError("Shard to Partial")
            if isinstance(old, TorchShard) and isinstance(new, TorchShard):
                padded = list(local)
                padded[old.dim] = -(-logical[old.dim] // group)
                padded[new.dim] = -(-logical[new.dim] // group)
                total += (group - 1) * math.prod(padded)
                local[old.dim], local[new.dim] = logical[old.dim], padded[new.dim]
                continue
            total += _gather(local, old, group, logical)
        elif isinstance(old, (TorchShard, _StridedShard)):
            total += _gather(local, old, group, logical)
        if isinstance(new, (TorchShard, _StridedShard)):
            local[new.dim] = _largest(local[new.dim], group, new)
    return total * source.itemsize


def _gather(local: list[int], old: Any, group: int, logical: list[int]) -> int:
    local[old.dim] = _largest(logical[old.dim], group, old)
    sent = (group - 1) * math.prod(local)
    local[old.dim] = logical[old.dim]
    return sent


def _largest(size: int, pieces: int, shard: Any) -> int:
    return length(intervals(size, ((pieces, int(getattr(shard, "split_factor", 1)), 0),)))


def one_shot_bytes(source: Spec, target: Spec) -> int | None:
    """A lower bound on one all_to_all on the flat group; None when a reduction is pending on either side."""
    if source.layout.partial_dims or target.layout.partial_dims:
        return None
    old, new = (_masks(s) for s in (source, target))
    received = [int((n & ~o).sum()) for o, n in zip(old, new)]
    holders: dict[bytes, list[int]] = {}
    for r, mask in enumerate(old):
        holders.setdefault(mask.tobytes(), []).append(r)
    sent = 0
    for ranks in holders.values():
        demand = sum(int((new[q] & old[ranks[0]]).sum()) for q in range(len(new)) if q not in ranks)
        sent = max(sent, -(-demand // len(ranks)))
    return max(sent, max(received)) * source.itemsize


def _masks(spec: Spec) -> list[np.ndarray]:
    result = []
    for rank in spec.mesh.ranks:
        block = spec.layout.block(spec.mesh.coordinates(rank))
        rows = np.zeros(spec.shape[0], dtype=bool)
        columns = np.zeros(spec.shape[1], dtype=bool)
        for start, stop in block[0]:
            rows[start:stop] = True
        for start, stop in block[1]:
            columns[start:stop] = True
        result.append(np.outer(rows, columns))
    return result


def pairs(mesh: tuple[int, ...], shape: tuple[int, int]) -> Iterator[tuple[Spec, Spec]]:
    """All ordered pairs of different layouts in which no dimension becomes partial that was not (DTensor refuses)."""
    plain = Mesh(mesh)
    specs = [Spec(plain, p, shape) for p in layouts(mesh)]
    # For some sizes that do not divide, a strided shard is no shard order, and DTensor, which takes it for one, moves
    # the wrong rows for free: nothing to compare with.
    specs = [s for s in specs if all(factor == 1 for cuts in s.layout.cuts for _, factor in cuts)]
    for source, target in itertools.permutations(specs, 2):
        if all(old or not new for old, new in zip(source.layout.partial, target.layout.partial)):
            yield source, target


def compare(source: Spec, target: Spec, device_mesh: DeviceMesh) -> dict[str, Any]:
    """Bytes of all contestants for one pair; ``default`` is what DTensor does on its own."""
    greedy = torch_bytes(source, target, device_mesh, graph=False)
    graph = torch_bytes(source, target, device_mesh, graph=True)
    shot = one_shot_bytes(source, target)
    exact = plan_redistribution(source, target, exactness="exact")
    free = plan_redistribution(source, target, exactness="reassociate")
    return {
        "partial": bool(source.layout.partial_dims),
        "default": greedy if greedy is not None else graph,
        "best": min((b for b in (greedy, graph, shot) if b is not None), default=None),
        "exact": exact.bytes,
        "reassociate": free.bytes,
    }


def summary(rows: list[dict[str, Any]], ours: str) -> dict[str, Any]:
    """Share improved, median and maximal ratio over the pairs in which DTensor communicates."""
    moving = [r for r in rows if r["default"]]
    ratios = [r["default"] / r[ours] if r[ours] else math.inf for r in moving]
    finite = [x for x in ratios if x != math.inf]
    known = [r for r in rows if r["best"] is not None]
    against = [r[ours] / r["best"] if r["best"] else (math.inf if r[ours] else 1.0) for r in known]
    return {
        "pairs": len(moving),
        "improved": sum(x > 1 for x in ratios),
        "worse": sum(x < 1 for x in ratios),
        "median": statistics.median(ratios) if ratios else 1.0,
        "largest": max(finite, default=1.0),
        "free": sum(x == math.inf for x in ratios),
        "above_best": sum(x > 1 for x in against),
        "worst_against_best": max(against, default=1.0),
    }


HEADER = (
    "mesh",
    "shape",
    "pairs",
    "tier",
    "communicate",
    "fewer bytes than DTensor",
    "more",
    "median ratio",
    "max ratio",
    "none left",
    "above best of all",
    "ours / best, worst",
    "ms for both plans",
)


def run(cases: list[tuple[tuple[int, ...], tuple[int, int]]]) -> list[dict[str, Any]]:
    """One row per mesh, shape, kind of pair and tier."""
    out = []
    for mesh, shape in cases:
        device_mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh)).view(mesh))
        rows = []
        planning = 0.0
        for source, target in pairs(mesh, shape):
            begin = time.perf_counter()
            plan_redistribution(source, target, exactness="exact")
            plan_redistribution(source, target, exactness="reassociate")
            planning += time.perf_counter() - begin
            rows.append(compare(source, target, device_mesh))
        for kind, partial in (("shard/replicate", False), ("from partial", True)):
            chosen = [r for r in rows if r["partial"] == partial]
            for tier in ("exact", "reassociate") if partial else ("exact",):
                known = {"mesh": mesh, "shape": shape, "kind": kind, "tier": tier}
                out.append({**known, **summary(chosen, tier), "planning_ms": 1e3 * planning / len(rows)})
    return out


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, by ``HEADER``."""
    share = 100 * row["improved"] // max(1, row["pairs"])
    return [
        str(row["mesh"]),
        str(row["shape"]),
        row["kind"],
        row["tier"],
        str(row["pairs"]),
        f"{row['improved']} ({share}%)",
        str(row["worse"]),
        f"{row['median']:.2f}",
        f"{row['largest']:.2f}",
        str(row["free"]),
        str(row["above_best"]),
        f"{row['worst_against_best']:.3f}",
        f"{row['planning_ms']:.1f}",
    ]


EXPLANATION = """All ordered pairs of placements (Shard on each of two tensor dims, Replicate, Partial sum, strided shards that encode
a shard order, where the size lets them) in which no mesh dimension becomes partial that was not, fp32. Bytes are per
rank, ring model, busiest rank. "communicate" counts the pairs in which DTensor's default plan moves data; the ratio is
DTensor's bytes over ours; "none left" counts pairs that need no communication with ours; "best of all" is the least of
DTensor's greedy planner, its graph planner and a lower bound on one all-to-all on the flat group.

The exact tier keeps DTensor's reductions bit for bit, so from partial placements it cannot reach plans that merge or
move sums; those are what `reassociate` allows.
"""  # noqa: E501


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    from tools.shared.plot import bars

    chosen = [r for r in rows if r["kind"] == "shard/replicate" or r["tier"] == "reassociate"]
    groups = [f"{r['mesh']} {r['shape']}\n{r['kind']}" for r in chosen]
    series = {"median": [r["median"] for r in chosen], "largest": [r["largest"] for r in chosen]}
    bars(path, groups, series, "DTensor's bytes / ours", line=1.0)


def _numbers(text: str, what: str, count: int | None = None) -> tuple[int, ...]:
    try:
        found = tuple(int(x) for x in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or (count is not None and len(found) != count):
        raise typer.BadParameter(f"{what} is {text!r}; expected whole numbers with commas, e.g. 2,4")
    return found


def redistribute(
    mesh: Annotated[str, typer.Option(help="E.g. 2,4, eight ranks in all. Default: all meshes.")] = "",
    shape: Annotated[str, typer.Option(help="E.g. 64,32. Default: one that divides and one that does not.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the page, its figures and its chart.")] = RESULTS,
) -> None:
    """Bytes of redistribution plans between all pairs of layouts, ours against DTensor's."""
    cases = CASES
    if mesh:
        wanted = _numbers(mesh, "mesh")
        if math.prod(wanted) != 8:
            raise typer.BadParameter(f"mesh is {mesh!r} with {math.prod(wanted)} ranks; expected 8")
        cases = [c for c in CASES if c[0] == wanted] or [(wanted, (64, 32))]
    if shape:
        rows, columns = _numbers(shape, "shape", 2)
        cases = [(m, (rows, columns)) for m in dict.fromkeys(m for m, _ in cases)]
    with fake_world(8):
        found = run(cases)
    view = Table(*HEADER)
    for row in found:
        view.add_row(*cells(row))
    Console(width=200).print(view)
    body = [*EXPLANATION.splitlines(), "", *markdown_table(HEADER, [cells(r) for r in found])]
    write("redistribute", "Redistribution bytes", body, found, lambda path: _draw(found, path), folder=out)
