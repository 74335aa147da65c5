"""Reports without a trace: who listens gets them, and pays for what-ifs only when asking for them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_passes.report import GraphReport
from inductor_passes.schedule import plan as planner
from inductor_passes.trace import advice
from inductor_passes.trace.collector import collect
from tests.support.models import WorldGather
from tests.support.world import fake_world


def compile_forward() -> None:
    """Three layers, gathered one after the other, where more memory would help; without code generation."""

    def model(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            x = torch.relu(x @ WorldGather.apply(weight))
        return x.sum()

    torch._dynamo.reset()
    options = {"inductor_passes.codegen": "aot_eager", "inductor_passes.memory_budget": "+5%"}
    with fake_world(2), torch.no_grad():
        torch.compile(model, backend="inductor_passes", options=options)(
            torch.ones(8, 64), [torch.ones(32, 64) for _ in range(3)]
        )


def without_advice(report: GraphReport) -> list[object]:
    return [dataclasses.replace(c, setting="", gain_ns=0, detail="") for c in report.collectives]


def test_what_ifs_are_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def counted(*args: object, **kwargs: object) -> planner.Plan:
        plans.append(args)
        return planner.plan(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(advice, "plan", counted)
    # Before its first record torch says that it traces.
    monkeypatch.setattr("inductor_passes._torch.trace_enabled", lambda: False)
    with collect(what_if=False) as cheap:
        compile_forward()
    assert not plans
    with collect() as asked, collect(what_if=False) as beside:
        compile_forward()
    assert plans
    (plain,), (full,), (same,) = cheap, asked, beside
    assert [c.setting for c in plain.collectives] == [""] * 3 and not any(c.gain_ns for c in plain.collectives)
    assert any(c.setting and c.gain_ns > 0 for c in full.collectives)
    assert same is full
    assert without_advice(plain) == without_advice(full) and plain.digest == full.digest


def test_nobody_hears_anything_afterwards() -> None:
    with collect() as first, collect() as second:
        compile_forward()
    compile_forward()
    assert len(first) == len(second) == 1
