"""reduce_scatters as exchanges and sums: when, with which bits, within which budget, and on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.fx
from expecttest import assert_expected_inline

from inductor_passes import _torch, verify
from inductor_passes.config import PassConfig
from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.report import PassReport, Reason, Verdict
from inductor_passes.rewrites.scatter_by_exchange import ScatterByExchange
from tests.support.async_tp_programs import Program, inputs, rs, run_ranks, trace
from tests.support.bucket_graphs import assert_same_bits, check_fakes, output_layouts
from tests.support.value_forgeries import Rewritten
from tests.support.world import fake_world

aten = torch.ops.aten


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


def _sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of what is a sum itself: of shared weights, of a bias, of an average, padded and merged."""
    twice = rs(x * 2 + (y + x)), rs(y - x, 0, "avg")
    merged = rs(torch.cat([(x + y)[:4], y[4:] + x[4:], torch.zeros_like(x)[:2], x[:2] + (x[:2] + y[:2])]))
    return *twice, merged, rs(rs(x + y, 0, "avg") + y[:4]) if x.shape[0] == 8 else merged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_may_be_a_sum(dtype: torch.dtype) -> None:
    """Found: the verifier took all sums apart, and more than two terms have an order."""
    program = Program("sums", _sums, ((8, 6), (8, 6)), dtype=dtype)
    with fake_world(2):
        gm = trace(program)
        generator = torch.Generator().manual_seed(0)
        shapes = ((8, 6), (8, 6))
        per_rank = [[(torch.randn(s, generator=generator) * 1e3).to(dtype) for s in shapes] for _ in range(2)]
        expected = run_ranks(gm, per_rank)
        report = run(gm, SLOW)
        assert [d.verdict for d in report.decisions] == [Verdict.APPLIED] * 5
        assert_same_bits(expected, run_ranks(gm, per_rank))


Add = Callable[[torch.fx.Node, torch.fx.Node], torch.fx.Node]


@pytest.mark.parametrize(
    "total",
    [
        lambda add, x, y: add(add(add(x[0], y[0]), x[1]), y[1]),
        lambda add, x, y: add(add(x[0], x[1]), add(y[0], y[1])),
        lambda add, x, y: add(add(x[0], y[0]), add(x[0], y[0])),
        lambda add, x, y: add(add(x[0], y[0]), add(x[1], y[0])),
    ],
)
def test_only_what_is_added_last_may_be_in_another_order(
    total: Callable[[Add, list[torch.fx.Node], list[torch.fx.Node]], torch.fx.Node],
) -> None:
    with fake_world(2):
        gm = trace(Program("sum", lambda x, y: rs(x + y).relu(), ((8, 6), (8, 6))))
        before = verify.snapshot(gm.graph)
        assert run(gm, SLOW).changed
        one = Rewritten(gm, before)
        (inner, last), (sent,) = one.calls(aten.add.Tensor), one.calls(_all_to_all())
        at = last.prev
        parts = []
        for term in inner.args:
            at = one.insert(at, sent.target, term, *sent.args[1:])
            at = one.insert(at, torch.ops._c10d_functional.wait_tensor.default, at)
            parts.append([one.insert(at, aten.slice.Tensor, at, 0, 4 * rank, 4 * rank + 4) for rank in (1, 0)][::-1])
        at = last

        def add(a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node:
            nonlocal at
            at = one.insert(at, aten.add.Tensor, a, b)
            return at

        made = total(add, *parts)
        last.replace_all_uses_with(made, delete_user_cb=lambda user: user.target is aten.relu.default)
        gm.graph.eliminate_dead_code()
        found = one.findings()
    assert {f.rule for f in found} == {"value-changed"}, found


def _all_to_all() -> object:
    return torch.ops._c10d_functional.all_to_all_single.default


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
