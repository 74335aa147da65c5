"""Collectives carry the names of parameters, forward and backward: in reports, plan files, buckets and findings."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import inductor_passes
from inductor_passes import _torch, verify
from inductor_passes.engine import naming
from inductor_passes.ir import parameters
from inductor_passes.ir.view import GraphView
from inductor_passes.pin.file import PlanFileError
from inductor_passes.report import Finding, GraphReport
from inductor_passes.rewriting.merge import merge
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.compiled import dotted, without_kernels
from tests.support.world import fake_world

WIDTH = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Dynamo calls a node as the variable that holds its result.
        scale = self.scale
        return torch.relu(self.wq(x)) @ scale


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


NAMES = {name for name, _ in Model().named_parameters()}


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_world(2):
        yield
    torch._dynamo.reset()


def sharded(**settings: Any) -> nn.Module:
    return simple_fsdp(Model(settings.pop("checkpointed", False)), init_device_mesh("cpu", (2,)), **settings)


def adopted() -> nn.Module:
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return inductor_passes.adopt(fully_shard(model, mesh=init_device_mesh("cpu", (2,))))


def replicated() -> nn.Module:
    return inductor_passes.adopt(DistributedDataParallel(Model()))


def reports_of(model: nn.Module, **settings: Any) -> dict[str, GraphReport]:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="inductor_passes", options=dotted(**settings))
    with collect(what_if=False) as reports:
        compiled(torch.randn(4, WIDTH)).sum().backward()
    return {report.phase: report for report in reports}


def carried(report: GraphReport, kind: str) -> list[str]:
    return sorted(p.name for c in report.collectives if c.kind == kind for p in c.parameters)


@pytest.mark.parametrize("make", [sharded, adopted])
@pytest.mark.parametrize("bucket", ["off", "on"])
def test_every_gather_and_reduction_names_its_parameters(make: Callable[[], nn.Module], bucket: str) -> None:
    reports = reports_of(make(), bucket=bucket)
    assert carried(reports["forward"], "all_gather") == sorted(NAMES)
    assert carried(reports["backward"], "reduce_scatter") == sorted(NAMES)
    # Backward does not need the biases, and not the first layer's input.
    assert set(carried(reports["backward"], "all_gather")) <= NAMES - {"layers.0.wq.bias", "layers.1.wq.bias"}
    for report in reports.values():
        assert report.region == "Model"
        assert all(c.parameters for c in report.collectives)
        modules = {p.name: p.module for c in report.collectives for p in c.parameters}
        assert modules["head.weight"] == "head" and modules["layers.1.scale"] == "layers.1"
        assert GraphReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_inductors_own_graphs_keep_the_names() -> None:
    """Our passes run after Inductor's there, and the kernels are planned again."""
    with without_kernels():
        reports = reports_of(sharded(), codegen="inductor")
    assert carried(reports["forward"], "all_gather") == sorted(NAMES)
    assert carried(reports["backward"], "reduce_scatter") == sorted(NAMES)
    assert {s.level for s in reports["backward"].schedules} == {"fx", "scheduler"}
    assert any(d.parameters for p in reports["forward"].passes if p.name == "replay" for d in p.decisions)


def test_ddp_names_its_reductions() -> None:
    reports = reports_of(replicated())
    names = sorted(f"module.{name}" for name in NAMES)
    assert [p.name for c in reports["backward"].collectives for p in c.parameters] and names == carried(
        reports["backward"], "all_reduce"
    )


def test_hybrid_shards_name_both_reductions() -> None:
    torch.distributed.destroy_process_group()
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        reports = reports_of(simple_fsdp(Model(), mesh, mode="hybrid_shard"), bucket="off")
        assert carried(reports["backward"], "reduce_scatter") == sorted(NAMES)
        assert carried(reports["backward"], "all_reduce") == sorted(NAMES)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=torch.distributed.HashStore())


def test_a_block_compiled_alone_has_names_below_the_block() -> None:
    model = sharded()
    for layer in model.layers:
        layer.compile(backend="inductor_passes", options=dotted())
    with collect(what_if=False) as reports, torch.no_grad():
        model(torch.randn(4, WIDTH))
    # Equal layers are compiled once: what it is called in the model nobody can say.
    (report,) = reports
    assert report.region == "Attention"
    assert carried(report, "all_gather") == ["scale", "wq.bias", "wq.weight"]


def test_names_do_not_recompile_equal_layers() -> None:
    model = sharded()
    classes = {type(layer.wq) for layer in model.layers}
    assert len(classes) == 1
    with collect(what_if=False) as reports:
        for layer in model.layers:
            layer.compile(backend="inductor_passes", options=dotted())
        model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
    assert [r.phase for r in reports] == ["forward", "backward"]


def test_a_bucket_lists_its_members_and_so_does_its_node() -> None:
    reports = reports_of(sharded(), bucket="on")
    buckets = [c for r in reports.values() for c in r.collectives if c.members]
    assert buckets
    for one in buckets:
        assert one.bucket == f"bucket of {len(one.members)}" and len(one.parameters) == len(one.members)


def test_a_merged_node_carries_what_its_members_carried() -> None:
    seen: list[torch.fx.Graph] = []
    original = naming.names

    def keep(graph: torch.fx.Graph, settings: Any) -> dict[str, tuple[str, ...]]:
        seen.append(graph)
        return original(graph, settings)

    with mock.patch.object(naming, "names", keep):
        reports_of(sharded(), bucket="off")
    graph = next(g for g in seen if not any("tangents" in n.name for n in g.nodes))
    view = GraphView(graph)
    chosen = view.collectives[:2]
    expected = tuple(one for c in chosen for one in parameters.carried(c.start))
    (merged,) = merge(graph, view, [chosen])
    started = next(n for n in graph.nodes if n.name == merged.start)
    assert parameters.carried(started) == expected and len(expected) == 2
    assert pickle.loads(pickle.dumps(started.meta[parameters.META_KEY])) == expected
    assert parameters.names_at(next(n for n in graph.nodes if n.name == merged.waits[0])) == tuple(
        one.name for one in expected
    )


def test_a_finding_names_the_parameter() -> None:
    found: list[list[Finding]] = []
    original = naming.names

    def break_it(graph: torch.fx.Graph, settings: Any) -> dict[str, tuple[str, ...]]:
        copy = torch.fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        (first, *_) = GraphView(copy).collectives
        reference = verify.snapshot(copy)
        for wait in first.waits:
            wait.replace_all_uses_with(first.start)
            copy.erase_node(wait)
        found.append(verify.check(copy, reference=reference))
        return original(graph, settings)

    with mock.patch.object(naming, "names", break_it):
        reports_of(sharded(), bucket="off")
    for findings in found:
        about = [f for f in findings if f.parameters]
        assert about and all(set(f.parameters) <= NAMES for f in about)
        assert about[0].parameters[0] in str(about[0])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_data_parallelism_issues_is_never_implicit(checkpointed: bool) -> None:
    reports = reports_of(sharded(checkpointed=checkpointed), redistribute="error-above:1B")
    for report in reports.values():
        assert report.redistributions and all(one.explicit and one.parameters for one in report.redistributions)
    # Also where the graph does not say which call it was.
    with mock.patch("inductor_passes.rewrites.origin._UNSHARD", re.compile("never")):
        reports = reports_of(sharded(checkpointed=checkpointed), redistribute="error-above:1B")
    assert all(one.explicit for report in reports.values() for one in report.redistributions)


def test_without_sources_there_are_no_names_and_no_error() -> None:
    with mock.patch.object(_torch, "parameter_sources", side_effect=RuntimeError("another torch")):
        reports = reports_of(sharded(), verify="on")
    assert all(not c.parameters for r in reports.values() for c in r.collectives) and len(reports) == 2
    with mock.patch.object(_torch, "parameter_sources", return_value={}):
        reports = reports_of(sharded())
    assert all(not c.parameters for r in reports.values() for c in r.collectives)


def test_a_graph_that_was_cut_in_pieces_has_no_names() -> None:
    """Argument k of a piece is not argument k of dynamo's graph: shapes tell."""
    original = _torch.parameter_sources

    def shifted() -> Any:
        return {k: dataclasses.replace(s, shape=(3, 1)) for k, s in original().items()}

    with mock.patch.object(_torch, "parameter_sources", shifted):
        reports = reports_of(sharded())
    assert all(not c.parameters for r in reports.values() for c in r.collectives)


def test_digests_do_not_know_names() -> None:
    with_names = reports_of(sharded())
    with mock.patch.object(_torch, "parameter_sources", return_value={}):
        without = reports_of(sharded())
    assert {p: r.digest for p, r in with_names.items()} == {p: r.digest for p, r in without.items()}


# -- plan files -------------------------------------------------------------------------------------------


def dumped(folder: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    reports_of(sharded(), dump_plan=str(folder), **settings)
    return {path.name.split("_")[0]: json.loads(path.read_text())["graphs"][0] for path in folder.glob("*.json")}


def pinned(path: Path, *graphs: dict[str, Any], **settings: Any) -> dict[str, GraphReport]:
    path.write_text(json.dumps({"graphs": graphs}))
    return reports_of(sharded(), plan=str(path), **settings)


def test_a_plan_file_names_the_parameters(tmp_path: Path) -> None:
    plans = dumped(tmp_path / "plans", bucket="off")
    for plan in plans.values():
        assert {name for names in plan["parameters"].values() for name in names} <= NAMES
        assert plan["parameters"].keys() == plan["collectives"].keys()


def test_a_bucket_is_pinned_by_parameters(tmp_path: Path) -> None:
    together = ["layers.0.wq.weight", "layers.0.wq.bias"]
    forward = {"phase": "forward", "buckets": [together], "order": None, "collectives": None}
    backward = {"phase": "backward", "buckets": [[f"reduce_scatter {name}" for name in together]]}
    reports = pinned(tmp_path / "plan.json", forward, backward)
    for report in reports.values():
        (bucket,) = [c for c in report.collectives if c.members]
        assert sorted(p.name for p in bucket.parameters) == sorted(together)


def test_a_parameter_that_several_collectives_carry_is_refused_with_what_to_write(tmp_path: Path) -> None:
    backward = {"phase": "backward", "buckets": [["layers.1.wq.weight", "head.weight"]]}
    with pytest.raises(Exception, match="carried by 2 collectives; expected one of all_gather") as caught:
        pinned(tmp_path / "plan.json", backward)
    assert PlanFileError.__name__ in f"{type(caught.value).__name__} {caught.value!r}" or "plan" in str(caught.value)
    unknown = {"phase": "forward", "buckets": [["head.wait", "head.weight"]]}
    with pytest.raises(Exception, match=r"names head\.wait, which the graph does not have"):
        pinned(tmp_path / "plan.json", unknown)


def test_buckets_above_the_memory_budget_are_refused_or_given_up(tmp_path: Path) -> None:
    whole = {"phase": "forward", "buckets": [sorted(NAMES)]}
    free = pinned(tmp_path / "plan.json", whole, memory_budget="unlimited")["forward"]
    assert [len(c.members) for c in free.collectives] == [len(NAMES)]
    with pytest.raises(Exception, match=r"`buckets` is above the memory budget: peak \d+ bytes, the cap is \d+ bytes"):
        pinned(tmp_path / "plan.json", whole, memory_budget="0")
    anew = pinned(tmp_path / "plan.json", whole, memory_budget="0", plan_mismatch="replan")["forward"]
    assert anew.schedules[-1].digest == reports_of(sharded(), memory_budget="0")["forward"].schedules[-1].digest
    assert any("given up" in note and "above the memory budget" in note for note in anew.notes), anew.notes


def test_kept_gathers_are_pinned_by_parameters(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"graphs": [{"phase": "forward", "kept": ["head.weight"]}]}))
    options = {"plan": str(path), "memory_budget": "unlimited", "bucket": "off"}
    reports = reports_of(sharded(reshard_after_forward="auto"), **options)
    assert "head.weight" not in carried(reports["backward"], "all_gather")
    assert "layers.1.wq.weight" in carried(reports["backward"], "all_gather")
    (keep,) = [p for p in reports["forward"].passes if p.name == "keep"]
    assert {d.parameters for d in keep.decisions if d.verdict.value == "applied"} == {("head.weight",)}


def test_every_field_of_a_plan_may_be_null_or_left_out(tmp_path: Path) -> None:
    whole = dumped(tmp_path / "plans")["forward"]
    expected = reports_of(sharded())["forward"].schedules[-1].digest
    assert pinned(tmp_path / "plan.json", {})["forward"].schedules[-1].digest == expected
    assert pinned(tmp_path / "plan.json", dict.fromkeys(whole))["forward"].schedules[-1].digest == expected
    for key in whole:
        for changed in ({**whole, key: None}, {k: v for k, v in whole.items() if k != key}):
            path = tmp_path / "one.json"
            path.write_text(json.dumps({"schema_version": None, "graphs": [changed]}))
            inductor_passes.PassConfig(plan=str(path))
