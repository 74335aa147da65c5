"""Small real models for tests, their parallel plans, and the graphs that torch.compile makes of them.

Everything is deterministic (seeded), runs in milliseconds on a CPU and takes a config object. A Llama-shaped
transformer covers data, tensor, sequence and context parallelism; a mixture-of-experts block covers expert
parallelism. ``capture_graphs`` gives the forward and backward graphs as a compiler backend receives them, also under
a fake process group (``fake_world``), which needs no processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

# -- the transformer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-shaped model. ``tied`` shares the embedding with the output layer."""

    vocab: int = 64
    dim: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 48
    batch: int = 2
    seq: int = 16
    tied: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rope_table(head_dim: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each (length, head_dim / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (batch, seq, heads, head_dim)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[None, :, None, :].to(x.dtype), sin[None, :, None, :].to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def exchange_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(batch, seq / W, heads, d) -> (batch, seq, heads / W, d): Ulysses' all_to_all before attention."""
    b, s, h, d = x.shape
    world = group.size()
    x = x.view(b, s, world, h // world, d).permute(2, 0, 1, 3, 4).contiguous()
    x = funcol.all_to_all_single_autograd(x, None, None, group)
    return x.permute(1, 0, 2, 3, 4).reshape(b, world * s, h // world, d)


def exchange_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(batch, seq, heads / W, d) -> (batch, seq / W, heads, d): the inverse of :func:`exchange_heads`."""
    b, s, h, d = x.shape
    world = group.size()
    x = x.view(b, world, s // world, h, d).permute(1, 0, 2, 3, 4).contiguous()
    x = funcol.all_to_all_single_autograd(x, None, None, group)
    return x.permute(1, 2, 0, 3, 4).reshape(b, s // world, world * h, d)


class Attention(nn.Module):
    """Grouped-query attention; with ``sequence_group`` each rank holds a slice of the sequence."""

    def __init__(self, config: LlamaConfig, sequence_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.repeat = config.heads // config.kv_heads
        self.sequence_group = sequence_group
        self.wq = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        # The number of heads is left open: tensor parallelism gives each rank some of them.
        q = rotate(self.wq(x).view(b, s, -1, self.head_dim), cos, sin)
        k = rotate(self.wk(x).view(b, s, -1, self.head_dim), cos, sin)
        v = self.wv(x).view(b, s, -1, self.head_dim)
        if self.sequence_group is not None:
            q, k, v = (exchange_heads(t, self.sequence_group) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.repeat, dim=2) for t in (k, v))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
        if self.sequence_group is not None:
            y = exchange_sequence(y, self.sequence_group)
        return self.wo(y.reshape(b, s, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: LlamaConfig, sequence_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config, sequence_group)
        self.ffn_norm = RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids (batch, seq) -> logits (batch, seq, vocab).

    With ``sequence_group`` (context parallelism) ``seq`` is this rank's slice of the sequence.
    """

    def __init__(self, config: LlamaConfig, sequence_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.first = 0 if sequence_group is None else sequence_group.rank() * config.seq // sequence_group.size()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config, sequence_group) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.output.weight = self.embed.weight
        cos, sin = rope_table(config.head_dim, config.seq, config.dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        here = slice(self.first, self.first + tokens.shape[1])
        cos, sin = self.cos[here], self.sin[here]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


def llama(config: LlamaConfig, sequence_group: dist.ProcessGroup | None = None) -> Llama:
    """The model with reproducible weights, the same on every rank."""
    with _seeded(config.seed):
        model = Llama(config, sequence_group).to(config.dtype)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.2)
    return model


def llama_batch(config: LlamaConfig, seed: int = 1, batch: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, each (batch, seq)."""
    shape = (batch or config.batch, config.seq)
    with _seeded(seed):
        return torch.randint(config.vocab, shape), torch.randint(config.vocab, shape)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over tokens, a scalar."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


# -- other models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MLPConfig:
    """``layers`` linear layers with biases; ``width`` need not be divisible by anything."""

    width: int = 16
    hidden: int = 24
    layers: int = 2
    batch: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0


def mlp(config: MLPConfig) -> nn.Sequential:
    """Linear, GELU, linear, ..., from ``width`` over ``hidden`` back to ``width``."""
    sizes = [config.width] + [config.hidden] * (config.layers - 1) + [config.width]
    with _seeded(config.seed):
        parts: list[nn.Module] = []
        for i in range(config.layers):
            parts += [nn.Linear(sizes[i], sizes[i + 1]), nn.GELU()]
        return nn.Sequential(*parts[:-1]).to(config.dtype)


def mlp_batch(config: MLPConfig, seed: int = 1, batch: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each (batch, width)."""
    shape = (batch or config.batch, config.width)
    with _seeded(seed):
        return torch.randn(shape, dtype=config.dtype), torch.randn(shape, dtype=config.dtype)


@dataclass(frozen=True)
class MoEConfig:
    """``experts`` in all; each rank sends at most ``capacity`` of its ``tokens`` to each expert."""

    dim: int = 16
    hidden: int = 24
    experts: int = 4
    capacity: int = 8
    tokens: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0


class MoE(nn.Module):
    """Switch-style mixture of experts, pre-norm and residual: (tokens, dim) -> (tokens, dim).

    Tokens over an expert's capacity pass unchanged.

    With ``group`` each rank owns ``experts / W`` of them; tokens travel there and back by all_to_all. All shapes are
    static. Norm and gate are replicated: their gradients must be reduced like data-parallel ones.
    """

    def __init__(self, config: MoEConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group, self.experts, self.capacity = group, config.experts, config.capacity
        self.world = 1 if group is None else group.size()
        self.norm = RMSNorm(config.dim)
        self.gate = nn.Linear(config.dim, config.experts, bias=False)
        local = config.experts // self.world
        self.w1 = nn.Parameter(torch.empty(local, config.dim, config.hidden))
        self.w2 = nn.Parameter(torch.empty(local, config.hidden, config.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        scores = self.gate(h).softmax(-1)
        score, expert = scores.max(-1)
        one_hot = F.one_hot(expert, self.experts)
        slot = (one_hot.cumsum(0) * one_hot).sum(-1) - 1
        # (tokens, experts, capacity); slots beyond the capacity match no column.
        columns = (slot[:, None] == torch.arange(self.capacity, device=x.device)[None, :]).to(x.dtype)
        route = one_hot.to(x.dtype)[:, :, None] * columns[:, None, :]
        sent = torch.einsum("tec,td->ecd", route, h)
        if self.group is not None:
            sent = funcol.all_to_all_single_autograd(sent, None, None, self.group)
        local = self.experts // self.world
        work = sent.view(self.world, local, self.capacity, -1).transpose(0, 1).reshape(local, -1, x.shape[-1])
        done = torch.bmm(F.silu(torch.bmm(work, self.w1)), self.w2)
        back = done.view(local, self.world, self.capacity, -1).transpose(0, 1).reshape(sent.shape).contiguous()
        if self.group is not None:
            back = funcol.all_to_all_single_autograd(back, None, None, self.group)
        return x + torch.einsum("tec,ecd->td", route, back) * score[:, None]


def moe(config: MoEConfig, group: dist.ProcessGroup | None = None) -> MoE:
    """The block with reproducible weights; rank r of ``group`` gets its slice of the whole model's experts."""
    with _seeded(config.seed):
        whole = MoE(config)
        for parameter in whole.parameters():
            nn.init.normal_(parameter, std=0.3)
    if group is None:
        return whole.to(config.dtype)
    part = MoE(config, group)
    with torch.no_grad():
        part.norm.weight.copy_(whole.norm.weight)
        part.gate.weight.copy_(whole.gate.weight)
        part.w1.copy_(whole.w1.chunk(group.size())[group.rank()])
        part.w2.copy_(whole.w2.chunk(group.size())[group.rank()])
    return part.to(config.dtype)


def moe_batch(config: MoEConfig, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each (tokens, dim)."""
    with _seeded(seed):
        shape = (config.tokens, config.dim)
        return torch.randn(shape, dtype=config.dtype), torch.randn(shape, dtype=config.dtype)


# -- plans ----------------------------------------------------------------------------------------------


def tensor_parallel(model: Llama, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> Llama:
    """Megatron's plan on a one-dimensional mesh, in place; the caller still sees whole tokens and whole logits."""
    if model.output.weight is model.embed.weight:
        raise ValueError("the plan would give the shared embedding two different copies; expected tied=False")
    if not sequence_parallel:
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Replicate()),
        }
        block: dict[str, Any] = {}
        row = RowwiseParallel()
    else:
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        block = {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        }
        row = RowwiseParallel(output_layouts=Shard(1))
    for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
        block[name] = ColwiseParallel()
    for name in ("attention.wo", "feed_forward.w2"):
        block[name] = row
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
    return model


# -- graphs ---------------------------------------------------------------------------------------------


@dataclass
class Graphs:
    """What a backend received: per compiled frame the joint graph before partitioning, forward and backward.

    ``inference`` holds graphs that were compiled without gradients.
    """

    joint: list[torch.fx.GraphModule] = field(default_factory=list)
    forward: list[torch.fx.GraphModule] = field(default_factory=list)
    backward: list[torch.fx.GraphModule] = field(default_factory=list)
    inference: list[torch.fx.GraphModule] = field(default_factory=list)


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of ``world_size`` ranks without processes; collectives return without moving data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def recording_backend(graphs: Graphs, *, decompose: bool = True) -> Callable[..., Any]:
    """A torch.compile backend that runs eagerly after AOTAutograd and writes the graphs it saw into ``graphs``.

    ``decompose`` applies Inductor's decompositions, so that graphs look as Inductor's passes see them.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def record(into: list[torch.fx.GraphModule]) -> Callable[..., Any]:
        def compiler(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            into.append(gm)
            return make_boxed_func(gm.forward)

        return compiler

    def partition(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        # The partitioner rewrites its input; a shallow copy of the graph keeps the nodes' meta as they are now.
        joint = torch.fx.Graph()
        output = joint.graph_copy(gm.graph, {})
        joint.output(output)
        graphs.joint.append(torch.fx.GraphModule(gm, joint))
        return min_cut_rematerialization_partition(gm, *args, **kwargs)

    return aot_autograd(
        fw_compiler=record(graphs.forward),
        bw_compiler=record(graphs.backward),
        inference_compiler=record(graphs.inference),
        partition_fn=partition,
        decompositions=select_decomp_table() if decompose else None,
    )


def capture_graphs(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    decompose: bool = True,
    dynamic: bool | None = None,
) -> Graphs:
    """The graphs of one step of ``model`` (fullgraph), forward and backward from ``loss(output)``.

    ``loss`` defaults to the sum of the output. The step really runs, under whatever process group there is.
    """
    graphs = Graphs()
    compiled = torch.compile(
        model, backend=recording_backend(graphs, decompose=decompose), fullgraph=True, dynamic=dynamic
    )
    output = compiled(*inputs)
    value = output.sum() if loss is None else loss(output)
    if value.requires_grad:
        value.backward()
    return graphs


def capture_fake(
    build: Callable[[], tuple[Callable[..., Any], Sequence[Any]]],
    world_size: int,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **options: Any,
) -> Graphs:
    """:func:`capture_graphs` in a fake world: ``build()`` runs inside and returns (model, inputs)."""
    with fake_world(world_size):
        model, inputs = build()
        return capture_graphs(model, inputs, loss, **options)


def collectives(gm: torch.fx.GraphModule) -> list[str]:
    """Short names of a graph's collectives in graph order, waits left out."""
    return [
        node.target._opname
        for node in gm.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "_c10d_functional"
        and not node.target._opname.startswith("wait_tensor")
    ]


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
