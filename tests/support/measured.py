"""One step's peaks as the allocator sees them, of a compiled model of each layout on four ranks without processes."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.models import LlamaConfig, MoEConfig, llama, llama_batch, moe, moe_batch, tensor_parallel

LAYOUTS = ("fsdp", "hybrid", "tp", "tp_sp", "fsdp_tp", "moe", "context_parallel")
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
    # What other tests left behind would be freed in the middle of the step, and the peak would be lower by that.
    gc.collect()
    gc.disable()
    try:
        return _measured(call, tokens, folder)
    finally:
        gc.enable()


def _measured(call: Any, tokens: torch.Tensor, folder: Path) -> tuple[int, int]:
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
