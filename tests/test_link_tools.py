"""The benchmark's arithmetic and its crash isolation, without running it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console

import inductor_passes
from inductor_passes.config import PassConfig
from inductor_passes.emulation.link_model import Record
from inductor_passes.models import LlamaConfig, language_batch, language_model
from inductor_passes.report import Swap, SwapOutcome, Timing
from inductor_passes.schedule.problem import INPUT, Kind, Problem, Storage, Task
from tools.benchmarks import budgets as bench_budgets
from tools.benchmarks import link as bench_link
from tools.link import lab as link_lab
from tools.link import models as link_models
from tools.link import narrower, retiming
from tools.link import report as link_report
from tools.link import sweep as link_sweep
from tools.link import worker as link_worker
from tools.link.prediction import measured_stalls, predicted_peak
from tools.shared.launch import OUT_OF_TIME


def _record(kind: str, wire: int, duration: int = 0) -> Record:
    return Record(0, kind, "g", 2, "intra", wire, wire, wire, duration)


def test_the_link_is_tuned_to_the_step() -> None:
    records = [_record("all_gather", 600), _record("reduce_scatter", 400), _record("barrier", 0)]
    # Communication takes 2 x 1000 ns: two collectives with 100 ns of latency each, 1000 bytes in what is left.
    latency_ns, bytes_per_s = link_lab.tuned(records, 1_000, link_lab.LinkRate("x", 2.0, 0.1))
    assert latency_ns == 100
    assert bytes_per_s == pytest.approx(1_000 / 1_800e-9)
    with pytest.raises(ValueError, match="without collectives"):
        link_lab.tuned(records[2:], 1_000, link_lab.RATES["balanced"])
    with pytest.raises(ValueError, match="latency_share=1"):
        link_lab.LinkRate("x", 1.0, 1.0)


def test_contenders_of_a_layout() -> None:
    fsdp, tp = link_models.LAYOUTS["fsdp"], link_models.LAYOUTS["tp"]
    assert bench_link.contenders_of(["fsdp2", "ours"], fsdp) == ["inductor", "fsdp2", "ours"]
    assert bench_link.contenders_of(["fsdp2", "ours", "inductor"], tp) == ["ours", "inductor"]
    # What is kept after forward is a question only where parameters are sharded.
    assert bench_link.contenders_of(["ours-keep", "ours-auto"], fsdp) == ["inductor", "ours-keep", "ours-auto"]
    assert bench_link.contenders_of(["ours-keep", "ours"], tp) == ["inductor", "ours"]
    # Settings of ours are settings: a misspelt one would raise here.
    for contender in link_lab.CONTENDERS.values():
        if contender.family == "ours":
            PassConfig(**contender.settings)


def test_sizes_of_a_layout() -> None:
    config = link_models.LAYOUTS["moe"].sized({"layers": 1})
    assert (config.layers, config.experts, config.capacity) == (1, 4, 512)


def test_head_and_tail() -> None:
    records = [_record("all_gather", 1, 7), _record("all_gather", 1, 8), _record("reduce_scatter", 1, 9)]
    assert link_lab.head_and_tail_ns(records) == (7, 9)
    assert link_lab.head_and_tail_ns([]) == (0, 0)


def test_peak_of_memory_events() -> None:
    changes = [(3, -50), (1, 100), (2, 30), (4, 60), (5, -140)]
    events: list[dict[str, Any]] = [{"name": "[memory]", "ts": ts, "args": {"Bytes": b}} for ts, b in changes]
    assert link_lab.peak_of_events([*events, {"name": "aten::mm", "ts": 0}]) == 140


def test_each_contender_compiles_code_of_its_own() -> None:
    config = LlamaConfig(layers=1, dim=8, heads=2, kv_heads=2, hidden=8, vocab=16, batch=1, seq=4)
    model = language_model(config)
    steps = [link_lab.own_code(model, name) for name in ("ours-0", "ours")]
    assert len({step.__code__ for step in steps}) == 2
    tokens, targets = language_batch(config)
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
        "traffic": {"wrong": [], "known_bytes": 3_000},
        "peak_bytes": 100,
        "worst_loss_difference": 0.0,
        "violations": 0,
    }
    return {**row, **changes}


def _results(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "layout": "fsdp",
        "title": "FSDP",
        "sharded": True,
        "rate": "balanced",
        "ratio": 1.0,
        "latency_ns": 5,
        "sizes": {"layers": 1, "dim": 2, "hidden": 3, "batch": 4, "seq": 5},
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
    assert link_report.errors(results) == []
    assert link_report.notes(results) == ["eager did not run: RuntimeError: no"]
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
        ({"traffic": {"wrong": ["sent 500 bytes of w"], "known_bytes": 3_000}}, "sent 500 bytes of w"),
        ({"traffic": {"wrong": [], "known_bytes": 2_900}}, "sent 3000 bytes per step, of which 2900 belong to"),
        ({"worst_loss_difference": 1e-3}, "losses differ by up to 1.0e-03"),
    ],
)
def test_invalid_rows_are_named(changes: dict[str, Any], message: str) -> None:
    reference = _row("inductor", "inductor", 1)
    (error,) = link_report.errors(_results(reference, _row("ours", "in-tree", 1, **changes)))
    assert message in error
    late = link_report.notes(_results(reference, _row("ours", "ours", 1, violations=3)))
    assert "3 real transfers" in late[0] and len(late) == 2


def test_what_carries_the_bytes_does_not_matter() -> None:
    reference = _row("inductor", "inductor", 1)
    exchanged = {"all_gather": 2_000, "all_to_all": 600, "reduce_scatter": 400}
    assert link_report.errors(_results(reference, _row("ours", "ours", 1, wire_bytes=exchanged))) == []


def test_losses_are_judged_while_rounding_is_small() -> None:
    reference = [1.0] * 80
    assert link_worker._difference(reference, reference) == 0
    late = [*reference[:-1], 2.0]
    assert link_worker._difference(late, reference) == 0
    early = [1.0, 1.5, *reference[2:]]
    assert link_worker._difference(early, reference) == 0.5
    for wrong in (float("nan"), float("inf")):
        found = link_worker._difference([wrong], [1.0])
        assert found > link_report.LOSS_TOLERANCE and json.dumps(found, allow_nan=False)
    assert link_worker._difference([1e-3], [0.0]) > link_report.LOSS_TOLERANCE


def test_ours_may_not_send_more_than_the_graph_that_came_in() -> None:
    reference = _row("inductor", "inductor", 1)
    more = _row("ours", "ours", 1, wire_bytes={"all_reduce": 4_000})
    (error,) = link_report.errors({**_results(reference, more), "sharded": False})
    assert error == "ours: sent 4000 bytes per step; default Inductor sends 3000"


def test_the_page_sums_up() -> None:
    rows = [_row("inductor", "inductor", 200), _row("reorder", "in-tree", 150), _row("ours", "ours", 100)]
    busy, fast = _results(*rows), {**_results(*rows), "rate": "fast"}
    text = "\n".join(bench_link.page([busy, fast]))
    assert "| FSDP | balanced | 2.000 | 1.500 | 1.500 | reorder | 1.000 |" in text
    # Only the balanced row counts.
    assert "2.000 times default Inductor's speed (1 rows), 1.500 times the best in-tree setting's (1 rows)" in text
    assert "- eager did not run: RuntimeError: no" in text


def test_a_contender_that_kills_the_job_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []

    def torchrun(script: str, folder: str, ranks: int, timeout_s: int) -> tuple[int, str]:
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
        Path(folder, "results.json").write_text(json.dumps([{"rows": [], "failed": {"eager": "no"}}]))
        return 0, ""

    monkeypatch.setattr(bench_link, "torchrun", torchrun)
    console = Console(file=io.StringIO())
    (results,) = bench_link.run_job({"contenders": ["inductor", "bucket", "eager"]}, 2, 1, console)
    assert tried == [["inductor", "bucket", "eager"], ["inductor", "eager"]]
    assert results["failed"] == {"eager": "no", "bucket": "took the job down (status -6) while compiling"}


def test_a_job_that_is_out_of_time_leaves_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    status = OUT_OF_TIME

    def torchrun(script: str, folder: str, ranks: int, timeout_s: int) -> tuple[int, str]:
        Path(folder, "results.json").write_text(json.dumps([{"rows": [], "failed": {}}]))
        return status, "stopped"

    monkeypatch.setattr(bench_link, "torchrun", torchrun)
    said = io.StringIO()
    job = {"contenders": ["inductor"], "rates": ["balanced", "fast"]}
    assert len(bench_link.run_job(job, 2, 60, Console(file=said, width=120))) == 1
    assert "out of time after 60 s: 1 of 2 links are measured" in said.getvalue()
    status = -6
    with pytest.raises(RuntimeError, match="status -6"):
        bench_link.run_job(job, 2, 60, Console(file=said))


def test_the_reference_must_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_link, "torchrun", lambda *_: (1, "no gloo"))
    with pytest.raises(RuntimeError, match="status 1 while starting inductor"):
        bench_link.run_job({"contenders": ["inductor"]}, 2, 1, Console(file=io.StringIO()))


def _point(name: str, step: int, peak: int, **changes: Any) -> dict[str, Any]:
    family = "ours" if name.startswith("ours") else "inductor"
    return _row(name, family, step, peak_bytes=peak, predicted_ns=step, **changes)


def test_ours_and_the_sweep_at_each_peak() -> None:
    rows = [
        _point("inductor", 200, 1_000),
        _point("inductor-saved-50", 210, 900),
        _point("ours-saved-50", 150, 950),
        _point("ours-less-30", 140, 700, predicted_peak_bytes=714),
        _point("ours-less-10", 120, 900, worst_loss_difference=1e-9),
        _point("ours-auto", 130, 1_000),
    ]
    everyone = bench_budgets.measured(_results(*rows))
    lines, whole, today = bench_budgets.at_each_peak(everyone)
    # Nothing of the sweep fits where ours needs least; what needs less is allowed to ours at every peak.
    assert [line[4] for line in lines] == ["nobody", "default Inductor, 50% saved", "our order, 50% saved"]
    assert whole == [210 / 120, 150 / 120] and today == [210 / 120, 200 / 120]
    assert [m.name for m in bench_budgets.front(everyone)] == ["ours-less-30", "ours-less-10"]
    caps = {line[0]: line[1:] for line in bench_budgets.at_caps(everyone)}
    assert caps["0.6"] == ["nobody", "-", "nobody", "-", "-"]
    assert caps["0.8"][2:] == ["nobody", "-", "-"] and caps["0.9"][-1] == "1.750"
    text = "\n".join(bench_budgets.page([{**_results(*rows), "model": "tiny"}]))
    assert "Least peak of ours: 0.0 MB" in text and "off by 2.0% at most (1 points)" in text
    assert 'not bit-equal for ours, "auto", "-10%"' in text


def test_contenders_of_the_sweep_are_chosen_by_pattern() -> None:
    everyone = bench_budgets.selected(None)
    assert len(everyone) == len({*link_sweep.SWEEP, *link_sweep.BUDGETS}) and everyone[0] == "inductor"
    # What is relative to the step's peak comes behind a contender that says what that is.
    assert everyone.index("ours-less-10") < everyone.index("ours-within-100")
    assert bench_budgets.selected(["ours-less-[12]0"]) == ["inductor", "ours-less-10", "ours-less-20"]
    with pytest.raises(typer.BadParameter, match="our-less is not known"):
        bench_budgets.selected(["our-less"])
    for contender in link_sweep.EVERY.values():
        if contender.family == "ours":
            PassConfig(**contender.settings)
    within = link_sweep.BUDGETS["ours-within-110"]
    with pytest.raises(ValueError, match="ours-within-110 needs a contender with a budget below the peak"):
        within.compile_options("profile.json")


def test_a_peak_is_predicted_without_what_the_caller_holds(tmp_path: Path) -> None:
    storages = (Storage(100, INPUT, (0,), True), Storage(20, INPUT, (0,)), Storage(5, 0, (), True))
    problem = Problem((Task("a", Kind.COMPUTE, 1),), ((),), storages=storages, name="backward_0")
    (tmp_path / "rank0_backward_0_x.json").write_text(json.dumps(problem.to_json()))
    backward = SimpleNamespace(phase="backward", schedules=[SimpleNamespace(peak_after_bytes=125)])
    reports: Any = [backward, SimpleNamespace(phase="forward", schedules=[])]
    assert predicted_peak(reports, tmp_path, 0) == 25
    assert predicted_peak(reports, tmp_path, 1) == 0


def test_first_steps_are_over_when_their_costs_are_written(tmp_path: Path) -> None:
    def report(phase: str, timing: Timing | None = None, planned: bool = True) -> Any:
        return SimpleNamespace(phase=phase, timing=timing, schedules=[None] if planned else [])

    there, missing = tmp_path / "costs.json", tmp_path / "none.json"
    there.write_text("{}")
    def timing(outcome: SwapOutcome | None, **more: Any) -> Timing:
        return Timing(5, (0, 1), 9_000_000, 7_500_000, swap=outcome and Swap(outcome, **more))

    forward = report("forward", timing(SwapOutcome.KEPT, before_ns=7_000_000, after_ns=6_000_000))
    backward = report("backward", timing(SwapOutcome.NOTHING, why="the same plan"))
    assert not retiming.is_over([], there)
    assert not retiming.is_over([forward, report("backward")], there)
    assert not retiming.is_over([forward, backward], missing)
    for way in (None, SwapOutcome.AGREED, SwapOutcome.SWAPPED):
        assert not retiming.is_over([forward, report("backward", timing(way))], there)
    # A graph that nobody planned is not timed.
    done = [forward, backward, report("inference", planned=False)]
    assert retiming.is_over(done, there)
    assert retiming.told(done) == [
        "forward predicted 9.0, took 7.5 ms, planned again: swapped in, faster (7.0 -> 6.0 ms)",
        "backward predicted 9.0, took 7.5 ms, planned again: nothing swapped: the same plan",
    ]
    plans = {"graphs": [{"phase": "forward", "graph_index": 7, "order": []}]}
    assert json.loads(retiming.of_any_program(json.dumps(plans))) == {"graphs": [{"phase": "forward", "order": []}]}


def test_costs_of_a_link_that_nobody_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_passes, "options", lambda **settings: settings)
    known = {name: one.compile_options("folder/balanced.json") for name, one in link_lab.TUNED.items()}
    assert known["ours-assumed"] == {}
    both = {"tune": 5, "tune_swap": "on"}
    assert known["ours-assumed-tuned"] == {**both, "tune_file": "folder/balanced_ours-assumed-tuned.json"}
    beside = {"cost_profile": "folder/balanced.json", "tune_file": "folder/balanced_ours-tuned.json"}
    assert known["ours-tuned"] == {**both, **beside}
    # What comes of it is compiled with these costs, and is not tuned again.
    for one in (link_lab.TUNED["ours-tuned"], link_lab.TUNED["ours-assumed-tuned"]):
        assert one.timed().compile_options("costs.json") == {"cost_profile": "costs.json"}
        assert one.tunes and not one.timed().tunes
        assert one.timed("p.json").compile_options("costs.json") == {"cost_profile": "costs.json", "plan": "p.json"}


def test_what_narrower_messages_do_is_one_table() -> None:
    def contender(name: str, step: int, sent: int, **more: Any) -> dict[str, Any]:
        row = {"name": name, "title": f"<{name}>", "virtual_ns": [step, step, 9 * step], "predicted_ns": step // 2}
        sizes = {"wire_bytes": {"all_gather": sent}, "worst_loss_difference": 3e-4, "narrowed": False}
        return {**row, **sizes, **more}

    rows = [contender("inductor", 4_000_000, 8_000_000), contender("ours", 2_000_000, 8_000_000)]
    plain = {"title": "FSDP", "rate": "balanced", "rows": rows}
    assert narrower.section([plain]) == []
    small = contender("ours-int8", 1_000_000, 2_000_000, narrowed=True, error_bound=0.004, measured_error=0.0039)
    older = contender("ours-bf16", 1_000_000, 4_000_000, narrowed=True)
    *_, first, second, _ = narrower.section([{**plain, "rows": [*rows, small, older]}])
    assert first.startswith("| FSDP | balanced | <ours-int8> | 1.0 | 0.250 | 0.500 | 2.000 | 2.00 | 0.250 |")
    assert first.endswith("| 3e-04 | 0.004 | 0.0039 |")
    assert second.endswith("| 4.00 | 0.500 | 3e-04 | - | - |")


def test_a_stall_is_charged_to_what_fills_it() -> None:
    """As reports charge those of a plan: a wait for the second of two transfers stands still for both."""
    first, second, other, barrier = (_sent(kind, link) for kind, link in (
        ("all_gather", "a"), ("reduce_scatter", "a"), ("all_reduce", "b"), ("barrier", "a"),
    ))  # fmt: skip
    first.virtual.begin_ns, first.virtual.end_ns = 10, 40
    second.virtual.begin_ns, second.virtual.end_ns = 40, 60
    second.virtual.wait_begin_ns, second.virtual.wait_end_ns = 25, 60
    first.virtual.wait_begin_ns = first.virtual.wait_end_ns = 70
    other.virtual.begin_ns, other.virtual.end_ns = 100, 110
    other.virtual.wait_begin_ns, other.virtual.wait_end_ns = 80, 110
    assert measured_stalls([first, second, barrier, other]) == [
        ("all_gather", 15), ("reduce_scatter", 20), ("all_reduce", 30)
    ]  # fmt: skip


def _sent(kind: str, link: str) -> Record:
    return Record(0, kind, "g", 2, link, 8, 8, 8, 10)
