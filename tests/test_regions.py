"""Blocks that are compiled each by itself: equal ones are planned once, and the report says what no region sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import inductor_passes
from inductor_passes.report import GraphReport
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support import wrapped
from tests.support.world import fake_world
from tests.support.wrapped import Net, mesh_of

BLOCKS = 4


def managed(model: Any) -> nn.Module:
    return simple_fsdp(model, mesh_of(2))


def adopted(model: Any) -> nn.Module:
    return inductor_passes.adopt(wrapped.sharded(model))


def adopted_ddp(model: Any) -> nn.Module:
    return inductor_passes.adopt(wrapped.ddp(model))


def aot_eager() -> dict[str, Any]:
    options = {"inductor_passes.codegen": "aot_eager", "inductor_passes.rank_agreement": "trust"}
    return {"backend": "inductor_passes", "options": options}


def inductor() -> dict[str, Any]:
    return {"options": inductor_passes.options(rank_agreement="trust")}


def step(wrap: Callable[[Any], nn.Module], whole: bool, compiling: Callable[[], dict[str, Any]]) -> list[GraphReport]:
    """The reports of a forward and backward pass; each region has options that were made for it."""
    torch._dynamo.reset()
    model: Any = wrap(Net(BLOCKS))
    blocks = model.module.blocks if wrap is adopted_ddp else model.blocks
    for region in [model] if whole else blocks:
        region.compile(**compiling())
    with collect(what_if=False) as reports:
        model(torch.randn(5, wrapped.WIDTH)).sum().backward()
    return reports


@pytest.mark.parametrize("compiling", [aot_eager, inductor], ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrap", [managed, adopted, adopted_ddp], ids=lambda f: f.__name__)
def test_equal_regions_are_planned_once_and_say_what_they_do_not_see(wrap: Any, compiling: Any) -> None:
    with fake_world(2):
        reports = step(wrap, False, compiling)
    # A forward graph of DDP has no collectives.
    assert [r.phase for r in reports] == ["forward", "backward"][wrap is adopted_ddp :]
    for report in reports:
        said = [note for note in report.notes if note.startswith("a region")]
        # Of 4 blocks with three modules each, and two more.
        assert len(said) == 1 and "3 of the 14 modules" in said[0], report.notes


@pytest.mark.parametrize("wrap", [managed, adopted, adopted_ddp], ids=lambda f: f.__name__)
def test_a_whole_model_is_no_region(wrap: Any) -> None:
    with fake_world(2):
        reports = step(wrap, True, aot_eager)
    assert reports and not [note for r in reports for note in r.notes if note.startswith("a region")]


class Odd(nn.Module):
    """Reads parameters of its own and of a list, and has an attention whose output layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.more = nn.ParameterList([nn.Parameter(torch.ones(8))])
        attending = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.Sequential(attending, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.scale + self.more[0])


@pytest.mark.parametrize("inside", [True, False], ids=["in_a_function", "itself"])
def test_parameters_that_are_read_without_a_call_are_no_other_region(inside: bool) -> None:
    with fake_world(2):
        torch._dynamo.reset()
        model = managed(Odd())
        step = torch.compile((lambda x: model(x).sum()) if inside else model, **aot_eager())
        with collect(what_if=False) as reports:
            step(torch.randn(2, 3, 8)).sum().backward()
    assert len(reports) == 2 and not [note for r in reports for note in r.notes if note.startswith("a region")]


def test_a_region_of_one_module() -> None:
    """It is not on the stack of its own nodes. Dynamo compiles what reads its parameters, and not torch's forward."""
    with fake_world(2):
        torch._dynamo.reset()
        model: Any = managed(Odd())
        model.layers[1].compile(**aot_eager())
        with collect(what_if=False) as reports:
            model(torch.randn(2, 3, 8)).sum().backward()
    forward = [[note for note in r.notes if note.startswith("a region")] for r in reports if r.phase == "forward"]
    assert forward and all(len(said) == 1 and "1 of the 9 modules" in said[0] for said in forward), forward
