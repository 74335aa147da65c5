"""A gathered table of which a sequence reads as much as it is long: a piece whose size has a range.

Found: with learned positions (``p[:length]``) nothing was merged once a batch of another length had come, forward and
backward. The verifier could not say on which shard an element of the piece is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.bucket.pass_ import BucketPass
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.verify.facts.view import View
from inductor_passes.verify.values import Program as Values
from inductor_passes.verify.values import changed_values
from tests.support.models import capture_graphs
from tests.support.world import fake_world

aten = torch.ops.aten
Cut = Callable[[torch.Tensor, int], torch.Tensor]
CUTS: dict[str, Cut] = {
    "first": lambda p, n: p[:n],
    "behind the first": lambda p, n: p[1 : n + 1],
    "last": lambda p, n: p[-n:],
    "columns": lambda p, n: p[:, :n].t(),
    "twice": lambda p, n: p[1:][:n],
    "joined": lambda p, n: torch.cat([p, p])[:n],
    "padded": lambda p, n: nn.functional.pad(p, (0, 0, 1, 0))[:n],
}


class Positions(nn.Module):
    """Two tables of one form, of which the first is cut to the length of the input."""

    def __init__(self, rows: int, cut: Cut) -> None:
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.randn(rows, rows)) for _ in range(2))
        self.layer, self.cut = nn.Linear(rows, rows), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.cut(self.p, x.shape[1])) @ self.q


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_world(2):
        yield


def graphs_of(rows: int, cut: Cut) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Forward and backward, for sequences of any length."""
    model = simple_fsdp(Positions(rows, cut), init_device_mesh("cpu", (2,)))
    x = torch.randn(2, 5, rows)
    torch._dynamo.mark_dynamic(x, 1, min=2, max=rows - 2)
    found = capture_graphs(model, [x], dynamic=None)
    (forward,), (backward,) = found.forward, found.backward
    return forward, backward


@pytest.mark.parametrize("rows", [12, 13], ids=["even", "uneven"])
@pytest.mark.parametrize("cut", list(CUTS))
def test_gathers_and_reductions_are_merged_for_every_length(cut: str, rows: int) -> None:
    for gm in graphs_of(rows, CUTS[cut]):
        before = len(GraphView(gm.graph).collectives)
        config = PassConfig(memory_budget="unlimited", verify="strict")
        report = run_passes(gm.graph, [BucketPass()], config, CostProfile.default("cuda")).report.passes[0]
        assert report.changed and not report.findings, report.detail
        assert before >= 4 and len(GraphView(gm.graph).collectives) < before


def _of(graph: torch.fx.Graph, target: Any) -> list[torch.fx.Node]:
    return [n for n in graph.nodes if n.target is target]


@pytest.mark.parametrize("forged", ["another table", "another place", "another length"])
def test_another_piece_is_not_proven(forged: str) -> None:
    """What merging made is taken, and the piece cut out of something else."""
    gm, _ = graphs_of(12, CUTS["behind the first"])
    before = Values(View(gm.graph))
    config = PassConfig(memory_budget="unlimited", verify="strict")
    run_passes(gm.graph, [BucketPass()], config, CostProfile.default("cuda"))
    after = Values(View(gm.graph))
    assert changed_values(before, after) == []
    symbolic = [n for n in _of(gm.graph, aten.slice.Tensor) if any(isinstance(a, torch.fx.Node) for a in n.args[1:])]
    (piece,) = symbolic
    if forged == "another table":
        table = piece.args[0]
        assert isinstance(table, torch.fx.Node)
        alike = [n for n in _of(gm.graph, table.target) if n.meta["val"].shape == table.meta["val"].shape]
        other = next(n for n in reversed(alike) if n is not table)
        other.append(piece)
        piece.replace_input_with(table, other)
    elif forged == "another place":
        piece.args = (*piece.args[:2], 0, *piece.args[3:])
    else:
        piece.args = (*piece.args[:3], 5, *piece.args[4:])
    gm.graph.lint()
    assert changed_values(before, Values(View(gm.graph)))
