"""Small DTensor models whose redistributions DTensor's planning wastes, and what is counted on their graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.engine import joint as joint_pass
from inductor_passes.ir.view import GraphView
from inductor_passes.rewrites.audit import sent_bytes
from tests.support.redistribute_graphs import Captured, capture, duplicate, rewritten
from tests.support.redistribute_programs import settings_for

COPIES = ("aten::cat", "aten::clone", "aten::constant_pad_nd")


class Block(nn.Module):
    """Pre-norm attention and SwiGLU; the number of local heads and rows is left open."""

    def __init__(self, dim: int = 32, heads: int = 4, hidden: int = 64) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (w(h) for w in (self.wq, self.wk, self.wv))
        rows = q.shape[:2]
        q, k, v = (t.view(*rows, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.wo(y.reshape(*rows, -1))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def tensor_parallel_block(mesh: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Megatron's plan; activations are replicated."""
    columns, rows = ("wq", "wk", "wv", "w1", "w3"), ("wo", "w2")
    plan = {n: ColwiseParallel() for n in columns} | {n: RowwiseParallel() for n in rows}
    return parallelize_module(Block(), mesh, plan), [torch.randn(2, 8, 32, requires_grad=True)]


def sequence_parallel_block(mesh: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Megatron's plan with sequence parallelism; every linear gathers its own input."""
    plan: dict[str, Any] = {n: ColwiseParallel(input_layouts=Shard(1)) for n in ("wq", "wk", "wv", "w1", "w3")}
    plan |= {n: RowwiseParallel(output_layouts=Shard(1)) for n in ("wo", "w2")}
    plan |= {n: SequenceParallel() for n in ("norm1", "norm2")}
    return parallelize_module(Block(), mesh, plan), [torch.randn(3, 2, 32, requires_grad=True)]


class SwiGLU(nn.Module):
    """The MLP of a block."""

    def __init__(self, dim: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def sequence_parallel_mlp(mesh: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Megatron's plan with sequence parallelism for an MLP; batch 3."""
    plan: dict[str, Any] = {n: ColwiseParallel(input_layouts=Shard(1)) for n in ("w1", "w3")}
    plan["w2"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(SwiGLU(), mesh, plan), [torch.randn(3, 2, 32, requires_grad=True)]


class Stack(nn.Module):
    """Linears of 64 x 32 and 32 x 64 whose weights are gathered before use; the batch is cut by all mesh dimensions."""

    def __init__(self, mesh: Any, placements: list[Any], layers: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.mesh, self.dtype = mesh, dtype
        shapes = [(64, 32), (32, 64)] * layers
        self.weights = nn.ParameterList(
            nn.Parameter(distribute_tensor(torch.randn(shape), mesh, placements, src_data_rank=None))
            for shape in shapes[:layers]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ndim = self.mesh.ndim
        h = DTensor.from_local(x, self.mesh, [Shard(0)] * ndim, run_check=False)
        for weight in self.weights:
            whole = weight.redistribute(placements=[Replicate()] * ndim)
            whole = whole.to(self.dtype) if self.dtype is not None else whole
            h = torch.relu(F.linear(h, whole))
        return h.to_local()


def hybrid_shard(mesh: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Weights sharded over the second mesh dimension and replicated over the first."""
    return Stack(mesh, [Replicate(), Shard(0)], 6), [torch.randn(4, 32)]


def two_dimensional(mesh: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Weights sharded over both mesh dimensions."""
    return Stack(mesh, [Shard(0), Shard(0)], 3), [torch.randn(4, 32)]


def cast_weights(mesh: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Weights in float32, used in bfloat16, cast after they are gathered."""
    return Stack(mesh, [Shard(0)], 2, torch.bfloat16), [torch.randn(4, 32).to(torch.bfloat16)]


@dataclass(frozen=True)
class Count:
    """What a graph communicates and copies."""

    collectives: dict[str, int]
    bytes: int
    copies: int

    @staticmethod
    def of(gm: torch.fx.GraphModule) -> Count:
        """Of one graph; copies are packs and unpacks around collectives."""
        view = GraphView(gm.graph)
        kinds: dict[str, int] = {}
        for c in view.collectives:
            kinds[c.kind] = kinds.get(c.kind, 0) + 1
        copies = sum(_torch.op_name(n.target) in COPIES for n in gm.graph.nodes if n.op == "call_function")
        return Count(kinds, sum(sent_bytes(c) for c in view.collectives), copies)


def counted(captured: Captured, exactness: str, backward: bool) -> tuple[Count, Count]:
    """Before and after the rewrites, of the forward or the backward graph."""
    gm = captured.graphs[captured.backward.index(backward)]
    after = duplicate(gm)
    rewritten(after, settings_for(), exactness)
    return Count.of(gm), Count.of(after)


MODELS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "TP block": (tensor_parallel_block, (4,)),
    "TP + SP block, inputs per linear": (sequence_parallel_block, (4,)),
    "TP + SP MLP, batch 3": (sequence_parallel_mlp, (4,)),
    "hybrid shard, 6 weights of 8 KiB": (hybrid_shard, (2, 4)),
    "2-D sharded, 3 weights": (two_dimensional, (2, 4)),
    "float32 weights used in bfloat16": (cast_weights, (8,)),
}


def graphs_of(name: str, mesh: Any, joint: bool = False) -> Captured:
    """Forward and backward of a model, with ``joint`` after the rewrites of the joint graph."""
    torch.manual_seed(0)
    build = MODELS[name][0]
    if not joint:
        return capture(*build(mesh))
    return capture(*build(mesh), joint=lambda graph: joint_pass.run(graph, PassConfig(redistribute="reassociate")))


__all__ = ["MODELS", "Count", "counted", "graphs_of"]
