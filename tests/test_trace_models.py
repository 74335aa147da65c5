"""Verdicts on the graphs of real models: one per collective, times that add up, settings that keep their promise."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build
from inductor_passes.report import Reason
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.simulate import simulate
from inductor_passes.settings.budget import MemoryBudget
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.verdict import explain
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

LLAMA = LlamaConfig(layers=2)


def mesh(*names: str) -> Any:
    return init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)


def fsdp_tp() -> Any:
    both = mesh("dp", "tp")
    model = tensor_parallel(llama(LLAMA), both["tp"])
    return simple_fsdp(model, both["dp"]), llama_batch(LLAMA)


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "fsdp": (lambda: (simple_fsdp(llama(LLAMA), mesh("dp")), llama_batch(LLAMA)), 2),
    "replicate": (lambda: (simple_fsdp(llama(LLAMA), mesh("dp"), mode="replicate"), llama_batch(LLAMA)), 2),
    "hybrid": (
        lambda: (
            simple_fsdp(mlp(MLPConfig(layers=3)), mesh("replicate", "shard"), mode="hybrid_shard"),
            mlp_batch(MLPConfig()),
        ),
        4,
    ),
    "tp": (lambda: (tensor_parallel(llama(LLAMA), mesh("tp")), llama_batch(LLAMA)), 2),
    "tp_sp": (lambda: (tensor_parallel(llama(LLAMA), mesh("tp"), sequence_parallel=True), llama_batch(LLAMA)), 2),
    "fsdp_tp": (fsdp_tp, 4),
    "moe": (lambda: (moe(MoEConfig(), dist.group.WORLD), moe_batch(MoEConfig())), 2),
    "context_parallel": (lambda: (llama(LLAMA, dist.group.WORLD), llama_batch(LLAMA)), 2),
}
#: A device on which so small a model is neither all latency nor all compute.
PROFILE = CostProfile.default("cuda", ranks_per_host=1)


@pytest.mark.parametrize("name", MODELS)
def test_every_collective_of_every_model_has_a_verdict(name: str) -> None:
    make, world_size = MODELS[name]
    torch._dynamo.reset()
    checked = promises = 0
    with fake_world(world_size):
        model, batch = make()
        loss = (lambda out: cross_entropy(out, batch[1])) if batch[0].dtype is torch.int64 else None
        captured = capture_graphs(model, [batch[0]], loss)
        graphs = [*captured.forward, *captured.backward]
        for graph, budget in itertools.product(graphs, ("0", "+25%")):
            problem = build(GraphView(graph.graph), PROFILE).problem
            starts = [t for t in problem.tasks if t.kind is Kind.START]
            if not starts:
                continue
            before = simulate(problem)
            limit = MemoryBudget.parse(budget).limit_bytes(before.peak_bytes)
            answer = plan(problem, limit)
            after = simulate(problem, answer.order)
            reports = explain(problem, answer.order, before, after, limit, effort=1)
            assert sorted(r.name for r in reports) == sorted(t.name for t in starts)
            busy = after.compute_ns + after.issue_ns
            assert sum(r.exposed_ns for r in reports) == after.makespan_ns - busy
            for report in reports:
                assert (report.reason is Reason.HIDDEN) == (report.exposed_ns == 0)
                assert report.hidden_ns + report.exposed_ns == report.duration_ns
                checked += 1
                match = re.fullmatch(r'memory_budget="(.*)"', report.setting)
                if match:
                    applied = plan(problem, MemoryBudget.parse(match[1]).limit_bytes(before.peak_bytes))
                    gain = after.makespan_ns - applied.makespan_ns
                    assert gain == pytest.approx(report.gain_ns, rel=0.1)
                    promises += 1
    assert checked
    if name in ("tp", "hybrid"):
        assert promises, "memory binds here: the promise must really be put to the test"
