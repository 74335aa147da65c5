"""The peak that the planner predicts is the peak that the allocator sees, for every kind of parallel model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes.schedule.problem import INPUT, Problem
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.compiled import without_kernels
from tests.support.models import LlamaConfig, MoEConfig, llama, llama_batch, moe, moe_batch, tensor_parallel
from tests.support.world import fake_world

CONFIG = LlamaConfig(layers=2, dim=64, kv_heads=4, hidden=160, batch=4, seq=64)
MOE = MoEConfig(tokens=256, dim=64, hidden=160)


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model on four ranks without processes, and its input."""
    if name == "moe":
        return moe(MOE, dist.group.WORLD), moe_batch(MOE)[0]
    tokens = llama_batch(CONFIG)[0]
    if name == "context_parallel":
        return llama(CONFIG, dist.group.WORLD), tokens.chunk(4, 1)[0]
    model = llama(CONFIG)
    if name == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return simple_fsdp(model, mesh, mode="hybrid_shard"), tokens
    if name == "fsdp_tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, mesh["tp"])
        return simple_fsdp(model, mesh["dp"]), tokens
    if name in ("tp", "tp_sp"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        tensor_parallel(model, mesh, sequence_parallel=name == "tp_sp")
        return model, tokens
    return simple_fsdp(model, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))), tokens


def measured_peaks(call: Any, model: nn.Module, tokens: torch.Tensor, folder: Path) -> tuple[int, int]:
    """Most bytes allocated during forward and during backward, above what was there before the step."""
    model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = call(tokens)
        with torch.profiler.record_function("backward begins"):
            pass
        loss.backward()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    (begin,) = [float(e["ts"]) for e in events if e.get("name") == "backward begins" and e.get("ph") == "X"]
    changes = sorted((float(e["ts"]), int(e["args"]["Bytes"])) for e in events if e.get("name") == "[memory]")
    held, forward, backward = 0, 0, 0
    for at, change in changes:
        held += change
        if at < begin:
            forward = max(forward, held)
        else:
            backward = max(backward, held)
    return forward, backward


def predicted_peaks(folder: Path, orders: dict[str, Any]) -> dict[str, int]:
    """Planned peaks by phase, without what the caller holds: parameters and inputs."""
    found = {}
    for path in folder.glob("rank0_*.json"):
        problem = Problem.from_json(json.loads(path.read_text()))
        held = sum(s.size_bytes for s in problem.storages if s.producer == INPUT and s.name.startswith("primals_"))
        phase = problem.name.split("_")[0]
        found[phase] = orders[phase] - held
    return found


@pytest.mark.parametrize("name", ["fsdp", "hybrid", "tp", "tp_sp", "fsdp_tp", "moe", "context_parallel"])
def test_predicted_peak_is_the_measured_one(name: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    problems = tmp_path / "problems"
    # What is allocated is the wrapper's doing, not the kernels'.
    with fake_world(4), without_kernels():
        model, tokens = build(name)
        options = inductor_passes.options(memory_budget="+25%", dump_problem=str(problems))

        def loss(tokens: torch.Tensor) -> torch.Tensor:
            # A scalar result: what the caller of backward holds besides is next to nothing.
            return model(tokens).square().mean()  # type: ignore[no-any-return]

        compiled = torch.compile(loss, fullgraph=True, options=options)
        with collect(what_if=False) as reports:
            compiled(tokens).backward()
        measured = measured_peaks(compiled, model, tokens, tmp_path)
    peaks = {r.phase: r.schedules[-1].peak_after_bytes for r in reports}
    assert {r.schedules[-1].level for r in reports} == {"scheduler"}
    predicted = predicted_peaks(problems, peaks)
    assert predicted["forward"] == pytest.approx(measured[0], rel=0.05), (predicted, measured)
    assert predicted["backward"] == pytest.approx(measured[1], rel=0.05), (predicted, measured)
