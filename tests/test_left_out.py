"""What passes left out because the graph plans better without it: found, written to the plan, and followed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.authoring import (
    Compilation,
    CostProfile,
    GraphView,
    PassConfig,
    build,
    passes_of,
    run_passes,
    simulate,
)
from inductor_passes.engine import pipeline, written
from inductor_passes.engine.compilation import Known
from inductor_passes.engine.following import Earlier, Variant
from inductor_passes.pin import pins
from inductor_passes.pin.file import GraphPlan, PlanFileError
from inductor_passes.report import Reason
from inductor_passes.rewriting.messages import messages
from tests.support.random_layers import random_layers
from tests.support.world import mesh_world

GPU = CostProfile.default("cuda", 8)
EVERYTHING = {"redistribute": "reassociate", "async_tp": "force"}


def run(gm: torch.fx.GraphModule, plan: pins.Pins | None = None, **fields: Any) -> tuple[Compilation, GraphPlan]:
    """The passes over a graph, and what they decided as a file would say it."""
    config = PassConfig(**{"verify": "strict", "redistribute": "reassociate", **fields})
    described = pins.described(GraphView(gm.graph))
    done = run_passes(gm.graph, passes_of(config), config, GPU, known=Known("forward", pins=plan))
    return done, GraphPlan.from_json(written.plan_of(done, described, {}), "a test")


def pinned(plan: GraphPlan, *, replan: bool = False) -> pins.Pins:
    return pins.Pins(plan, "a file", "0123", 0, replan)


def step_ns(gm: torch.fx.GraphModule) -> int:
    return simulate(build(GraphView(gm.graph), GPU).problem).makespan_ns


# Seeds that leave out: one rewrite, what extends, both, a whole pass.
@pytest.mark.parametrize("seed", [70, 58, 61, 59])
def test_a_graph_does_without_the_rewrite_that_costs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others stay, and the graph plans no slower than where all or none are applied."""
    with mesh_world((2, 2)) as mesh:
        gm = random_layers(seed, mesh)
        done, _ = run(gm, memory_budget="0")
        assert done.left_out
        for part in done.left_out:
            _, _, name = part.partition("/")
            (report,) = (p for p in done.report.passes if p.name == "redistribute")
            if name.startswith("R"):
                assert report.changed
                assert all(d.subject != name for d in report.decisions if d.reason is Reason.PROFITABLE)
                refused = [d.detail for d in report.decisions if d.reason is Reason.SLOWER]
                assert refused and all(f"plans faster without {name}" in detail for detail in refused)
        found = step_ns(gm)
        monkeypatch.setattr(pipeline, "_smaller", lambda _: [])
        whole = random_layers(seed, mesh)
        run(whole, memory_budget="0")
        none = random_layers(seed, mesh)
        run(none, memory_budget="0", redistribute="off")
        assert found <= min(step_ns(whole), step_ns(none))


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["0", "+25%"]), st.sampled_from([(2, 2), (2, 4)]))
def test_a_plan_is_followed_by_who_wrote_it(seed: int, budget: str, shape: tuple[int, int]) -> None:
    """Whatever was undone on the way: the same messages, buckets, order and step."""
    with mesh_world(shape) as mesh:
        first, second = random_layers(seed, mesh), random_layers(seed, mesh)
        done, plan = run(first, memory_budget=budget)
        again, same = run(second, pinned(plan), memory_budget=budget)
        assert same == replace(plan, compile_id=same.compile_id) and again.left_out == done.left_out
        assert step_ns(second) == step_ns(first)


@pytest.mark.parametrize(("seed", "shape"), [(12, (2, 4)), (15, (2, 4)), (61, (2, 2)), (59, (2, 2))])
@pytest.mark.parametrize("fields", [{}, EVERYTHING], ids=["redistribute", "async_tp too"])
def test_plans_of_graphs_that_leave_something_out(seed: int, shape: tuple[int, int], fields: dict[str, str]) -> None:
    with mesh_world(shape) as mesh:
        first, second, third = (random_layers(seed, mesh) for _ in range(3))
        done, plan = run(first, memory_budget="0", **fields)
        assert fields or (done.left_out and plan.left_out == done.left_out)
        again, same = run(second, pinned(plan), memory_budget="0", **fields)
        assert same == replace(plan, compile_id=same.compile_id) and again.left_out == done.left_out
        # A further variant of the function, which another rank may run beside the first one, does the same.
        came, sent = messages(GraphView(third.graph)), messages(GraphView(first.graph))
        places = {c.start.name: k for k, c in enumerate(GraphView(third.graph).collectives)}
        buckets = tuple(tuple(places.get(name, name) for name in bucket) for bucket in done.buckets)
        variant = Variant(came, sent, buckets, rewritten=True, left_out=done.left_out)
        (way,) = Earlier.of(variant).ways(GraphView(third.graph), 0)
        run(third, way.pins, memory_budget="0", **fields)
        assert sorted(messages(GraphView(third.graph))) == sorted(sent)


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("redistribut", "`left_out` names 'redistribut'; expected some of redistribute, async_tp, compress, exchange"),
        ("redistribute/R99", "`left_out`: redistribute has no part 'R99'; expected some of R0"),
        ("exchange/small", "`left_out`: exchange has no part 'small'; expected large"),
        ("async_tp/half", "`left_out`: async_tp has no parts; expected 'async_tp'"),
        ("compress/large", "`left_out`: compress has no parts; expected 'compress'"),
    ],
)
def test_what_there_is_not_is_an_error_or_planned_anew(left_out: str, message: str) -> None:
    plan = GraphPlan(left_out=(left_out,))
    with mesh_world((2, 2)) as mesh:
        with pytest.raises(PlanFileError, match=message.replace("(", r"\(")):
            run(random_layers(1, mesh), pinned(plan), async_tp="force")
        run(random_layers(1, mesh), pinned(plan, replan=True), async_tp="force")


def test_a_pass_that_is_pinned_to_nothing_says_so() -> None:
    with mesh_world((2, 2)) as mesh:
        done, _ = run(random_layers(54, mesh), pinned(GraphPlan(left_out=("redistribute",))))
    (report,) = (p for p in done.report.passes if p.name == "redistribute")
    assert not report.changed and report.rolled_back is Reason.PLAN_PINNED
    assert list(itertools.chain(report.decisions)) == [] and "pinned plan leaves it out" in report.detail
