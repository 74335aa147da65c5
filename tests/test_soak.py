"""A short soak: one kill, a restart from the last common checkpoint, and figures that can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import LIMIT_S, environment
from tools.fuzzing import soak

pytestmark = pytest.mark.ranks


def test_a_killed_rank_and_a_restart(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "tools.fuzzing.soak", "--cycles", "2", "--minutes", "4", "--kill-every", "1"]
    command += ["--codegen", "aot_eager", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    figures = json.loads(out.read_text())["figures"]
    assert figures["killed"] >= 1 and figures["generations"] == figures["killed"] + 1
    assert figures["losses"] and figures["graphs_planned"] >= 8
    assert figures["different_losses"] == figures["different_weights"] == 0


def record(cycle: int, ours: int, graphs: int) -> dict[str, Any]:
    """What a rank says of a cycle in which the pass without us came first."""
    return {
        "cycle": cycle,
        "first": "without us",
        "losses": 3,
        "frames_compiled": 2,
        "graphs_planned": 4,
        "different_losses": 0,
        "different_weights": 0,
        **{f"ours {which}": ours * (cycle + 1) for which in ("with us", "without us")},
        "graphs without us": graphs * 2 * cycle,
        "graphs with us": graphs * (2 * cycle + 1),
        "resident with us": 1024,
        "resident without us": 1024,
    }


def figures_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    one = soak.Soak(Path(), 1, 0.0, 0, "inductor", 0, generations=[[records]])
    return soak.summary(one, 60.0)


def test_what_stays_alive_is_found() -> None:
    assert soak.verdict(figures_of([record(i, 0, 0) for i in range(5)])) == []
    # Torch keeps as many graphs without us: not ours.
    assert soak.verdict(figures_of([record(i, 0, 4) for i in range(5)])) == []
    leaking = [record(i, 0, 0) | {"graphs with us": 2 * i + 2, "graphs without us": 2 * i} for i in range(5)]
    assert any("graphs stay alive" in w for w in soak.verdict(figures_of(leaking)))
    different = [record(0, 0, 0) | {"different_losses": 1}]
    assert soak.verdict(figures_of(different)) == ["different_losses: 1"]
    assert soak.verdict(figures_of([])) == ["nothing was planned or trained"]
