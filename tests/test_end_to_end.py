"""Real models on real ranks: where only the order changes, the numbers are Inductor's bit for bit, in both passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import inductor_passes
from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.report import GraphReport, Verdict
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.device import ATOMIC, DEVICE, ON_CPU, on_device
from tests.support.joint_kernels import kernels_together
from tests.support.models import (
    LlamaConfig,
    MoEConfig,
    cross_entropy,
    llama,
    llama_batch,
    moe,
    moe_batch,
    tensor_parallel,
)
from tests.support.parity import share, whole
from tests.support.processes import LIMIT_S
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

#: Two layers where a collective of one layer may move beside another layer's work; the other layouts are about which
#: collectives there are and what they compute, and every kind of them is in one layer.
LLAMA, DEEPER = LlamaConfig(layers=1), LlamaConfig(layers=2)
Case = tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor], Callable[..., torch.Tensor], int, int]


@pytest.fixture
def pair(two_ranks: Ranks) -> Ranks:
    return two_ranks


@pytest.fixture
def four(four_ranks: Ranks) -> Ranks:
    return four_ranks


def build(name: str, rank: int, world_size: int) -> Case:
    """(parallel model, single-process reference, global batch, loss, part of the batch, number of parts)."""
    if name == "moe":
        config = MoEConfig()
        parallel, reference = on_device(moe(config, dist.group.WORLD)), on_device(moe(config))
        x, y = moe_batch(config)
        return parallel, reference, (on_device(x), on_device(y)), mse_loss, 0, 1
    config = DEEPER if name in ("fsdp", "tp_sp") else LLAMA
    reference = on_device(llama(config))
    tokens, targets = llama_batch(config, batch=4)
    batch = on_device(tokens), on_device(targets)
    if name == "context_parallel":
        return on_device(llama(config, dist.group.WORLD)), reference, batch, cross_entropy, rank, world_size
    model = copy.deepcopy(reference)
    if name in ("fsdp", "replicate"):
        mesh = init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("dp",))
        simple_fsdp(model, mesh, mode="fully_shard" if name == "fsdp" else "replicate")
        return model, reference, batch, cross_entropy, rank, world_size
    if name == "hybrid":
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
        simple_fsdp(model, mesh, mode="hybrid_shard")
        return model, reference, batch, cross_entropy, rank, world_size
    if name in ("tp", "tp_sp"):
        mesh = init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("tp",))
        tensor_parallel(model, mesh, sequence_parallel=name == "tp_sp")
        return model, reference, batch, cross_entropy, 0, 1
    assert name == "fsdp_tp"
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    simple_fsdp(model, mesh["dp"])
    return model, reference, batch, cross_entropy, mesh["dp"].get_local_rank(), 2


def slow_scatters(ranks: int) -> CostProfile:
    """A measured link on which a reduce_scatter takes twice an exchange's time."""
    rates = {"all_gather": 20.0, "all_to_all": 20.0, "reduce_scatter": 40.0, "all_reduce": 40.0}
    costs = tuple(CollectiveCost(kind, 50_000.0, rate, 1_000.0, 0.0) for kind, rate in rates.items())
    group = GroupCost(GroupLayout(ranks, 1, ranks), "test", "wire", costs)
    return replace(CostProfile.default("cpu", ranks), measured=True, groups=(group,))


def step(model: nn.Module, call: Any, batch: Any, loss: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step, as this rank holds them."""
    model.zero_grad()
    value = loss(call(batch[0]), batch[1])
    value.backward()
    found = {"loss": value.detach().clone()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            local = getattr(parameter.grad, "_local_tensor", parameter.grad)
            found[name] = local.clone()
    return found


#: What default Inductor found, by model: several tests compare the same model with it.
_DEFAULT: dict[str, dict[str, torch.Tensor]] = {}


@kernels_together()
def compare(rank: int, world_size: int, name: str, options: dict[str, Any]) -> list[GraphReport]:
    """Default Inductor, ours and one eager process on the same step; returns our reports."""
    model, reference, batch, loss, index, count = build(name, rank, world_size)
    if name == "context_parallel":
        # The sequence is sharded: every rank has its part of each sample.
        mine = (batch[0].chunk(count, 1)[index], batch[1].chunk(count, 1)[index])
    else:
        mine = share(batch, index, count)
    if name not in _DEFAULT:
        torch._dynamo.reset()
        _DEFAULT[name] = step(model, torch.compile(model, fullgraph=True), mine, loss)
    default = _DEFAULT[name]
    torch._dynamo.reset()
    with collect(what_if=False) as reports:
        compiled = torch.compile(model, fullgraph=True, options=inductor_passes.options(verify="strict", **options))
        ours = step(model, compiled, mine, loss)
        again = step(model, compiled, mine, loss)
    assert list(default) == list(ours)
    for key, value in default.items():
        difference = (value - ours[key]).abs().max()
        if options.get("bucket") == "off" and ON_CPU:
            assert torch.equal(value, ours[key]), f"{name}: {key} differs from Inductor's by {difference}"
        else:
            # Buckets change the layout of matmul operands, and with it how a library adds. On a GPU Inductor adds the
            # rows of a gradient in other parts where its kernels fuse otherwise.
            torch.testing.assert_close(value, ours[key], rtol=1e-5, atol=1e-5)
        assert key in ATOMIC or torch.equal(ours[key], again[key]), f"{name}: {key} differs in the second step"
    expected = loss(reference(batch[0]), batch[1])
    expected.backward()
    like_one_process(name, rank, world_size, ours, model, reference, expected.detach(), split=count > 1)
    return reports


def like_one_process(
    name: str,
    rank: int,
    world_size: int,
    ours: dict[str, torch.Tensor],
    model: nn.Module,
    reference: nn.Module,
    loss: torch.Tensor,
    *,
    split: bool,
) -> None:
    """Our loss and every gradient against those of one eager process that saw the whole batch."""
    mean = ours["loss"].clone()
    if split:
        dist.all_reduce(mean)
        mean /= world_size
    torch.testing.assert_close(mean, loss, rtol=1e-5, atol=1e-6)
    named = dict(model.named_parameters())
    for key, parameter in reference.named_parameters():
        assert parameter.grad is not None and named[key].grad is not None
        actual, expected = whole(named[key].grad), parameter.grad
        if name == "context_parallel":
            # Parameters are replicated and nobody reduces their gradients: each rank has its tokens' share.
            dist.all_reduce(actual)
            actual = actual / world_size
        elif name == "moe" and key in ("w1", "w2"):
            # A rank has its experts only, and every rank sends them the same tokens.
            expected = expected.chunk(world_size)[rank] * world_size
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{name} {k}: {m}")


def check_reports(per_rank: list[list[GraphReport]], phases: tuple[str, ...] = ("forward", "backward")) -> None:
    """Every phase was planned, compiled in the planned order, within its budget, equally on all ranks."""
    for reports in per_rank:
        assert tuple(r.phase for r in reports) == phases
        for report in reports:
            assert report.order_check == "as planned"
            assert [p.rolled_back for p in report.passes] == [None] * len(report.passes)
            assert report.collectives
            for schedule in report.schedules:
                assert schedule.makespan_after_ns <= schedule.makespan_before_ns
                assert schedule.budget_bytes is not None
                assert schedule.peak_after_bytes <= max(schedule.budget_bytes, schedule.peak_before_bytes)
    first = per_rank[0]
    for reports in per_rank[1:]:
        for mine, theirs in zip(first, reports):
            assert [c.label for c in mine.collectives] == [c.label for c in theirs.collectives]
            assert mine.schedules[0].schedule_after == theirs.schedules[0].schedule_after


@pytest.mark.parametrize("name", ["fsdp", "replicate", "tp", "tp_sp", "moe", "context_parallel"])
def test_two_ranks(pair: Ranks, name: str) -> None:
    # Replicated parameters are not gathered: only their gradients travel.
    phases = ("backward",) if name == "replicate" else ("forward", "backward")
    check_reports(pair.run(compare, name, {"memory_budget": "+25%", "bucket": "off"}), phases)


def test_two_ranks_with_everything_on(pair: Ranks) -> None:
    reports = pair.run(compare, "fsdp", {"memory_budget": "+100%"})
    check_reports(reports)
    merged = [p for p in reports[0][0].passes if p.name == "bucket"]
    assert merged and merged[0].changed, "so small a model is latency-bound: its gathers travel together"


def test_reductions_as_exchanges(pair: Ranks, tmp_path: Path) -> None:
    """Where the library's reduce_scatter is measured to be slow: the same bits, of two ranks."""
    file = tmp_path / "profile.json"
    slow_scatters(2).save(file)
    reports = pair.run(
        compare, "fsdp", {"memory_budget": "+100%", "bucket": "off", "cost_profile": str(file)}, timeout=LIMIT_S
    )
    check_reports(reports)
    (exchange,) = [p for p in reports[0][1].passes if p.name == "exchange"]
    assert exchange.changed and all(d.verdict is Verdict.APPLIED for d in exchange.decisions)
    assert "all_to_all" in {c.kind for c in reports[0][1].collectives}


@pytest.mark.parametrize("name", ["hybrid", "fsdp_tp"])
def test_four_ranks(four: Ranks, name: str) -> None:
    check_reports(four.run(compare, name, {"memory_budget": "0", "bucket": "off"}))
