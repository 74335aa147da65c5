"""Lowerings side by side: which fits what, and the same numbers from each of them on real ranks.

Kernels run in Triton's interpreter on memory that the ranks' processes share; torch's symmetric-memory operators run as
the fallbacks that torch ships with them, which the tests register for CPUs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import inductor_passes
from inductor_passes._torch import torch_version
from inductor_passes.groups.availability import Availability, record
from inductor_passes.report import Reason, Verdict
from inductor_passes.trace.collector import collect
from tests.support.async_tp_programs import BY_NAME, Program, inputs, on_gloo, rs, trace
from tests.support.bucket_graphs import check_fakes, output_layouts
from tests.support.device import DEVICE, KERNEL_VARIABLES, ON_CPU, on_device
from tests.support.ranks import Ranks
from tests.support.world import fake_world
from tests.test_async_tp_pass import link, run

pytestmark = pytest.mark.ranks

#: Programs that a single operator can compute, with the operators' names.
GATHERED = ("ag0_mm", "ag0_mm_3d", "ag1_mm_batch_1", "ag0_three_mms", "ag0_mm_and_output", "ag0_bf16", "ag0_fp16")
BIASED = ("ag0_addmm", "ag0_linear_bias", "ag1_linear_bias_batch_1", "mlp_with_bias")
SCATTERED = ("mm_rs0", "mm_rs0_avg", "mm_rs0_3d", "mm_rs0_bf16")
BOTH = ("dgrad_and_wgrad",)
KERNELS = (*GATHERED, *BIASED, *SCATTERED, *BOTH)
#: Before 2.12 CPUs scale whole tensors only.
SCALED = ("scaled_mm_rs0", *(["scaled_mm_rows_rs0"] if torch_version() >= (2, 12) else []))
SYMM_MEM = (*GATHERED, *SCATTERED, *BOTH, *SCALED)
#: What must not be taken by an operator along rows, and why not.
REFUSED = {
    "ag1_mm_3d": "no matmul has its rows",
    "mm_rs1_3d": "no matmul of two matrices",
    "scaled_mm_rs1_3d_batch_2": "no matmul of two matrices",
    "mm_two_users_rs0": "other users",
    "addmm_rs0": "bias",
    "wgrad": "no matmul has its rows",
    "mm_ar": "all_reduce has no operator",
}


def operators(gm: torch.fx.GraphModule) -> list[str]:
    """Operators that communicate inside, in graph order."""
    names = [f"{getattr(n.target, 'namespace', '')}::{getattr(n.target, '_opname', '')}" for n in gm.graph.nodes]
    return [n for n in names if n.startswith(("inductor_passes::", "symm_mem::"))]


def usable(device: str = "cpu") -> Availability:
    return Availability("", "", "", device)


def compare_programs(rank: int, world: int, names: tuple[str, ...], lowering: str) -> dict[str, Any]:
    """Programs after the pass against themselves before it, on real ranks; equal bits, or the largest difference."""
    inductor_passes.prepare_groups(groups=[dist.group.WORLD])
    if lowering == "symm_mem" and ON_CPU:
        fallbacks()
        record(dist.group.WORLD.group_name, usable())
    noise = random.Random(rank)
    found: dict[str, Any] = {}
    for name in names:
        program = BY_NAME[name]
        gm = trace(program)
        values = inputs(program, rank)
        expected = on_gloo(gm, values)
        layouts = output_layouts(gm)
        report = run(gm, link(32.0), mode="force", lowering=lowering)
        assert output_layouts(gm) == layouts, name
        check_fakes(gm)
        time.sleep(noise.random() * 0.05)
        for e, f in zip(expected, on_gloo(gm, values), strict=True):
            assert (e.shape, e.stride(), e.dtype) == (f.shape, f.stride(), f.dtype), name
            torch.testing.assert_close(f, e, rtol=1e-2 if e.dtype.itemsize < 4 else 1e-6, atol=1e-5)
        (decision, *_) = [d for d in report.decisions if d.subject == "async_tp"]
        found[name] = (operators(gm), decision.detail)
    return found


def fallbacks() -> None:
    """torch's fallbacks as the CPU implementations of its symmetric-memory operators."""
    import torch.distributed._symmetric_memory as symmetric

    if "library" in _LIBRARY:
        return
    library = torch.library.Library("symm_mem", "IMPL")
    for name in (
        "fused_all_gather_matmul",
        "fused_all_gather_scaled_matmul",
        "fused_matmul_reduce_scatter",
        "fused_scaled_matmul_reduce_scatter",
    ):
        library.impl(name, getattr(symmetric, f"_{name}_fallback"), "CPU")
    _LIBRARY["library"] = library


_LIBRARY: dict[str, torch.library.Library] = {}


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2, env=KERNEL_VARIABLES) as ranks:
        yield ranks


def test_kernels_compute_what_they_replace(pair: Ranks) -> None:
    found, other = pair.run(compare_programs, KERNELS, "kernels")
    assert found == other
    for name, (names, detail) in found.items():
        assert detail.startswith("kernels,"), (name, detail)
        assert set(names) <= {"inductor_passes::symm_gathered_mm", "inductor_passes::symm_mm_scattered"} and names, name
    assert len(found["mlp_with_bias"][0]) == 2


def test_symm_mem_computes_what_it_replaces(pair: Ranks) -> None:
    found, other = pair.run(compare_programs, SYMM_MEM, "symm_mem")
    assert found == other
    for name, (names, detail) in found.items():
        assert detail.startswith("symm_mem,"), (name, detail)
        assert all(n.startswith("symm_mem::fused_") for n in names) and names, name
    assert found[SCALED[-1]][0] == ["symm_mem::fused_scaled_matmul_reduce_scatter"]


def test_a_scaled_gather_moves_bytes_and_multiplies_float8() -> None:
    """Float8 does not travel on gloo: the form of the graph only."""
    with fake_world(2) as group:
        record(group, usable())
        gm = trace(BY_NAME["ag0_scaled_mm"])
        layouts = output_layouts(gm)
        run(gm, link(32.0), mode="force", lowering="symm_mem")
        check_fakes(gm)
        assert output_layouts(gm) == layouts
    (node,) = [n for n in gm.graph.nodes if "scaled_matmul" in str(n.target)]
    assert node.args[0].meta["val"].dtype is torch.float8_e4m3fn and node.args[4:6] == (0, group)


@pytest.mark.parametrize("lowering", ["kernels", "symm_mem", "op"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_decomposed_and_says_why(name: str, lowering: str) -> None:
    with fake_world(2) as group:
        record(group, usable())
        gm = trace(BY_NAME[name])
        decision = run(gm, link(32.0), mode="force", lowering=lowering).decisions[0]
        assert not operators(gm)
    said = REFUSED[name] if lowering != "op" or name != "addmm_rs0" else "no plain mm"
    assert decision.detail.startswith(f"decompose ({lowering} does not fit: ") and said in decision.detail


@pytest.mark.parametrize("lowering", ["kernels", "op"])
def test_a_matmul_between_two_collectives_goes_to_one(lowering: str) -> None:
    """No operator gathers and scatters: where one of the two is cheaper than parts for both, the other stays whole."""
    with fake_world(2) as group:
        record(group, usable())
        gm = trace(BY_NAME["ag_mm_rs"])
        first, second = run(gm, link(32.0), mode="force", lowering=lowering).decisions
        check_fakes(gm)
        assert len(operators(gm)) == 1
    assert first.detail.startswith(f"{lowering},") and first.verdict is Verdict.APPLIED
    assert "part of another" in second.detail


def test_maximum_is_never_fused() -> None:
    """torch's pass takes it, and its operator raises when it runs."""
    with fake_world(2) as group:
        record(group, usable())
        gm = trace(BY_NAME["mm_rs0_max"])
        (decision,) = run(gm, link(32.0), mode="force", lowering="symm_mem").decisions
        assert not operators(gm) and "'max' is not linear" in decision.detail


@pytest.mark.parametrize("lowering", ["kernels", "symm_mem"])
def test_without_availability_the_decision_says_what_to_call(lowering: str) -> None:
    with fake_world(2):
        gm = trace(BY_NAME["ag0_mm"])
        (decision,) = run(gm, link(32.0), mode="force", lowering=lowering).decisions
    assert "call inductor_passes.prepare_groups" in decision.detail and decision.detail.startswith("decompose (")


def test_auto_takes_the_cheapest_that_fits() -> None:
    """Without availability parts; with it the kernels where parts pay many latencies, and parts where they do not."""
    big = Program("big", lambda x, w: rs(x @ w), ((512, 64), (64, 64)))
    found = []
    for known in (None, Availability("", "unusable", "", "cpu"), usable()):
        with fake_world(2) as group:
            if known is not None:
                record(group, known)
            gm = trace(big)
            (decision,) = run(gm, link(32.0, alpha_ns=1e6), mode="force").decisions
            found.append((decision.detail.split(",")[0], decision.gain_ns))
    assert [name for name, _ in found] == ["decompose", "kernels", "kernels"]
    assert found[1][1] > found[0][1]


def test_the_gate_judges_by_the_cheapest_lowering() -> None:
    """In parts it would pay so many latencies that it is left whole; a kernel pays one."""
    big = Program("big", lambda x, w: rs(x @ w), ((512, 64), (64, 64)))
    found = []
    for known in (Availability(), usable()):
        with fake_world(2) as group:
            record(group, known)
            gm = trace(big)
            (decision,) = run(gm, link(32.0, alpha_ns=4e6), mode="auto").decisions
            found.append((decision.verdict, decision.reason))
            assert bool(operators(gm)) == (decision.verdict is Verdict.APPLIED), decision
    assert found == [(Verdict.REFUSED, Reason.NOT_PROFITABLE), (Verdict.APPLIED, Reason.PROFITABLE)]


class Mlp(nn.Module):
    """Norm and projections with bias up, without down, around a residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def train(rank: int, world: int, lowering: str, prepare: bool) -> tuple[list[str], float]:
    """A compiled tensor- and sequence-parallel MLP against default Inductor: decisions and the largest difference."""
    mesh = init_device_mesh(DEVICE, (world,), mesh_dim_names=("tp",))
    if prepare:
        inductor_passes.prepare_groups(mesh)
    torch.manual_seed(0)
    model = on_device(Mlp(16, 8 * world))
    plan = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(model, mesh, plan)
    x = on_device(torch.randn(4 * world, 16)[rank * 4 : rank * 4 + 4])
    ours = inductor_passes.options(
        async_tp="force", async_tp_lowering=lowering, memory_budget="unlimited", verify="strict"
    )
    outcomes = []
    details: list[str] = []
    for options in ({}, ours):
        torch._dynamo.reset()
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with collect(what_if=False) as reports:
            compiled = torch.compile(model, options=options, fullgraph=True)
            out = compiled(leaf)
            (out * torch.arange(out.numel(), device=out.device).view(out.shape) / out.numel()).sum().backward()
        outcomes.append([out.detach(), leaf.grad, *(p.grad.to_local() for p in model.parameters())])
        details += [d.detail for r in reports for p in r.passes if p.name == "async_tp" for d in p.decisions]
    worst = max(float((a - b).abs().max()) for a, b in zip(*outcomes))
    return details, worst


@pytest.mark.parametrize("world", [2, 4])
def test_a_compiled_mlp_trains_with_kernels(world: int, pair: Ranks) -> None:
    if world == 2:
        results = pair.run(train, "kernels", True)
    else:
        with Ranks(4, env=KERNEL_VARIABLES) as four:
            results = four.run(train, "kernels", True)
    assert all(details == results[0][0] for details, _ in results)
    assert all(worst < 1e-5 for _, worst in results)
    taken = [d for d in results[0][0] if d.startswith("kernels,")]
    assert len(taken) >= 3, results[0][0]
