"""Sharded parameters that ``torch.cond`` reads: before it they are gathered, in its body there is a clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from tests.support.compiled import dotted
from tests.support.world import fake_world


class Inside(nn.Module):
    """Both branches read the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: torch.tanh(self.layer(x)), lambda x: torch.sin(self.layer(x)), (x,))


class Before(Inside):
    """What they need was read before."""

    def forward(self, x: torch.Tensor) -> Any:
        weight, bias = self.layer.weight, self.layer.bias

        def positive(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(nn.functional.linear(x, weight, bias))

        def negative(x: torch.Tensor) -> torch.Tensor:
            return torch.sin(nn.functional.linear(x, weight, bias))

        return torch.cond(x.sum() > 0, positive, negative, (x,))


def compiled(model: nn.Module) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    sharded = inductor_passes.simple_fsdp(model, init_device_mesh("cpu", (2,)))
    return sharded, torch.compile(sharded, backend="inductor_passes", options=dotted(), fullgraph=True)


def test_read_in_a_body() -> None:
    with fake_world(2):
        _, step = compiled(Inside())
        with pytest.raises(Exception, match=r"in the body of torch\.cond.*read it before: weight = layer\.weight"):
            step(torch.ones(4, 16))


def test_read_before() -> None:
    with fake_world(2):
        model, step = compiled(Before())
        torch.testing.assert_close(step(torch.ones(4, 16)), model(torch.ones(4, 16)))
