"""What a report says about redistributions, and the limit above which implicit ones are an error."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import inductor_passes
from inductor_passes.config import PassConfig
from inductor_passes.report import GraphReport, PassReport, Reason, RedistributionReport
from inductor_passes.rewrites.audit import close
from inductor_passes.settings.errors import ConfigError
from inductor_passes.settings.redistribution import Redistribution
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from inductor_passes.trace.text import render_graph
from tests.support.world import fake_world


def compiled(function, inputs, **settings):
    """Reports of one call, executed op by op."""
    torch._dynamo.reset()
    with collect(what_if=False) as reports:
        options = {f"inductor_passes.{k}": v for k, v in {"codegen": "aot_eager", **settings}.items()}
        torch.compile(function, backend="inductor_passes", options=options, fullgraph=True)(*inputs)
    return reports


@pytest.fixture
def mesh():
    with fake_world(4):
        yield init_device_mesh("cpu", (4,))


def implicit(mesh):
    """Adding a sharded to a replicated tensor of another layout makes DTensor gather."""

    def function(x, y):
        a = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        b = DTensor.from_local(y, mesh, [Shard(1)], run_check=False)
        return (a + b).to_local()  # here

    return function, [torch.ones(2, 8), torch.ones(8, 2)]


def line_of_the_sum():
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, text in enumerate(lines, 1) if text.endswith("# here"))


def explicit(mesh):
    def function(x):
        d = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
        return d.redistribute(placements=[Replicate()]).to_local()

    return function, [torch.ones(8, 2)]


def test_every_redistribution_is_listed(mesh):
    function, inputs = explicit(mesh)
    (report,) = compiled(function, inputs)
    (record,) = report.redistributions
    assert record.explicit and record.call == "redistribute"
    assert record.placements == ("S(1) -> R over 4 ranks",)
    assert record.bytes_before == record.bytes_after == 3 * 8 * 2 * 4
    assert record.source.startswith(__file__)
    assert GraphReport.from_json(report.to_json()).redistributions == report.redistributions


def test_implicit_ones_are_told_apart_and_name_their_line(mesh):
    function, inputs = implicit(mesh)
    (report,) = compiled(function, inputs)
    (record,) = report.redistributions
    line = line_of_the_sum()
    assert record.explicit is False and record.call == "add" and record.source == f"{__file__}:{line}"


def test_what_a_rewrite_saved_is_in_the_list(mesh):
    def function(x):
        return DTensor.from_local(x, mesh, [Shard(0)], run_check=False).full_tensor().to(torch.bfloat16)

    (report,) = compiled(function, [torch.ones(512, 512)])
    (record,) = report.redistributions
    assert record.bytes_before == 2 * record.bytes_after and record.rewrites == ("R7",)
    (report,) = compiled(function, [torch.ones(512, 512)], redistribute="off")
    (record,) = report.redistributions
    assert record.bytes_before == record.bytes_after and record.rewrites == ()
    assert record.refused == ("R7: switched off (torch.float32 to torch.bfloat16)",)


@pytest.mark.parametrize("codegen", ["aot_eager", "inductor"])
def test_the_limit_reaches_the_user_with_the_line(mesh, codegen):
    function, inputs = implicit(mesh)
    line = line_of_the_sum()
    with pytest.raises(Exception) as caught:
        compiled(function, inputs, redistribute="error-above:16B", codegen=codegen)
    assert "LargeRedistributionError" in f"{type(caught.value).__name__} {caught.value}"
    assert f"{__file__}:{line}: add" in str(caught.value)


def test_the_limit_leaves_explicit_and_small_ones_alone(mesh):
    function, inputs = explicit(mesh)
    assert compiled(function, inputs, redistribute="exact,error-above:16B")
    function, inputs = implicit(mesh)
    assert compiled(function, inputs, redistribute="reassociate,error-above:64MiB")


def test_gathers_of_simple_fsdp_are_asked_for():
    with fake_world(2):
        layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        model = simple_fsdp(layers, init_device_mesh("cpu", (2,)))
        reports = compiled(lambda x: model(x).sum(), [torch.ones(4, 8)], redistribute="error-above:1B")
        reports += inductor_passes.explain(model, torch.ones(4, 8), options={"redistribute": "error-above:1B"}).reports
    assert {r.phase for r in reports} == {"forward", "backward"}
    found = [one for r in reports for one in r.redistributions]
    assert found and all(one.explicit and one.call.startswith("simple_fsdp") for one in found)


@pytest.mark.parametrize(
    "text, parsed",
    [
        ("exact", Redistribution("exact")),
        ("error-above:64MiB", Redistribution(None, 64 * 2**20)),
        ("numerics", Redistribution()),
        ("reassociate,error-above:2KB", Redistribution("reassociate", 2000)),
        ("error-above: 1 GiB, off", Redistribution("off", 2**30)),
    ],
)
def test_the_setting_is_parsed(text, parsed):
    assert PassConfig(redistribute=text).redistribution == parsed


@pytest.mark.parametrize(
    "text", ["fast", "", "exact,off", "error-above:64", "error-above:", "exact,error-above:1KB,error-above:1KB", None]
)
def test_bad_settings_are_named(text):
    with pytest.raises(ConfigError, match="error-above:64MiB") as error:
        inductor_passes.options(redistribute=text)
    assert repr(text) in str(error.value) and "redistribute" in str(error.value)


def test_undone_rewrites_are_not_claimed(mesh):
    function, inputs = explicit(mesh)
    (report,) = compiled(function, inputs)
    report.passes = [PassReport("redistribute", rolled_back=Reason.VERIFIER)]
    close(report, PassConfig())
    assert report.redistributions[0].refused == ("undone: verifier finding",)


def test_equal_redistributions_share_a_line_of_the_text() -> None:
    one = RedistributionReport(("a",), "add", False, "model.py:31", ("P(sum) -> R over 4 ranks",), 8 << 20, 4 << 20)
    other = dataclasses.replace(one, names=("z",), source="model.py:40", bytes_before=100, bytes_after=100)
    again = [dataclasses.replace(one, names=(f"a{i}",)) for i in range(30)]
    report = GraphReport("forward", 0, "0/0", 0, 4, "2.13", {}, redistributions=[other, one, *again])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_graph(report))
    lines = [line.split() for line in console.export_text().splitlines() if "model.py" in line]
    assert [(line[0], line[-1]) for line in lines] == [("31", "model.py:31"), ("1", "model.py:40")]
