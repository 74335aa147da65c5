"""``inductor-passes report``: text, JSON, Perfetto, comparison of runs and ranks, and the page."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from inductor_passes.cli.main import app
from inductor_passes.records.text import printable
from inductor_passes.report import GAIN_AT_MOST, Decision, GraphReport, PassReport, Reason, Verdict
from inductor_passes.schedule.problem import Problem
from inductor_passes.trace import artifacts
from inductor_passes.trace.compare import across_ranks, across_runs
from inductor_passes.trace.html import compact, embed, render_page
from inductor_passes.trace.reader import events_of, read_trace
from inductor_passes.trace.text import render_graph
from inductor_passes.trace.units import change, duration, percent, size
from tests.support.trace_samples import fsdp_problem, planned

run = CliRunner().invoke


class TraceDir:
    """A trace directory written without compiling anything: the records that torch would write."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._patch = monkeypatch
        path.mkdir(exist_ok=True)

    def add(self, report: GraphReport, problem: Problem | None, order: tuple[int, ...] | None) -> None:
        log = self.path / f"dedicated_log_torch_trace_rank_{report.rank}_x.log"

        def write(name: str, encoding: str, payload: object) -> None:
            text = payload()  # type: ignore[operator]
            head = {
                "artifact": {"name": name, "encoding": encoding},
                "rank": report.rank,
                "frame_id": 0,
                "frame_compile_id": 0,
                "has_payload": hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(),
            }
            body = "".join(f"\n\t{line}" for line in text.split("\n"))
            with log.open("a") as stream:
                stream.write(f"V0101 00:00:00.000000 1 x.py:1] {json.dumps(head)}{body}\n")

        with self._patch.context() as patch:
            patch.setattr("inductor_passes._torch.trace_enabled", lambda: True)
            patch.setattr("inductor_passes._torch.trace_artifact", write)
            before = None if problem is None else problem.input_order
            artifacts.emit(report, problem=problem, order_before=before, order_after=order)

    def sample(self, *, layers: int = 4, phase: str = "forward", budget: str = "+25%", rank: int = 0) -> GraphReport:
        problem = fsdp_problem(layers, name=f"{phase}_0")
        report, answer = planned(problem, phase=phase, budget=budget, rank=rank, world_size=2)
        self.add(report, problem, answer.order)
        return report


@pytest.fixture
def trace_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TraceDir:
    return TraceDir(tmp_path / "trace", monkeypatch)


def text_of(report: GraphReport, **options: int) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_graph(report, **options))  # type: ignore[arg-type]
    return console.export_text()


def test_text_says_what_happened_and_why(trace_dir: TraceDir) -> None:
    report = trace_dir.sample()
    done = run(app, ["report", str(trace_dir.path)])
    assert done.exit_code == 0, done.output
    s = report.schedule
    assert s is not None
    for expected in (
        "forward_0 [0/0]",
        duration(s.makespan_before_ns),
        duration(s.makespan_after_ns),
        duration(s.exposed_after_ns),
        size(s.peak_after_bytes),
        f"budget {size(s.budget_bytes or 0)}",
        f"gap {percent(s.gap)}",
        f"plan {report.digest}",
        s.method,
        "pass bucket was rolled back: simulated slower than the input (3 us slower)",
        "wrapper equals plan",
        "datasheet defaults",
    ):
        assert expected in done.output, expected
    for one in report.collectives:
        (line,) = [line for line in done.output.splitlines() if line.split()[:1] == [one.label]]
        for part in (one.kind, size(one.size_bytes), one.lane, duration(one.hidden_ns), one.reason.value, one.source):
            assert part in line, (part, line)
        assert duration(one.exposed_ns) in line and one.setting in line


def test_from_cache_and_nothing_planned_are_said() -> None:
    report = GraphReport("forward", 1, from_cache=True)
    refused = Decision("graph", "", Verdict.REFUSED, Reason.NO_COLLECTIVES)
    report.passes.append(PassReport("reorder", decisions=[refused]))
    text = text_of(report)
    assert "from cache" in text and "nothing was planned: no collectives" in text


def test_a_pass_that_stays_beside_an_order_that_is_dropped_is_said() -> None:
    report = GraphReport("backward", 3)
    report.passes.append(PassReport("bucket", changed=True))
    over = {"rolled_back": Reason.OVER_BUDGET, "detail": "peak is 12 bytes, budget 10 bytes"}
    report.passes.append(PassReport("reorder", changed=True, **over))
    text = text_of(report)
    assert "no order was planned; what bucket changed stays" in text and "nothing was planned" not in text
    assert "pass reorder was rolled back: above the memory budget (peak is 12 bytes, budget 10 bytes)" in text


def test_top_shows_the_most_exposed(trace_dir: TraceDir) -> None:
    report = trace_dir.sample(layers=6)
    done = run(app, ["report", str(trace_dir.path), "--top", "1"])
    worst = max(report.collectives, key=lambda c: c.exposed_ns)
    shown = [line.split()[0] for line in done.output.splitlines() if re.match(r" *AG\d+ ", line)]
    assert shown == [worst.label] and "1 of 6 collectives" in done.output


def test_markup_in_names_is_text(trace_dir: TraceDir) -> None:
    problem = fsdp_problem(2)
    report, answer = planned(problem)
    report.collectives = [dataclasses.replace(c, label="[red]x[/red]", source="[/]") for c in report.collectives]
    trace_dir.add(report, problem, answer.order)
    done = run(app, ["report", str(trace_dir.path)])
    assert done.exit_code == 0 and "[red]x[/red]" in done.output


def test_json(trace_dir: TraceDir) -> None:
    expected = [trace_dir.sample(), trace_dir.sample(phase="backward", layers=5)]
    done = run(app, ["report", "--json", str(trace_dir.path)])
    data = json.loads(done.output)
    assert [g["phase"] for g in data["graphs"]] == ["forward", "backward"]
    back = GraphReport.from_json(data["graphs"][1])
    assert back.collectives == expected[1].collectives and back.digest == expected[1].digest


def test_perfetto_holds_all_ranks_before_and_after(trace_dir: TraceDir, tmp_path: Path) -> None:
    for rank in (0, 1):
        trace_dir.sample(rank=rank)
    out = tmp_path / "all.json"
    done = run(app, ["report", str(trace_dir.path), "--perfetto", str(out)])
    assert done.exit_code == 0 and "4 timelines" in done.output
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == [f"rank {r} forward_0 [0/0] {w}" for r in (0, 1) for w in ("after", "before")]
    flows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(flows) == len(set(flows)), "flows of different processes must not meet"


def test_ranks_with_another_plan_are_named_forward_and_backward(trace_dir: TraceDir) -> None:
    for phase in ("forward", "backward"):
        trace_dir.sample(phase=phase, rank=0)
        trace_dir.sample(phase=phase, rank=1)
        trace_dir.sample(phase=phase, rank=2, layers=5)
    groups = across_ranks(read_trace(trace_dir.path).graphs)
    assert [(g.key[1], g.agreeing) for g in groups] == [("forward", [0, 1]), ("backward", [0, 1])]
    for group in groups:
        ((rank, difference),) = group.differences
        assert rank == 2 and "schedule" in difference
    output = run(app, ["report", str(trace_dir.path)]).output
    assert "ranks 0-1, same plan" in output and output.count("rank 2 has another plan") == 2
    assert "rank 2" in run(app, ["report", str(trace_dir.path), "--rank", "2"]).output.splitlines()[0]


def test_same_labels_but_another_digest_is_a_difference(trace_dir: TraceDir) -> None:
    trace_dir.sample(rank=0)
    problem = fsdp_problem(4)
    report, answer = planned(problem, rank=1)
    report.digest = "0" * 16
    trace_dir.add(report, problem, answer.order)
    (group,) = across_ranks(read_trace(trace_dir.path).graphs)
    assert "digest" in group.differences[0][1]


def test_what_differs_in_plans_of_equal_labels_is_named(trace_dir: TraceDir) -> None:
    trace_dir.sample(rank=0)
    problem = fsdp_problem(4)
    report, answer = planned(problem, rank=1)
    before = report.schedules[0].peak_after_bytes
    report.schedules[0] = dataclasses.replace(report.schedules[0], peak_after_bytes=before + 8, digest="0" * 16)
    report.digest = "0" * 16
    trace_dir.add(report, problem, answer.order)
    (group,) = across_ranks(read_trace(trace_dir.path).graphs)
    said = f"peak after ({report.schedules[0].level}) is {before} bytes on rank 0 and {before + 8} bytes on rank 1"
    assert group.differences == [(1, f"same labels in the same order; {said}")]


def test_diff_of_two_runs(trace_dir: TraceDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_dir.sample(budget="0")
    other = TraceDir(tmp_path / "other", monkeypatch)
    other.sample(budget="+50%")
    other.sample(phase="backward")
    done = run(app, ["report", "diff", str(trace_dir.path), str(other.path)])
    assert done.exit_code == 0, done.output
    for expected in ("setting memory_budget", "+50%", "makespan after", "AG1 exposed", "plan digest", "only in other"):
        assert expected in done.output, expected
    longer = TraceDir(tmp_path / "longer", monkeypatch)
    longer.sample(layers=6)
    (changed,) = across_runs(read_trace(trace_dir.path).graphs, read_trace(longer.path).graphs)
    found = {change.what: (change.a, change.b) for change in changed.changes}
    assert found["collectives"] == (4, 6) and not any(what.startswith("AG") for what in found)
    (same,) = across_runs(read_trace(trace_dir.path).graphs, read_trace(trace_dir.path).graphs)
    assert same.changes == [] and same.nodes is None
    assert changed.nodes is not None and changed.nodes[0] < changed.nodes[1]
    said = " ".join(run(app, ["report", "diff", str(trace_dir.path), str(longer.path)]).output.split())
    assert "another program" in said and "another program" not in done.output


def test_missing_directory_and_trace_without_our_graphs(tmp_path: Path) -> None:
    done = run(app, ["report", str(tmp_path / "nowhere")])
    assert done.exit_code == 2 and "TORCH_TRACE" in done.output
    (tmp_path / "x.log").write_text("V0101 00:00:00.000000 1 x.py:1] {}\n")
    done = run(app, ["report", str(tmp_path)])
    assert done.exit_code == 1 and "Inductor compiled none in this run" in done.output


def test_files_that_cannot_be_written_are_named(trace_dir: TraceDir, tmp_path: Path) -> None:
    trace_dir.sample()
    for option in ("-o", "--perfetto"):
        done = run(app, ["report", str(trace_dir.path), option, str(tmp_path / "no" / "folder")])
        assert done.exit_code == 2 and "No such file" in done.output and done.exception.__class__ is SystemExit


def test_page_names_the_extra_that_it_needs(trace_dir: TraceDir, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_dir.sample()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = run(app, ["report", str(trace_dir.path), "-o", str(trace_dir.path / "x.html")])
    assert done.exit_code == 2 and "inductor-passes[report]" in done.output


def test_units() -> None:
    times = [duration(n) for n in (0, 999, 1500, 1_234_567, 2_000_000_000)]
    assert times == ["0 ns", "999 ns", "1.5 us", "1.23 ms", "2 s"]
    assert [size(n) for n in (10, 1536, 3 * 2**30)] == ["10 B", "1.5 KiB", "3 GiB"]
    assert (percent(None), percent(0.0312)) == ("-", "3.1%")
    assert (change(200, 150), change(100, 103), change(0, 5)) == ("-25.0%", "+3.0%", "-")
    assert duration(999_900) == "1000 us"


# ---- the page -----------------------------------------------------------------------------------------------------

EVIL = "</script><script>window.evil=1</script><img src=x onerror=window.evil=2>\u2028'\"&"


class Page(HTMLParser):
    """Elements and their attributes, and the text of script elements."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._open: dict[str, str | None] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = dict(attrs) if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.scripts.append((self._open, data))

    def handle_endtag(self, tag: str) -> None:
        self._open = None


def evil_trace(trace_dir: TraceDir) -> None:
    problem = fsdp_problem(2)
    tasks = tuple(dataclasses.replace(t, name=f"{t.name}{EVIL}", source=EVIL) for t in problem.tasks)
    problem = dataclasses.replace(problem, tasks=tasks, name=EVIL)
    report, answer = planned(problem)
    report.notes = [EVIL]
    report.cost_profile = report.torch_version = report.order_check = EVIL
    trace_dir.add(report, problem, answer.order)


def test_page_is_self_contained_and_escapes_everything(trace_dir: TraceDir, tmp_path: Path) -> None:
    evil_trace(trace_dir)
    out = tmp_path / "report.html"
    done = run(app, ["report", str(trace_dir.path), "-o", str(out)])
    assert done.exit_code == 0, done.output
    text = out.read_text()
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert "img" not in tags and "link" not in tags and "iframe" not in tags
    assert [a for _, a in page.elements if {"src", "href", "action"} & a.keys() and a.get("href") != "#main"] == []
    assert tags.count("script") == 4, "data, two timelines, the program"
    data = json.loads(next(s for a, s in page.scripts if a.get("id") == "data"))
    assert data["graphs"][0]["report"]["cost_profile"] == printable(EVIL)
    assert "default-src 'none'" in text and "innerHTML" not in text
    assert not re.search(r"https?://", text)


def test_embedded_data_cannot_leave_its_element() -> None:
    text = embed({"a": EVIL, "b": float("nan"), "c": "<!--"})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": EVIL, "b": None, "c": "<!--"}


def test_title_is_escaped() -> None:
    text = render_page([], [EVIL], title=EVIL)
    assert "evil=1</script>" not in text and "&lt;/script&gt;" in text


def test_compact_timeline_leaves_out_what_is_malformed() -> None:
    good = {"ph": "X", "tid": 0, "cat": "compute", "ts": 1.5, "dur": 0.001, "name": "mm", "args": {"task": 0}}
    bad = [7, None, {"ph": "X"}, {**good, "cat": "evil"}, {**good, "args": 3}, {**good, "ts": "x"}, {**good, "ts": -1}]
    line = compact(events_of([*bad, good]))
    assert line["slices"] == [0, 0, 1500, 1, 1, 0] and line["strings"] == ["", "mm"]


def test_compact_timeline_is_sorted_by_time_within_a_thread() -> None:
    def event(cat: str, ts: float, tid: int = 0) -> dict[str, object]:
        return {"ph": "X", "tid": tid, "cat": cat, "ts": ts, "dur": 0.5, "name": cat, "args": {}}

    events = [event("transfer", 2, 1), event("wait", 1), event("compute", 3), event("issue", 0)]
    line = compact(events_of(events))
    assert [tuple(line["slices"][k : k + 3 : 2]) for k in range(0, 24, 6)] == [(0, 0), (0, 1000), (0, 3000), (1, 2000)]


def test_page_of_36000_tasks_is_small(trace_dir: TraceDir) -> None:
    from inductor_passes.schedule.simulate import simulate
    from inductor_passes.trace.chrome import chrome_trace

    problem = fsdp_problem(1000, tasks_per_layer=34)
    assert len(problem) == 36_000
    text = chrome_trace(problem, problem.input_order, simulate(problem))
    line = compact(events_of(json.loads(text)["traceEvents"]))
    assert len(line["slices"]) == 6 * (36_000 + 1000)
    assert len(embed(line)) < 2_000_000


def test_text_says_what_transfers_slow_down() -> None:
    problem = fsdp_problem(4)
    tasks = [dataclasses.replace(t, slowdown_percent=50) if t.duration_ns and t.lane >= 0 else t for t in problem.tasks]
    text = text_of(planned(dataclasses.replace(problem, tasks=tuple(tasks)))[0])
    (row,) = [line for line in text.splitlines() if "kernels slowed down by transfers" in line]
    assert "compute alone 320 us" in row and not re.search(r"transfers\s+0 ns\s+0 ns", row)
    assert "kernels slowed down" not in text_of(planned(problem)[0])


def test_text_says_which_gains_are_upper_bounds() -> None:
    report, _ = planned(fsdp_problem(4))
    bounds = {c.setting for c in report.collectives if GAIN_AT_MOST in c.detail and c.gain_ns}
    assert bounds
    lines = [line.strip() for line in text_of(report).splitlines()]
    for setting in {c.setting for c in report.collectives if c.gain_ns}:
        (line,) = [line for line in lines if line.startswith(f"{setting}: ")]
        assert line.startswith(f"{setting}: {GAIN_AT_MOST} " if setting in bounds else f"{setting}: gain "), line
