"""What the compiled graph of a redistribution sends and copies, against what ``plan_redistribution`` plans for it.

For every pair of placements a DTensor program is compiled on a fake process group, forward and backward (the gradient
of a replicated mesh dimension arrives as a pending sum, as data parallelism has it), and the rewrites run on its graph.
Counted are collectives, bytes of the busiest rank and copies (``cat``, ``clone``, padding) of DTensor's graph, of the
rewritten one and of the plan under the same cost profile. A pair is worse than its plan when it sends more bytes or
issues more collectives or copies more often. Pairs without a pending sum run in the tier ``exact``, the others in
``reassociate``.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from inductor_passes import _torch
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.execute import torch_placement
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.plan import Exactness, plan_redistribution
from inductor_passes.redistribute.spec import Partial, Placement, Replicate, Shard, Spec
from inductor_passes.report import Verdict
from inductor_passes.rewrites.audit import sent_bytes
from inductor_passes.verify.messages import KEY, Messages
from tests.support.redistribute_graphs import capture, duplicate, rewritten
from tests.support.redistribute_models import COPIES
from tests.support.redistribute_programs import settings_for
from tests.support.world import mesh_world
from tools.shared.record import RESULTS, markdown_table, write

CASES: tuple[tuple[tuple[int, ...], tuple[int, int]], ...] = tuple(
    (mesh, shape) for mesh in ((2, 4), (4, 4), (2, 3), (2, 2, 2)) for shape in ((3072, 1536), (3071, 1535))
)
#: What copies a part of a pack before a ``cat`` puts it in its place.
PARTS = ("aten::clone", "aten::constant_pad_nd")
#: Pairs that are taken of a mesh with more than that many; drawn with a fixed seed.
MOST_PAIRS = 80


@dataclass(frozen=True)
class Cost:
    """Of one graph or plan: bytes per rank of the busiest rank, collectives, copies."""

    bytes: int
    collectives: int
    copies: int

    def __str__(self) -> str:
        return f"{self.bytes:,} / {self.collectives} / {self.copies}"

    def worse_than(self, other: Cost) -> bool:
        """Whether it sends, issues or copies more."""
        return any(a > b for a, b in zip(astuple(self), astuple(other)))


@dataclass(frozen=True)
class Row:
    """One redistribution in one phase.

    Attributes:
        refusals: of the rewrites, as ``rewrite: detail``.
    """

    mesh: tuple[int, ...]
    shape: tuple[int, int]
    phase: str
    source: str
    target: str
    default: Cost
    compiled: Cost
    plan: Cost
    refusals: tuple[str, ...]


def counted(gm: torch.fx.GraphModule) -> Cost:
    """Of a graph. An exchange that says what all ranks send counts for the busiest of them."""
    view = GraphView(gm.graph)
    copies = sum(_is_copied(n) for n in gm.graph.nodes if n.op == "call_function")
    return Cost(sum(_bytes(c) for c in view.collectives), len(view.collectives), copies)


def _is_copied(node: torch.fx.Node) -> bool:
    """Whether a node copies. What a ``cat`` alone reads is written to its place there: that is one copy, the cat's."""
    if _torch.op_name(node.target) not in COPIES:
        return False
    reader = node
    while len(reader.users) == 1 and _torch.op_name(next(iter(reader.users)).target) in ("aten::view", *PARTS):
        reader = next(iter(reader.users))
    joined = len(reader.users) == 1 and _torch.op_name(next(iter(reader.users)).target) == "aten::cat"
    return not joined or _torch.op_name(node.target) == "aten::cat"


def _bytes(collective: Collective) -> int:
    said = collective.start.meta.get(KEY)
    if collective.kind is not CollectiveKind.ALL_TO_ALL or not isinstance(said, Messages):
        return sent_bytes(collective)
    value = collective.start.meta["val"]
    sizes = {
        (a, b): sum(part.end - part.begin for part in said.parts(a, b))
        for a, b in itertools.permutations(collective.group.ranks, 2)
    }
    sent, received = Counter[int](), Counter[int]()
    for (a, b), size in sizes.items():
        sent[a] += size
        received[b] += size
    return int(max(*sent.values(), *received.values())) * int(value.dtype.itemsize)


def placements(mesh: tuple[int, ...]) -> list[tuple[Placement, ...]]:
    """Every combination of Shard(0), Shard(1), Replicate and Partial sum."""
    single: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial("sum"))
    return list(itertools.product(single, repeat=len(mesh)))


def pairs(mesh: tuple[int, ...]) -> list[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    """Ordered pairs in which nothing is pending afterwards; a sample of those of large meshes."""
    found = [
        (a, b)
        for a, b in itertools.permutations(placements(mesh), 2)
        if not any(isinstance(p, Partial) for p in b)
    ]
    if len(found) <= MOST_PAIRS:
        return found
    return [found[i] for i in sorted(random.Random(0).sample(range(len(found)), MOST_PAIRS))]


def gradients(target: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """How the gradient of a result arrives: pending where the result is replicated."""
    return tuple(Partial("sum") if isinstance(p, Replicate) else p for p in target)


def program(device_mesh: Any, source: Spec, target: Spec) -> Any:
    """A function from this rank's part to its part after the redistribution."""
    stride = torch.empty(source.shape, device="meta").stride()
    before, after = ([torch_placement(p) for p in s.placements] for s in (source, target))
    grads = [torch_placement(p) for p in gradients(target.placements)]

    def run(x: torch.Tensor) -> torch.Tensor:
        d = DTensor.from_local(
            x, device_mesh, before, run_check=False, shape=torch.Size(source.shape), stride=stride
        )
        return d.redistribute(placements=after).to_local(grad_placements=grads) * 2.0

    return run


def measured(
    mesh: tuple[int, ...],
    shape: tuple[int, int],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    here: int,
) -> Iterator[Row]:
    """Forward and backward of one pair, as ``here`` compiles it."""
    plain = Mesh(mesh)
    old, new = Spec(plain, source, shape), Spec(plain, target, shape)
    back = tuple(Replicate() if isinstance(p, Partial) else p for p in source)
    ends = {False: (old, new), True: (Spec(plain, gradients(target), shape), Spec(plain, back, shape))}
    with mesh_world(mesh, here) as device_mesh:
        held = [Replicate() if isinstance(p, Partial) else p for p in source]
        local = compute_local_shape_and_global_offset(shape, device_mesh, [torch_placement(p) for p in held])[0]
        inputs = [torch.zeros(local, requires_grad=True)]
        captured = capture(program(device_mesh, old, new), inputs)
        for gm, backward in zip(captured.graphs, captured.backward):
            first, last = ends[backward]
            tier: Exactness = "reassociate" if first.layout.partial_dims else "exact"
            settings = settings_for()
            after = duplicate(gm)
            report = rewritten(after, settings, tier)
            plan = plan_redistribution(first, last, exactness=tier, cost_profile=settings[1])
            copies = sum(1 + (s.kind == "all_to_all") for s in plan.steps if s.copy_bytes)
            planned = Cost(plan.bytes, plan.collectives, copies)
            refusals = tuple(f"{d.subject}: {d.detail}" for d in report.decisions if d.verdict is Verdict.REFUSED)
            yield Row(
                mesh, shape, "backward" if backward else "forward", str(first), str(last),
                counted(gm), counted(after), planned, refusals,
            )  # fmt: skip


HEADER = (
    "mesh", "shape", "phase", "pairs that communicate", "worse than the plan", "bytes: DTensor", "compiled", "plan",
    "collectives: DTensor", "compiled", "plan", "copies: DTensor", "compiled", "plan",
)  # fmt: skip
LISTED = ("mesh", "shape", "phase", "pair", "DTensor: bytes / collectives / copies", "compiled", "plan", "refusals")


def summary(rows: list[Row]) -> list[list[str]]:
    """One line per mesh, shape and phase."""
    lines = []
    for key, group in itertools.groupby(
        sorted(rows, key=lambda r: (r.mesh, -r.shape[0], r.phase)), key=lambda r: (r.mesh, r.shape, r.phase)
    ):
        found = [r for r in group if r.default.collectives]
        worse = sum(r.compiled.worse_than(r.plan) for r in found)
        sums = [
            f"{sum(getattr(cost, what) for cost in (getattr(r, of) for r in found)):,}"
            for what in ("bytes", "collectives", "copies")
            for of in ("default", "compiled", "plan")
        ]
        lines.append([*map(str, key), str(len(found)), str(worse), *sums])
    return lines


def listed(rows: list[Row]) -> list[list[str]]:
    """Every pair that is worse than its plan, most bytes too many first."""
    worse = [r for r in rows if r.compiled.worse_than(r.plan)]
    worse.sort(key=lambda r: r.plan.bytes - r.compiled.bytes)
    return [
        [str(r.mesh), str(r.shape), r.phase, f"{r.source} -> {r.target}", str(r.default), str(r.compiled), str(r.plan),
         "; ".join(dict.fromkeys(r.refusals))]
        for r in worse
    ]  # fmt: skip


EXPLANATION = (__doc__ or "").partition("\n\n")[2]


def reach(
    mesh: Annotated[str, typer.Option(help="Only this one, e.g. 4,4. Default: all.")] = "",
    rank: Annotated[int, typer.Option(help="The rank whose graphs are compiled.", min=0, max=5)] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the page and its figures.")] = RESULTS,
) -> None:
    """Compiled redistributions against the plans for them: bytes, collectives, copies."""
    known = {",".join(map(str, m)) for m, _ in CASES}
    if mesh and mesh not in known:
        raise typer.BadParameter(f"mesh is {mesh!r}; expected one of {', '.join(sorted(known))}")
    logging.disable(logging.WARNING)
    rows = [
        row
        for m, shape in CASES
        if not mesh or ",".join(map(str, m)) == mesh
        for source, target in pairs(m)
        for row in measured(m, shape, source, target, rank)
    ]
    view = Table(*HEADER)
    for line in summary(rows):
        view.add_row(*line)
    console = Console(width=220)
    console.print(view)
    for line in listed(rows):
        console.print(" | ".join(line), soft_wrap=True, highlight=False)
    body = [*EXPLANATION.splitlines(), "", *markdown_table(HEADER, summary(rows)), "", "Worse than the plan:", ""]
    body += markdown_table(LISTED, listed(rows))
    write("reach", "Compiled redistributions", body, [asdict(r) for r in rows], folder=out)
