"""All-reduce with residual and RMSNorm: every way to write it, one kernel, the same numbers on real ranks."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import inductor_passes
from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.profile import CostProfile
from inductor_passes.groups.availability import Availability, record
from inductor_passes.report import Reason, Verdict
from inductor_passes.trace.collector import collect
from tests.support.async_tp_programs import Program, ar, inputs, on_gloo, trace
from tests.support.bucket_graphs import check_fakes, output_layouts
from tests.support.device import KERNEL_VARIABLES, on_device
from tests.support.ranks import Ranks
from tests.support.world import fake_world
from tests.test_async_tp_pass import link, run

T = torch.Tensor
ROWS, COLUMNS = (6, 20), (20,)


def plain(x: T, r: T, w: T) -> T:
    h = ar(x) + r
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def llama(x: T, r: T, w: T) -> tuple[T, T]:
    """Weight first, cast before it, the sum read elsewhere."""
    h = r + ar(x)
    f = h.float()
    return w * (torch.rsqrt((f * f).mean(-1, keepdim=True) + 1e-6) * f).to(h.dtype), h


def cast_last(x: T, r: T, w: T) -> tuple[T, T]:
    """Weight in float32, cast behind it."""
    h = ar(x) + r
    f = h.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()).to(h.dtype), h.sum(0)


def wide_residual(x: T, r: T, w: T) -> tuple[T, T]:
    """A residual stream in float32 beside half-precision matmuls."""
    h = ar(x).float() + r.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * w).to(x.dtype), h


def three_dimensional(x: T, r: T, w: T) -> T:
    return plain(x.view(2, 3, 20), r.view(2, 3, 20), w)


FORMS = {
    f"{fn.__name__} {str(dtype).removeprefix('torch.')}": Program(fn.__name__, fn, (ROWS, ROWS, COLUMNS), dtype=dtype)
    for fn in (plain, llama, cast_last, wide_residual, three_dimensional)
    for dtype in (torch.float32, torch.bfloat16)
}


def _over_columns(x: T, r: T, w: T) -> T:
    h = ar(x) + r
    return h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + 1e-5) * w


def _root_read(x: T, r: T, w: T) -> tuple[T, T]:
    h = ar(x) + r
    inverse = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
    return h * inverse * w, inverse


def _sum_read_before(x: T, r: T, w: T) -> tuple[T, T]:
    summed = ar(x)
    h = summed + r
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * w, summed


def _other_value(x: T, r: T, w: T) -> T:
    h = ar(x) + r
    return r * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def _matrix_weight(x: T, r: T, w: T) -> T:
    h = ar(x) + r
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * r


def _maximum(x: T, r: T, w: T) -> T:
    h = ar(x, "max") + r
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def _broadcast(x: T, r: T, w: T) -> T:
    h = ar(x) + w
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * w


NOT = (_over_columns, _root_read, _sum_read_before, _other_value, _matrix_weight, _maximum, _broadcast)


def priced(world: int, ns_per_byte: float, alpha_ns: float) -> CostProfile:
    """The test link for a world of any size."""
    profile = link(ns_per_byte, alpha_ns)
    group = replace(profile.groups[0], layout=GroupLayout(world, 1, world))
    return replace(profile, ranks_per_host=world, groups=(group,))


def fused(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [n for n in gm.graph.nodes if getattr(n.target, "_opname", "") == "all_reduce_residual_rms_norm"]


def compare(rank: int, world: int) -> dict[str, Any]:
    inductor_passes.prepare_groups(groups=[dist.group.WORLD])
    noise = random.Random(rank)
    found = {}
    for name, program in FORMS.items():
        gm = trace(program)
        values = inputs(program, rank)
        # The residual differs between ranks: nothing says that it must not.
        expected = on_gloo(gm, values)
        layouts = output_layouts(gm)
        for latency, two_shot in ((1e7, False), (0.0, True)):
            gm = trace(program)
            report = run(gm, priced(world, 1e3, latency), mode="force", lowering="kernels")
            (node,) = fused(gm)
            (decision,) = report.decisions
            assert node.args[-1] is (two_shot and world > 2), (name, decision)
            assert decision.verdict is Verdict.APPLIED and output_layouts(gm) == layouts, name
            check_fakes(gm)
            time.sleep(noise.random() * 0.02)
            for e, f in zip(expected, on_gloo(gm, values), strict=True):
                assert (e.shape, e.stride(), e.dtype) == (f.shape, f.stride(), f.dtype), name
                exact = e.dtype.itemsize < 4
                torch.testing.assert_close(f, e, rtol=2e-2 if exact else 1e-5, atol=2e-2 if exact else 1e-5)
            found[name, two_shot] = decision.detail
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_every_form(world: int) -> None:
    with Ranks(world, env=KERNEL_VARIABLES) as ranks:
        answers = ranks.run(compare)
    assert all(a == answers[0] for a in answers) and len(answers[0]) == 2 * len(FORMS)


def compile_block(rank: int, world: int) -> tuple[list[str], float, bool, int]:
    """torch's RMSNorm behind a row-parallel matmul, compiled with everything on, against default Inductor."""
    from torch._dynamo.utils import counters

    inductor_passes.prepare_groups(groups=[dist.group.WORLD])
    name = dist.group.WORLD.group_name
    norm = on_device(torch.nn.RMSNorm(16, eps=1e-5))
    torch.manual_seed(rank)
    x, left, right = (on_device(torch.randn(shape)) for shape in ((4, 16), (4, 8), (8, 16)))

    def block(x: T, left: T, right: T) -> tuple[T, T]:
        h = x + torch.distributed._functional_collectives.all_reduce(left @ right, "sum", name)
        return norm(h), h

    ours = inductor_passes.options(async_tp="force", async_tp_lowering="kernels", verify="strict")
    results, details = [], []
    with torch.no_grad(), collect(what_if=False) as reports:
        for options in ({}, ours):
            torch._dynamo.reset()
            compiled = torch.compile(block, options=options, fullgraph=True)
            results.append([compiled(x, left, right) for _ in range(3)][-1])
    details = [d.detail for r in reports for p in r.passes if p.name == "async_tp" for d in p.decisions]
    worst = max(float((a - b).abs().max()) for a, b in zip(*results))
    hits = counters["inductor"]["fxgraph_cache_hit"]
    return details, worst, all(a.stride() == b.stride() for a, b in zip(*results)), hits


@pytest.mark.ranks
def test_a_compiled_block_with_the_norm_of_torch(tmp_path: Path) -> None:
    """Twice: fresh processes that take the graph from the cache know its operators too."""
    environment = {**KERNEL_VARIABLES, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for warm in (False, True):
        with Ranks(2, env=environment) as ranks:
            for details, worst, same, hits in ranks.run(compile_block):
                assert worst < 1e-5 and same and (hits >= 2 or not warm), (warm, hits)
                assert len(details) == 1
                assert details[0].startswith("kernels, all-reduce with residual and RMSNorm of float32 in")


@pytest.mark.parametrize("fn", NOT, ids=lambda fn: fn.__name__.strip("_"))
def test_what_is_no_such_norm_stays(fn: Any) -> None:
    with fake_world(2) as group:
        record(group, Availability("", "", "", "cpu"))
        gm = trace(Program("no", fn, (ROWS, ROWS, COLUMNS)))
        run(gm, link(32.0), mode="force", lowering="kernels")
    assert not fused(gm)


READY = Availability("", "", "", "cpu")
SMALL, LARGE = priced(8, 1e-3, 1e6), priced(8, 1e6, 0.0)


@pytest.mark.parametrize(
    ("known", "profile", "options", "reason"),
    [
        (READY, SMALL, {"mode": "auto"}, Reason.PROFITABLE),
        (READY, LARGE, {"mode": "auto"}, Reason.NOT_PROFITABLE),
        (READY, LARGE, {"mode": "force", "lowering": "kernels"}, Reason.PROFITABLE),
        (Availability(), SMALL, {"mode": "auto"}, Reason.UNSUPPORTED),
        (replace(READY, device="cuda"), SMALL, {"mode": "auto"}, Reason.UNSUPPORTED),
        (READY, SMALL, {"mode": "auto", "lowering": "decompose"}, None),
    ],
)
def test_gate(known: Availability, profile: CostProfile, options: dict[str, Any], reason: Reason | None) -> None:
    """Half-precision messages on a slow link: sums travel in float32, which one collective does not."""
    with fake_world(8) as group:
        record(group, known)
        gm = trace(Program("gate", plain, (ROWS, ROWS, COLUMNS), dtype=torch.bfloat16))
        report = run(gm, profile, **options)
    assert len(fused(gm)) == (reason is Reason.PROFITABLE)
    found = [d for d in report.decisions if d.verdict is Verdict.APPLIED or d.subject == "async_tp/norm"]
    assert [d.reason for d in found] == ([] if reason is None else [reason])
    if known == Availability():
        assert "prepare_groups" in found[0].detail
