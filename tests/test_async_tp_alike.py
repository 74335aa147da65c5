"""What was found around one collective is carried over to those whose surroundings are the same, and to no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx

from inductor_passes.async_tp import gate
from inductor_passes.async_tp.gate import Pricer
from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.async_tp.search import Around, Search
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.ir.view import GraphView
from tests.support.async_tp_programs import Program, ag, rs, trace
from tests.support.world import fake_world
from tests.test_async_tp_pass import link
from tools.capture.graphs import capture
from tools.capture.models import SCENARIOS


def layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Sequence-parallel layers; ``flip`` ends a region, whatever it is cut along."""
    for a, b in zip(weights[::2], weights[1::2], strict=True):
        x = torch.flip(x + rs(torch.relu(ag(x) @ a) @ b), (0, 1))
    return x


def program(widths: tuple[int, ...]) -> Program:
    return Program("layers", layers, ((64, 64), *(shape for n in widths for shape in ((64, n), (n, 64)))))


def search_of(view: GraphView) -> Search:
    profile = link(16.0)
    return Search(AsyncTpPass(mode="force"), view, Pricer(view, profile, ComputeCosts(view, profile)))


def text(around: Around) -> list[Any]:
    """Everything about the regions around a collective, in names."""
    found: list[Any] = [around.refusal and around.refusal.text]
    for recipe, priced in around.options:
        region = priced.region
        found += [recipe, priced.before_ns, priced.after_ns, priced.overhead_ns, priced.gain_ns, region.axis]
        found += [(node.name, part) for node, part in priced.order.order]
        found += [(node.name, str(cut)) for node, cut in region.cuts.items()]
        found += [(n.name, i.name, str(part)) for n, needs in region.needs.items() for i, part in needs.items()]
        found += [c.start.name for c in region.collectives]
        found += [(node.name, dot) for node, dot in region.matmuls.items()]
    return found


def assert_as_searched_alone(gm: torch.fx.GraphModule) -> tuple[int, int]:
    """Every collective has what a search of its own finds; how many were searched, and how many there are."""
    view = GraphView(gm.graph)
    search = search_of(view)
    shared = [search.around(collective) for collective in view.collectives]
    for collective, around in zip(view.collectives, shared, strict=True):
        assert text(around) == text(search_of(view).around(collective))
    return len(search.searched), len(shared)


def test_layers_that_are_alike_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    simulated = gate.run
    monkeypatch.setattr(gate, "run", lambda *args: (runs.append(1), simulated(*args))[1])
    searched, timelines = {}, {}
    with fake_world(2):
        for depth in (4, 8):
            view = GraphView(trace(program((128,) * depth)).graph)
            search = search_of(view)
            runs.clear()
            for collective in view.collectives:
                search.around(collective)
            searched[depth], timelines[depth] = len(search.searched), len(runs)
            assert len(view.collectives) == 2 * depth
    assert searched[8] == searched[4] < 8 and timelines[8] == timelines[4] > 0


def test_other_sizes_are_another_place() -> None:
    with fake_world(2):
        searched, number = assert_as_searched_alone(trace(program((128, 64, 32, 16))))
        assert searched == number == 8
        searched, number = assert_as_searched_alone(trace(program((128, 64, 128, 64, 128, 64, 128, 64))))
        assert searched < number == 16


@pytest.mark.parametrize("scenario", ["context_parallel", "moe_ep"])
def test_what_is_carried_over_is_what_would_be_found(scenario: str) -> None:
    with fake_world(SCENARIOS[scenario].world):
        for gm in capture(SCENARIOS[scenario], 2).values():
            searched, number = assert_as_searched_alone(gm)
            assert searched < number
