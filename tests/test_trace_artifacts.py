"""Artifacts: written through torch's structured trace, valid, read back without loss, rendered by tlparse."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from inductor_passes.records.convert import plain
from inductor_passes.report import GraphReport, PassReport, Reason
from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.simulate import simulate
from inductor_passes.trace import artifacts
from inductor_passes.trace.chrome import chrome_trace
from inductor_passes.trace.payload import dumps
from inductor_passes.trace.reader import TraceError, read_trace
from inductor_passes.trace.spans import span
from inductor_passes.trace.tlparse import TlparseError, run_tlparse
from tests.support.processes import LIMIT_S, ROOT
from tests.support.trace_samples import fsdp_problem, planned, run_traced
from tools.generate import schemas

SCHEMAS = ROOT / "inductor_passes" / "trace" / "schemas"
TLPARSE = Path(sys.executable).parent / "tlparse"
needs_tlparse = pytest.mark.skipif(not TLPARSE.is_file(), reason="tlparse is not installed beside this Python")


def schema(kind: str) -> dict[str, object]:
    data = json.loads((SCHEMAS / f"{kind}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(data)
    return data


def strict(text: str) -> dict[str, object]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of one process that compiled a forward and a backward graph."""
    directory = tmp_path_factory.mktemp("trace")
    done = run_traced(directory, TORCH_LOGS="+inductor_passes")
    assert done.returncode == 0, done.output
    return directory


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two ranks whose plans differ: rank 1 has one layer more."""
    directory = tmp_path_factory.mktemp("ranks")
    for rank in range(2):
        done = run_traced(directory, rank=rank, world_size=2, layers=3 + rank)
        assert done.returncode == 0, done.output
    return directory


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[str, str]]]:
    """What would be written, by name: (encoding, payload)."""
    written: dict[str, tuple[str, str]] = {}
    monkeypatch.setattr("inductor_passes._torch.trace_enabled", lambda: True)
    monkeypatch.setattr(
        "inductor_passes._torch.trace_artifact",
        lambda name, encoding, payload: written.__setitem__(name, (encoding, payload())),
    )
    monkeypatch.setattr(artifacts, "_warned", False)
    yield written


def emit_sample(report: GraphReport, problem: Problem, order: tuple[int, ...]) -> None:
    artifacts.emit(report, problem=problem, order_before=problem.input_order, order_after=order)


def test_a_real_compilation_writes_every_artifact_and_they_are_valid(one_rank: Path) -> None:
    trace = read_trace(one_rank)
    assert trace.notes == []
    assert [(g.phase, g.graph_index, g.compile_id) for g in trace.graphs] == [
        ("forward", 0, "0/0"),
        ("backward", 0, "0/0"),
    ]
    for graph in trace.graphs:
        assert set(graph.artifacts) == {*artifacts.ALWAYS, *artifacts.PLANNED, *artifacts.DEBUG, "failure_bucket"}
        for kind, text in graph.artifacts.items():
            if kind in ("schedule", "graph_before", "graph_after"):
                assert f"# phase: {graph.phase}\n" in text and "# graph_index: 0\n" in text
                continue
            data = strict(text)
            assert (data["phase"], data["graph_index"], data["schema_version"]) == (graph.phase, 0, 1)
            jsonschema.validate(data, schema(re.sub("(?<=chrome_trace)_.*|(?<=failure)_.*", "", kind)))
        assert graph.report is not None and graph.report.schedule is not None
        assert Problem.from_json(strict(graph.artifacts["problem"])).digest(None)


def test_the_report_survives_the_trace(one_rank: Path) -> None:
    forward = read_trace(one_rank).graphs[0]
    expected, _ = planned(fsdp_problem(4))
    expected.compile_id = "0/0"
    schedule = dataclasses.replace(expected.schedules[0], schedule_before="", schedule_after="")
    expected.schedules = [schedule]
    assert forward.report == expected


def test_spans_are_in_the_compile_time_trace(one_rank: Path) -> None:
    (log,) = one_rank.glob("*.log")
    payloads = re.findall(r'"chromium_event".*\n((?:\t.*\n)+)', log.read_text())
    events = [event for event in map(json.loads, payloads) if event["name"] == "inductor_passes.plan"]
    assert [event["ph"] for event in events] == ["B", "E"] * 2, "forward and backward"
    attached = [event["args"] for event in events if event["ph"] == "E"]
    assert [one["tasks"] for one in attached] == [12, 15] and all("gap" in one for one in attached)


@needs_tlparse
def test_tlparse_renders_one_rank(one_rank: Path, tmp_path: Path) -> None:
    (log,) = one_rank.glob("*.log")
    done = subprocess.run(
        [str(TLPARSE), str(log), "-o", str(tmp_path / "out"), "--no-browser", "--strict"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.output
    names = {path.name for path in (tmp_path / "out").rglob("inductor_passes_*")}
    for phase in ("forward", "backward"):
        for kind in artifacts.ALWAYS + artifacts.PLANNED:
            assert any(name.startswith(f"inductor_passes_{kind}_{phase}_0") for name in names), (kind, phase)


@needs_tlparse
def test_tlparse_renders_all_ranks_and_links_the_page(two_ranks: Path, tmp_path: Path) -> None:
    index = run_tlparse(two_ranks, tmp_path / "out", read_trace(two_ranks))
    assert 'href="inductor_passes.html"' in index.read_text()
    for rank in range(2):
        folder = index.parent / f"rank_{rank}"
        assert 'href="inductor_passes.html"' in (folder / "index.html").read_text()
        assert (folder / "inductor_passes.html").is_file()
        assert list(folder.rglob("inductor_passes_summary_backward_0*"))
    with pytest.raises(TlparseError, match="not an empty directory"):
        run_tlparse(two_ranks, tmp_path / "out", read_trace(two_ranks))


@needs_tlparse
def test_tlparse_needs_ranks_in_several_logs(one_rank: Path, tmp_path: Path) -> None:
    (log,) = one_rank.glob("*.log")
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_bytes(log.read_bytes())
    with pytest.raises(TlparseError, match="without a rank"):
        run_tlparse(tmp_path, tmp_path / "out", read_trace(tmp_path))


def test_ranks_are_told_apart(two_ranks: Path) -> None:
    trace = read_trace(two_ranks)
    assert trace.ranks == [0, 1] and trace.notes == []
    groups = trace.graphs[0].payload("collectives")["groups"]
    assert groups == [{"name": "dp", "ranks": [0, 1], "start": 0, "stride": 1}]


def test_unwritable_trace_directory_warns_once_and_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(name: str, encoding: str, payload: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("inductor_passes._torch.trace_enabled", lambda: True)
    monkeypatch.setattr("inductor_passes._torch.trace_artifact", full)
    monkeypatch.setattr(artifacts, "_warned", False)
    report, answer = planned(fsdp_problem(2))
    with caplog.at_level(logging.WARNING, "inductor_passes"):
        emit_sample(report, fsdp_problem(2), answer.order)
        artifacts.emit_failure(report, report.passes[1])
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text and "TORCH_TRACE" in caplog.text


def test_nothing_is_built_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inductor_passes._torch.trace_enabled", lambda: False)
    monkeypatch.setattr(GraphReport, "to_json", lambda self: pytest.fail("built a payload without a trace"))
    emit_sample(GraphReport("forward", 0), fsdp_problem(1), (0, 1, 2))


def test_payloads_are_lazy_under_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from inductor_passes._torch import trace_artifact

    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
    trace_artifact("inductor_passes_x", "json", lambda: pytest.fail("built"))


def test_one_artifact_that_cannot_be_built_does_not_take_the_others(
    in_memory: dict[str, tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    report, answer = planned(fsdp_problem(2))
    artifacts.emit(report, problem=fsdp_problem(2), order_before=(0,), order_after=answer.order)
    assert "inductor_passes_summary_forward_0" in in_memory
    assert "inductor_passes_chrome_trace_after_forward_0" in in_memory
    assert "inductor_passes_chrome_trace_before_forward_0" not in in_memory
    assert len(caplog.records) == 1


def test_a_graph_that_was_left_alone_has_no_schedule(in_memory: dict[str, tuple[str, str]]) -> None:
    artifacts.emit(GraphReport("inference", 3), problem=None, order_before=None, order_after=None)
    assert set(in_memory) == {f"inductor_passes_{kind}_inference_3" for kind in artifacts.ALWAYS}


def test_names_are_not_reserved_by_tlparse(in_memory: dict[str, tuple[str, str]]) -> None:
    report, answer = planned(fsdp_problem(2))
    emit_sample(report, fsdp_problem(2), answer.order)
    artifacts.emit_failure(report, PassReport("R1 all-gather!", rolled_back=Reason.VERIFIER))
    assert "inductor_passes_failure_r1_all_gather__forward_0" in in_memory
    for name, (encoding, _) in in_memory.items():
        assert name.startswith("inductor_passes_") and encoding in ("json", "string")
        assert not name.startswith(("inductor_collective_schedule", "inductor_runtime_and_tensor_meta"))


def test_a_graph_that_cannot_be_printed_still_has_its_failure(in_memory: dict[str, tuple[str, str]]) -> None:
    def broken() -> str:
        raise KeyError("node")

    artifacts.emit_failure(GraphReport("forward", 0), PassReport("p", rolled_back=Reason.EXCEPTION), broken)
    data = strict(in_memory["inductor_passes_failure_p_forward_0"][1])
    jsonschema.validate(data, schema("failure"))
    assert "KeyError" in data["graph"][0]


def test_no_nan_and_no_infinity_reach_json(in_memory: dict[str, tuple[str, str]]) -> None:
    report, answer = planned(fsdp_problem(2))
    report.schedules = [dataclasses.replace(report.schedules[0], gap=float("inf"))]
    report.passes[0].metrics["ratio"] = float("nan")
    emit_sample(report, fsdp_problem(2), answer.order)
    summary = strict(in_memory["inductor_passes_summary_forward_0"][1])
    jsonschema.validate(summary, schema("summary"))
    assert summary["schedules"][0]["gap"] is None and summary["passes"][0]["metrics"]["ratio"] is None
    assert plain([float("-inf"), 1.5, Reason.HEAD]) == [None, 1.5, Reason.HEAD.value]
    assert json.loads(dumps({"a": object}))["a"]


def test_stride_of_a_group(in_memory: dict[str, tuple[str, str]]) -> None:
    report, answer = planned(fsdp_problem(2))
    for ranks, start, stride in (((1, 3, 5), 1, 2), ((0, 1, 4), 0, None), ((7,), 7, 1), ((), None, None)):
        report.collectives = [dataclasses.replace(c, ranks=ranks) for c in report.collectives]
        emit_sample(report, fsdp_problem(2), answer.order)
        data = strict(in_memory["inductor_passes_collectives_forward_0"][1])
        jsonschema.validate(data, schema("collectives"))
        assert (data["groups"][0]["start"], data["groups"][0]["stride"]) == (start, stride)


def test_schemas_are_current() -> None:
    rendered = schemas.rendered()
    paths = list(SCHEMAS.glob("*.json"))
    assert {path.name: path.read_text() for path in paths} == rendered, "run tools/gen schemas"
    for path in paths:
        assert (ROOT / "docs" / "schemas" / path.name).resolve() == path.resolve()


def test_schema_refuses_what_is_not_documented() -> None:
    data = strict(dumps({**GraphReport("forward", 0).to_json()}))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema("summary"))


def test_chrome_trace_has_lanes_flows_and_memory() -> None:
    problem = fsdp_problem(3)
    timeline = simulate(problem)
    data = strict(chrome_trace(problem, problem.input_order, timeline, rank=4, budget_bytes=9999))
    events = data["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {0: "compute", 1: "dp"}
    assert {e["pid"] for e in events} == {4}
    slices = {(e["cat"], e["args"]["task"]): e for e in events if e["ph"] == "X"}
    for i, task in enumerate(problem.tasks):
        category = {Kind.COMPUTE: "compute", Kind.START: "issue", Kind.WAIT: "wait"}[task.kind]
        one = slices[category, i]
        assert (round(one["ts"] * 1000), round((one["ts"] + one["dur"]) * 1000)) == (
            timeline.start_ns[i],
            timeline.end_ns[i],
        )
        if task.kind is Kind.START:
            assert slices["transfer", i]["tid"] == 1 and slices["transfer", i]["args"]["bytes"] == 1000
    flows = {e["id"] for e in events if e["ph"] in "stf"}
    assert len(flows) == 3, "one per collective"
    for flow in flows:
        assert [e["ph"] for e in events if e.get("id") == flow] == ["s", "t", "f"]
    memory = [e["args"] for e in events if e["ph"] == "C"]
    assert max(m["bytes"] for m in memory) == timeline.peak_bytes and {m["budget"] for m in memory} == {9999}


def test_span_passes_exceptions_and_survives_a_broken_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError), span("x"):
        raise ZeroDivisionError
    with span("y", tasks=3) as attach:
        attach(gap=0.5)

    def broken(name: str) -> None:
        raise RuntimeError(name)

    monkeypatch.setattr("inductor_passes._torch.compile_span", broken)
    ran = []
    with span("z") as attach:
        attach(a=1)
        ran.append(True)
    assert ran == [True]


# ---- reading hostile and broken logs ------------------------------------------------------------------------------


def record(name: str, payload: str, *, checksum: str | None = None, **more: object) -> bytes:
    digest = checksum or hashlib.md5(payload.encode(), usedforsecurity=False).hexdigest()
    head = {"artifact": {"name": name, "encoding": "json"}, "frame_id": 0, "frame_compile_id": 0, **more}
    text = json.dumps({**head, "has_payload": digest})
    body = "".join(f"\n\t{line}" for line in payload.split("\n"))
    return f"V0101 00:00:00.000000 1 x.py:1] {text}{body}\n".encode()


def summary_text(**more: object) -> str:
    data = GraphReport("forward", 0).to_json()
    del data["config"], data["collectives"]
    return dumps({**data, **more})


SUMMARY = "inductor_passes_summary_forward_0"
GOOD = record(SUMMARY, summary_text())


@pytest.mark.parametrize(
    ("name", "log", "graphs", "note"),
    [
        ("good", GOOD, 1, ""),
        ("empty", b"", 0, ""),
        ("no records", b"hello\n\tworld\n\xff\xfe\x00\n", 0, ""),
        ("header cut off", GOOD + GOOD[:80], 1, "cut off"),
        ("payload cut off", GOOD[:-9], 0, "checksum"),
        ("wrong checksum", record(SUMMARY, summary_text(), checksum="0" * 32), 0, "checksum"),
        ("payload no JSON", record("inductor_passes_summary_forward_0", "{nope"), 0, "no readable summary"),
        ("NaN", record("inductor_passes_summary_forward_0", '{"a": NaN}'), 0, "no readable summary"),
        ("list", record("inductor_passes_summary_forward_0", "[1]"), 0, "no readable summary"),
        ("deep", record("inductor_passes_summary_forward_0", "[" * 200_000), 0, "no readable summary"),
        ("newer schema", record(SUMMARY, summary_text(schema_version=99)), 0, "schema_version 99"),
        ("passes no list", record(SUMMARY, summary_text(passes=7)), 0, "passes is 7; expected a list"),
        ("path as name", record("inductor_passes_../../etc/passwd_forward_0", "{}"), 0, ""),
        ("name no text", record(3, "{}"), 0, ""),  # type: ignore[arg-type]
        ("rank no number", record(SUMMARY, summary_text(), rank="../x"), 0, "rank is '../x'"),
        ("other artifact", record("graph_execution", "{}"), 0, ""),
    ],
)
def test_broken_logs_become_notes(tmp_path: Path, name: str, log: bytes, graphs: int, note: str) -> None:
    (tmp_path / "dedicated_log_torch_trace_x.log").write_bytes(log)
    trace = read_trace(tmp_path)
    assert sum(graph.report is not None for graph in trace.graphs) == graphs
    assert (note in "\n".join(trace.notes)) if note else trace.notes == []


def test_any_prefix_of_a_log_can_be_read(one_rank: Path, tmp_path: Path) -> None:
    (log,) = one_rank.glob("*.log")
    data = log.read_bytes()
    for cut in range(0, len(data), len(data) // 40):
        (tmp_path / "x.log").write_bytes(data[:cut])
        assert len(read_trace(tmp_path).graphs) <= 2


def test_oversized_payload_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inductor_passes.trace.reader.MAX_PAYLOAD_BYTES", 1000)
    (tmp_path / "x.log").write_bytes(record("inductor_passes_summary_forward_0", "x" * 5000) + GOOD)
    trace = read_trace(tmp_path)
    assert "more than 1000" in trace.notes[0] and trace.graphs[0].report is not None


def test_links_out_of_the_directory_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "secret.log"
    outside.write_bytes(GOOD)
    inside = tmp_path / "trace"
    inside.mkdir()
    (inside / "a.log").symlink_to(outside)
    (inside / "b.log").write_bytes(GOOD)
    trace = read_trace(inside)
    assert len(trace.graphs) == 1 and trace.graphs[0].log == "b.log"
    assert "a.log" in trace.notes[0]


def test_two_runs_in_one_directory_are_noticed(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_bytes(GOOD)
    assert "several runs" in "\n".join(read_trace(tmp_path).notes)


def test_missing_directory_and_directory_without_logs(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"no \.log file"):
        read_trace(tmp_path)

