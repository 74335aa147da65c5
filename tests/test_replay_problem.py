"""The problem built from fused scheduler nodes: waits belong to their starts, memory agrees with the verifier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes import _torch, verify
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir import ops
from inductor_passes.problems.kernel_memory import donated_inputs
from inductor_passes.problems.kernels import SchedulerProblem, build
from inductor_passes.replay import batches
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import INPUT, Kind
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.compiled import without_kernels
from tests.support.inductor_orders import lower
from tests.support.models import LlamaConfig, capture_graphs, cross_entropy, llama, llama_batch, tensor_parallel
from tests.support.world import fake_world

LLAMA = LlamaConfig(layers=1)


def tp() -> Any:
    return tensor_parallel(llama(LLAMA), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))


def fsdp() -> Any:
    return simple_fsdp(llama(LLAMA), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))


def allocated_peak(built: SchedulerProblem, order: Any) -> int:
    """Peak without the inputs that the caller keeps: what the verifier counts."""
    kept = sum(s.size_bytes for s in built.problem.storages if s.producer == INPUT and s.pinned)
    return batches.peak_bytes(built.problem, order, built.batched) - kept


@pytest.mark.parametrize("make", [tp, fsdp])
def test_waits_and_memory(make: Any) -> None:
    torch._dynamo.reset()
    inspected = []
    with fake_world(2):
        model, batch = make(), llama_batch(LLAMA)
        graphs = capture_graphs(model, [batch[0]], lambda out: cross_entropy(out, batch[1]))

        def inspect(nodes: list[Any], backward: bool) -> list[Any]:
            built = build(nodes, CostProfile.default("cpu"), backward=backward)
            problem = built.problem
            starts = [i for i, t in enumerate(problem.tasks) if t.kind is Kind.START]
            waits = [t for t in problem.tasks if t.kind is Kind.WAIT]
            # One wait per collective here, in place (all_reduce) or not (all_gather, reduce_scatter).
            assert sorted(w.start for w in waits) == starts
            assert not any(t.fence for t in problem.tasks)
            for wait in waits:
                node = nodes[[t.name for t in problem.tasks].index(wait.name)]
                waited = _torch.snode_origin(node)
                assert waited is None or ops.role(waited) is ops.Role.WAIT
            donated = donated_inputs(backward)
            for budget in (None, peak_bytes(problem)):
                result = plan(problem, budget)
                order = [nodes[i] for i in result.order]
                assert allocated_peak(built, result.order) == verify.snodes_peak_bytes(order, donated)
            assert allocated_peak(built, problem.input_order) == verify.snodes_peak_bytes(nodes, donated)
            inspected.append(len(starts))
            return nodes

        lower(graphs.forward[0], lambda nodes: inspect(nodes, False))
        lower(graphs.backward[0], lambda nodes: inspect(nodes, True))
    assert len(inspected) == 2 and min(inspected) > 1


def test_an_estimator_counts_on_fused_kernels() -> None:
    """Its answers replace the nodes' own shares, once each; where it has none, nothing changes."""
    torch._dynamo.reset()
    asked: list[Any] = []

    def without_answers(node: torch.fx.Node) -> float | None:
        asked.append(node)
        return None

    def pointwise(node: torch.fx.Node) -> float | None:
        compute = ops.role(node) is ops.Role.COMPUTE
        return 1e6 if compute and torch.Tag.pointwise in getattr(node.target, "tags", ()) else None

    totals = []

    def inspect(nodes: list[Any]) -> list[Any]:
        def compute(estimator: Any) -> list[int]:
            built = build(nodes, CostProfile.default("cpu"), backward=False, estimator=estimator)
            return [t.duration_ns for t in built.problem.tasks if t.kind is Kind.COMPUTE]

        fused = [n for n in nodes if _torch.snode_kind(n) == "fused"]
        counted = {o for n in fused for o in _torch.snode_origins(n) if pointwise(o) is not None}
        assert any(len(_torch.snode_origins(n)) > 2 for n in fused) and counted
        assert compute(without_answers) == compute(None)
        totals.append((sum(compute(pointwise)) - sum(compute(None))) / len(counted))
        return nodes

    with fake_world(2):
        model, batch = fsdp(), llama_batch(LLAMA)
        graphs = capture_graphs(model, [batch[0]], lambda out: cross_entropy(out, batch[1]))
        lower(graphs.forward[0], inspect)
    assert asked
    assert 0.9e6 < totals[0] <= 1e6


class Scaled(nn.Module):
    """Products whose weight is computed from two gathered parameters of different shapes."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(dim, dim) * 0.05) for _ in range(layers))
        self.gates = nn.ParameterList(nn.Parameter(torch.randn(dim, 1)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, gate in zip(self.weights, self.gates, strict=True):
            x = torch.relu(nn.functional.linear(x, torch.tanh(weight * 3) * torch.sigmoid(gate) + 0.1 * weight))
        return x


def test_a_fused_kernel_comes_after_the_waits_of_all_that_it_reads() -> None:
    """The order of the kernels was undone (read-before-wait).

    Inductor forgets that a kernel depends on a wait when C++ kernels of [n, 1] and [n, n] elements are fused.
    """
    torch._dynamo.reset()
    with fake_world(4), without_kernels():
        model = simple_fsdp(Scaled(256, 6), init_device_mesh("cpu", (4,)))
        options = inductor_passes.options(memory_budget="0", verify="strict")
        compiled = torch.compile(lambda x: model(x).square().mean(), fullgraph=True, options=options)
        with collect(what_if=False) as reports:
            compiled(torch.randn(128, 256)).backward()
    backward = reports[-1]
    assert backward.phase == "backward" and backward.schedules[-1].level == "scheduler"
    assert not any(p.rolled_back for p in backward.passes)


class Parallel(nn.Module):
    """A sum of pointwise results of one large activation: backward's kernels hold more than the operators."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(dim)) for _ in range(count))
        self.shifts = nn.ParameterList(nn.Parameter(torch.randn(dim)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            total = total + torch.tanh(x * scale + shift)
        return total


@pytest.mark.parametrize("budget", ["0", "unlimited"])
def test_the_report_says_where_fusion_raised_the_memory(budget: str) -> None:
    """It took 2.5 times the memory of default Inductor at "0", and nothing said so."""
    torch._dynamo.reset()
    with fake_world(4), without_kernels():
        model = simple_fsdp(Parallel(24, 256), init_device_mesh("cpu", (4,)))
        options = inductor_passes.options(memory_budget=budget)
        compiled = torch.compile(lambda x: model(x).square().mean(), fullgraph=True, options=options)
        with collect(what_if=False) as reports:
            compiled(torch.randn(1024, 256)).backward()
    said = [any("fused kernels need at least" in note for note in r.notes) for r in reports]
    assert said == [False, budget == "0"]
