"""Backward computes with what an input held when forward began, also where forward writes to that input.

Found in adopted models: torch alone saves a buffer that forward updates, and computes from the updated one again.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx

import inductor_passes
from inductor_passes.engine.entry_values import copy_what_is_overwritten
from tests.support.ranks import Ranks

WIDTH = 8


class Average(nn.Module):
    """A running value that is read after its update."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.register_buffer("kept", torch.zeros(WIDTH))

    def update(self) -> None:
        self.kept.mul_(0.9).add_(0.1)

    def factor(self) -> torch.Tensor:
        return self.scale + self.kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.update()
        return torch.tanh(self.linear(x)) * self.factor()


class Counter(Average):
    """An annealed gate: a counter of steps."""

    def update(self) -> None:
        self.kept += 1

    def factor(self) -> torch.Tensor:
        return self.scale * torch.exp(-0.3 * self.kept)


class Row(Average):
    """A part of the buffer is written to, and another view of it is read."""

    def update(self) -> None:
        self.kept[2:5].mul_(0.5).add_(0.3)

    def factor(self) -> torch.Tensor:
        return self.scale * torch.exp(self.kept.view(2, -1)).flatten()


class Before(Average):
    """Read before the update, and after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = torch.sin(self.kept + 0.5) * self.scale
        return super().forward(x) * early


MODELS = (Average, Counter, Row, Before)


def train(model: nn.Module, call: Any, seed: int = 0) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(3):
        loss = call(torch.randn(6, WIDTH, generator=drawn)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = [getattr(t, "full_tensor", t.clone)().detach() for t in (*model.parameters(), *model.buffers())]
    return [*losses, *whole]


def options(**settings: str) -> dict[str, Any]:
    return {f"inductor_passes.{name}": value for name, value in {"verify": "strict", **settings}.items()}


@pytest.mark.parametrize("settings", [{"codegen": "aot_eager"}, {}, {"memory_budget": "-30%"}], ids=str)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_training_is_that_of_eager_execution(kind: type[Average], settings: dict[str, str]) -> None:
    torch.manual_seed(0)
    plain = kind()
    expected = train(one := copy.deepcopy(plain), one)
    torch._dynamo.reset()
    compiled = torch.compile(plain, fullgraph=True, backend="inductor_passes", options=options(**settings))
    for found, wanted in zip(train(plain, compiled), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def adopted(rank: int, world_size: int, kind: type[Average]) -> float:
    """How far an adopted model is off FSDP2."""
    torch.manual_seed(0)
    plain = kind()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    expected = train(one := fully_shard(copy.deepcopy(plain), mesh=mesh), one, rank)
    model = inductor_passes.adopt(fully_shard(plain, mesh=mesh))
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend="inductor_passes", options=options(codegen="aot_eager"))
    return max((a - b).abs().max().item() for a, b in zip(train(model, call, rank), expected, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Average, Counter], ids=lambda kind: kind.__name__)
def test_adopted_models_train_as_before(two_ranks: Ranks, kind: type[Average]) -> None:
    assert max(two_ranks.run(adopted, kind)) <= 1e-6


class Counts(torch.autograd.Function):
    """Forward and backward write to one buffer; backward may also read what it held when forward began."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor, how: str) -> torch.Tensor:
        ctx.kept, ctx.how = kept, how
        old = kept.clone()
        kept.mul_(0.5).add_(1)
        ctx.save_for_backward(old if "old" in how else x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        if "slice" in ctx.how:
            ctx.kept[1:].add_(10)
        elif "copy" in ctx.how:
            ctx.kept.copy_(grad.abs().amax(0))
        elif "add" in ctx.how:
            ctx.kept.add_(grad.abs().amax(0))
        return grad * torch.cos(saved), None, None


@pytest.mark.parametrize("settings", [{"codegen": "aot_eager"}, {}, {"memory_budget": "-30%"}], ids=str)
@pytest.mark.parametrize("how", ["add", "add old", "slice", "slice old", "copy", "copy old", "old"])
def test_what_backward_writes_reaches_the_buffer(how: str, settings: dict[str, str]) -> None:
    """Found: the write went to the copy that backward reads, and the next forward computed from the wrong buffer."""

    def run(call: Any) -> list[torch.Tensor]:
        drawn, kept, found = torch.Generator().manual_seed(1), torch.full((WIDTH,), 0.5), []
        for _ in range(3):
            x = torch.randn(3, WIDTH, generator=drawn, requires_grad=True)
            call(x, kept).sum().backward()
            found += [kept.clone(), x.grad]
        return found

    def step(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return Counts.apply(x.sin(), kept, how).cos() * (kept + x).sin()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor_passes", options=options(**settings))
    for found, expected in zip(run(compiled), run(step), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_write_of_another_form_leaves_the_value_alone() -> None:
    forward, backward = forward_of(update=True), backward_of(lambda kept: kept.view(2, 2).add_(1))
    before = str(forward.graph), str(backward.graph)
    assert copy_what_is_overwritten(forward, backward, 1) == 2, "the views of it"
    assert str(backward.graph) == before[1]
    saved = forward.graph.output_node().args[0]
    assert saved[1].op == "placeholder" and {saved[3].target, saved[4].target} == {torch.ops.aten.clone.default}


def backward_of(write: Any) -> torch.fx.GraphModule:
    """A backward graph that reads what :func:`forward_of` saves."""

    def backward(kept: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        result = tangent * kept.exp()
        write(kept)
        return result

    gm = make_fx(backward, tracing_mode="fake")(torch.zeros(4), torch.zeros(4))
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), ("kept_1", "tangents_1")):
        node.name = node.target = name
    gm.recompile()
    return gm


def forward_of(update: bool) -> torch.fx.GraphModule:
    """A forward graph with one result that saves a buffer and views of it, and writes to it with ``update``."""

    def forward(kept: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        new, view, half = kept * 0.9 + 0.1, kept.view(2, 2), kept.chunk(2)[1]
        out = scale * torch.exp(new)
        if update:
            kept.copy_(new)
        return [out, kept, scale, view, half]

    gm = make_fx(forward, tracing_mode="fake")(torch.zeros(4), torch.zeros(4))
    # make_fx takes the result of the write for the buffer; partitioners save the input.
    buffer, *_ = gm.graph.find_nodes(op="placeholder")
    result = gm.graph.output_node()
    out, _, *others = result.args[0]
    result.args = ([out, buffer, *others],)
    gm.recompile()
    return gm


def test_only_what_is_written_to_is_copied() -> None:
    forward = forward_of(update=False)
    before = str(forward.graph)
    assert copy_what_is_overwritten(forward, backward_of(lambda kept: None), 1) == 0 and str(forward.graph) == before


def test_copies_are_made_before_the_write() -> None:
    forward = forward_of(update=True)
    assert copy_what_is_overwritten(forward, backward_of(lambda kept: None), 1) == 3
    forward.graph.lint()
    kept, scale = torch.full((4,), 2.0), torch.ones(4)
    _, saved, parameter, view, half = forward(kept, scale)
    assert all((found == 2.0).all() for found in (saved, view, half))
    assert parameter is scale and torch.allclose(kept, torch.full((4,), 1.9))
    values = [node.meta["val"] for node in forward.graph.output_node().args[0]]  # type: ignore[union-attr]
    assert [tuple(v.shape) for v in values] == [(4,), (4,), (4,), (2, 2), (2,)]
