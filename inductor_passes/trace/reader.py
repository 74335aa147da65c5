"""Reads our artifacts back out of the logs that torch writes under ``TORCH_TRACE``.

Such a log is a sequence of records: one line with a glog header and a JSON object, and, when the object has
``has_payload`` (an MD5), the payload's lines, each indented by one tab. Only our artifacts are parsed; everything
else is skipped without decoding. A log may be cut off (a killed process), may be huge, or may have been tampered with:
whatever cannot be read becomes a note and the rest is returned. Nothing is ever executed, no path in a log is followed,
and every text that leaves this module is printable.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from inductor_passes.records.convert import convert
from inductor_passes.records.json_text import MAX_BYTES, RecordError, parse
from inductor_passes.records.limits import Count
from inductor_passes.records.text import printable, printable_lines
from inductor_passes.report import GraphReport
from inductor_passes.trace.artifacts import MEASURED, NOTHING_PLANNED
from inductor_passes.trace.records import ChromeEvent, MeasuredArtifact, NothingPlannedArtifact

#: A payload above this is skipped with a note (a Chrome trace of 36,000 tasks has about 10 MiB).
MAX_PAYLOAD_BYTES = MAX_BYTES
#: All payloads of a trace together.
MAX_TOTAL_BYTES = 2**30
#: A record's header line above this is skipped.
MAX_HEADER_BYTES = 16 * 2**20
#: Larger logs are not read.
MAX_LOG_BYTES = 8 * 2**30
#: So many things that could not be read are named.
MAX_NOTES = 200
#: More files than this in one directory are not read.
MAX_FILES = 4096

_HEADER = re.compile(rb"^[VIWEC]\d{4} \d{2}:\d{2}:\d{2}\.\d+ \d+ [^\]]*\] ")
_MARK = b'"inductor_passes_'
#: Torch's own record of the code of a graph, new or from a cache.
_GENERATED = b'] {"inductor_output_code": '
#: Torch's own record of a graph that it found in a cache.
_CACHED = b'] {"artifact": {"name": "fx_graph_cache_hit"'
_NAME = re.compile(r"inductor_passes_(?P<kind>[a-z0-9_]{1,200})_(?P<phase>[a-z]{1,40})_(?P<index>\d{1,9})", re.ASCII)
_RANK = re.compile(r"rank_(\d{1,9})_", re.ASCII)


class TraceError(RecordError):
    """A trace directory that cannot be read at all; the message says what was expected."""


@dataclass
class GraphTrace:
    """The artifacts of one compiled graph on one rank.

    Attributes:
        log: name of the log file.
        artifacts: kind (``summary``, ``chrome_trace_after``, ``failure_<pass>``, ...) -> payload text.
    """

    log: str
    rank: int
    compile_id: str
    phase: str
    graph_index: int
    artifacts: dict[str, str] = field(default_factory=dict)
    report: GraphReport | None = None

    @property
    def title(self) -> str:
        """``forward_0 [0/0]``: what tells graphs of one rank apart."""
        return f"{self.phase}_{self.graph_index}" + (f" [{self.compile_id}]" if self.compile_id else "")

    def payload(self, kind: str) -> dict[str, Any] | None:
        """A JSON artifact, decoded; None when it is absent or no object."""
        text = self.artifacts.get(kind)
        if text is None:
            return None
        try:
            data = parse(text.encode("utf-8", "replace"), kind)
        except RecordError:
            return None
        return data if isinstance(data, dict) else None

    def text(self, kind: str) -> str:
        """A text artifact; "" when it is absent."""
        return printable_lines(self.artifacts.get(kind, ""))

    def timelines(self) -> dict[str, list[ChromeEvent]]:
        """The events of its Chrome traces that can be read, by ``before`` and ``after``."""
        found = ((when, self.payload(f"chrome_trace_{when}")) for when in ("before", "after"))
        return {
            when: events_of(data["traceEvents"])
            for when, data in found
            if data is not None and isinstance(data.get("traceEvents"), list)
        }


def events_of(raw: list[Any]) -> list[ChromeEvent]:
    """Events of ours, from plain data; others, and malformed ones, are left out."""
    try:
        return convert(raw, list[ChromeEvent], "a timeline")
    except RecordError:
        pass
    events: list[ChromeEvent] = []
    for one in raw:
        try:
            events.append(msgspec.convert(one, ChromeEvent))  # type: ignore[arg-type]
        except msgspec.ValidationError:
            continue
    return events


@dataclass
class Trace:
    """Everything of ours in a trace directory: graphs by rank, log and order of compilation, and notes for people.

    Attributes:
        nothing_planned: why there are no graphs, each reason once, where ranks wrote it down.
        compiled: how many graphs torch recorded as generated or loaded code of Inductor, planned or not.
        cached: how many of them came out of a cache.
    """

    graphs: list[GraphTrace] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    nothing_planned: list[str] = field(default_factory=list)
    compiled: int = 0
    cached: int = 0

    def note(self, text: str) -> None:
        """Keep a note; of very many only the first ``MAX_NOTES``."""
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)
        elif len(self.notes) == MAX_NOTES:
            self.notes.append(f"more than {MAX_NOTES} notes; the others are left out")

    @property
    def ranks(self) -> list[int]:
        """Ranks that wrote at least one graph."""
        return sorted({graph.rank for graph in self.graphs})


def read_trace(path: str | Path) -> Trace:
    """Read a trace directory (every rank's log) or a single log.

    Raises:
        TraceError: the path does not exist or holds no log.
    """
    trace = Trace()
    left = MAX_TOTAL_BYTES
    for log in _logs(Path(path), trace):
        name = printable(log.name)
        try:
            if log.stat().st_size > MAX_LOG_BYTES:
                trace.note(f"{name}: larger than {MAX_LOG_BYTES} bytes, skipped")
            elif left <= 0:
                trace.note(f"{name}: skipped, the logs before it hold {MAX_TOTAL_BYTES} bytes of our artifacts")
            else:
                left -= _read_log(log, name, left, trace)
        except OSError as error:
            trace.note(f"{name}: cannot be read ({error.strerror or error})")
    _take_nothing_planned(trace)
    for graph in trace.graphs:
        _assemble(graph, trace)
    trace.graphs.sort(key=lambda g: g.rank)
    logs_of_rank: dict[int, set[str]] = {}
    for graph in trace.graphs:
        logs_of_rank.setdefault(graph.rank, set()).add(graph.log)
    for rank, logs in logs_of_rank.items():
        if len(logs) > 1:
            trace.note(
                f"rank {rank} has graphs in {len(logs)} logs: several runs in one directory, or processes that "
                "compiled before their process group existed. Use a fresh TORCH_TRACE directory per run."
            )
    return trace


def _take_nothing_planned(trace: Trace) -> None:
    """Graphs that were left alone are no graphs of ours. Where others were planned, it does not matter why."""
    alone = [graph for graph in trace.graphs if set(graph.artifacts) == {NOTHING_PLANNED}]
    trace.graphs = [graph for graph in trace.graphs if graph not in alone]
    found: dict[str, None] = {}
    for graph in [] if trace.graphs else alone:
        try:
            record = convert(graph.payload(NOTHING_PLANNED), NothingPlannedArtifact, "a record")
        except RecordError as error:
            trace.note(f"{graph.log}: {graph.title}: {error}")
        else:
            found[printable(record.line)] = None
    trace.nothing_planned = list(found)
    for line in found:
        trace.note(line)


def _logs(root: Path, trace: Trace) -> list[Path]:
    shown = printable(str(root))
    try:
        if root.is_file():
            return [root]
        if not root.is_dir():
            state = "is no directory or log" if root.exists() else "does not exist"
            raise TraceError(f"{shown} {state}; expected the directory that TORCH_TRACE named")
        inside = root.resolve()
        logs = []
        for candidate in sorted(root.glob("*.log")):
            # A link out of the directory would let a trace from elsewhere show this machine's files.
            if candidate.is_file() and candidate.resolve().parent == inside:
                logs.append(candidate)
            else:
                trace.note(f"{printable(candidate.name)}: not a regular file of this directory, skipped")
    except (OSError, RuntimeError, ValueError) as error:
        # Too long a name, a loop of links, a zero byte, no permission.
        if isinstance(error, TraceError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{shown} cannot be read ({reason}); expected the directory that TORCH_TRACE named") from None
    if not logs:
        raise TraceError(f"{shown} holds no .log file; run the program with TORCH_TRACE={printable(str(root))} first")
    if len(logs) > MAX_FILES:
        trace.note(f"only the first {MAX_FILES} of {len(logs)} logs were read")
    return logs[:MAX_FILES]


@dataclass(frozen=True)
class _Artifact:
    name: str


@dataclass(frozen=True)
class _Header:
    """What we read of a record's JSON object."""

    artifact: _Artifact
    has_payload: str | None = None
    rank: Count | None = None
    frame_id: Count | None = None
    frame_compile_id: Count | None = None
    compiled_autograd_id: Count | None = None

    @property
    def compile_id(self) -> str:
        """As torch writes it: ``0/1``, ``!2/0/1`` under compiled autograd; "" for none."""
        frame, compile_, autograd = self.frame_id, self.frame_compile_id, self.compiled_autograd_id
        own = f"{frame}/{compile_}" if frame is not None and compile_ is not None else ""
        return own if autograd is None else f"!{autograd}" + (f"/{own}" if own else "")


def _read_log(log: Path, name: str, most_bytes: int, trace: Trace) -> int:
    """Read one log, shown as ``name``, until its payloads have ``most_bytes``; returns how many they have."""
    graphs: dict[tuple[int, str, str, int], GraphTrace] = {}
    named = _RANK.search(log.name)
    total = 0
    for header, match, payload in _records(log, name, trace):
        if total + len(payload) > most_bytes:
            trace.note(f"{name}: the rest is skipped; a trace may hold {MAX_TOTAL_BYTES} bytes of artifacts")
            return total
        total += len(payload)
        rank = header.rank if header.rank is not None else int(named[1]) if named else 0
        key = (rank, header.compile_id, match["phase"], int(match["index"]))
        graph = graphs.get(key)
        if graph is None:
            graph = graphs[key] = GraphTrace(name, *key)
            trace.graphs.append(graph)
        graph.artifacts[match["kind"]] = payload
    return total


_Record = tuple[_Header, re.Match[str]]


def _records(log: Path, name: str, trace: Trace) -> Iterator[tuple[_Header, re.Match[str], str]]:
    """Records of ours with a payload that matches its checksum."""
    record: _Record | None = None
    lines: list[bytes] = []
    size = 0
    with log.open("rb") as stream:
        while line := stream.readline(MAX_HEADER_BYTES):
            if line.startswith(b"\t"):
                if record is not None:
                    size += len(line)
                    if size <= MAX_PAYLOAD_BYTES:
                        lines.append(line[1:])
                while not line.endswith(b"\n") and (line := stream.readline(MAX_HEADER_BYTES)):
                    size += len(line)
                    if record is not None and size <= MAX_PAYLOAD_BYTES:
                        lines.append(line)
                continue
            if record is not None:
                yield from _finish(record, lines, size, name, trace)
            trace.compiled += _GENERATED in line
            trace.cached += _CACHED in line
            record, lines, size = _header(line, name, trace), [], 0
    if record is not None:
        yield from _finish(record, lines, size, name, trace)


def _header(line: bytes, name: str, trace: Trace) -> _Record | None:
    if _MARK not in line or b'"artifact"' not in line:
        return None
    start = _HEADER.match(line)
    if start is None:
        return None
    try:
        header = convert(parse(line[start.end() :], "a record"), _Header, "a record")
    except RecordError as error:
        trace.note(f"{name}: a record of ours is cut off or malformed, skipped: {error}")
        return None
    match = _NAME.fullmatch(header.artifact.name)
    return None if match is None or header.has_payload is None else (header, match)


def _finish(
    record: _Record, lines: list[bytes], size: int, name: str, trace: Trace
) -> Iterator[tuple[_Header, re.Match[str], str]]:
    header, match = record
    if size > MAX_PAYLOAD_BYTES:
        trace.note(f"{name}: {match[0]} has {size} bytes, more than {MAX_PAYLOAD_BYTES}; skipped")
        return
    payload = b"".join(lines).removesuffix(b"\n")
    if hashlib.md5(payload, usedforsecurity=False).hexdigest() != header.has_payload:
        trace.note(f"{name}: {match[0]} does not match its checksum (log cut off?), skipped")
        return
    yield header, match, payload.decode("utf-8", "replace")


def _assemble(graph: GraphTrace, trace: Trace) -> None:
    """Put the report together again from its artifacts."""
    summary = graph.payload("summary")
    if summary is None:
        trace.note(f"{graph.log}: {graph.title} has no readable summary")
        return
    for kind in ("config", "collectives"):
        part = graph.payload(kind)
        if part is not None and kind in part:
            summary[kind] = part[kind]
    measured = graph.payload("timing")
    if measured is not None:
        summary["timing"] = measured.get("timing")
    passes, decided = summary.get("passes"), (graph.payload("decisions") or {}).get("passes")
    if isinstance(passes, list) and isinstance(decided, list):
        # A pass may run twice, so they are matched by place.
        for one, more in zip(passes, decided):
            if isinstance(one, dict) and isinstance(more, dict):
                one["decisions"] = more.get("decisions", [])
    try:
        graph.report = GraphReport.from_json(summary)
        if MEASURED in graph.artifacts:
            _enter_measured(graph.report, convert(graph.payload(MEASURED), MeasuredArtifact, "measured errors"))
    except RecordError as error:
        trace.note(f"{graph.log}: {graph.title}: {error}")


def _enter_measured(report: GraphReport, found: MeasuredArtifact) -> None:
    """Errors that were measured after the report was written."""
    by_name = {one.name: one for one in found.narrowed}
    for one in report.narrowed:
        if (now := by_name.get(one.name)) is not None:
            one.measured, one.largest, one.runs = now.measured, now.largest, now.runs
