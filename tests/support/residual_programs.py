"""Random functions of a residual stream, between tensor-parallel blocks: what sequence parallelism and async TP meet in
models that are no plain transformers. Everything that is done to the stream is done by every rank alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from tests.support.sequence_programs import GROUP, Copied, Reduced, Sizes, Transformer, rms_norm

Step = Callable[["Stream", torch.Tensor], torch.Tensor]


class Gathered(torch.autograd.Function):
    """All ranks' columns forward, the own ones of the gradient backward, which all ranks have alike."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.columns = x.shape[-1]
        return funcol.all_gather_tensor(x, x.ndim - 1, GROUP)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].split(ctx.columns, -1)[dist.get_rank()].contiguous()


class Stream:
    """What steps may use: the tokens, the parameters that all ranks hold alike, and a list of further results."""

    def __init__(self, tokens: torch.Tensor, shared: dict[str, torch.Tensor]) -> None:
        self.tokens, self.shared = tokens, shared
        self.results: list[torch.Tensor] = []
        self.skipped: torch.Tensor | None = None

    def kept(self, value: torch.Tensor) -> None:
        """One more result of the program."""
        self.results.append(value)


def _low_rank(s: Stream, h: torch.Tensor) -> torch.Tensor:
    return h + (h @ s.shared["a"]) @ s.shared["b"]


def _halves(s: Stream, h: torch.Tensor) -> torch.Tensor:
    left, right = h.chunk(2, -1)
    return torch.cat([right * 2, left - right], -1)


def _kept_rows(s: Stream, h: torch.Tensor) -> torch.Tensor:
    rows = h.unbind(0)
    s.kept(rows[-1])
    return torch.stack(rows)


def _kept_piece(s: Stream, h: torch.Tensor) -> torch.Tensor:
    first, rest = h.split([1, h.shape[0] - 1], 0)
    s.kept(first.square().mean())
    s.kept(rest)
    return h


def _kept_mean(s: Stream, h: torch.Tensor) -> torch.Tensor:
    s.kept(h.detach().mean((0, 1)))
    return h


def _written(s: Stream, h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[:, 0] = 0
    return h.mul_(2)


def _skip(s: Stream, h: torch.Tensor) -> torch.Tensor:
    """The first time it is kept for later, then added."""
    before, s.skipped = s.skipped, h
    return h if before is None else h + 0.5 * before


STEPS: dict[str, Step] = {
    "low rank": _low_rank,
    "low rank of a norm": lambda s, h: h + (rms_norm(h, s.shared["scale"]) @ s.shared["a"]) @ s.shared["b"],
    "mean of rows": lambda s, h: h - 0.3 * h.mean(0, keepdim=True),
    "mean of tokens": lambda s, h: h - 0.3 * h.mean(1, keepdim=True),
    "running sum": lambda s, h: h + 0.1 * h.cumsum(0),
    "flip": lambda s, h: h + 0.2 * h.flip(1),
    "roll": lambda s, h: h + h.roll(1, 0),
    "rows moved": lambda s, h: torch.cat([h[1:], h[:1] * 2], 0),
    "softmax of rows": lambda s, h: h * torch.softmax(h.sum(-1, keepdim=True), 0),
    "scaled": lambda s, h: h * s.shared["scale"],
    "shifted": lambda s, h: h + s.shared["shift"],
    "gate": lambda s, h: h * torch.tanh(h.mean(-1, keepdim=True)),
    "gate of tokens": lambda s, h: h + torch.sigmoid(h.mean(1, keepdim=True)) * h,
    "gate of rows": lambda s, h: h * torch.sigmoid(h.mean(0, keepdim=True)),
    "halves": _halves,
    "masked": lambda s, h: h.masked_fill((s.tokens % 3 == 0)[..., None], 0.5),
    "leaky": lambda s, h: torch.where(h > 0, h, 0.1 * h),
    "transposed": lambda s, h: F.silu(h.transpose(0, 1).contiguous()).transpose(0, 1),
    "divided": lambda s, h: h / 4,
    "stopped": lambda s, h: h + 0.5 * torch.sigmoid(h.detach()),
    "kept rows": _kept_rows,
    "kept piece": _kept_piece,
    "kept mean": _kept_mean,
    "written": _written,
    "skip": _skip,
    "normed": lambda s, h: rms_norm(h, s.shared["scale"]),
    "centred": lambda s, h: F.layer_norm(h, (h.shape[-1],), s.shared["scale"], s.shared["shift"][0]),
    "capped": lambda s, h: torch.tanh(h / 3) * 3,
    "largest": lambda s, h: h / (1 + h.abs().amax(-1, keepdim=True)),
    "heads": lambda s, h: F.normalize(h.unflatten(-1, (3, -1)), dim=-1).flatten(-2),
    "similar": lambda s, h: h + torch.softmax(h @ h.transpose(1, 2), -1) @ h,
}


@dataclass(frozen=True)
class Residual(Transformer):
    """Blocks, which may be called again, and a few random steps in front of and behind each.

    Attributes:
        style: where a block's norms are: in front (``pre``), behind (``post``), both (``sandwich``), or one for two
            branches (``parallel``); or what a block adds is gated by its mean over tokens (``gated``).
        gathered: whether all ranks get all classes and take the cross entropy.
    """

    seed: int = 0
    style: str = "pre"
    gathered: bool = False

    @cached_property
    def plan(self) -> tuple[str | int, ...]:
        """Names of steps and numbers of blocks, in order."""
        rng = random.Random(self.seed)
        names = sorted(STEPS)
        found: list[str | int] = []
        for _ in range(rng.choice((2, 3))):
            found += rng.sample(names, rng.choice((0, 1, 1, 2)))
            found.append(rng.randrange(self.sizes.layers))
        return (*found, *rng.sample(names, rng.choice((0, 1, 2))))

    def parameters(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """As in :class:`Transformer`, attention left out."""
        z = self.sizes
        found: dict[str, tuple[tuple[int, ...], bool]] = {"embed": ((z.vocab, z.dim), True)}
        for k in range(z.layers):
            found |= {f"{k}.norm": ((z.dim,), True)}
            found |= {f"{k}.up": ((z.hidden, z.dim), False), f"{k}.down": ((z.dim, z.hidden), False)}
        found |= {"a": ((z.dim, 4), True), "b": ((4, z.dim), True), "scale": ((z.dim,), True)}
        found |= {"shift": ((z.seq, z.dim), True), "norm": ((z.dim,), True)}
        return found | {"head": ((z.vocab, z.dim), False)}

    def results(self, tokens: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        """Logits, and what steps keep."""
        p = dict(zip(self.parameters(), values, strict=True))
        stream = Stream(tokens, p)
        h = F.embedding(tokens, p["embed"])
        for one in self.plan:
            if isinstance(one, str):
                h = STEPS[one](stream, h)
            else:
                h = self._block(p, one, h)
        logits = Copied.apply(rms_norm(h, p["norm"])) @ p["head"].t()
        if self.gathered:
            whole = Gathered.apply(logits).flatten(0, 1)
            logits = F.cross_entropy(whole, tokens.flatten(), reduction="none")
        return [logits, *stream.results]

    def _block(self, p: dict[str, torch.Tensor], k: int, h: torch.Tensor) -> torch.Tensor:
        weight = p[f"{k}.norm"]
        n = Copied.apply(h if self.style == "post" else rms_norm(h, weight))
        y = F.gelu(n @ p[f"{k}.up"].t()) @ p[f"{k}.down"].t()
        if self.style == "parallel":
            y = y + torch.sigmoid(n @ p[f"{1 - k}.up"].t()) @ p[f"{1 - k}.down"].t()
        y = Reduced.apply(y)
        if self.style == "gated":
            y = torch.sigmoid(y.mean(1, keepdim=True)) * y
        if self.style == "post":
            return rms_norm(h + y, weight)
        return h + (rms_norm(y, weight) if self.style == "sandwich" else y)

    def forward(self, tokens: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        """:meth:`results`."""
        return self.results(tokens, *values)

    def train(self, tokens: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        """Loss, what steps keep, and the gradient of every parameter that has one."""
        leaves = [v.detach().requires_grad_() for v in values]
        found = self.results(tokens, *leaves)
        loss = sum((one.square().mean() for one in found if one.requires_grad), torch.zeros((), dtype=found[0].dtype))
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [loss, *(f.detach() for f in found[1:]), *(g for g in grads if g is not None)]


def drawn(seed: int) -> Residual:
    """A program on 2 to 4 ranks."""
    rng = random.Random(1000 + seed)
    ranks = rng.choice((2, 2, 3, 4))
    style = rng.choice(("pre", "pre", "post", "sandwich", "parallel", "gated"))
    sizes = Sizes(batch=4 if ranks != 3 else 3, seq=6, dim=12, hidden=8, layers=2, vocab=8, ranks=ranks)
    return Residual(sizes, seed=seed, style=style, gathered=rng.random() < 0.4)
