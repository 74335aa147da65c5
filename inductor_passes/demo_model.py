"""A compact Llama-shaped language model for the demo and for benchmarks: small enough to train on two CPU cores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Llama", "Sizes", "make_batch", "make_model"]


@dataclass(frozen=True)
class Sizes:
    """Shape of the model and of one rank's batch."""

    layers: int = 4
    dim: int = 256
    heads: int = 4
    hidden: int = 704
    vocab: int = 1024
    batch: int = 8
    sequence: int = 256


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(sizes.dim, sizes.dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, sequence, dim = x.shape
        query, key, value = (
            project(x).view(batch, sequence, self.heads, dim // self.heads).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        mixed = functional.scaled_dot_product_attention(
            _rotate(query, rotation), _rotate(key, rotation), value, is_causal=True
        )
        out: torch.Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, sequence, dim))
        return out


class Block(nn.Module):
    """Attention and a gated feed-forward, each with a norm before it and a residual around it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(sizes.dim), RMSNorm(sizes.dim)
        self.attention = Attention(sizes)
        self.gate = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.dim, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        y = self.norm2(x)
        out: torch.Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Token ids (batch, sequence) -> mean cross-entropy against ``targets`` of the same shape."""

    rotation: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.dim)
        self.output = nn.Linear(sizes.dim, sizes.vocab, bias=False)
        self.register_buffer("rotation", _angles(sizes.sequence, sizes.dim // sizes.heads), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        logits = self.output(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _angles(sequence: int, head_dim: int) -> torch.Tensor:
    """Cosines and sines of the rotary positions, (2, sequence, head_dim / 2)."""
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(sequence)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()])


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    cos, sin = rotation.unbind(0)
    even, odd = x.chunk(2, dim=-1)
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


def make_model(sizes: Sizes, seed: int = 0) -> Llama:
    """The model with weights that depend on ``seed`` only."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Llama(sizes)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def make_batch(sizes: Sizes, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, each (batch, sequence), of a made-up language in which the next token is learnable."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(sizes.vocab, (sizes.batch, sizes.sequence + 1), generator=generator)
    for position in range(1, sizes.sequence + 1, 2):
        text[:, position] = (text[:, position - 1] * 3 + 7) % sizes.vocab
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
