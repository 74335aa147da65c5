"""Graphs that our passes produced, and a certificate that says that everything in them may differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import verify
from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.bucket.candidates import candidates
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.config import PassConfig
from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Finding
from inductor_passes.rewrites.pass_ import RewriteCollectives
from inductor_passes.rewrites.scatter_by_exchange import ScatterByExchange
from inductor_passes.rewriting.merge import merge
from inductor_passes.verify.snapshot import NodeRecord, ReferenceSnapshot
from inductor_passes.verify.values import Numerics
from tests.support.async_tp_programs import BY_NAME, rs, trace
from tests.support.async_tp_programs import Program as Traced
from tests.support.bucket_graphs import Program
from tests.support.redistribute_programs import run_pass
from tests.support.verify_graphs import unknown

aten, prims = torch.ops.aten, torch.ops.prims
RANKS = 4
_SETTINGS = PassConfig(verify="strict", memory_budget="unlimited")


@dataclass
class Rewritten:
    """A graph that a pass has changed, and what it was."""

    gm: torch.fx.GraphModule
    before: ReferenceSnapshot
    numerics: Numerics = "exact"

    @property
    def graph(self) -> torch.fx.Graph:
        """The graph."""
        return self.gm.graph

    def named(self, name: str) -> torch.fx.Node:
        """A node by its name."""
        return next(n for n in self.graph.nodes if n.name == name)

    def calls(self, target: Any) -> list[torch.fx.Node]:
        """The nodes that call an operator, in order."""
        return [n for n in self.graph.nodes if n.target is target]

    def insert(self, after: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A node with its fake tensor."""
        with self.graph.inserting_after(after):
            node = self.graph.call_function(target, args, kwargs)
        fakes, named = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = next(v.fake_mode for n in self.graph.nodes if hasattr(v := n.meta.get("val"), "fake_mode"))
        with mode:
            node.meta["val"] = target(*fakes, **named)
        return node

    def findings(self) -> list[Finding]:
        """What the verifier finds when a certificate says that all data movement and computation was replaced."""
        after = verify.snapshot(self.graph)
        removed = tuple(n for n, record in self.before.nodes.items() if _may_be_named(record))
        added = tuple(n for n, record in after.nodes.items() if _may_be_named(record))
        return verify.check(
            self.graph,
            reference=self.before,
            certificates=[verify.Certificate("forged", removed, added)],
            group_order="any",
            numerics=self.numerics,
        )


def _may_be_named(record: NodeRecord) -> bool:
    plain = record.role in (Role.COMPUTE, Role.FREE, Role.START, Role.WAIT)
    return plain and record.op == "call_function" and not record.channel and not record.writes


def groups() -> dict[str, str]:
    """Names of the whole world and of two meshes' dimensions, under a fake world of four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert dist.group.WORLD is not None
    return {"world": dist.group.WORLD.group_name, "a": mesh.get_group(0).group_name, "b": mesh.get_group(1).group_name}


def merged(gm: torch.fx.GraphModule, form: str = "packed") -> Rewritten:
    """All collectives that may travel together do."""
    before, view = verify.snapshot(gm.graph), GraphView(gm.graph)
    by_key: dict[object, list[Any]] = {}
    deps = Dependencies(view)
    for candidate in candidates(view)[0]:
        members = by_key.setdefault(candidate.key, [])
        if deps.conflict(members, candidate.collective) is None:
            members.append(candidate.collective)
            deps.merge(members)
    buckets = [members for members in by_key.values() if len(members) > 1]
    merge(gm.graph, view, buckets, forms=[form] * len(buckets))
    gm.graph.lint()
    return Rewritten(gm, before)


def gathers() -> Rewritten:
    """Three square parameters gathered in one message, and one of another size; each is multiplied."""
    p, world = Program(), groups()["world"]
    x = p.input(16, 16)
    shards = [p.input(4, 16) for _ in range(3)] + [p.input(2, 16)]
    weights = [p.collective("all_gather", s, world) for s in shards]
    products = [p.call(aten.mm.default, x, p.call(aten.permute.default, w, [1, 0])) for w in weights]
    return merged(p.done(*products, p.call(aten.mul.Tensor, weights[0], 2.0)))


def reductions(kind: str = "all_reduce", op: str = "sum") -> Rewritten:
    """Gradients reduced in one message over one dimension of a mesh, and what becomes of them."""
    p, group = Program(), groups()["a"]
    gradients = [p.call(aten.neg.default, p.input(8, 8)) for _ in range(3)]
    reduced = [p.collective(kind, g, group, op) for g in gradients]
    scaled = [p.call(aten.mul.Tensor, r, 0.5) for r in reduced]
    soft = p.call(aten._softmax.default, scaled[0], 1, False)
    turned = p.call(aten.permute.default, scaled[2], [1, 0])
    return merged(p.done(*scaled, soft, p.call(aten.mm.default, soft, turned)))


def narrow_sums() -> Rewritten:
    """bfloat16 gradients that are added, rounded and widened, beside gathers in one message."""
    p, world = Program(), groups()["world"]
    a, b = (p.input(4, 4, dtype=torch.bfloat16) for _ in range(2))
    total = p.call(prims.convert_element_type.default, p.call(aten.add.Tensor, a, b), torch.float32)
    gathered = [p.collective("all_gather", x, world) for x in (a, b)]
    return merged(p.done(total, *gathered))


def effects() -> Rewritten:
    """Draws, an unknown operator and a write to an input, beside gathers in one message."""
    p, world = Program(), groups()["world"]
    state, x, y = p.input(4, 4), p.input(4, 4), p.input(4, 4)
    early = p.call(aten.mul.Tensor, state, 3.0)
    wait = [p.collective("all_gather", t, world) for t in (x, y)]
    p.call(aten.mul_.Tensor, state, 2.0)
    late = p.call(aten.mul.Tensor, state, 5.0)
    drawn = p.call(aten.bernoulli.p, p.call(aten.neg.default, x), 0.5)
    # Its place in the order is not the passes' to change.
    odd = p.call(unknown, p.call(aten.neg.default, y))
    return merged(p.done(early, late, *wait, drawn, odd))


def with_body() -> Rewritten:
    """A higher-order operator that runs a body, beside gathers in one message."""
    p, world = Program(), groups()["world"]
    x, y = p.input(4, 4), p.input(4, 4)
    inner = Program()
    given = inner.input(4, 4)
    body = inner.done(inner.call(aten.mul.Tensor, inner.call(aten.sin.default, given), 2.0))
    wait = [p.collective("all_gather", t, world) for t in (x, y)]
    held = p.graph.get_attr("body")
    ran = p.graph.call_function(torch.ops.higher_order.invoke_subgraph, (held, "body", x))
    ran.meta["val"] = (x.meta["val"],)
    p.graph.output((*wait, ran))
    gm = torch.fx.GraphModule({"body": body}, p.graph)
    return merged(gm)


def overlapped(name: str) -> Rewritten:
    """A small program after async TP."""
    gm = trace(BY_NAME[name])
    before = verify.snapshot(gm.graph)
    run_passes(gm.graph, [AsyncTpPass(mode="force")], _SETTINGS, CostProfile.default("cpu"))
    return Rewritten(gm, before, "reassociate")


def narrow_product() -> Rewritten:
    """Products in bfloat16, with a bias and reduced over the ranks, and a sum, beside gathers in one message."""
    p, world = Program(), groups()["world"]
    x, w, b = (p.input(*shape, dtype=torch.bfloat16) for shape in ((4, 8), (8, 6), (6,)))
    product = p.call(aten.addmm.default, p.call(aten.neg.default, b), x, w)
    total = p.call(aten.sum.dim_IntList, x, [1])
    gathered = [p.collective("all_gather", t, world) for t in (x, b)]
    reduced = p.collective("all_reduce", p.call(aten.mm.default, x, p.call(aten.neg.default, w)), world)
    return replace(merged(p.done(product, total, reduced, *gathered)), numerics="reassociate")


def exchanged() -> Rewritten:
    """A reduce_scatter between two ranks after it became an exchange and a sum."""
    gm = trace(Traced("one", lambda x: rs(x * 2).relu(), ((8, 6),), dtype=torch.float32, world=2))
    before = verify.snapshot(gm.graph)
    costs = tuple(
        CollectiveCost(kind, 1_000.0, per_byte, 100.0, 0.0)
        for kind, per_byte in (("reduce_scatter", 4e4), ("all_to_all", 2e4))
    )
    group = GroupCost(GroupLayout(2, 1, 2), "test", "wire", costs)
    link = replace(CostProfile.default("cpu", 2), measured=True, groups=(group,))
    run_passes(gm.graph, [ScatterByExchange("exact")], _SETTINGS, link)
    return Rewritten(gm, before)


def planned(build: Callable[[], torch.fx.GraphModule]) -> Rewritten:
    """A graph after the rewrites of redistributions."""
    gm = build()
    before = verify.snapshot(gm.graph)
    run_pass(RewriteCollectives(), gm.graph)
    return Rewritten(gm, before)
