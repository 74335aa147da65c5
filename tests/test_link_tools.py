"""The benchmark's arithmetic and its crash isolation, without running it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import bench_link
import link_lab
import link_report

from inductor_passes.demo_model import Sizes, make_batch, make_model
from inductor_passes.link_model import Record


def _record(kind: str, wire: int, duration: int = 0) -> Record:
    return Record(0, kind, "g", 2, "intra", wire, wire, wire, duration)


def test_bandwidth_is_tuned_to_the_ratio() -> None:
    records = [_record("all_gather", 600), _record("reduce_scatter", 400), _record("barrier", 0)]
    # 1000 bytes in 2 x 1000 ns - 2 x 100 ns of latency.
    assert link_lab.tuned_bandwidth(records, 1_000, 2.0, 100) == pytest.approx(1_000 / 1_800e-9)
    with pytest.raises(ValueError, match="2 collectives of 600 ns latency alone"):
        link_lab.tuned_bandwidth(records, 1_000, 1.0, 600)


def test_head_and_tail() -> None:
    records = [_record("all_gather", 1, 7), _record("all_gather", 1, 8), _record("reduce_scatter", 1, 9)]
    assert link_lab.head_and_tail_ns(records) == (7, 9)
    assert link_lab.head_and_tail_ns([]) == (0, 0)


def test_peak_of_memory_events() -> None:
    changes = [(3, -50), (1, 100), (2, 30), (4, 60), (5, -140)]
    events: list[dict[str, Any]] = [{"name": "[memory]", "ts": ts, "args": {"Bytes": b}} for ts, b in changes]
    assert link_lab.peak_of_events([*events, {"name": "aten::mm", "ts": 0}]) == 140


def test_each_contender_compiles_code_of_its_own() -> None:
    model = make_model(Sizes(layers=1, dim=8, heads=2, hidden=8, vocab=16, batch=1, sequence=4))
    steps = [link_lab._own_code(model, name) for name in ("ours-0", "ours")]
    assert len({step.__code__ for step in steps}) == 2
    tokens, targets = make_batch(Sizes(vocab=16, batch=1, sequence=4), seed=1)
    assert steps[0](tokens, targets) == model(tokens, targets)


def _row(name: str, family: str, step: int, **changes: Any) -> dict[str, Any]:
    row = {
        "name": name,
        "title": name,
        "family": family,
        "virtual_ns": [step],
        "wall_ns": [2 * step],
        "exposed_ns": [1],
        "counts": {"all_gather": 3},
        "steady": True,
        "wire_bytes": {"all_gather": 2_000, "reduce_scatter": 1_000},
        "peak_bytes": 100,
        "worst_loss_difference": 0.0,
        "violations": 0,
    }
    return {**row, **changes}


def _results(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "job": {"ratio": 1.0, "latency_ns": 5, "sizes": vars(Sizes())},
        "torch": "2",
        "ranks": 2,
        "bytes_per_s": 1e6,
        "compute_alone_ns": 80.0,
        "communication_alone_ns": 90.0,
        "head_ns": 4,
        "tail_ns": 6,
        "parameter_wire_bytes": 1_000,
        "rows": list(rows),
        "failed": {"eager": "RuntimeError: no"},
    }


def test_ratios() -> None:
    results = _results(
        _row("inductor", "inductor", 200),
        _row("reorder", "in-tree", 160),
        _row("both", "in-tree", 150),
        _row("ours", "ours", 120),
    )
    assert link_report.ratios(results, "ours") == {
        "limit": 120 / 100,
        "bound": 120 / 90,
        "default": 120 / 200,
        "default wall": 120 / 200,
        "in-tree": 120 / 150,
    }
    assert link_report.errors(results) == [] == link_report.notes(results)
    with pytest.raises(KeyError, match="ours-0"):
        link_report.ratios(results, "ours-0")
    for table in (link_report.table(results), link_report.summary(results)):
        console = Console(file=io.StringIO(), width=200)
        console.print(table)
        assert isinstance(console.file, io.StringIO) and "ours" in console.file.getvalue()
    assert "1.0 MB/s" in link_report.facts(results)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steady": False}, "changed between steps"),
        ({"wire_bytes": {"all_gather": 2_000, "reduce_scatter": 500}}, "sent 500 bytes of gradients"),
        ({"wire_bytes": {"all_gather": 900, "reduce_scatter": 1_000}}, "sent 900 bytes of parameters"),
        ({"worst_loss_difference": 1e-3}, "losses differ by up to 1.0e-03"),
    ],
)
def test_invalid_rows_are_named(changes: dict[str, Any], message: str) -> None:
    (error,) = link_report.errors(_results(_row("ours", "ours", 1, **changes)))
    assert message in error
    assert not link_report.notes(_results(_row("ours", "ours", 1)))
    assert "3 real transfers" in link_report.notes(_results(_row("ours", "ours", 1, violations=3)))[0]


def test_a_contender_that_kills_the_job_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []

    def torchrun(folder: str, ranks: int, timeout_s: int) -> tuple[int, str]:
        names = json.loads(Path(folder, "job.json").read_text())["contenders"]
        tried.append(names)
        if "bucket" in names:
            Path(folder, "journal.jsonl").write_text(
                json.dumps({"phase": "measuring", "contender": "inductor"})
                + "\n"
                + json.dumps({"phase": "compiling", "contender": "bucket"})
                + "\n"
            )
            return -6, "Aborted"
        Path(folder, "results.json").write_text(json.dumps({"rows": [], "failed": {"eager": "no"}}))
        return 0, ""

    monkeypatch.setattr(bench_link, "_torchrun", torchrun)
    console = Console(file=io.StringIO())
    results = bench_link.run_job({"contenders": ["inductor", "bucket", "eager"]}, 2, 1, console)
    assert tried == [["inductor", "bucket", "eager"], ["inductor", "eager"]]
    assert results["failed"] == {"eager": "no", "bucket": "took the job down (status -6) while compiling"}


def test_the_reference_must_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_link, "_torchrun", lambda *_: (1, "no gloo"))
    with pytest.raises(RuntimeError, match="status 1 while starting inductor"):
        bench_link.run_job({"contenders": ["inductor"]}, 2, 1, Console(file=io.StringIO()))
