"""The benchmarks' shared parts and their entry, without measuring anything."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.profile import CostProfile
from tests.support.processes import LIMIT_S, environment
from tools.benchmarks import async_tp as bench_async_tp
from tools.benchmarks import compile as bench_compile
from tools.benchmarks import main as bench
from tools.benchmarks import redistribute as bench_redistribute
from tools.benchmarks import scale as bench_scale
from tools.benchmarks import whole_pass
from tools.benchmarks.scale import Assumptions, Cell, ClusterProfile
from tools.generate import readme as gen_readme
from tools.shared import plot as bench_plot
from tools.shared import record as bench_record

WORLD = tuple(range(64))
ACROSS = tuple(range(0, 64, 8))
WITHIN = tuple(range(8))


def test_every_subcommand_explains_itself() -> None:
    runner = CliRunner()
    listed = runner.invoke(bench.app, ["--help"]).output
    for name in ("link", "summary", "plan", "compile", "async-tp", "redistribute", "memory", "gpu", "scale"):
        assert name in listed
        assert runner.invoke(bench.app, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["link", "--model", "gpt"], "gpt"),
        (["plan", "--scenario", "gpt"], "gpt"),
        (["scale", "--ranks", "12"], "multiple of 8"),
        (["compile", "--budget", "1"], "unlimited"),
        (["compile", "--whole-shape", "gpt"], "gpt"),
        (["async-tp", "--mode", "on"], "force"),
        (["redistribute", "--mesh", "3"], "expected 8"),
        (["reach", "--mesh", "3"], "2,2,2"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_gpu_benchmark_says_so() -> None:
    result = CliRunner().invoke(bench.app, ["gpu"])
    assert result.exit_code == 0
    assert "skipped: torch sees no GPU" in result.output


def test_a_result_names_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", "scale", "--out", str(tmp_path), "--at", "0"])
    monkeypatch.setattr(bench_record, "_git", lambda *_: None)
    monkeypatch.setattr(bench_record, "provenance", bench_record.provenance.__wrapped__)
    page = bench_record.write("x", "Title", ["body"], {"a": 1}, lambda path: bench_plot.bars(
        path, ["g"], {"s": [1.0]}, "y"
    ), folder=tmp_path)
    text = page.read_text()
    assert text.startswith("# Title\n\n`tools/bench scale --at 0`, ")
    assert str(tmp_path) not in text and "commit unknown" in text and f"torch {torch.__version__}" in text
    stored = json.loads((tmp_path / "x.json").read_text())
    assert stored["data"] == {"a": 1} and stored["provenance"]["commit"] == "unknown"
    assert "CPU cores" in stored["provenance"]["machine"]["cores"]
    assert "<svg" in (tmp_path / "x.svg").read_text()
    # What people wrote stays, the rest is written again.
    page.write_text(text + "\n## Findings\n\nmine\n")
    bench_record.write("x", "Title", ["other"], {}, folder=tmp_path)
    text = page.read_text()
    assert "body" not in text and "other" in text and text.endswith("## Findings\n\nmine\n")


def test_charts_are_the_same_bytes_for_the_same_figures(tmp_path: Path) -> None:
    for name in ("a", "b"):
        panels = {"p": {"s": [(1.0, 2.0), (2.0, 3.0)]}, "q": {"s": [(1.0, 1.0)]}}
        bench_plot.curves(tmp_path / name, panels, "x", "y")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_names_that_do_not_exist_are_refused() -> None:
    assert bench_record.chosen(["a"], ["a", "b"], "thing") == ["a"]
    assert bench_record.chosen(None, ["a", "b"], "thing") == ["a", "b"]
    with pytest.raises(typer.BadParameter, match="thing c is not known; expected some of a, b"):
        bench_record.chosen(["a", "c"], ["a", "b"], "thing")


def test_planning_rows() -> None:
    rows = bench_compile.planning(["fsdp_forward"], [60, 120], "0")
    assert rows[0]["exponent"] is None and rows[1]["tasks"] > rows[0]["tasks"]
    assert all(r["plan_over_bound"] <= r["input_over_bound"] and r["peak_over_input"] <= 1 for r in rows)
    assert bench_compile.plan_cells(rows[0])[0] == "fsdp_forward"


def test_whole_pass_rows() -> None:
    rows = whole_pass.whole_passes(["tiny"], [80], ["0", "unlimited"], lambda row: None)
    assert [row["budget"] for row in rows] == ["0", "unlimited"]
    # Ten parameters, gathered and reduced; what is so small travels together where memory allows it.
    assert rows[0]["nodes"] >= 80 and rows[1]["collectives"] < rows[0]["collectives"] <= 20
    assert set(rows[0]["passes_ns"]) == {"redistribute", "bucket", "exchange", "reorder"}
    row = {**rows[0], "seconds": 1.5, "makespan_ns": 3, "bound_ns": 2, "passes_ns": {"a": 1, "bucket": 2, "reorder": 5}}
    collectives = str(row["collectives"])
    cells = ["tiny", str(row["nodes"]), "0", "1.50", collectives, "1.5000", "reorder 62%, bucket 25%"]
    assert whole_pass.cells(row) == cells


def test_compile_rows() -> None:
    default = {"layers": 2, "compiler": "default", "cpu_s": 3.0, "functions": 24, "wall_s": 4.0}
    default |= {"passes_s": {}, "peak_bytes": 100, "warm_s": 2.0}
    ours = {**default, "compiler": "ours", "passes_s": {"bucket": 0.5, "reorder": 1.5}, "peak_bytes": 110}
    ours |= {"cpu_s": 3.3, "spread_s": [3.1, 4.0], "warm_s": 2.1}
    cells = bench_compile.compile_cells(ours, default, 7)
    times = ["3.3", "3.1-4.0", "1.100", "2.1", "1.050"]
    assert cells == ["2", "7", "ours", *times, "24", "4.0", "2.00", "50.0%", "reorder 1.50", "0", "1.100"]


def test_compilations_take_turns() -> None:
    """The run of median processor time counts, with all that was measured of it; warm runs have their own median."""
    order: list[bool] = []

    def compiling(layers: int, ours: bool, timeout_s: int) -> dict[str, Any]:
        order.append(ours)
        run = order.count(ours)
        cpu_s, warm_s = {1: (5.0, 3.0), 2: (9.0, 1.0), 3: (7.0, 4.0)}[run]
        return {"layers": layers, "cpu_s": cpu_s + ours, "warm_s": warm_s, "run": run}

    with mock.patch.object(bench_compile, "compiling", compiling):
        default, ours = bench_compile.turns(2, 3, 60)
    assert order == [False, True] * 3
    assert default == {"layers": 2, "cpu_s": 7.0, "warm_s": 3.0, "run": 3, "spread_s": [5.0, 9.0]}
    assert ours == {"layers": 2, "cpu_s": 8.0, "warm_s": 3.0, "run": 3, "spread_s": [6.0, 10.0]}


def test_redistribution_rows() -> None:
    (row, *_) = bench_redistribute.summary([{"default": 4, "exact": 2, "best": 2}], "exact"), None
    assert (row["pairs"], row["improved"], row["median"], row["worst_against_best"]) == (1, 1, 2.0, 1.0)


def test_async_tp_rows() -> None:
    times = {"virtual_ms": 4.0, "wall_ms": 6.0, "exposed_ms": 1.0}
    row = {"case": "c", "difference": 0.0, "inductor": times, "planned": times}
    cells = bench_async_tp.cells({**row, "async_tp": {**times, "virtual_ms": 2.0}})
    assert cells == ["c", "4.0", "1.0", "4.0", "2.0", "1.0", "2.00", "1.00", "0e+00"]


@pytest.mark.parametrize("world", [8, 64, 512, 4096])
def test_groups_grow_with_the_cluster(world: int) -> None:
    profile = ClusterProfile.of(world, Assumptions())
    assert profile.layout(WORLD) == GroupLayout(world, world // 8, 8)
    assert profile.layout(ACROSS) == GroupLayout(world // 8, world // 8, 1)
    assert profile.layout(WITHIN) == GroupLayout(8, 1, 8)


def test_a_captured_collective_costs_what_it_would_in_the_cluster() -> None:
    profile, plain = ClusterProfile.of(512, Assumptions()), CostProfile.default("cuda")
    whole, ranks = 2**30, tuple(range(512))
    # Captured with 64 ranks, a shard is larger than it would be; the whole is the same.
    captured, real = whole // 64, whole // 512
    gathered = profile.communication_ns("all_gather", captured, whole, WORLD)
    assert gathered == plain.communication_ns("all_gather", real, whole, ranks)
    scattered = profile.communication_ns("reduce_scatter", whole, captured, WORLD)
    assert scattered == plain.communication_ns("reduce_scatter", whole, real, ranks)
    assert profile.communication_ns("all_reduce", whole, whole, WITHIN) == plain.communication_ns(
        "all_reduce", whole, whole, WITHIN
    )


def test_assumptions_move_prices_the_right_way() -> None:
    base = ClusterProfile.of(512, Assumptions())
    ask = ("all_gather", 2**21, 2**27, WORLD)
    assert ClusterProfile.of(512, Assumptions(bandwidth=2.0)).communication_ns(*ask) < base.communication_ns(*ask)
    assert ClusterProfile.of(512, Assumptions(latency=3.0)).communication_ns(*ask) > base.communication_ns(*ask)
    slow = ClusterProfile.of(512, Assumptions(compute=0.5))
    once, twice = (p.compute_ns(1e12, 0, "bfloat16", 0) for p in (base, slow))
    assert twice == pytest.approx(2 * once, rel=1e-6)
    assert Assumptions(latency=3.0).title() == "latency x 3" and Assumptions().title() == "as stated"


def test_depth_is_a_line() -> None:
    assert bench_scale.line((2, 4), (10.0, 16.0), 32) == 100.0


def test_the_better_in_tree_variant_counts() -> None:
    cell = Cell("m", 8, Assumptions(), bench_scale.INPUT, 4e6, 2e6, 1e6)
    first, second = bench_scale.IN_TREE_SHOWN
    cells = [
        cell,
        dataclasses.replace(cell, contender=first, step_ns=3e6),
        dataclasses.replace(cell, contender=second, step_ns=1e6, error="E: no"),
        dataclasses.replace(cell, contender=bench_scale.OURS_BUCKETED, step_ns=2e6),
    ]
    assert bench_scale.shown(cells)[3:] == ["4.0", "2.0", "3.0", "2.0", "2.0", "2.0", "2.000", "1.500", "2.000"]


def test_the_readme_quotes_the_results() -> None:
    """What ``tools/gen readme`` writes is what stands there."""
    text = gen_readme.README.read_text(encoding="utf-8")
    assert gen_readme.written(text, *gen_readme.sources()) == text
    with pytest.raises(ValueError, match="has no block between"):
        gen_readme.written("no markers", *gen_readme.sources())


def test_schedules_on_the_loopback_are_planned() -> None:
    """Found on the first GPU: ours waited for the seven other ranks, which are this one, and was not planned.

    Nor could ranks compare what they had measured: the loopback moved no objects.
    """
    code = (
        "import json, sys, torch, torch.distributed as dist\n"
        "from tools.benchmarks import gpu, loopback_group\n"
        "from inductor_passes.cost.profile import CostProfile\n"
        "from inductor_passes.models import LlamaConfig\n"
        "loopback_group.start(gpu.RANKS)\n"
        "known = [None] * gpu.RANKS\n"
        "dist.all_gather_object(known, 'measured')\n"
        "assert known == ['measured'] * gpu.RANKS\n"
        "CostProfile.default('cpu').save(sys.argv[1])\n"
        "(row,) = gpu.schedules(LlamaConfig(layers=1), torch.device('cpu'), sys.argv[1], 1, ('ours',), ())\n"
        "assert len(gpu.cells(row, row)) == len(gpu.SCHEDULE_HEADER)\n"
        "print(json.dumps(row))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, f"{folder}/profile.json"]
        found = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert found.returncode == 0, found.stdout + found.stderr
    ours = json.loads(found.stdout.splitlines()[-1])
    # Twelve parameters' gathers, and as many reductions, in a few messages.
    assert len(ours["collectives"]) == 2 and sum(ours["collectives"]) < 12
    assert ours["predicted_ms"] > 0 and ours["ms"] and not ours["undone"]


def test_kernel_benchmarks_run_in_the_interpreter() -> None:
    """Their kernels and comparisons; times in the interpreter mean nothing."""
    pytest.importorskip("triton")
    code = (
        "import torch\n"
        "from tools.benchmarks import kernels as bench_kernels\n"
        "def timed(run): run(); return 1.0\n"
        "cpu = torch.device('cpu')\n"
        "a = bench_kernels.gemms(cpu, timed, 1, ((40, 48, 36),), (torch.float32, torch.bfloat16))\n"
        "b = bench_kernels.norms(cpu, timed, 1, (1,), (1, 3), 64)\n"
        "assert [len(r) for r in a] == [7, 7] and [len(r) for r in b] == [7, 7]\n"
        "if __name__ == '__main__': print(bench_kernels.check(cpu, (2,)))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "2 ranks that share one device: equal" in found.stdout
