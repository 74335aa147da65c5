"""reduce_scatters as exchanges and sums: when, with which bits, within which budget, and on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.fx
from expecttest import assert_expected_inline

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.report import PassReport, Reason, Verdict
from inductor_passes.rewrites.scatter_by_exchange import ScatterByExchange
from tests.support.async_tp_programs import Program, inputs, rs, run_ranks, trace
from tests.support.bucket_graphs import assert_same_bits, check_fakes, output_layouts
from tests.support.world import fake_world


def link(ranks: int, scatter: float, exchange: float | None) -> CostProfile:
    """A measured link with these ns per byte; None: not measured."""
    costs = tuple(
        CollectiveCost(kind, 1_000.0, per_byte, 100.0, 0.0)
        for kind, per_byte in (("reduce_scatter", scatter), ("all_to_all", exchange))
        if per_byte is not None
    )
    group = GroupCost(GroupLayout(ranks, 1, ranks), "test", "wire", costs)
    return replace(CostProfile.default("cpu", ranks), measured=True, groups=(group,))


def run(gm: torch.fx.GraphModule, profile: CostProfile, tier: str = "exact", budget: str = "unlimited") -> PassReport:
    config = PassConfig(verify="strict", memory_budget=budget)
    done = run_passes(gm.graph, [ScatterByExchange(tier)], config, profile)  # type: ignore[arg-type]
    gm.graph.lint()
    gm.recompile()
    return done.report.passes[0]


def collectives(gm: torch.fx.GraphModule) -> str:
    named = [getattr(n.target, "_opname", "") for n in gm.graph.nodes]
    return " ".join(n for n in named if "scatter" in n or "all_to_all" in n or n == "wait_tensor")


def _chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rs(x * 2).relu(), rs(y + 1) * 3


SLOW = link(2, 4e4, 2e4)
SHAPES = ((8, 6), (16, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("world", [2, 4])
def test_equal_on_all_ranks(dtype: torch.dtype, world: int) -> None:
    program = Program("two", _chain, SHAPES, dtype=dtype, world=world)
    with fake_world(world):
        gm = trace(program)
        per_rank = [inputs(program, rank) for rank in range(world)]
        expected, layouts = run_ranks(gm, per_rank), output_layouts(gm)
        report = run(gm, link(world, 4e4, 2e4), "reassociate")
        check_fakes(gm)
        assert output_layouts(gm) == layouts
        assert_same_bits(expected, run_ranks(gm, per_rank))
    assert [d.verdict for d in report.decisions] == [Verdict.APPLIED] * 2
    assert_expected_inline(collectives(gm), """all_to_all_single wait_tensor all_to_all_single wait_tensor""")


def test_average() -> None:
    program = Program("average", lambda x: rs(x, 0, "avg") + 1, ((8, 6),))
    with fake_world(2):
        gm = trace(program)
        per_rank = [inputs(program, rank) for rank in range(2)]
        expected = run_ranks(gm, per_rank)
        assert run(gm, SLOW).changed
        assert_same_bits(expected, run_ranks(gm, per_rank))


def test_any_two_terms_add_up_to_the_same_bits() -> None:
    """With two ranks every order of a sum is the same sum: random values, not small integers."""
    program = Program("two", _chain, SHAPES)
    with fake_world(2):
        gm = trace(program)
        generator = torch.Generator().manual_seed(0)
        per_rank = [[torch.randn(shape, generator=generator) * 1e3 for shape in SHAPES] for _ in range(2)]
        expected = run_ranks(gm, per_rank)
        assert run(gm, SLOW).changed
        assert_same_bits(expected, run_ranks(gm, per_rank))


@pytest.mark.parametrize(
    ("fn", "profile", "tier", "world", "reasons"),
    [
        (_chain, link(2, 2e4, 2e4), "exact", 2, []),  # nothing to gain: no candidate
        (_chain, CostProfile.default("cpu"), "reassociate", 2, []),
        (_chain, link(2, 4e4, None), "exact", 2, []),  # a measured reduction and an exchange from the datasheet
        (_chain, CostProfile.default("cuda"), "reassociate", 2, []),
        (_chain, SLOW, "off", 2, [Reason.DISABLED] * 2),
        (_chain, link(4, 4e4, 2e4), "exact", 4, [Reason.NUMERICS] * 2),
        (lambda x, y: (rs(x, 0, "max"), rs(y)), SLOW, "exact", 2, [Reason.PROFITABLE]),
    ],
)
def test_when(fn: Callable[..., object], profile: CostProfile, tier: str, world: int, reasons: list[Reason]) -> None:
    with fake_world(world):
        gm = trace(Program("when", fn, SHAPES, world=world))
        before = collectives(gm)
        report = run(gm, profile, tier)
    assert [d.reason for d in report.decisions] == reasons
    assert report.changed == (Reason.PROFITABLE in reasons)
    assert report.changed or collectives(gm) == before
    assert all(d.setting for d in report.decisions if d.verdict is Verdict.REFUSED)


def test_whole_numbers_may_be_summed_in_any_order() -> None:
    with fake_world(4):
        gm = trace(Program("whole", _chain, SHAPES, dtype=torch.int32, world=4))
        assert [d.verdict for d in run(gm, link(4, 4e4, 2e4)).decisions] == [Verdict.APPLIED] * 2


def _late(x: torch.Tensor, y: torch.Tensor, big: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first reduction runs where memory is full, the second where a large tensor is gone."""
    full = big * 2
    total = rs(x * 2).sum() + full.sum()
    return total, rs(y * total)


@pytest.mark.parametrize(
    ("budget", "copies", "applied"), [("unlimited", False, 2), ("0", False, 1), ("unlimited", True, 2), ("0", True, 2)]
)
def test_what_the_budget_does_not_hold_stays(budget: str, copies: bool, applied: int) -> None:
    """Where the library reduces a copy, as gloo does, what arrives takes no more than that copy."""
    program = Program("late", _late, ((64, 64), (64, 32), (96, 64)))
    with fake_world(2), mock.patch.object(_torch, "copies_messages", return_value=copies):
        gm = trace(program)
        per_rank = [inputs(program, rank) for rank in range(2)]
        expected = run_ranks(gm, per_rank)
        report = run(gm, SLOW, budget=budget)
        assert_same_bits(expected, run_ranks(gm, per_rank))
    assert sum(d.verdict is Verdict.APPLIED for d in report.decisions) == applied, report.decisions
    refused = [d.reason for d in report.decisions if d.verdict is Verdict.REFUSED]
    assert refused == [Reason.MEMORY_BUDGET] * (2 - applied)
