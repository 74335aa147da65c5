"""A stand-in for XPU devices with XCCL, which no machine of ours has: nothing assumes NCCL or CUDA.

Three views of it. Graphs whose fake tensors are on ``xpu:0`` go through all passes. Real ranks run code by Inductor on
a group that torch calls ``xccl``; it writes down what is asked of it. Commands see a machine with such devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes.cli import doctor
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.emulation import link as emulated_link
from inductor_passes.emulation.group import EmulatedGroup
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.groups import availability
from inductor_passes.groups.availability import Facts, agree
from inductor_passes.models import MLPConfig, mlp, mlp_batch
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.graphs import GraphBuilder, aten, c10d
from tests.support.joint_kernels import kernels_together
from tests.support.ranks import Ranks
from tests.support.world import fake_world

DEVICE = torch.device("xpu", 0)


def _named(group: dist.ProcessGroup | None) -> None:
    """Torch calls the backend of ``group`` xccl from now on."""
    assert group is not None
    names = distributed_c10d._world.pg_map
    names[group] = ("xccl", names[group][1])


def _on_xpu(group: str, layers: int = 4, width: int = 64) -> torch.fx.GraphModule:
    """Sharded layers, forward and gradient: gathers, matmuls, reduce-scatters, an all-reduce at the end."""
    build = GraphBuilder("model.py")

    def placed(name: str, *shape: int) -> torch.fx.Node:
        node = build.placeholder(name, *shape)
        with build.mode:
            node.meta["val"] = torch.empty(shape, device=DEVICE)
        return node

    shards = [placed(f"shard{k}", width // 8, width) for k in range(layers)]
    x = first = placed("x", 32, width)
    wholes = []
    for shard in shards:
        wait = build.call(c10d.wait_tensor.default, build.call(c10d.all_gather_into_tensor.default, shard, 8, group))
        wholes.append(wait)
        x = build.call(aten.relu.default, build.call(aten.mm.default, x, wait))
    gradients = []
    for whole in reversed(wholes):
        product = build.call(aten.mm.default, build.call(aten.permute.default, first, [1, 0]), x)
        start = build.call(c10d.reduce_scatter_tensor.default, product, "avg", 8, group)
        gradients.append(build.call(c10d.wait_tensor.default, start))
        x = build.call(aten.mm.default, x, build.call(aten.permute.default, whole, [1, 0]))
    total = build.call(aten.sum.default, x)
    loss = build.call(c10d.wait_tensor.default, build.call(c10d.all_reduce.default, total, "sum", group))
    outputs = (loss, *gradients)
    build.graph.output(outputs).meta["val"] = tuple(o.meta["val"] for o in outputs)
    return torch.fx.GraphModule(torch.nn.Module(), build.graph)


@pytest.mark.parametrize(
    ("settings", "changing"),
    [
        ({}, ["bucket", "reorder"]),
        ({"compress": "*=int8"}, ["compress"]),
        ({"numerics": "reassociate", "async_tp": "force"}, ["async_tp"]),
    ],
)
def test_graphs_on_xpu(settings: dict[str, Any], changing: list[str]) -> None:
    """Every pass: proven, and no tensor is made on another device."""
    with fake_world(8) as world:
        _named(dist.group.WORLD)
        gm = _on_xpu(world)
        config = PassConfig(memory_budget="unlimited", verify="strict", **settings)
        done = run_passes(gm.graph, passes_of(config), config, CostProfile.default("xpu"))
        assert not [p for p in done.report.passes if p.rolled_back]
        assert {p.name for p in done.report.passes if p.changed} >= set(changing)
        for node in gm.graph.nodes:
            for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
                assert not isinstance(value, torch.Tensor) or value.device == DEVICE, node
            places = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.device)]
            assert all(place == DEVICE for place in places), node
        if not settings:
            names = " ".join(str(node.target) for node in gm.graph.nodes)
            assert "all_gather_into_tensor_coalesced" in names and "reduce_scatter_tensor_coalesced" in names
            assert "aten.cat" not in names


def _register(rank: int, world_size: int) -> None:
    emulated_link.register()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, backend="emulated", setup=_register) as pool:
        yield pool


def _step(options: dict[str, Any] | None, rank: int, world: int) -> tuple[list[torch.Tensor], list[str], int]:
    """Loss and gradients of one step, the calls of the group, and how many collectives the plan has."""
    torch._dynamo.reset()
    config = MLPConfig(width=24, hidden=16, layers=4)
    torch.manual_seed(0)
    model = simple_fsdp(mlp(config), init_device_mesh("cpu", (world,)))
    inputs, targets = mlp_batch(config, seed=rank)
    calls: list[str] = []
    real = EmulatedGroup._run

    def written_down(self: Any, kind: str, ins: Any, outs: Any, names: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in (*ins, *outs):
            # What XCCL refuses: it takes dense tensors of real numbers.
            assert tensor.is_contiguous() and not tensor.is_complex() and not tensor.is_sparse
        calls.append(f"{names[0]} {len(ins)}")
        return real(self, kind, ins, outs, names, *args, **kwargs)

    compiled = torch.compile(model, options=options) if options is not None else torch.compile(model)
    with mock.patch.object(EmulatedGroup, "_run", written_down), collect() as reports:
        loss = (compiled(inputs) - targets).square().mean()
        loss.backward()
    gradients = [p.grad.to_local() for p in model.parameters()]
    return [loss.detach(), *gradients], calls, sum(any(p.changed for p in r.passes) for r in reports)


@kernels_together()
def _both(rank: int, world: int) -> tuple[bool, list[str], list[str], int]:
    default, before, _ = _step(None, rank, world)
    _named(dist.group.WORLD)
    ours, after, planned = _step(inductor_passes.options(memory_budget="unlimited", verify="strict"), rank, world)
    same = all(torch.equal(a, b) for a, b in zip(default, ours))
    return same, before, after, planned


def test_ranks_on_a_group_called_xccl(ranks: Ranks) -> None:
    """Gathers and reductions of a bucket are one call with a list, as XCCL has it; results are those of default."""
    found = ranks.run(_both)
    for same, before, after, planned in found:
        assert same and planned == 2
        assert not any("coalesced" in call and not call.endswith(" 1") for call in before), before
        merged = [call for call in after if "coalesced" in call and not call.endswith(" 1")]
        assert {call.split()[0] for call in merged} == {
            "all_gather_single_coalesced",
            "reduce_scatter_single_coalesced",
        }
        assert len(after) < len(before)
    assert found[0][2] == found[1][2]


def test_what_a_group_of_xpus_can_do() -> None:
    with mock.patch("torch.xpu.is_available", lambda: True), fake_world(2) as world:
        own = availability.own_facts(world)
    assert own.device == "xpu" and own.device_id == ""
    facts = Facts(host="a", device="xpu", symmetric_memory="torch's symmetric memory needs CUDA devices")
    both = agree([facts, facts])
    assert both.device == "xpu" and "CUDA" in both.symmetric_memory and "these have xpu" in both.kernels
    assert both.point_to_point == ""
    mixed = agree([facts, Facts(host="a", device="cpu", symmetric_memory="x")])
    assert mixed.device == "cpu" and "these have cpu, xpu" in mixed.kernels


def test_the_doctor_of_a_machine_with_xpus() -> None:
    with (
        mock.patch("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("xpu")),
        mock.patch("torch.accelerator.device_count", lambda: 4),
        mock.patch("importlib.metadata.version", side_effect=doctor.metadata.PackageNotFoundError),
    ):
        checks = {c.name: c for c in (*doctor._backends({}), *doctor._device({}), *doctor._compilers({}))}
    assert checks["XPU"].found == "4 devices"
    assert checks["XCCL"].status == "warn" and "NCCL" not in checks
    assert checks["Triton"].status == "fail"
