"""A stack of linear layers with biases, whose width need not be divisible by anything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from inductor_passes.models.layers import seeded


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
    with seeded(config.seed):
        parts: list[nn.Module] = []
        for i in range(config.layers):
            parts += [nn.Linear(sizes[i], sizes[i + 1]), nn.GELU()]
        return nn.Sequential(*parts[:-1]).to(config.dtype)


def mlp_batch(config: MLPConfig, seed: int = 1, batch: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each (batch, width)."""
    shape = (batch or config.batch, config.width)
    with seeded(seed):
        return torch.randn(shape, dtype=config.dtype), torch.randn(shape, dtype=config.dtype)
