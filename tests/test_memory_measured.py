"""The peak that the planner predicts is the peak that the allocator sees, for every kind of parallel model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_passes
from inductor_passes.problems.graph_memory import kept_by_caller, mark_views_of_inputs
from inductor_passes.schedule.problem import INPUT, Problem
from inductor_passes.trace.collector import collect
from tests.support.compiled import without_kernels
from tests.support.graphs import GraphBuilder
from tests.support.measured import LAYOUTS, SHAPES, build, measured_peaks, one_thread
from tests.support.world import fake_world


def predicted_peaks(folder: Path, orders: dict[str, Any]) -> dict[str, int]:
    """Planned peaks by phase, without what the caller holds: parameters, inputs, and what is saved of them."""
    found = {}
    for path in folder.glob("rank0_*ward_*.json"):
        problem = Problem.from_json(json.loads(path.read_text()))
        held = sum(s.size_bytes for s in problem.storages if s.producer == INPUT and s.pinned)
        phase = problem.name.split("_")[0]
        found[phase] = orders[phase] - held
    return found


_EAGER = [("deep", "unlimited"), ("deep", "-20%"), ("residual", "-20%"), ("fsdp", "0")]


@pytest.mark.parametrize("name", LAYOUTS)
def test_predicted_peak_is_the_measured_one(name: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    problems = tmp_path / "problems"
    # What is allocated is the wrapper's doing, not the kernels'.
    with one_thread(), fake_world(4), without_kernels():
        model, tokens = build(name)
        options = inductor_passes.options(memory_budget="+25%", dump_problem=str(problems))

        def loss(tokens: torch.Tensor) -> torch.Tensor:
            # A scalar result: what the caller of backward holds besides is next to nothing.
            return model(tokens).square().mean()  # type: ignore[no-any-return]

        compiled = torch.compile(loss, fullgraph=True, options=options)
        with collect(what_if=False) as reports:
            compiled(tokens).backward()
        measured = measured_peaks(compiled, model, tokens, tmp_path)
    peaks = {r.phase: r.schedules[-1].peak_after_bytes for r in reports}
    assert {r.schedules[-1].level for r in reports} == {"scheduler"}
    predicted = predicted_peaks(problems, peaks)
    # Kernels in a row free at its end, which the prediction does not know.
    # So has hybrid, where its file runs alone: 0.3%. Behind other files it gets another plan, and that is exact.
    close = 0.04 if name in ("fsdp_tp", "moe") else 0.004 if name == "hybrid" else 0.001
    assert predicted["forward"] == pytest.approx(measured[0], rel=close), (predicted, measured)
    assert predicted["backward"] == pytest.approx(measured[1], rel=close), (predicted, measured)


@pytest.mark.parametrize(("name", "budget"), _EAGER)
def test_graphs_that_run_operator_by_operator_free_what_was_read_last(name: str, budget: str, tmp_path: Path) -> None:
    """Found by an outsider: backward held all that forward had saved to its end, up to 37% above the budget."""
    torch._dynamo.reset()
    with one_thread(), fake_world(4):
        model, given = build(name)
        options = {"inductor_passes.codegen": "aot_eager", "inductor_passes.memory_budget": budget}

        def loss(given: torch.Tensor) -> torch.Tensor:
            return model(given).square().mean()  # type: ignore[no-any-return]

        compiled = torch.compile(loss, fullgraph=True, backend="inductor_passes", options=options)
        with collect(what_if=False) as reports:
            compiled(given).backward()
        measured = measured_peaks(compiled, model, given, tmp_path)
    # The planned peak counts parameters and inputs, too.
    (planned,) = [r.schedules[-1].peak_after_bytes for r in reports if r.phase == "backward"]
    assert measured[1] <= planned, (planned, measured)


@pytest.mark.parametrize("name", ["tp", "hybrid"])
def test_a_budget_below_the_peak_holds_as_measured(name: str, tmp_path: Path) -> None:
    """Also where the joint graph holds tensors that cannot be copied."""
    peaks = []
    for budget in ("0", "-20%"):
        torch._dynamo.reset()
        problems = tmp_path / budget
        with one_thread(), fake_world(4), without_kernels():
            model, tokens = build(name)
            options = inductor_passes.options(memory_budget=budget, dump_problem=str(problems), bucket="off")

            def loss(tokens: torch.Tensor, model: torch.nn.Module = model) -> torch.Tensor:
                return model(tokens).square().mean()  # type: ignore[no-any-return]

            compiled = torch.compile(loss, fullgraph=True, options=options)
            with collect(what_if=False) as reports:
                compiled(tokens).backward()
            measured = measured_peaks(compiled, model, tokens, tmp_path)
        predicted = predicted_peaks(problems, {r.phase: r.schedules[-1].peak_after_bytes for r in reports})
        assert predicted["forward"] == pytest.approx(measured[0], rel=0.02), (predicted, measured)
        assert predicted["backward"] == pytest.approx(measured[1], rel=0.02), (predicted, measured)
        peaks.append(max(measured))
    assert peaks[1] <= peaks[0] * 0.85


def test_a_budget_below_the_peak_knows_what_is_fused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each step of the loss counted: "-10%" was refused, and what was taken instead needed more than "0"."""
    peaks = []
    for options in (None, inductor_passes.options(memory_budget="-15%", dump_problem=str(tmp_path))):
        torch._dynamo.reset()
        with one_thread(), fake_world(4), without_kernels():
            model, tokens = build("vocabulary")
            compiled = torch.compile(model, fullgraph=True, options=options)
            compiled(tokens).backward()
            peaks.append(max(measured_peaks(compiled, model, tokens, tmp_path)))
    (held, *_) = {
        sum(s.size_bytes for s in problem.storages if s.producer == INPUT and s.pinned)
        for path in tmp_path.glob("rank0_forward_*.json")
        for problem in [Problem.from_json(json.loads(path.read_text()))]
    }
    assert not [r for r in caplog.records if "no plan was found" in r.getMessage()]
    assert peaks[1] + held <= 0.85 * 1.01 * (peaks[0] + held), (peaks, held)


_INFERENCE = tuple(f"{name}, inference" for name in ("gated", "uneven", "residual"))


@pytest.mark.parametrize("name", ["fsdp", "context_parallel", *SHAPES, *_INFERENCE])
def test_the_smallest_budget_holds_as_measured(name: str, tmp_path: Path) -> None:
    """Found: up to 1.9 times default Inductor at "0". The budget was relative to orders that default Inductor does not
    keep: that of the FX graph, and that of the kernels which our order of collectives leaves."""
    name, _, mode = name.partition(", ")
    peaks = []
    for options in (None, inductor_passes.options(memory_budget="0")):
        torch._dynamo.reset()
        with one_thread(), fake_world(4), without_kernels(), torch.set_grad_enabled(not mode):
            model, given = build(name)

            def loss(given: torch.Tensor, model: torch.nn.Module = model) -> torch.Tensor:
                return model(given).square().mean()  # type: ignore[no-any-return]

            compiled = torch.compile(loss, fullgraph=True, options=options)
            first = compiled(given)
            if first.requires_grad:
                first.backward()
            peaks.append(max(measured_peaks(compiled, model, given, tmp_path)))
    assert peaks[1] <= peaks[0] * 1.02


def test_saved_views_of_inputs_belong_to_the_caller() -> None:
    forward, backward = GraphBuilder(), GraphBuilder()
    weight, x = forward.placeholder("primals_1", 4, 6), forward.placeholder("primals_2", 4, 6)
    view = forward.call(torch.ops.aten.permute.default, weight, [1, 0])
    part = forward.call(torch.ops.aten.slice.Tensor, view, 0, 0, 3)
    product = forward.call(torch.ops.aten.mm.default, x, view)
    turned = forward.call(torch.ops.aten.permute.default, product, [1, 0])
    forward.graph.output((product, part, turned, weight))
    for node in (part, turned, weight):
        backward.placeholder(node.name, *node.meta["val"].shape)
    backward.placeholder("tangents_1", 4, 4)
    backward.graph.output(())
    mark_views_of_inputs(forward.graph, backward.graph)
    kept = {n.name: kept_by_caller(n, backward=True) for n in backward.graph.nodes if n.op == "placeholder"}
    assert kept == {part.name: True, turned.name: False, "primals_1": True, "tangents_1": True}
