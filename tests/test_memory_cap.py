"""One cap for all passes: computed from the graph that came in, held by what comes out, and never a loss of time."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.authoring import (
    Compilation,
    CostProfile,
    GraphView,
    PassConfig,
    Timeline,
    build,
    passes_of,
    run_passes,
    simulate,
)
from inductor_passes.engine import pipeline
from inductor_passes.problems.fx import kept_by_caller
from inductor_passes.verify.facts.view import View
from inductor_passes.verify.memory import peak_of
from tests.support.graphs import GraphBuilder, aten, c10d
from tests.support.random_layers import random_layers
from tests.support.world import mesh_world

BUDGETS = ("0", "+5%", "+25%", "+100%", "unlimited")
GPU = CostProfile.default("cuda", 8)


def compiled(gm: torch.fx.GraphModule, **fields: str) -> tuple[Compilation, Timeline]:
    """What became of a graph, and the order that it has now, simulated."""
    config = PassConfig(**{"verify": "strict", **fields})
    done = run_passes(gm.graph, passes_of(config), config, GPU)
    return done, simulate(build(GraphView(gm.graph), GPU).problem)


def held(done: Compilation, after: Timeline) -> bool:
    """Whether the cap holds, or, where the graph came in above it, whether the graph is no higher."""
    limit, before = done.cap.limit_bytes, done.cap.input_peak_bytes
    assert before is not None or limit is None
    return limit is None or after.peak_bytes <= max(limit, before or 0)


def test_a_rewrite_that_takes_memory_leaves_nothing_over_the_cap() -> None:
    """Two nested gathers become one: its unpacking takes memory, and ``memory_budget="0"`` has none."""
    with mesh_world((2, 4)) as mesh:
        b = GraphBuilder()
        x = b.placeholder("x", 16, 8)
        for d in (1, 0):
            start = b.call(c10d.all_gather_into_tensor.default, x, mesh.size(d), mesh.get_group(d).group_name)
            x = b.call(c10d.wait_tensor.default, start)
        b.graph.output((b.call(aten.relu.default, x),))
        gm = torch.fx.GraphModule(torch.nn.Module(), b.graph)
        before = simulate(build(GraphView(gm.graph), GPU).problem).peak_bytes
        done, after = compiled(gm, memory_budget="0")
    assert done.cap.limit_bytes == done.cap.input_peak_bytes == before
    assert after.peak_bytes <= before


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(BUDGETS), st.sampled_from(["exact", "reassociate"]))
def test_the_cap_holds_after_all_passes(seed: int, budget: str, tier: str) -> None:
    with mesh_world((2, 4)) as mesh:
        done, after = compiled(random_layers(seed, mesh), memory_budget=budget, redistribute=tier)
        assert held(done, after), [(p.name, p.changed, p.rolled_back) for p in done.report.passes]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(BUDGETS))
def test_no_pass_makes_the_planned_step_slower(seed: int, budget: str) -> None:
    with mesh_world((2, 4)) as mesh:
        _, best = compiled(random_layers(seed, mesh), memory_budget=budget, redistribute="reassociate")
        for off in ({"bucket": "off"}, {"redistribute": "off"}, {"bucket": "off", "redistribute": "off"}):
            fields = {"memory_budget": budget, "redistribute": "reassociate", **off}
            _, other = compiled(random_layers(seed, mesh), **fields)
            assert best.makespan_ns <= other.makespan_ns, off


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_more_memory_is_not_slower_by_more_than_a_hundredth(seed: int) -> None:
    with mesh_world((2, 4)) as mesh:
        steps = [compiled(random_layers(seed, mesh), memory_budget=b)[1].makespan_ns for b in BUDGETS]
    for less, more in itertools.pairwise(steps):
        assert more <= less + less // 100


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_planner_and_verifier_mean_the_same_by_peak(seed: int, planned: bool) -> None:
    """Two replays, written twice: over tasks and storages, and over nodes."""
    with mesh_world((2, 4)) as mesh:
        gm = random_layers(seed, mesh)
        if planned:
            compiled(gm, memory_budget="+25%")
        freed = [n.name for n in gm.graph.nodes if n.op == "placeholder" and not kept_by_caller(n, False)]
        view = GraphView(gm.graph)
        assert simulate(build(view, GPU).problem).peak_bytes == peak_of(View(gm.graph), freed)


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_verifier_is_told_the_cap(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from inductor_passes import verify

    told: list[int | None] = []
    check = verify.check

    def listening(*args: object, **kwargs: object) -> object:
        told.append(kwargs.get("memory_budget"))  # type: ignore[arg-type]
        return check(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(verify, "check", listening)
    # Alternatives are tried under lower caps.
    monkeypatch.setattr(pipeline, "ALTERNATIVES_NODES", 0)
    with mesh_world((2, 4)) as mesh:
        done, _ = compiled(random_layers(3, mesh), memory_budget=budget)
    assert told and told[-1] == done.cap.limit_bytes
