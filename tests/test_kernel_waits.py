"""Waits among Inductor's kernels belong to the start whose result they wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes import _torch
from inductor_passes.cost.flops import flops, library_shape
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import kernels
from inductor_passes.ir import ops
from inductor_passes.models import LlamaConfig, llama, llama_batch
from inductor_passes.problems.kernels import SchedulerProblem
from inductor_passes.schedule.problem import Kind
from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.compiled import without_kernels
from tests.support.world import fake_world

CONFIG = LlamaConfig(vocab=64, dim=32, layers=2, heads=4, kv_heads=4, hidden=48, batch=4, seq=8)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerProblem]:
    """The problems of fused kernels that are made from now on."""
    found: list[SchedulerProblem] = []
    build = kernels.build

    def seen(*args: Any, **settings: Any) -> SchedulerProblem:
        found.append(build(*args, **settings))
        return found[-1]

    monkeypatch.setattr(kernels, "build", seen)
    return found


@pytest.mark.parametrize("bucket", ["off", "on"])
def test_what_sums_in_place_has_waits_of_its_own(built: list[SchedulerProblem], bucket: str) -> None:
    """Found: with hybrid sharding the wait of an all_reduce was taken for one of the reduce_scatter before it.

    So results counted as there as soon as their sum was issued, and tuned predictions were 12 to 16% too long.
    """
    with fake_world(4), without_kernels():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model = simple_fsdp(llama(CONFIG), mesh, mode="hybrid_shard")
        torch._dynamo.reset()
        step = torch.compile(model, options=inductor_passes.options(bucket=bucket, inductor={"fx_graph_cache": False}))
        step(llama_batch(CONFIG)[0]).sum().backward()
    sums = 0
    for one in built:
        waits = {i: task.start for i, task in enumerate(one.problem.tasks) if task.kind is Kind.WAIT}
        assert set(waits.values()) == set(one.collectives), "each has a wait"
        for wait, start in waits.items():
            (awaited,) = {
                origin.args[0] for origin in _torch.snode_origins(one.nodes[wait]) if ops.role(origin) is ops.Role.WAIT
            }
            assert awaited in _torch.snode_origins(one.nodes[start])
            sums += one.collectives[start].kind == "all_reduce"
    assert sums >= 1


def test_attention_takes_as_long_among_kernels_as_on_fx(built: list[SchedulerProblem]) -> None:
    """It has several results, and was priced by its bytes there."""
    config = LlamaConfig(vocab=64, dim=256, layers=1, heads=4, kv_heads=4, hidden=48, batch=2, seq=512)
    profile = CostProfile.default()
    with fake_world(2), without_kernels():
        model = simple_fsdp(llama(config), init_device_mesh("cpu", (2,)))
        torch._dynamo.reset()
        step = torch.compile(model, options=inductor_passes.options(inductor={"fx_graph_cache": False}))
        step(llama_batch(config)[0]).sum().backward()
    seen = 0
    for one in built:
        for task, node in zip(one.problem.tasks, one.nodes):
            calls = [o for o in _torch.snode_origins(node) if "flash_attention" in _torch.op_name(o.target)]
            if not calls or task.kind is not Kind.COMPUTE or "getitem" in task.name:
                continue
            (call,) = calls
            if _torch.snode_op(node) is not call.target:
                continue
            seen += 1
            count = flops(call)
            assert count is not None
            assert task.duration_ns >= profile.compute_ns(count, 0, "float32", 1, library_shape(call))
    assert seen == 2
