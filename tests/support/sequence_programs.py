"""Tensor-parallel transformers as plain functions, forward and backward in one graph: what R16 is tried on.

Parameters are flagged: what every rank holds alike, and what is a rank's own. Collectives are Megatron's: one
all_reduce behind each row-parallel product, one of the gradient in front of each column-parallel one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.fx
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

GROUP = "0"


class Reduced(torch.autograd.Function):
    """Sum over ranks forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x, "sum", GROUP)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class Copied(torch.autograd.Function):
    """Nothing forward, sum over ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(grads[0].contiguous(), "sum", GROUP)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As Llama writes it: in float32, or wider, and cast before the weight."""
    wide = x if x.dtype is torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


@dataclass(frozen=True)
class Sizes:
    """One rank's part: ``hidden`` columns of each feed-forward, ``heads`` heads of ``head`` columns."""

    batch: int = 2
    seq: int = 8
    dim: int = 16
    heads: int = 2
    head: int = 4
    hidden: int = 12
    vocab: int = 24
    layers: int = 2
    ranks: int = 4
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Transformer:
    """A function of its parameters.

    Attributes:
        norm: ``rms`` (Llama: no biases) or ``layer`` (GPT: biases, and positions are added to the embedding).
        mixed: a token-mixing operator between all_reduce and norm.
    """

    sizes: Sizes = field(default_factory=Sizes)
    norm: str = "rms"
    mixed: bool = False

    def parameters(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Name -> (shape, whether all ranks hold the same)."""
        z = self.sizes
        found: dict[str, tuple[tuple[int, ...], bool]] = {"embed": ((z.vocab, z.dim), True)}
        if self.norm == "layer":
            found["positions"] = ((z.seq, z.dim), True)
        for k in range(z.layers):
            wide = z.heads * z.head
            found |= {f"{k}.qkv": ((3 * wide, z.dim), False), f"{k}.out": ((z.dim, wide), False)}
            found |= {f"{k}.up": ((z.hidden, z.dim), False), f"{k}.down": ((z.dim, z.hidden), False)}
            for name in (f"{k}.norm1", f"{k}.norm2"):
                found[name] = ((z.dim,), True)
                if self.norm == "layer":
                    found[f"{name}.bias"] = ((z.dim,), True)
            if self.norm == "layer":
                found |= {f"{k}.out.bias": ((z.dim,), True), f"{k}.down.bias": ((z.dim,), True)}
        found["norm"] = ((z.dim,), True)
        if self.norm == "layer":
            found["norm.bias"] = ((z.dim,), True)
        found["head"] = ((z.vocab, z.dim), False)
        return found

    def inputs(self, rank: int) -> list[torch.Tensor]:
        """Tokens and parameters of a rank."""
        z = self.sizes
        shared, own = (torch.Generator().manual_seed(seed) for seed in (1, 100 + rank))
        values = [torch.randint(0, z.vocab, (z.batch, z.seq), generator=shared)]
        for shape, alike in self.parameters().values():
            values.append(torch.randn(shape, generator=shared if alike else own, dtype=z.dtype) / 2)
        return values

    def forward(self, tokens: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """The rank's columns of the logits."""
        p = dict(zip(self.parameters(), values, strict=True))
        h = F.embedding(tokens, p["embed"])
        if self.norm == "layer":
            h = h + p["positions"]
        for k in range(self.sizes.layers):
            n = Copied.apply(self._norm(p, f"{k}.norm1", h))
            h = h + self._out(p, f"{k}.out", self._attention(p[f"{k}.qkv"], n))
            n = Copied.apply(self._norm(p, f"{k}.norm2", h))
            h = h + self._out(p, f"{k}.down", F.silu(n @ p[f"{k}.up"].t()))
        return Copied.apply(self._norm(p, "norm", h)) @ p["head"].t()

    def train(self, tokens: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        """Loss and the gradient of every parameter."""
        leaves = [v.detach().requires_grad_() for v in values]
        loss = self.forward(tokens, *leaves).square().mean()
        return [loss, *torch.autograd.grad(loss, leaves)]

    def _norm(self, p: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
        if self.mixed:
            x = x.cumsum(1)
        if self.norm == "rms":
            return rms_norm(x, p[name])
        return F.layer_norm(x, (x.shape[-1],), p[name], p[f"{name}.bias"])

    def _out(self, p: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
        y = Reduced.apply(x @ p[name].t())
        return y + p[f"{name}.bias"] if self.norm == "layer" else y

    def _attention(self, qkv: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        z = self.sizes
        q, k, v = (t.view(*x.shape[:2], z.heads, z.head).transpose(1, 2) for t in (x @ qkv.t()).chunk(3, -1))
        y = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        return y.transpose(1, 2).reshape(*x.shape[:2], -1)

    def traced(self, mode: str, rank: int = 0) -> torch.fx.GraphModule:
        """The functional graph of ``forward`` or ``train``, decomposed as Inductor does."""
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.fx_passes.post_grad import view_to_reshape

        function: Callable[..., Any] = getattr(self, mode)
        gm = make_fx(function, tracing_mode="fake", decomposition_table=select_decomp_table())(*self.inputs(rank))
        out = gm.graph.output_node()
        if isinstance(out.args[0], torch.fx.Node):
            out.args = ((out.args[0],),)
        view_to_reshape(gm)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return gm
