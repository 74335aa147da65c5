"""Adopted DDP where tensors are written to: parameters in forward, buffers that autograd has saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from inductor_passes import adopt
from tests.support import wrapped
from tests.support.ranks import Ranks
from tests.support.wrapped import OUT, WIDTH, Net, batch, compare, whole

pytestmark = pytest.mark.ranks


def _rows(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() * 5).long() % 20


class Embedded(Net):
    """``max_norm`` scales rows of the weight where they are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.embedding(_rows(x)).sum(1))


class Bagged(Net):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.bag(_rows(x)))


class Decaying(Net):
    """Writes to what it has read, and to what it reads again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.into.weight
        with torch.no_grad():
            weight.mul_(0.9)
            self.out.weight.clamp_(-0.2, 0.2)
        return super().forward(nn.functional.linear(x, weight))


class Normal(Net):
    """A parametrization keeps vectors in buffers and writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.utils.parametrizations.spectral_norm(self.into)


@pytest.mark.parametrize("make", [Embedded, Bagged, Decaying, Normal], ids=lambda value: value.__name__)
@pytest.mark.parametrize("parts", [1, 2])
def test_writes_in_forward_reach_the_parameter(two_ranks: Ranks, make: type[nn.Module], parts: int) -> None:
    # Decaying reads a weight twice, so its two gradients are reduced one by one.
    rounding = 1e-6 if make is Decaying and parts == 1 else 0.0
    found = two_ranks.run(compare, wrapped.ddp, make, None, parts)
    assert all(max(one) <= rounding for one in found), found


@pytest.mark.parametrize("make", [Embedded, Decaying], ids=lambda value: value.__name__)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor_passes"])
def test_writes_in_compiled_code_reach_the_parameter(two_ranks: Ranks, make: type[nn.Module], backend: str) -> None:
    found = two_ranks.run(compare, wrapped.ddp, make, backend)
    assert all(max(one) <= 1e-6 for one in found), found


class Masked(Net):
    """Backward needs the mask, which is a buffer, and what the statistics were."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.arange(float(WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.statistics(x) * self.mask
        if self.breaks:
            torch._dynamo.graph_break()
        return super().forward(x) * self.mask.sum() + x.sum() * self.mask[:OUT]


def several_forwards(rank: int, world_size: int, compiled: str, breaks: bool) -> None:
    """Buffers are sent before each forward pass, also while an earlier one waits for its backward pass."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = Masked(breaks)
    # Other ranks' buffers are replaced.
    plain.mask += rank
    models: list[Any] = [wrapped.ddp(copy.deepcopy(plain)) for _ in range(2)]
    adopt(models[1])
    called = [models[0], torch.compile(models[1], backend=compiled) if compiled else models[1]]
    for step in range(2):
        for model, call in zip(models, called):
            model.zero_grad()
            first = call(batch(step, 0)[0])
            with torch.no_grad():
                call(batch(step, 1)[0])
            second = call(batch(step, 2)[0])
            (first.square().sum() + second.abs().sum()).backward()
        for one, other in zip(models[0].parameters(), models[1].parameters()):
            # Two reads are reduced one by one, and Inductor rounds differently from eager.
            assert (one.grad - other.grad).abs().max() <= 1e-3 * one.grad.abs().max() + 1e-3
        mask = models[1].module.mask
        assert mask.tolist() == models[0].module.mask.tolist() == list(range(WIDTH))


@pytest.mark.parametrize(
    ("compiled", "breaks"), [("", False), ("aot_eager", False), ("inductor", True), ("inductor_passes", True)]
)
def test_several_forwards_before_backward(two_ranks: Ranks, compiled: str, breaks: bool) -> None:
    two_ranks.run(several_forwards, compiled, breaks)


class Counting(Net):
    """A buffer that also an evaluation changes, on each rank by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum()
        return super().forward(x)


def after_evaluation(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether ranks have equal buffers after training, evaluating, training: in DDP, and adopted."""
    found = []
    for adopts in (False, True):
        torch.manual_seed(0)
        model = wrapped.ddp(Counting())
        if adopts:
            adopt(model)
        x, _ = batch(0, 0)
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
        model(torch.ones_like(x)).sum().backward()
        seen = [torch.zeros(()) for _ in range(world_size)]
        dist.all_gather(seen, whole(model.module.seen))  # type: ignore[union-attr, arg-type]
        found.append(len({one.item() for one in seen}) == 1)
    return found[0], found[1]


def test_buffers_after_an_evaluation_come_from_the_first_rank(two_ranks: Ranks) -> None:
    """DDP leaves them to the ranks: documented as a difference."""
    assert two_ranks.run(after_evaluation) == [(False, True)] * 2
