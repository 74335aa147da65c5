"""A mixture of experts whose tokens travel to their experts and back by all_to_all.

Dense dispatch with a fixed capacity per expert, as in Switch Transformers (Fedus et al. 2021): all shapes are static.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from inductor_passes import _torch
from inductor_passes.models.layers import RMSNorm, seeded


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
    std: float = 0.3


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
            sent = _torch.all_to_all_autograd(sent, self.group)
        local = self.experts // self.world
        work = sent.view(self.world, local, self.capacity, -1).transpose(0, 1).reshape(local, -1, x.shape[-1])
        done = torch.bmm(F.silu(torch.bmm(work, self.w1)), self.w2)
        back = done.view(local, self.world, self.capacity, -1).transpose(0, 1).reshape(sent.shape).contiguous()
        if self.group is not None:
            back = _torch.all_to_all_autograd(back, self.group)
        return x + torch.einsum("tec,ecd->td", route, back) * score[:, None]


def moe(config: MoEConfig, group: dist.ProcessGroup | None = None) -> MoE:
    """The block with reproducible weights; rank r of ``group`` gets its slice of the whole model's experts."""
    with seeded(config.seed):
        whole = MoE(config)
        for parameter in whole.parameters():
            nn.init.normal_(parameter, std=config.std)
    if group is None:
        return whole.to(config.dtype)
    with seeded(config.seed), torch.no_grad():
        part = MoE(config, group)
        part.norm.weight.copy_(whole.norm.weight)
        part.gate.weight.copy_(whole.gate.weight)
        part.w1.copy_(whole.w1.chunk(group.size())[group.rank()])
        part.w2.copy_(whole.w2.chunk(group.size())[group.rank()])
    return part.to(config.dtype)


def moe_batch(config: MoEConfig, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each (tokens, dim)."""
    with seeded(seed):
        shape = (config.tokens, config.dim)
        return torch.randn(shape, dtype=config.dtype), torch.randn(shape, dtype=config.dtype)
