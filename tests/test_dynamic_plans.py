"""``dynamic_plans``: several plans for one function whose sizes are symbols."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import inductor_passes
from inductor_passes.config import PassConfig
from inductor_passes.engine import dynamic_plans
from inductor_passes.engine.dynamic_plans import Range
from inductor_passes.report import GraphReport
from inductor_passes.settings.errors import ConfigError
from inductor_passes.trace.collector import collect
from tests.support.device import DEVICE, on_device
from tests.support.ranks import Ranks
from tests.support.world import fake_world

WIDTH = 64
SIZES = (64, 96, 4096, 8192, 100000, 64, 37, 4096, 500, 96, 8192, 7)


def parallel(mesh: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate())}
    return parallelize_module(on_device(model), mesh, plan)


def compiled(model: nn.Module, plans: object, **settings: Any) -> Any:
    given = {"codegen": "aot_eager", "dynamic_plans": plans, "numerics": "reassociate", "verify": "strict", **settings}
    options = {f"inductor_passes.{key}": value for key, value in given.items()}
    return torch.compile(model, backend="inductor_passes", options=options)


def rows(count: int, **bounds: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(count)
    batch = on_device(torch.randn(count, WIDTH, generator=drawn))
    torch._dynamo.mark_dynamic(batch, 0, **bounds)
    return batch


def graphs(plans: int, sizes: tuple[int, ...], train: bool, **bounds: int) -> tuple[list[GraphReport], list[int]]:
    """Reports of all graphs, and how many there were after each size."""
    counts: list[int] = []
    torch._dynamo.reset()
    with fake_world(2), collect(what_if=False) as reports:
        model = compiled(parallel(init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))), plans)
        for size in sizes:
            with torch.set_grad_enabled(train):
                out = model(rows(size, **bounds))
                if train:
                    out.sum().backward()
            counts.append(len(reports))
        return list(reports), counts


def said(report: GraphReport, what: str) -> str:
    return next((note for note in report.notes if note.startswith(what)), "")


@pytest.mark.parametrize("train", [False, True])
def test_each_range_has_a_plan_of_its_own(train: bool) -> None:
    reports, counts = graphs(3, SIZES, train)
    # No size is compiled again, whichever graph was called last.
    assert counts == [1, 1, 2, 2, *[3] * 8]
    assert [said(r, "holds for").partition(" ")[2].partition(";")[0].split(" ", 2)[2] for r in reports] == [
        "from 32 to 128 in steps of 16 (example 64)",
        "from 2048 to 8192 in steps of 16 (example 4096)",
        "from 2 (example 100000)",
    ]
    others = [said(r, "other plans are for").count("from") for r in reports]
    assert others == [0, 1, 2], [r.notes for r in reports]


def test_one_plan_has_no_guards_of_ours() -> None:
    reports, counts = graphs(1, SIZES, False)
    assert counts == [1] * len(SIZES)
    assert "from 2 (example 64)" in said(reports[0], "holds for") and not said(reports[0], "other plans")


def test_sizes_that_do_not_divide_have_another_plan() -> None:
    reports, counts = graphs(3, (64, 65, 48, 67, 1000), False)
    assert counts == [1, 2, 2, 2, 3]
    assert "from 33 to 130 (example 65)" in said(reports[1], "holds for")


def test_declared_bounds_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes a guard that rules out some of these sizes for an error of the program."""
    told: list[str] = []
    monkeypatch.setattr(dynamic_plans, "warn_once", told.append)
    reports, counts = graphs(4, (64, 4096, 100), False, min=2, max=8192)
    assert counts == [1, 1, 1] and "from 2 to 8192" in said(reports[0], "holds for")
    assert len(told) == 1 and "bounds of a size are declared" in told[0]


def test_a_reset_begins_anew() -> None:
    for _ in range(2):
        reports, counts = graphs(2, (64, 4096), False)
        assert counts == [1, 2] and "from 32 to 128" in said(reports[0], "holds for")


def test_static_sizes_need_no_plans() -> None:
    torch._dynamo.reset()
    with fake_world(2), collect(what_if=False) as reports:
        model = compiled(parallel(init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))), 4)
        batch = on_device(torch.randn(8, WIDTH))
        torch._dynamo.mark_static(batch)
        model(batch)
    (report,) = reports
    assert not said(report, "holds for") and not said(report, "other plans")


def test_what_a_range_holds() -> None:
    assert 4 in Range(4, 8) and 8 in Range(4, 8) and 3 not in Range(4, 8) and 9 not in Range(4, 8)
    assert 6 not in Range(4, 8, 4) and str(Range(4, 8, 4)) == "from 4 to 8 in steps of 4"
    ranges = {"x": Range(4, 8), "y": Range(1, 2)}
    assert dynamic_plans._holds(ranges, {"x": 5, "y": 1}) and not dynamic_plans._holds(ranges, {"x": 5, "y": 3})
    # Where a size is no symbol, guards on its value tell the graphs apart.
    assert dynamic_plans._holds(ranges, {"x": 5})


def test_plans_out_of_a_cache_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = {"x": (4, 8, 2)}

    def plans(compile_id: str) -> int:
        monkeypatch.setattr(dynamic_plans._torch, "compile_id", lambda: compile_id)
        return len(dynamic_plans._plans_of(False))

    assert plans("[91/0]") == 0
    for _ in range(2):
        dynamic_plans.loaded(False, ranges)
        assert plans("[91/0]") == 1, "compiled and loaded it is one plan"
    assert plans("[91/1]") == 1
    dynamic_plans.loaded(False, {"x": (9, 9, 1)})
    assert plans("[91/1_2]") == 2
    # Loaded as the function's first graph: what was before was thrown away.
    assert plans("[91/0]") == 2
    dynamic_plans.loaded(True, ranges)
    assert plans("[91/0]") == 0


@pytest.mark.parametrize("value", [0, 65, -1, True, "two", 1.5, ""])
def test_bad_values(value: object) -> None:
    with pytest.raises(ConfigError, match=r"dynamic_plans=.*expected a whole number of plans from 1 to 64"):
        PassConfig(dynamic_plans=value)  # type: ignore[arg-type]
    assert PassConfig(dynamic_plans="3").dynamic_plans == 3  # type: ignore[arg-type]


def on_ranks(rank: int, world_size: int, sizes: list[tuple[int, int]]) -> tuple[float, int, list[str]]:
    """How far results and gradients are off, how many graphs there are, and what async TP decided in each."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    inductor_passes.prepare_groups(mesh)
    plain = parallel(mesh["tp"])
    ours = copy.deepcopy(plain)
    step = compiled(ours, 3, memory_budget="unlimited", async_tp="force", rank_agreement="60s")
    off = []
    with collect(what_if=False) as reports:
        for of_row in sizes:
            batch = rows(of_row[rank // 2])
            results = [model(batch) for model in (plain, step)]
            for out in results:
                out.square().mean().backward()
            off.append((results[0] - results[1]).abs().max().item())
    pairs = zip(plain.parameters(), ours.parameters())
    off += [(a.grad.to_local() - b.grad.to_local()).abs().max().item() for a, b in pairs]  # type: ignore[union-attr]
    forward = [r for r in reports if r.phase == "forward"]
    return max(off), len(forward), [p.name for r in forward for p in r.passes if p.name == "async_tp" and p.changed]


@pytest.mark.ranks
def test_ranks_run_the_plan_of_their_size(four_ranks: Ranks) -> None:
    sizes = [(16, 16), (32, 32), (200, 200), (16, 200), (200, 24), (7, 1000), (32, 7), (400, 16)]
    for off, count, cut in four_ranks.run(on_ranks, sizes, timeout=300):
        assert off <= 1e-5, off
        assert count == 3 and cut, (count, cut)
