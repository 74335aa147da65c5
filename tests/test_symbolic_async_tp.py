"""Matmuls beside collectives, with rows that are only known at run time: cut as fixed ones, right at every size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx

from inductor_passes.groups.availability import Availability, record
from inductor_passes.report import PassReport, Reason, Verdict
from tests.support.bucket_graphs import aten
from tests.support.symbolic_graphs import SymbolicProgram, at_sizes
from tests.support.world import fake_world
from tests.test_async_tp_pass import link, run, small

FLOAT8 = torch.float8_e4m3fn
OPERATORS = {"op": "inductor_passes.mm_scattered.default", "symm_mem": "symm_mem.fused_matmul_reduce_scatter.default"}


def scattered(world: str, symbolic: bool, multiple: int, form: str, columns: int = 48) -> SymbolicProgram:
    """``reduce_scatter(x @ w)`` along the rows, plain, with a bias, or scaled; done."""
    p = SymbolicProgram(symbolic)
    scaled = form == "scaled"
    x = p.rows(64, 32, multiple=multiple, dtype=FLOAT8 if scaled else torch.float32)
    w = p.input(columns, 32, dtype=FLOAT8) if scaled else p.input(32, columns)
    if form == "bias":
        y = p.call(aten.addmm.default, p.input(columns), x, w)
    elif scaled:
        w = p.call(aten.permute.default, w, [1, 0])
        y = p.call(aten._scaled_mm.default, x, w, p.input(), p.input(), None, None, torch.bfloat16)
    else:
        y = p.call(aten.mm.default, x, w)
    p.done(p.collective("reduce_scatter", y, world))
    return p


def passed(p: SymbolicProgram, **options: Any) -> tuple[torch.fx.GraphModule, PassReport]:
    gm = torch.fx.GraphModule(torch.nn.Module(), p.graph)
    guards = len(p.env.guards)
    report = run(gm, link(32.0), mode="force", parts=(2,), **options)
    assert not report.findings and report.rolled_back is None
    assert len(p.env.guards) == guards
    return gm, report


@pytest.mark.parametrize("form", ["plain", "bias"])
@pytest.mark.parametrize("multiple", [2, 4])
def test_rows_of_unknown_number_are_scattered_in_parts(form: str, multiple: int) -> None:
    """Along the rows where they are known to divide by ranks and parts, else along the columns."""
    with fake_world(2) as world:
        static, symbolic = (scattered(world, one, multiple, form) for one in (False, True))
        before = torch.fx.GraphModule(torch.nn.Module(), symbolic.graph)
        rest = (32,) if form == "plain" else (32, 48)
        sizes = [(rows, *rest) for rows in (64, 4, 20)]
        expected = [at_sizes(before, one, 2) for one in sizes]
        gm, report = passed(symbolic)
        assert small(gm) == small(passed(static)[0])
        (decision,) = report.decisions
        assert decision.verdict is Verdict.APPLIED
        for one, wanted in zip(sizes, expected):
            for e, f in zip(wanted, at_sizes(gm, one, 2), strict=True):
                for a, b in zip(e, f, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("lowering", ["op", "symm_mem"])
def test_one_operator_takes_rows_of_unknown_number(lowering: str) -> None:
    with fake_world(2) as world:
        record(world, Availability("", "", "", "cpu"))
        for symbolic in (False, True):
            gm, report = passed(scattered(world, symbolic, 2, "plain"), lowering=lowering)
            assert [d.detail.partition(",")[0] for d in report.decisions] == [lowering]
            (made,) = [n.target for n in gm.graph.nodes if "scatter" in str(n.target)]
            assert str(made) == OPERATORS[lowering]


def test_scaled_matmuls_of_symbolic_rows_are_cut_along_the_rows() -> None:
    """The columns have no parts that a scaled matmul takes. Torch's own operator computes no symbolic shapes."""
    with fake_world(2) as world:
        record(world, Availability("", "", "", "cpu"))
        gm, report = passed(scattered(world, True, 4, "scaled"), lowering="symm_mem")
        (decision,) = report.decisions
        assert decision.verdict is Verdict.APPLIED and "along dimension 0" in decision.detail
        assert "symm_mem does not fit" in decision.detail
        assert len([n for n in gm.graph.nodes if "_scaled_mm" in str(n.target)]) == 2


def test_rows_that_may_not_divide_stay_whole() -> None:
    """Columns that no scaled matmul takes in parts, and rows of which nothing is known but that ranks divide them."""
    with fake_world(2) as world:
        _, report = passed(scattered(world, True, 2, "scaled"))
        assert [d.verdict for d in report.decisions] == [Verdict.REFUSED]
        assert {d.reason for d in report.decisions} <= {Reason.RANGE, Reason.NO_INDEPENDENT_COMPUTE}


def test_what_is_gathered_is_multiplied_in_parts() -> None:
    with fake_world(2) as world:
        p = SymbolicProgram()
        x = p.collective("all_gather", p.rows(64, 32, multiple=2), world)
        p.done(p.call(aten.addmm.default, p.input(48), x, p.input(32, 48)))
        before = torch.fx.GraphModule(torch.nn.Module(), p.graph)
        sizes = [(rows, 48, 32) for rows in (64, 2, 10)]
        expected = [at_sizes(before, one, 2) for one in sizes]
        gm, report = passed(p)
        assert [d.verdict for d in report.decisions] == [Verdict.APPLIED] and small(gm).count("addmm") == 2
        for one, wanted in zip(sizes, expected):
            assert [t.shape for t in wanted[0]] == [t.shape for t in at_sizes(gm, one, 2)[0]]
            for a, b in zip(wanted[0], at_sizes(gm, one, 2)[0], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-3)
