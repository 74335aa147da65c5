"""Random programs of redistributions whose layouts are noted, forward and backward, on all ranks of random meshes.

Each rank's graph is rewritten as that rank sees it. All ranks have to come to the same collectives, the verifier has to
be content, and every rank gets the bits of the graph as it came, for no more bytes. Inputs are small whole numbers, so
sums are exact in any order; ranks along which a tensor is replicated have the same.
"""

from __future__ import annotations

import collections
import logging
import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from inductor_passes._torch import strided_shard
from inductor_passes.agreement.lines import describe
from inductor_passes.agreement.roles import IncomparableError
from inductor_passes.ir.view import GraphView
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.report import Verdict
from inductor_passes.rewrites.audit import sent_bytes
from tests.support.redistribute_graphs import (
    LockstepError,
    assert_equal_on_all_ranks,
    capture,
    duplicate,
    integers,
    rewritten,
    run_in_lockstep,
)
from tests.support.redistribute_programs import settings_for
from tests.support.world import mesh_world
from tests.test_agreement_lines import fit
from tests.test_redistribute_copies import local_shape

MESHES = ((2, 2), (2, 3), (3, 2), (2, 2, 2), (4,), (3,))


@dataclass(frozen=True)
class Drawn:
    """One program: where its tensor is, then where it is brought, one after the other.

    Attributes:
        between: per hop what happens before it: ``""`` nothing, ``"*"`` arithmetic, ``"read"`` the result so far is
            read by others too, ``"local"`` the local tensor is worked on and becomes a DTensor again.
        branches: where the tensor is brought besides, each for a result of its own.
        last: how the result leaves: ``to_local`` or ``full_tensor``.
        cast: whether the last hop casts on the way.
        tier: what rewrites may do to sums.
    """

    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    layouts: tuple[tuple[Placement, ...], ...]
    between: tuple[str, ...]
    branches: tuple[tuple[Placement, ...], ...]
    last: str
    cast: bool
    grad: bool
    dtype: torch.dtype
    tier: str


def drawn(seed: int) -> Drawn:
    r = random.Random(seed)
    mesh = r.choice(MESHES)
    even = r.random() < 0.8
    shape = tuple(
        math.prod(mesh) * r.choice((1, 2)) if even else r.randint(1, 13) for _ in range(r.choice((1, 2, 2, 3)))
    )
    hops = r.choice((1, 1, 2, 3))

    def layout(pending: bool) -> tuple[Placement, ...]:
        kinds = [Replicate(), *(Shard(d) for d in range(len(shape))), *(Shard(d) for d in range(len(shape)))]
        kinds += [Partial(r.choice(("sum", "sum", "max")))] * 3 if pending else []
        return tuple(r.choice(kinds) for _ in mesh)

    first = layout(r.random() < 0.4)
    if len(mesh) == 2 and r.random() < 0.15:
        first = (strided_shard(0, mesh[1]), Shard(0))
    return Drawn(
        mesh,
        shape,
        (first, *(layout(False) for _ in range(hops))),
        ("", *(r.choice(("", "", "*", "read", "local")) for _ in range(hops - 1))),
        tuple(layout(False) for _ in range(r.choice((0, 0, 0, 1, 3)))),
        r.choice(("to_local", "to_local", "full_tensor")),
        r.random() < 0.1,
        r.random() < 0.5,
        r.choice((torch.float32, torch.float32, torch.float64, torch.complex64)),
        r.choice(("exact", "reassociate")),
    )


def program(what: Drawn, mesh):
    """The function of a rank's local tensor."""

    def placed(local, placements):
        stride = torch.empty(what.shape, device="meta").stride()
        shape = torch.Size(what.shape)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def run(x):
        d, more, here = placed(x * 1.0, what.layouts[0]), [], what.layouts[0]
        branches = [d.redistribute(placements=target).to_local() for target in what.branches]
        for number, (target, between) in enumerate(zip(what.layouts[1:], what.between)):
            if between == "*":
                d = d * 2.0
            elif between == "read":
                more.append(d.to_local().sum().detach())
            elif between == "local":
                d = placed(d.to_local() * 3.0, here)
            casts = what.cast and number == len(what.between) - 1
            d = d.redistribute(placements=target, **({"forward_dtype": torch.float64} if casts else {}))
            here = target
        out = getattr(d, what.last)() * 2.0
        for one in more:
            out = out + one
        return (out, *branches)

    x = torch.zeros(local_shape(mesh, what.shape, what.layouts[0]), dtype=what.dtype)
    return run, [x.requires_grad_(what.grad and not what.dtype.is_complex)]


def _given(
    what: Drawn, layouts: tuple[tuple[Placement, ...], ...], gm: torch.fx.GraphModule, rank: int
) -> list[torch.Tensor]:
    """Inputs of a graph: ranks that hold the same of a tensor are given the same; () is replicated on all."""
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    at, found = Mesh(what.mesh).coordinates(rank), []
    for value, layout in zip((v for v in values if isinstance(v, torch.Tensor)), layouts, strict=True):
        copy = sum(1009**m * (c + 1) for m, (c, p) in enumerate(zip(at, layout)) if not p.is_replicate())
        generator = torch.Generator().manual_seed(copy)
        found.append(torch.randint(-2, 3, tuple(value.shape), generator=generator).to(value.dtype))
    return found


def agreed(graphs: dict[int, torch.fx.GraphModule], mesh: tuple[int, ...]) -> bool:
    """Whether the ranks would find that they compile the same, as ``agreement`` has it."""
    found = []
    for rank, gm in graphs.items():
        with mesh_world(mesh, rank):
            try:
                found.append(describe(GraphView(gm.graph), {}, rank, len(graphs)))
            except IncomparableError:
                return False
    return fit(found)


def checked(seed: int, counts: collections.Counter[str]) -> None:
    what = drawn(seed)
    size = math.prod(what.mesh)
    before: dict[str, dict[int, torch.fx.GraphModule]] = {"forward": {}, "backward": {}}
    groups: dict[int, dict[str, tuple[int, ...]]] = {}
    for rank in range(size):
        _clear_sharding_prop_cache()  # Else results are on the mesh of the rank before.
        with mesh_world(what.mesh, rank) as mesh:
            captured = capture(*program(what, mesh))
            groups[rank] = captured.groups
            for gm, backward in zip(captured.graphs, captured.backward):
                before["backward" if backward else "forward"][rank] = gm
    for phase, graphs in before.items():
        if len(graphs) < size or not any(GraphView(gm.graph).collectives for gm in graphs.values()):
            continue
        last = what.layouts[-1] if what.last == "to_local" else ()
        given = (what.layouts[0],) if phase == "forward" else (last, *what.branches)
        if any(len(integers(gm, 0)) != len(given) for gm in graphs.values()):
            # Some rank saves what it holds nothing of.
            counts["other inputs"] += 1
            continue
        inputs = {rank: _given(what, given, gm, rank) for rank, gm in graphs.items()}
        try:
            run_in_lockstep(graphs, inputs, groups)
        except LockstepError:
            # DTensor's own graphs of ranks that hold nothing.
            counts["DTensor hangs"] += 1
            continue
        counts["graphs"] += 1
        together = agreed(graphs, what.mesh)
        counts["agreed"] += together
        after: dict[int, torch.fx.GraphModule] = {}
        for rank, gm in graphs.items():
            with mesh_world(what.mesh, rank):
                after[rank] = duplicate(gm)
                report = rewritten(after[rank], settings_for(), what.tier, agreed=together)
                was, now = (sum(sent_bytes(c) for c in GraphView(g.graph).collectives) for g in (gm, after[rank]))
                assert now <= was, (phase, rank, was, now)
        counts["fewer bytes"] += now < was
        planned = any(d.subject == "R17" and d.verdict is Verdict.APPLIED for d in report.decisions)
        counts[f"planned, {phase}"] += planned
        assert_equal_on_all_ranks(graphs, after, groups, inputs)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_programs(first: int) -> None:
    logging.getLogger("torch").setLevel(logging.ERROR)
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + 10):
        try:
            checked(seed, counts)
        except Exception as error:
            raise AssertionError(f"program {seed}: {drawn(seed)}: {error}") from error
    assert counts["planned, forward"]
