"""Reads our artifacts back out of the logs that torch writes under ``TORCH_TRACE``.

Such a log is a sequence of records: one line with a glog header and a JSON object, and, when the object has
``has_payload`` (an MD5), the payload's lines, each indented by one tab. Only our artifacts are parsed; everything
else is skipped without decoding. A log may be cut off (a killed process), may be huge, or may have been tampered with:
whatever cannot be read becomes a note and the rest is returned. Nothing is ever executed, and no path in a log is
followed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inductor_passes.report import GraphReport

#: A payload above this is skipped with a note (a Chrome trace of 36,000 tasks has about 10 MiB).
MAX_PAYLOAD_BYTES = 256 * 2**20
#: A record's header line above this is skipped.
MAX_HEADER_BYTES = 16 * 2**20
#: More files than this in one directory are not read.
MAX_FILES = 4096

_HEADER = re.compile(rb"^[VIWEC]\d{4} \d{2}:\d{2}:\d{2}\.\d+ \d+ [^\]]*\] ")
_MARK = b'"inductor_passes_'
_NAME = re.compile(r"inductor_passes_(?P<kind>[a-z0-9_]+)_(?P<phase>[a-z]+)_(?P<index>\d+)")
_RANK = re.compile(r"rank_(\d+)_")


class TraceError(ValueError):
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
            data = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None


@dataclass
class Trace:
    """Everything of ours in a trace directory: graphs by rank, log and order of compilation, and notes for people."""

    graphs: list[GraphTrace] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """Ranks that wrote at least one graph."""
        return sorted({graph.rank for graph in self.graphs})


def read_trace(path: str | Path) -> Trace:
    """Read a trace directory (every rank's log) or a single log.

    Raises:
        TraceError: the path does not exist or holds no log.
    """
    root = Path(path)
    trace = Trace()
    for log in _logs(root, trace):
        try:
            _read_log(log, trace)
        except OSError as error:
            trace.notes.append(f"{log.name}: cannot be read ({error.strerror or error})")
    for graph in trace.graphs:
        _assemble(graph, trace)
    trace.graphs.sort(key=lambda g: g.rank)
    logs_of_rank: dict[int, set[str]] = {}
    for graph in trace.graphs:
        logs_of_rank.setdefault(graph.rank, set()).add(graph.log)
    for rank, logs in logs_of_rank.items():
        if len(logs) > 1:
            trace.notes.append(
                f"rank {rank} has graphs in {len(logs)} logs: several runs in one directory, or processes that "
                "compiled before their process group existed. Use a fresh TORCH_TRACE directory per run."
            )
    return trace


def _logs(root: Path, trace: Trace) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise TraceError(f"{root} does not exist; expected the directory that TORCH_TRACE named")
    inside = root.resolve()
    logs = []
    for candidate in sorted(root.glob("*.log")):
        # A link out of the directory would let a trace from elsewhere show this machine's files.
        if candidate.is_file() and candidate.resolve().parent == inside:
            logs.append(candidate)
        else:
            trace.notes.append(f"{candidate.name}: not a regular file of this directory, skipped")
    if not logs:
        raise TraceError(f"{root} holds no .log file; run the program with TORCH_TRACE={root.name} first")
    if len(logs) > MAX_FILES:
        trace.notes.append(f"only the first {MAX_FILES} of {len(logs)} logs were read")
    return logs[:MAX_FILES]


def _read_log(log: Path, trace: Trace) -> None:
    graphs: dict[tuple[object, ...], GraphTrace] = {}
    named = _RANK.search(log.name)
    for record, payload in _records(log, trace):
        artifact = record.get("artifact")
        match = _NAME.fullmatch(str(artifact.get("name"))) if isinstance(artifact, dict) else None
        if match is None:
            continue
        rank = record.get("rank", int(named[1]) if named else 0)
        if not isinstance(rank, int):
            trace.notes.append(f"{log.name}: rank {rank!r} is no number, record skipped")
            continue
        key = (rank, _compile_id(record), match["phase"], int(match["index"]))
        graph = graphs.get(key)
        if graph is None:
            graph = graphs[key] = GraphTrace(log.name, *key)  # type: ignore[arg-type]
            trace.graphs.append(graph)
        graph.artifacts[match["kind"]] = payload


def _compile_id(record: dict[str, Any]) -> str:
    frame, compile_ = record.get("frame_id"), record.get("frame_compile_id")
    own = f"{frame}/{compile_}" if frame is not None and compile_ is not None else ""
    autograd = record.get("compiled_autograd_id")
    return own if autograd is None else f"!{autograd}" + (f"/{own}" if own else "")


def _records(log: Path, trace: Trace) -> Iterator[tuple[dict[str, Any], str]]:
    """Records of ours with a payload that matches its checksum."""
    record: dict[str, Any] | None = None
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
                        if size <= MAX_PAYLOAD_BYTES:
                            lines.append(line)
                continue
            if record is not None:
                yield from _finish(record, lines, size, log, trace)
            record, lines, size = _header(line, log, trace), [], 0
    if record is not None:
        yield from _finish(record, lines, size, log, trace)


def _header(line: bytes, log: Path, trace: Trace) -> dict[str, Any] | None:
    if _MARK not in line or b'"artifact"' not in line:
        return None
    match = _HEADER.match(line)
    if match is None:
        return None
    try:
        record = json.loads(line[match.end() :], parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        trace.notes.append(f"{log.name}: a record of ours is cut off or no JSON, skipped")
        return None
    return record if isinstance(record, dict) and "has_payload" in record else None


def _finish(
    record: dict[str, Any], lines: list[bytes], size: int, log: Path, trace: Trace
) -> Iterator[tuple[dict[str, Any], str]]:
    artifact = record.get("artifact")
    name = artifact.get("name") if isinstance(artifact, dict) else None
    if size > MAX_PAYLOAD_BYTES:
        trace.notes.append(f"{log.name}: {name} has {size} bytes, more than {MAX_PAYLOAD_BYTES}; skipped")
        return
    payload = b"".join(lines).removesuffix(b"\n")
    if hashlib.md5(payload, usedforsecurity=False).hexdigest() != record["has_payload"]:
        trace.notes.append(f"{log.name}: {name} does not match its checksum (log cut off?), skipped")
        return
    yield record, payload.decode("utf-8", "replace")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _assemble(graph: GraphTrace, trace: Trace) -> None:
    """Put the report together again from its artifacts."""
    summary = graph.payload("summary")
    if summary is None:
        trace.notes.append(f"{graph.log}: {graph.title} has no readable summary")
        return
    for kind, key in (("config", "config"), ("collectives", "collectives")):
        part = graph.payload(kind)
        if part is not None and key in part:
            summary[key] = part[key]
    decisions = graph.payload("decisions")
    try:
        # A pass may run twice, so they are matched by place.
        for one, decided in zip(summary["passes"], (decisions or {}).get("passes", [])):
            one["decisions"] = decided["decisions"]
        graph.report = GraphReport.from_json(summary)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        trace.notes.append(f"{graph.log}: {graph.title}: {type(error).__name__}: {error}")
