"""Every small program: what is fused, why the rest is not, and all bits on all ranks, beside torch's own pass."""

from __future__ import annotations

import pytest
import torch

from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.report import PassReport, Verdict
from tests.support.async_tp_in_tree import in_tree_fused
from tests.support.async_tp_programs import BY_NAME, PROGRAMS, Program, inputs, run_ranks, trace
from tests.support.bucket_graphs import assert_same_bits, check_fakes, output_layouts
from tests.support.world import fake_world


def apply(gm: torch.fx.GraphModule, **options: object) -> PassReport:
    """Run the pass under the strict verifier."""
    settings, profile = PassConfig(verify="strict", memory_budget="unlimited"), CostProfile.default("cpu")
    one = AsyncTpPass(**{"mode": "force", **options})  # type: ignore[arg-type]
    done = run_passes(gm.graph, [one], settings, profile)
    gm.graph.lint()
    gm.recompile()
    return done.report.passes[0]


def fused_and_refused(report: PassReport) -> tuple[int, tuple[str, ...]]:
    decisions = [d for d in report.decisions if d.subject == "async_tp"]
    applied = sum(d.verdict is Verdict.APPLIED for d in decisions)
    return applied, tuple(d.reason.value for d in decisions if d.verdict is Verdict.REFUSED)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_program(program: Program) -> None:
    with fake_world(program.world):
        gm = trace(program)
        per_rank = [inputs(program, rank) for rank in range(program.world)]
        expected, layouts = run_ranks(gm, per_rank), output_layouts(gm)
        in_tree = in_tree_fused(gm).split(" of ")
        report = apply(gm)
        check_fakes(gm)
        assert output_layouts(gm) == layouts
        assert_same_bits(expected, run_ranks(gm, per_rank))
    assert fused_and_refused(report) == (program.fused, program.refused)
    assert (len(in_tree) == 2 and in_tree[0] == in_tree[1]) == (program.name in IN_TREE)


def test_there_are_enough_programs() -> None:
    assert len(PROGRAMS) == len(BY_NAME) >= 70


#: Programs whose collectives the in-tree pass fuses all.
IN_TREE = [
    "ag0_mm", "ag0_mm_3d", "ag1_mm_3d", "ag1_mm_4d", "ag2_mm_4d", "ag0_three_mms", "ag0_mm_and_output",
    "ag0_mm_and_sum", "ag0_gathered_twice", "ag0_bf16", "ag0_fp16", "ag1_fp64_4_ranks", "ag_odd",
    "dgrad_and_wgrad", "mm_rs0", "mm_rs1", "mm_rs0_avg", "mm_rs0_3d", "mm_rs1_3d", "mm_rs2_3d", "mm_rs1_batch_1",
    "wgrad_rs0", "mm_rs0_max", "mm_rs0_bf16", "swiglu_3d", "scaled_mm_rs0", "scaled_mm_rows_rs0",
    "scaled_mm_rs1_3d_batch_2", "ag0_prime_rows", "ag1_prime_rows_3d", "mm_rs0_prime", "mm_rs1_prime_batch",
]


def test_what_only_the_in_tree_pass_fuses() -> None:
    """A maximum is no sum: fused in tree, then an error at run time."""
    ours = {p.name for p in PROGRAMS if p.fused and not p.refused}
    assert set(IN_TREE) - ours == {"mm_rs0_max"}
    assert len(ours) > 3 * len(IN_TREE) - 5
