"""Inductor lets a collective write to an input that something is copied to later: no result may be lost by that."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx

import inductor_passes
from inductor_passes import verify
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from tests.support.graphs import GraphBuilder, aten, c10d
from tests.support.ranks import Ranks
from tests.support.world import fake_world
from tools.fuzzing import cases, judging


def _program(change: str, gathered: torch.Tensor, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = funcol.wait_tensor(funcol.all_gather_tensor(gathered, 0, dist.group.WORLD))
    total = funcol.wait_tensor(funcol.all_reduce(sent, "sum", dist.group.WORLD))
    if change == "mul_":
        sent.mul_(0.5)
    elif change == "copy_":
        sent.copy_(sent + gathered)
    else:
        sent[:2].zero_()
    return (total.view(-1) if change == "view" else total), whole


def _compiled(rank: int, world: int, change: str, settings: dict[str, Any]) -> list[tuple[float, float]]:
    torch._dynamo.reset()
    call = torch.compile(_program, options=inductor_passes.options(**settings))
    found = []
    for _ in range(2):
        total, _ = call(change, torch.ones(4, 4), torch.full((4, 4), 10.0 * (rank + 1)))
        found.append((total.min().item(), total.max().item()))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("change", ["mul_", "copy_", "rows", "view"])
@pytest.mark.parametrize("settings", [{}, {"memory_budget": "0", "bucket": "off"}], ids=["default", "order only"])
def test_a_sum_is_not_lost(two_ranks: Ranks, change: str, settings: dict[str, Any]) -> None:
    assert two_ranks.run(_compiled, change, settings) == [[(30.0, 30.0)] * 2] * 2


def _graph(target: Any, moved: bool, read: bool = True, several: bool = False) -> torch.fx.Graph:
    """A sum of an input that gets another value in the end; ``moved``: that value is computed before the sum."""
    graph = GraphBuilder()
    x, w = graph.placeholder("x", 4, 4), graph.placeholder("w", 4, 4)
    gathered = graph.call(c10d.wait_tensor.default, graph.call(c10d.all_gather_into_tensor.default, w, 2, "0"))
    half = graph.call(aten.mul.Tensor, x, 0.5) if moved else None
    if several:
        start = graph.call(operator.getitem, graph.call(c10d.all_reduce_coalesced.default, [x], "sum", "0"), 0)
    else:
        start = graph.call(c10d.all_reduce.default, x, "sum", "0")
    half = half or graph.call(aten.mul.Tensor, x, 0.5)
    total = graph.call(c10d.wait_tensor.default, start)
    graph.call(aten.copy_.default, x, target(half, total))
    graph.graph.output((gathered, total) if read else (gathered,))
    return graph.graph


def test_the_verifier_refuses_a_lost_result() -> None:
    with fake_world(2):

        def rules(several: bool = False, **more: Any) -> set[str]:
            kept = _graph(lambda half, total: half, moved=False, several=several)
            return {f.rule for f in verify.check(_graph(moved=True, several=several, **more), reference=kept)}

        assert rules(target=lambda half, total: half) == {"result-overwritten"}
        assert rules(target=lambda half, total: half, several=True) == {"result-overwritten"}
        assert "result-overwritten" not in rules(target=lambda half, total: total)
        assert "result-overwritten" not in rules(target=lambda half, total: half, read=False)
        # What Inductor breaks without us is not held against us.
        lost = _graph(lambda half, total: half, moved=True)
        assert not verify.check(_graph(lambda half, total: half, moved=True), reference=lost)


def test_no_order_loses_a_result() -> None:
    with fake_world(2):
        graph = _graph(lambda half, total: half, moved=False)
        settings = PassConfig(memory_budget="unlimited", verify="strict")
        run_passes(graph, passes_of(settings), settings, CostProfile.default("cpu", 2))
        position = {node: k for k, node in enumerate(graph.nodes)}
        (start,) = graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
        (half,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        assert position[start] < position[half]


def test_a_loop_over_the_input_stays_behind() -> None:
    """A loop may return what it was given: it reads its input nevertheless. Found by the fuzzer."""
    case = cases.Case(
        steps=(
            ("written_back", 54, 29, 48),
            ("all_reduce_coalesced", 59, 43, 56),
            ("wait_again", 1, 16, 60),
            ("wait", 5, 21, 16),
            ("loop", 7, 39, 8),
        ),
        settings={"memory_budget": "+1%", "bucket": "off", "schedule": "on", "redistribute": "exact"},
    )
    with cases.world(4) as groups:
        assert case.backs and judging.judge(case, groups)[0] == ""


def _with_view(moved: bool) -> torch.fx.Graph:
    """A sum of an input, half of which is returned as it is; ``moved``: the half is taken before the sum."""
    graph = GraphBuilder()
    x, w = graph.placeholder("x", 4, 4), graph.placeholder("w", 4, 4)
    other = graph.call(aten.neg.default, x)
    rows = graph.call(aten.slice.Tensor, x, 0, 0, 2) if moved else None
    start = graph.call(c10d.all_reduce.default, x, "sum", "0")
    rows = rows or graph.call(aten.slice.Tensor, x, 0, 0, 2)
    product = graph.call(aten.mm.default, w, w)
    total = graph.call(c10d.wait_tensor.default, start)
    graph.call(aten.copy_.default, x, other)
    graph.graph.output((product, total, rows))
    return graph.graph


def test_a_view_is_a_use_where_it_stands() -> None:
    """Found by the fuzzer: a view of the input was moved in front of the sum, and nothing kept that from being lost."""
    with fake_world(2):
        found = verify.check(_with_view(moved=True), reference=_with_view(moved=False))
        assert {f.rule for f in found} == {"result-overwritten"}
        graph, settings = _with_view(moved=False), PassConfig(memory_budget="unlimited", verify="strict")
        run_passes(graph, passes_of(settings), settings, CostProfile.default("cpu", 2))
        position = {node: k for k, node in enumerate(graph.nodes)}
        (start,) = graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
        (rows,) = graph.find_nodes(op="call_function", target=aten.slice.Tensor)
        assert position[start] < position[rows]
    case = cases.Case(
        steps=(
            *(("written_back", 40, 40, 24), ("all_reduce", 0, 33, 4), ("all_reduce", 7, 53, 54), ("wait", 40, 9, 11)),
            *(("mm", 60, 59, 30), ("all_reduce", 52, 45, 10), ("view", 63, 46, 49), ("split", 62, 38, 32)),
        ),
        settings={"memory_budget": "+1%", "bucket": "off", "schedule": "on", "redistribute": "off"},
    )
    with cases.world(4) as groups:
        assert case.backs and judging.judge(case, groups)[0] == ""
