"""Random programs whose forward and backward read and write buffers train as in eager execution.

The search behind ``test_entry_values``: where torch's own ``aot_eager`` is right, ours has to be.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 6, 4
_STEPS = 3
#: Writes to a buffer, of a row of values.
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "average": lambda b, v: b.mul_(0.5).add_(v, alpha=0.1),
    "count": lambda b, v: b.add_(1),
    "slice": lambda b, v: b[2:].add_(v[2:]),
    "view": lambda b, v: b.view(2, -1)[1].mul_(0.7),
    "copy": lambda b, v: b.copy_(v),
    "fill": lambda b, v: b.fill_(0.25),
    "where": lambda b, v: b.copy_(torch.where(b > 0.5, b * 0.5, b + 0.1)),
}


class Writing(torch.autograd.Function):
    """Forward and backward may write to a buffer; backward may read it, and what it was before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor, how: tuple[str, str, bool]) -> torch.Tensor:
        ctx.buffer, ctx.how = buffer, how
        ctx.save_for_backward(x, buffer.clone())
        if how[0]:
            WRITES[how[0]](buffer, x.detach().mean(0))
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, old = ctx.saved_tensors
        _, written, reads = ctx.how
        result = grad * torch.cos(x) * (1 + old if reads else 1.0)
        if written:
            WRITES[written](ctx.buffer, grad.abs().mean(0))
        return result, None, None


@dataclass(frozen=True)
class Line:
    """``what`` is done with buffer number ``buffer``; ``how`` it is written to."""

    what: str
    buffer: int
    how: tuple[str, str, bool] = ("", "", False)


def drawn(seed: int) -> list[Line]:
    rng = random.Random(seed)
    writes = ["", *WRITES]
    lines = []
    for _ in range(rng.randint(2, 6)):
        what = rng.choice(("read", "read", "keep", "write", "write", "function", "function", "checkpoint"))
        how = rng.choice(writes if what == "function" else writes[1:]), rng.choice(writes), rng.random() < 0.5
        lines.append(Line(what, rng.randrange(2), how))
    return lines


def step_of(lines: list[Line]) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, *buffers: torch.Tensor) -> torch.Tensor:
        y, kept = x.sin(), torch.zeros(WIDTH)
        for line in lines:
            buffer = buffers[line.buffer]
            if line.what == "read":
                y = torch.tanh(y) * (buffer + 1)
            elif line.what == "keep":
                kept = kept + torch.exp(-buffer)
            elif line.what == "checkpoint":
                y = checkpoint(lambda v, b: torch.sigmoid(v) * (b * b + 1), y, buffer.clone(), use_reentrant=False)
            elif line.what == "function":
                y = Writing.apply(y, buffer, line.how)
            else:
                with torch.no_grad():
                    WRITES[line.how[0]](buffer, y.detach().mean(0))
        return (y * (kept + 1)).cos()

    return step


def trained(call: Callable[..., torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.rand(WIDTH, generator=generator) for _ in range(2)]
    found = []
    for _ in range(_STEPS):
        x = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)
        y = call(x, *buffers)
        found += [y.detach(), *(b.clone() for b in buffers)]
        y.sum().backward()
        assert x.grad is not None
        found += [x.grad, *(b.clone() for b in buffers)]
    return found


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def judge(seed: int) -> str:
    """What is wrong; "" where nothing is, or torch itself is, or eager execution refuses the program."""
    step = step_of(drawn(seed))
    try:
        expected = trained(step, seed)
    except RuntimeError:
        return ""
    ours = {"inductor_passes.codegen": "aot_eager", "inductor_passes.verify": "strict"}
    torch._dynamo.reset()
    try:
        found = difference(trained(torch.compile(step, backend="inductor_passes", options=ours), seed), expected)
        wrong = "" if found < 1e-4 else f"off by {found}"
    except Exception as error:
        wrong = repr(error)
    if wrong:
        torch._dynamo.reset()
        try:
            if difference(trained(torch.compile(step, backend="aot_eager"), seed), expected) >= 1e-4:
                return ""
        except Exception:
            return ""
    return wrong


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1 << 20))
def test_training_is_that_of_eager_execution(seed: int) -> None:
    assert judge(seed) == "", drawn(seed)
