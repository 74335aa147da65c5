"""A Llama-shaped transformer, sized by a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from inductor_passes import _torch
from inductor_passes.models.experts import MoE, MoEConfig, moe
from inductor_passes.models.layers import RMSNorm, seeded


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-shaped model and of one rank's batch.

    ``tied`` shares the embedding with the output layer. ``experts`` (0: none) replaces each feed-forward by that many,
    of which each takes at most ``capacity`` tokens from a rank. ``std`` is that of the initial matrices.
    """

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
    std: float = 0.2
    experts: int = 0
    capacity: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


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
    x = _torch.all_to_all_autograd(x, group)
    return x.permute(1, 0, 2, 3, 4).reshape(b, world * s, h // world, d)


def exchange_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(batch, seq, heads / W, d) -> (batch, seq / W, heads, d): the inverse of :func:`exchange_heads`."""
    b, s, h, d = x.shape
    world = group.size()
    x = x.view(b, world, s // world, h, d).permute(1, 0, 2, 3, 4).contiguous()
    x = _torch.all_to_all_autograd(x, group)
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
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.sequence_group is not None:
            y = exchange_sequence(y, self.sequence_group)
        out: torch.Tensor = self.wo(y.reshape(b, s, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward (or experts) with residuals."""

    def __init__(
        self,
        config: LlamaConfig,
        sequence_group: dist.ProcessGroup | None = None,
        expert_group: dist.ProcessGroup | None = None,
        number: int = 0,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config, sequence_group)
        self.experts: MoE | None = None
        if config.experts:
            self.experts = moe(_experts_of(config, number), expert_group)
        else:
            self.ffn_norm = RMSNorm(config.dim)
            self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        if self.experts is not None:
            mixed: torch.Tensor = self.experts(x.flatten(0, 1)).view_as(x)
            return mixed
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


def _experts_of(config: LlamaConfig, layer: int) -> MoEConfig:
    tokens = config.batch * config.seq
    seed = config.seed + layer
    return MoEConfig(
        config.dim, config.hidden, config.experts, config.capacity, tokens, config.dtype, seed, config.std
    )


class Llama(nn.Module):
    """Token ids (batch, seq) -> logits (batch, seq, vocab).

    With ``sequence_group`` (context parallelism) ``seq`` is this rank's slice of the sequence; with ``expert_group``
    each rank holds some of the experts.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        config: LlamaConfig,
        sequence_group: dist.ProcessGroup | None = None,
        expert_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.first = 0 if sequence_group is None else sequence_group.rank() * config.seq // sequence_group.size()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config, sequence_group, expert_group, i) for i in range(config.layers))
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
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


class LanguageModel(Llama):
    """(tokens, targets), each (batch, seq) -> mean cross-entropy: a whole forward in one compiled graph."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cross_entropy(super().forward(tokens), targets)


#: Either of the two.
LlamaT = TypeVar("LlamaT", bound=Llama)


def llama(
    config: LlamaConfig,
    sequence_group: dist.ProcessGroup | None = None,
    expert_group: dist.ProcessGroup | None = None,
) -> Llama:
    """The model with reproducible weights, the same on every rank but for a rank's share of the experts."""
    return _initialised(Llama, config, sequence_group, expert_group)


def language_model(
    config: LlamaConfig,
    sequence_group: dist.ProcessGroup | None = None,
    expert_group: dist.ProcessGroup | None = None,
) -> LanguageModel:
    """As :func:`llama`, with the loss behind it."""
    return _initialised(LanguageModel, config, sequence_group, expert_group)


def _initialised(kind: type[LlamaT], config: LlamaConfig, *groups: dist.ProcessGroup | None) -> LlamaT:
    with seeded(config.seed):
        model = kind(config, *groups).to(config.dtype)
        # Experts have their weights: a rank's share of what one process would have.
        theirs = {id(p) for module in model.modules() if isinstance(module, MoE) for p in module.parameters()}
        for parameter in model.parameters():
            if parameter.ndim > 1 and id(parameter) not in theirs:
                nn.init.normal_(parameter, std=config.std)
    return model


def llama_batch(config: LlamaConfig, seed: int = 1, batch: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, each (batch, seq)."""
    shape = (batch or config.batch, config.seq)
    with seeded(seed):
        return torch.randint(config.vocab, shape), torch.randint(config.vocab, shape)


def language_batch(config: LlamaConfig, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, each (batch, seq), of a made-up language in which every other token follows from the last."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(config.vocab, (config.batch, config.seq + 1), generator=generator)
    for position in range(1, config.seq + 1, 2):
        text[:, position] = (text[:, position - 1] * 3 + 7) % config.vocab
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over tokens, a scalar."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
