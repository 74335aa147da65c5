"""One step's peaks as the allocator sees them, of compiled models on four ranks without processes.

``LAYOUTS`` are a small Llama under each kind of parallelism; ``SHAPES`` are other models under FSDP, the kinds on which
a user measured peaks above the budget.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.models import LlamaConfig, MoEConfig, llama, llama_batch, moe, moe_batch, tensor_parallel

SHAPES = ("wide", "uneven", "gated", "deep", "dense", "vectors", "residual", "vocabulary")
LAYOUTS = ("fsdp", "hybrid", "tp", "tp_sp", "fsdp_tp", "moe", "context_parallel")
CONFIG = LlamaConfig(layers=2, dim=64, kv_heads=4, hidden=160, batch=4, seq=64)
MOE = MoEConfig(tokens=256, dim=64, hidden=160)


class Layers(nn.Module):
    """Linear layers of these sizes with ``act`` between them."""

    def __init__(self, sizes: Sequence[int], act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return x


class Residual(nn.Module):
    """Linear layers with a residual: each input of a layer has a product and pointwise operators for readers."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            for _ in range(6):
                y = torch.sin(y) + x * 0.5
            x = y
        return x


class Gated(nn.Module):
    """MLPs with a gate, which is half of one product, and a residual."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(dim, 8 * dim, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * dim, dim, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down):
            gate, value = up(x).chunk(2, -1)
            x = x + down(nn.functional.silu(gate) * value)
        return x


class Dense(nn.Module):
    """Each layer reads what all layers before it gave."""

    def __init__(self, dim: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim + i * growth, growth) for i in range(layers))
        self.out = nn.Linear(dim + layers * growth, 2 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, torch.relu(layer(x))], -1)
        out: torch.Tensor = self.out(x)
        return out


class Vectors(nn.Module):
    """Parameters much smaller than activations."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((dim,), 0.1)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, shift in zip(self.parts[::2], self.parts[1::2]):
            x = torch.tanh(x * scale + shift)
        return x


class Vocabulary(nn.Module):
    """A language model whose step is mostly its loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = llama(config)
        self.target = llama_batch(config)[1].flatten()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.model(tokens).flatten(0, 1).float()
        return nn.functional.cross_entropy(scores, self.target, label_smoothing=0.1)


def shaped(name: str) -> tuple[nn.Module, torch.Tensor]:
    """One of ``SHAPES`` under FSDP, and its input."""
    model, rows, columns = {
        "wide": lambda: (Layers([768] * 7, torch.relu), 16, 768),
        "uneven": lambda: (Layers([509, 1021, 389, 769, 997, 307], nn.functional.gelu), 256, 509),
        "gated": lambda: (Gated(256, 4), 128, 256),
        "deep": lambda: (Layers([128] * 11, torch.sin), 1024, 128),
        "dense": lambda: (Dense(128, 64, 6), 512, 128),
        "residual": lambda: (Residual(300, 10), 700, 300),
        "vectors": lambda: (Vectors(40, 256), 512, 256),
    }[name]()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    return simple_fsdp(model, mesh), torch.randn(rows, columns)


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model on four ranks without processes, and its input: of ``LAYOUTS`` or ``SHAPES``."""
    if name in SHAPES and name != "vocabulary":
        return shaped(name)
    if name == "moe":
        return moe(MOE, dist.group.WORLD), moe_batch(MOE)[0]
    if name == "vocabulary":
        config = replace(CONFIG, vocab=8000)
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        return simple_fsdp(Vocabulary(config), mesh), llama_batch(config)[0]
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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Some operators take a workspace for each thread; what is compiled for another number is compiled again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measured_peaks(
    call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, given: torch.Tensor, folder: Path
) -> tuple[int, int]:
    """Most bytes allocated during forward and during backward, above what was there before the step.

    Without gradients the second number is what is left.
    """
    model.zero_grad()
    # What other tests left behind would be freed in the middle of the step, and the peak would be lower by that.
    gc.collect()
    gc.disable()
    try:
        return _measured(call, given, folder)
    finally:
        gc.enable()


def _measured(call: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor, folder: Path) -> tuple[int, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call(given)
        with torch.profiler.record_function("backward begins"):
            pass
        if result.requires_grad:
            result.backward()
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
