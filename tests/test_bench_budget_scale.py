"""The simulated budgets: a case with one contender of each kind, and what the page says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from inductor_passes.cost.profile import CostProfile
from tests.support.world import fake_world
from tools.benchmarks import budget_scale as bench
from tools.benchmarks import main
from tools.link.worker import REFERENCE

CASE = bench.Case("tiny", 8, 64)


def test_a_case_is_judged_by_one_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SAVED", (50,))
    monkeypatch.setattr(bench, "IN_TREE_RUNS", bench.IN_TREE_RUNS[:1])
    monkeypatch.setattr(bench, "BUDGETS", ("-10%", "={peak}B", "unlimited"))
    profile = tmp_path / "profile.json"
    CostProfile.default(bench.DEVICE).save(profile)
    with fake_world(CASE.ranks):
        found = bench.Contest(CASE, profile).run(layers=1)
    assert not found.failed
    # Gathered again or kept, with all, half or with checkpointed blocks: the order as it came, in-tree's, and ours.
    assert sum(m.today for m in found.everyone) == 2 * 3 * 2
    assert sum(not m.today and not m.ours for m in found.everyone) == 2 * 3
    ours = {m.title: m for m in found.everyone if m.ours}
    default = next(m for m in found.everyone if m.name == REFERENCE)
    within = next(m for title, m in ours.items() if '"=' in title)
    assert within.peak_bytes <= default.peak_bytes and within.step_ns < default.step_ns
    assert ours['ours, "unlimited"'].step_ns <= within.step_ns
    assert ours['ours, "-10%"'].peak_bytes < default.peak_bytes
    assert found.cost is not None and found.cost.joint_nodes > 100 and found.compute_ns and found.sent_ns
    text = "\n".join(bench.page([found], 1))
    assert f"## tiny, 8 ranks, 64 tokens per rank\n\nCompute alone {found.compute_ns / 1e6:.1f} ms" in text
    assert f"The joint graph has {found.cost.joint_nodes} nodes." in text
    assert "| default Inductor, 100% saved |" in text


def test_without_a_reference_a_section_says_why() -> None:
    found = bench.Found(CASE, failed={bench.DEFAULT: "ValueError: no"})
    assert bench.section(found)[-1] == f"- {bench.DEFAULT} failed: ValueError: no"


def test_ranks_fill_hosts() -> None:
    result = CliRunner().invoke(main.app, ["budget-scale", "--ranks", "12"])
    assert result.exit_code == 2 and "multiple of 8" in result.output
