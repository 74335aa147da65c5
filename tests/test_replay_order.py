"""Any legal order of the fused kernels comes out of the generated code as planned; an illegal one is refused."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import _torch, verify
from inductor_passes.cost.profile import CostProfile
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
