"""Any legal order of the fused kernels comes out of the generated code as planned; an illegal one is refused."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._guards import detect_fake_mode
from torch._inductor.fx_passes.replace_random import replace_random_passes
from torch._inductor.virtualized import V
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import _torch, verify
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.hooks import FusionHook
from inductor_passes.problems.kernels import build
from inductor_passes.replay import order_check
from inductor_passes.schedule.problem import Problem
from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.inductor_orders import illegal_order, lower, random_order
from tests.support.models import (
    LlamaConfig,
    MLPConfig,
    MoEConfig,
    capture_graphs,
    cross_entropy,
    llama,
    llama_batch,
    mlp,
    mlp_batch,
    moe,
    moe_batch,
    tensor_parallel,
)
from tests.support.world import fake_world

LLAMA = LlamaConfig(layers=1)
ORDERS = 5


def mesh(*names: str) -> Any:
    return init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)


def fsdp() -> Any:
    return simple_fsdp(llama(LLAMA), mesh("dp")), llama_batch(LLAMA)


def tp_sp() -> Any:
    return tensor_parallel(llama(LLAMA), mesh("tp"), sequence_parallel=True), llama_batch(LLAMA)


def experts() -> Any:
    return moe(MoEConfig(), dist.group.WORLD), moe_batch(MoEConfig())


def hybrid() -> Any:
    config = MLPConfig(width=12, layers=3)
    return simple_fsdp(mlp(config), mesh("replicate", "shard"), mode="hybrid_shard"), mlp_batch(config)


def context_parallel() -> Any:
    return llama(LLAMA, dist.group.WORLD), llama_batch(LLAMA)


SHAPES: dict[str, tuple[Callable[[], Any], int]] = {
    "fsdp": (fsdp, 2),
    "tp_sp": (tp_sp, 2),
    "moe": (experts, 2),
    "hybrid": (hybrid, 4),
    "context_parallel": (context_parallel, 2),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def graphs(request: pytest.FixtureRequest) -> Iterator[list[torch.fx.GraphModule]]:
    """Forward and backward of one shape; the fake world stays up while they are lowered."""
    make, world_size = SHAPES[request.param]
    torch._dynamo.reset()
    with fake_world(world_size):
        model, batch = make()
        loss = (lambda out: cross_entropy(out, batch[1])) if batch[0].dtype is torch.int64 else None
        captured = capture_graphs(model, [batch[0]], loss)
        yield [*captured.forward, *captured.backward]


def test_random_legal_orders_are_generated_as_planned(graphs: list[torch.fx.GraphModule]) -> None:
    assert torch._inductor.config.reorder_for_peak_memory, "the test is about Inductor's defaults"
    rng = random.Random(0)
    checked = 0
    for graph in graphs:
        for _ in range(ORDERS):
            planned: list[Any] = []

            def shuffle(nodes: list[Any], planned: list[Any] = planned) -> list[Any]:
                problem = build(nodes, CostProfile.default("cpu"), backward=False).problem
                order = random_order(problem, rng)
                planned.extend(nodes[i] for i in order)
                assert not verify.check_snodes(planned, nodes)
                return list(planned)

            statements = lower(graph, shuffle)
            assert order_check.compare(planned, statements) == order_check.CONFIRMED
            starts = [s for s in planned if _torch.snode_kind(s) == "start"]
            assert starts, "a graph without collectives would show nothing"
            checked += 1
    assert checked >= 2 * ORDERS


class Noisy(nn.Module):
    """Layers that draw by operators with one result and with several; only the generator keeps them in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for layer in self.layers:
            heads = layer(x).view(2, 8, 2, 8).transpose(1, 2)
            attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)[0]
            found += [torch.rand(4, 4), nn.functional.dropout(x, 0.5), attended, nn.functional.dropout(layer(x), 0.2)]
        return torch.stack([one.sum() for one in found])


@pytest.mark.parametrize("held", [False, True], ids=["as inductor has them", "held"])
@pytest.mark.parametrize("fallback", [False, True], ids=["seeds", "fallback_random"])
def test_draws_of_any_legal_order_are_the_same(fallback: bool, held: bool) -> None:
    """What draws is known from the FX graph; neither the plan of kernels nor its verifier is asked.

    Inductor makes one draw of seeds of all that it lowers itself, and moves draws to save memory; torch 2.13 keeps
    those of ``fallback_random`` in the program's order. Our hook before fusion keeps all of them.
    """
    torch._dynamo.reset()
    rng = random.Random(2)
    seen: list[list[str]] = []
    settings = {"fallback_random": fallback} | ({"_pre_fusion_custom_pass": FusionHook(PassConfig())} if held else {})
    with fake_world(2), torch._inductor.config.patch(settings):
        captured = capture_graphs(simple_fsdp(Noisy(), mesh("dp")), [torch.randn(16, 16)], None)
        (graph,) = captured.forward
        with V.set_fake_mode(detect_fake_mode([n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")])):
            replace_random_passes(graph)
        names = [n.name for n in graph.graph.nodes if _torch.is_seeded_random(n.target)]
        assert len(names) == (12 if fallback else 4)

        def drawn(node: Any) -> list[str]:
            # Inductor works on a copy of the graph, and wraps some of these nodes.
            calls = _torch.snode_kind(node) == "extern" and _torch.snode_op(node) is not None
            return [o.name for o in _torch.snode_origins(node) if calls and o.name in names]

        def inspect(nodes: list[Any]) -> list[Any]:
            problem = build(nodes, CostProfile.default("cpu"), backward=False).problem
            for order in (range(len(nodes)), *(random_order(problem, rng) for _ in range(20))):
                seen.append([name for i in order for name in drawn(nodes[i])])
            return nodes

        lower(graph, inspect)
    assert len(seen) == 21 and sorted(seen[0]) == sorted(names)
    assert all(one == seen[0] for one in seen), seen
    assert seen[0] == names or not held


def test_the_check_sees_another_order(graphs: list[torch.fx.GraphModule]) -> None:
    planned: list[Any] = []

    def keep(nodes: list[Any]) -> list[Any]:
        planned.extend(nodes)
        return nodes

    statements = lower(graphs[0], keep)
    assert order_check.compare(planned, statements) == order_check.CONFIRMED
    assert order_check.compare(planned[::-1], statements) != order_check.CONFIRMED
    assert "not found" in order_check.compare(planned, [s for s in statements if s[0] != "extern"])


def _without_parts(problem: Problem, nodes: list[Any]) -> Problem:
    """Without the order of the parts of a concatenation: it is there for the sake of memory, and any other is legal."""
    wholes = {s for node in nodes for _, _, shared, _ in _torch.snode_buffers(node) for s in shared}
    return dataclasses.replace(problem, storages=tuple(s for s in problem.storages if s.name not in wholes))


def test_random_illegal_orders_are_refused(graphs: list[torch.fx.GraphModule]) -> None:
    rng = random.Random(1)
    refused = 0

    def inspect(nodes: list[Any]) -> list[Any]:
        nonlocal refused
        problem = _without_parts(build(nodes, CostProfile.default("cpu"), backward=False).problem, nodes)
        for _ in range(40):
            order = [nodes[i] for i in illegal_order(problem, rng)]
            assert verify.check_snodes(order, nodes)
            refused += 1
        return nodes

    for graph in graphs:
        lower(graph, inspect)
    assert refused == 40 * len(graphs)
