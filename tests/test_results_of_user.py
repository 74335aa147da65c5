"""Results that come out of a merged message: what somebody keeps of them does not hold the whole message."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn

from inductor_passes.ir import results
from inductor_passes.trace.collector import collect
from tests.support.world import fake_world

Results = tuple[torch.Tensor, ...]


class Measured(nn.Module):
    """A large result, and two numbers that somebody may keep for every step."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.inner, self.group = nn.Linear(64, 64), group

    def forward(self, x: torch.Tensor) -> Results:
        y = self.inner(x)
        sent = y.flatten().sin(), y.pow(2).mean(), (y > 0).sum().float()
        return tuple(funcol.all_reduce(one, "sum", self.group) for one in sent)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_number_holds_nothing_else(training: bool) -> None:
    """Found: a count of 4 bytes that was kept, or saved to a file, held the message of 1 MiB that it came in."""
    torch._dynamo.reset()
    settings = {"codegen": "aot_eager", "memory_budget": "unlimited", "verify": "strict"}
    options = {f"inductor_passes.{name}": value for name, value in settings.items()}
    with fake_world(2) as group, collect(what_if=False) as reports, torch.set_grad_enabled(training):
        model = Measured(group)
        x = torch.randn(4096, 64)
        found = torch.compile(model, backend="inductor_passes", options=options)(x)
        wanted = model(x)
    assert any(p.name == "bucket" and p.changed for p in reports[0].passes)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    large, *small = (one.untyped_storage().nbytes() for one in found)
    assert small == [4, 4] and large <= 4096 * 64 * 4 + 8


def test_what_backward_reads_is_not_the_users() -> None:
    """Gathers that are kept for backward are results of forward, too; the planner knows how long they live."""
    graph = torch.fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    graph.output((one, None, other))
    module = torch.fx.GraphModule(nn.Module(), graph)
    assert results.of_user(module.graph, "inference") == list(module.graph.nodes)[:2]
    assert results.of_user(module.graph, "forward") == []
    results.note(module, 2)
    assert results.of_user(module.graph, "forward") == list(module.graph.nodes)[:1]
    assert results.of_user(module.graph, "backward") == []
