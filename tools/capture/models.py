"""Models in the shapes that are trained on clusters, laid out for a fake world; built on the meta device.

``SCENARIOS`` names them. Each is a function ``(layers) -> (model, inputs)`` that runs inside an initialised process
group of ``Scenario.world`` ranks. Nothing here allocates parameters: the capture turns them into fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from inductor_passes.simple_fsdp import simple_fsdp

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder and of one rank's batch; ``hiddens`` are cycled over the layers."""

    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hiddens: tuple[int, ...] = (14336,)
    vocab: int = 128256
    sequence: int = 8192
    experts: int = 0
    expert_hidden: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


LLAMA_8B = Shape()
LLAMA_70B = Shape(dim=8192, heads=64, hiddens=(28672,))
LLAMA_405B = Shape(dim=16384, heads=128, hiddens=(53248,))


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight.to(x.dtype)


def exchange(x: torch.Tensor, group: dist.ProcessGroup, gather_sequence: bool) -> torch.Tensor:
    """(batch, sequence, heads, d): whole heads and a slice of the sequence, or the other way round (Ulysses)."""
    batch, sequence, heads, d = x.shape
    ranks = group.size()
    if gather_sequence:
        x = x.view(batch, sequence, ranks, heads // ranks, d).permute(2, 0, 1, 3, 4).contiguous()
        x = funcol.all_to_all_single_autograd(x, None, None, group)
        return x.permute(1, 0, 2, 3, 4).reshape(batch, ranks * sequence, heads // ranks, d)
    x = x.view(batch, ranks, sequence // ranks, heads, d).permute(1, 0, 2, 3, 4).contiguous()
    x = funcol.all_to_all_single_autograd(x, None, None, group)
    return x.permute(1, 2, 0, 3, 4).reshape(batch, sequence // ranks, ranks * heads, d)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; ``group`` exchanges heads for sequence around it."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.head_dim, self.repeat, self.group = shape.head_dim, shape.heads // shape.kv_heads, group
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (w(x).view(batch, sequence, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rotation), rotate(k, rotation)
        if self.group is not None:
            q, k, v = (exchange(t, self.group, True) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.repeat, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.group is not None:
            y = exchange(y, self.group, False)
        return self.wo(y.reshape(batch, sequence, -1))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotary positions for (batch, sequence, heads, head_dim); ``rotation`` is (2, sequence, head_dim / 2)."""
    cos, sin = rotation[0, None, :, None, :], rotation[1, None, :, None, :]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """(groups of tokens, experts' inputs) -> the same shape; every rank of the expert group owns some experts."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.w1)), self.w2)


class MoE(nn.Module):
    """Top-1 routing with a fixed capacity: tokens travel to their experts and back by all_to_all."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.count = group, shape.experts
        self.gate = nn.Linear(shape.dim, shape.experts, bias=False)
        self.experts = Experts(shape.experts // group.size(), shape.dim, shape.expert_hidden)
        self.shared = FeedForward(shape.dim, shape.expert_hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        capacity = tokens.shape[0] // self.count * 2
        score, expert = self.gate(tokens).softmax(-1).max(-1)
        chosen = F.one_hot(expert, self.count)
        slot = ((chosen.cumsum(0) * chosen).sum(-1) - 1).clamp(max=capacity - 1)
        place = expert * capacity + slot
        sent = torch.zeros(self.count * capacity, tokens.shape[1], dtype=x.dtype, device=x.device)
        sent = sent.index_copy(0, place, tokens)
        got = funcol.all_to_all_single_autograd(sent, None, None, self.group)
        ranks = self.group.size()
        local = self.count // ranks
        work = got.view(ranks, local, capacity, -1).transpose(0, 1).reshape(local, ranks * capacity, -1)
        done = self.experts(work).view(local, ranks, capacity, -1).transpose(0, 1).reshape(sent.shape).contiguous()
        back = funcol.all_to_all_single_autograd(done, None, None, self.group)
        return self.shared(x) + (back.index_select(0, place) * score[:, None]).view(x.shape)


class Block(nn.Module):
    """Pre-norm attention and feed-forward (or experts) with residuals."""

    def __init__(self, shape: Shape, layer: int, sequence_group: Any = None, expert_group: Any = None) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(shape.dim), RMSNorm(shape.dim)
        self.attention = Attention(shape, sequence_group)
        self.feed_forward: nn.Module = (
            FeedForward(shape.dim, shape.hiddens[layer % len(shape.hiddens)])
            if expert_group is None
            else MoE(shape, expert_group)
        )

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """(tokens, targets, rotation) -> mean cross-entropy."""

    def __init__(self, shape: Shape, layers: int, sequence_group: Any = None, expert_group: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Block(shape, i, sequence_group, expert_group) for i in range(layers))
        self.norm = RMSNorm(shape.dim)
        self.output = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class VisionTransformer(nn.Module):
    """(patches, labels) -> mean cross-entropy; linear layers and norms have biases: many small parameters."""

    def __init__(self, layers: int, dim: int = 1664, heads: int = 16, hidden: int = 8192, patches: int = 256) -> None:
        super().__init__()
        self.embed = nn.Linear(14 * 14 * 3, dim)
        self.positions = nn.Parameter(torch.empty(1, patches, dim))
        self.layers = nn.ModuleList(VisionBlock(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 1000)

    def forward(self, patches: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(patches) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), labels)


class VisionBlock(nn.Module):
    """Pre-norm attention and a GELU feed-forward, all with biases."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, sequence, dim)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


def text(shape: Shape, batch: int = 1, here: int | None = None) -> tuple[torch.Tensor, ...]:
    """Tokens, targets and rotary positions of one rank, whose sequence has ``here`` tokens; on the meta device."""
    sequence = here or shape.sequence
    tokens = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    rotation = torch.empty(2, sequence, shape.head_dim // 2, dtype=torch.bfloat16, device="meta")
    return tokens, torch.empty_like(tokens), rotation


def decoder(shape: Shape, layers: int, *groups: Any) -> Decoder:
    """A decoder on the meta device."""
    with torch.device("meta"):
        return Decoder(shape, layers, *groups)


def world_mesh(*sizes: int, names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def fsdp(shape: Shape) -> Callable[[int], Built]:
    """Fully sharded over the whole world."""

    def build(layers: int) -> Built:
        mesh = world_mesh(dist.get_world_size(), names=("dp",))
        return simple_fsdp(decoder(shape, layers), mesh, mp_policy=BF16), text(shape)

    return build


def hybrid(layers: int) -> Built:
    """Sharded within a host of 8, replicated over hosts."""
    mesh = world_mesh(dist.get_world_size() // 8, 8, names=("replicate", "shard"))
    return simple_fsdp(decoder(LLAMA_8B, layers), mesh, mode="hybrid_shard", mp_policy=BF16), text(LLAMA_8B)


def tensor_parallel(layers: int, shape: Shape = LLAMA_8B) -> Built:
    """FSDP over hosts, tensor and sequence parallelism within a host."""
    mesh = world_mesh(dist.get_world_size() // 8, 8, names=("dp", "tp"))
    model, tp = decoder(shape, layers), mesh["tp"]
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    rows = RowwiseParallel(output_layouts=Shard(1))
    block = {
        "attention_norm": SequenceParallel(),
        "ffn_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attention.wo": rows,
        "feed_forward.w2": rows,
        **{f"attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")},
        **{f"feed_forward.{w}": ColwiseParallel() for w in ("w1", "w3")},
    }
    for layer in model.layers:
        parallelize_module(layer, tp, block)
    return simple_fsdp(model, mesh["dp"], mp_policy=BF16), text(shape)


MOE = replace(LLAMA_8B, dim=2048, heads=16, kv_heads=4, sequence=8192, experts=64, expert_hidden=1408)


def experts(layers: int) -> Built:
    """Experts spread over 8 ranks and sharded over the others; everything else sharded over the world."""
    world = dist.get_world_size()
    mesh = world_mesh(world // 8, 8, names=("dp", "ep"))
    model = decoder(MOE, layers, None, mesh.get_group("ep"))
    for layer in model.layers:
        simple_fsdp(layer.feed_forward.experts, mesh["dp"], mp_policy=BF16, shard_dim=1)
    return simple_fsdp(model, world_mesh(world, names=("world",)), mp_policy=BF16), text(MOE)


def context_parallel(layers: int) -> Built:
    """64k tokens over 8 ranks, heads exchanged for sequence around attention; sharded over the world."""
    mesh = world_mesh(dist.get_world_size() // 8, 8, names=("dp", "cp"))
    model = decoder(LLAMA_8B, layers, mesh.get_group("cp"))
    flat = world_mesh(dist.get_world_size(), names=("world",))
    return simple_fsdp(model, flat, mp_policy=BF16), text(LLAMA_8B, here=8192)


def vision(layers: int) -> Built:
    """A vision transformer of 1.8 billion parameters, fully sharded."""
    with torch.device("meta"):
        model = VisionTransformer(layers)
        inputs = torch.empty(32, 256, 588, dtype=torch.bfloat16), torch.empty(32, dtype=torch.int64)
    return simple_fsdp(model, world_mesh(dist.get_world_size(), names=("dp",)), mp_policy=BF16), inputs


def mixed_dtypes(layers: int) -> Built:
    """Every other block computes and travels in fp32."""
    shape = replace(LLAMA_8B, dim=2048, heads=16, hiddens=(8192,))
    mesh = world_mesh(dist.get_world_size(), names=("dp",))
    model = decoder(shape, layers)
    for layer in list(model.layers)[::2]:
        policy = replace(FP32, output_dtype=torch.bfloat16)
        simple_fsdp(layer, mesh, mp_policy=policy)
    return simple_fsdp(model, mesh, mp_policy=BF16), text(shape)


@dataclass(frozen=True)
class Scenario:
    """What to capture: ``build(layers)`` in a world of ``world`` ranks; ``full_layers`` is the real model's depth."""

    world: int
    layers: int
    full_layers: int
    build: Callable[[int], Built]
    groups: int = 1


SCENARIOS: dict[str, Scenario] = {
    "llama8b_fsdp64": Scenario(64, 32, 32, fsdp(LLAMA_8B)),
    "llama70b_fsdp512": Scenario(512, 32, 80, fsdp(LLAMA_70B)),
    "hybrid": Scenario(64, 16, 32, hybrid, groups=2),
    "fsdp_tp_sp": Scenario(64, 8, 32, tensor_parallel, groups=2),
    "moe_ep": Scenario(64, 12, 24, experts, groups=3),
    "context_parallel": Scenario(64, 16, 32, context_parallel, groups=2),
    "vision": Scenario(64, 24, 48, vision),
    "heterogeneous": Scenario(64, 16, 16, fsdp(replace(LLAMA_8B, hiddens=(4096, 14336, 8192, 22016)))),
    "mixed_dtypes": Scenario(64, 16, 16, mixed_dtypes),
    # Layers so narrow that each message is mostly latency.
    "latency_bound": Scenario(64, 16, 16, fsdp(Shape(512, 8, 8, (1408,), 8192, 2048))),
}
