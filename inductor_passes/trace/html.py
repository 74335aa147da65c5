"""The report as one self-contained HTML page: no network, no other file, everything escaped.

The page's data travel as JSON in inert ``<script type="application/json">`` elements, in which ``<``, ``>`` and ``&``
are written as escapes, and its script writes them with ``textContent`` only: a node name or a source path can hold
anything. A content security policy forbids every load. Timelines are flat integer arrays that are decoded when a
graph is shown and drawn on a canvas, so that tens of thousands of tasks open at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from inductor_passes.records.convert import convert, plain
from inductor_passes.records.json_text import RecordError
from inductor_passes.report import GraphReport
from inductor_passes.trace.compare import RankGroup, across_ranks
from inductor_passes.trace.profiled import Measured
from inductor_passes.trace.reader import GraphTrace, Trace
from inductor_passes.trace.records import ChromeEvent, Counter, FailureArtifact, Metadata, Slice

#: Slice categories, by number in the page's arrays.
CATEGORIES = ("compute", "wait", "issue", "transfer")
_NUMBER = {category: number for number, category in enumerate(CATEGORIES)}


def write_page(trace: Trace, path: Path, *, title: str, measured: Sequence[Measured] = ()) -> None:
    """Write the page of a whole trace to ``path``; see :func:`render_page`."""
    page = render_page(across_ranks(trace.graphs), trace.notes, title=title, measured=measured)
    path.write_text(page, encoding="utf-8")


def render_page(
    groups: Sequence[RankGroup], notes: Sequence[str], *, title: str, measured: Sequence[Measured] = ()
) -> str:
    """The page of these graphs as text.

    Args:
        measured: of the same trace, shown beside what was predicted.

    Raises:
        ModuleNotFoundError: jinja2 is missing; the message names the extra that brings it.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the HTML report needs jinja2: pip install 'inductor-passes[report]'") from error
    folder = files("inductor_passes.trace") / "templates"
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
        (folder / "report.html").read_text(encoding="utf-8")
    )
    drawn = [_timelines(group.graph) for group in groups]
    data = {
        "title": title,
        "categories": CATEGORIES,
        "graphs": [_graph(group, lines, measured) for group, lines in zip(groups, drawn)],
        "notes": list(notes),
    }
    return template.render(
        title=title,
        style=(folder / "report.css").read_text(encoding="utf-8"),
        script=(folder / "report.js").read_text(encoding="utf-8"),
        data=embed(data),
        timelines=[(f"timeline-{k}-{when}", embed(lines[when])) for k, lines in enumerate(drawn) for when in lines],
    )


def embed(data: Any) -> str:
    """JSON that can stand inside a ``<script>`` element: it cannot end the element or open a comment."""
    text = json.dumps(plain(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _graph(group: RankGroup, lines: dict[str, Any], measured: Sequence[Measured]) -> dict[str, Any]:
    report = group.graph.report
    assert isinstance(report, GraphReport)
    data = report.to_json()
    del data["plan"]
    for schedule in data["schedules"]:
        del schedule["schedule_before"], schedule["schedule_after"]
    return {
        "title": group.graph.title,
        "report": data,
        "agreeing": group.agreeing,
        "differences": [list(d) for d in group.differences],
        "timelines": list(lines),
        "failures": _failures(group.graph),
        "measured": _measured(group, measured),
    }


def _measured(group: RankGroup, measured: Sequence[Measured]) -> dict[str, Any] | None:
    """Predicted and measured ns of the group's graph: on the rank that is shown, or on one with the same plan."""
    same = [one for one in measured if one.graph.title == group.graph.title and one.graph.rank in group.agreeing]
    if not same:
        return _tuned(group)
    one = min(same, key=lambda m: (m.graph.rank != group.graph.rank, m.graph.rank))
    found: dict[str, Any] = {"rank": one.graph.rank, "steps": one.steps, "step": None, "collectives": {}}
    for pair in one.pairs:
        times = [pair.predicted_ns, pair.measured_ns]
        if pair.what == "step":
            found["step"] = times
        elif pair.what in ("exposed", "transfer"):
            found["collectives"].setdefault(pair.label, {})[pair.what] = times
    return found


def _tuned(group: RankGroup) -> dict[str, Any] | None:
    """The same of what the setting ``tune`` measured."""
    report = group.graph.report
    timing = report.timing if report is not None else None
    if timing is None:
        return None
    collectives = {
        one.label: {
            "exposed": [one.predicted_stall_ns, one.measured_stall_ns],
            **({"transfer": [one.predicted_ns, one.measured_ns]} if one.known in ("measured", "shared") else {}),
        }
        for one in timing.collectives
    }
    step = [timing.predicted_ns, timing.measured_ns]
    return {"rank": group.graph.rank, "steps": timing.steps, "step": step, "collectives": collectives}


def _failures(graph: GraphTrace) -> list[Any]:
    found = []
    for kind in sorted(graph.artifacts):
        payload = graph.payload(kind) if kind.startswith("failure_") else None
        if payload is not None:
            with contextlib.suppress(RecordError):
                found.append(plain(convert(payload, FailureArtifact, "a failure")))
    return found


def _timelines(graph: GraphTrace) -> dict[str, Any]:
    return {when: compact(events) for when, events in graph.timelines().items()}


def compact(events: Sequence[ChromeEvent]) -> dict[str, Any]:
    """Chrome events as flat arrays: ``slices`` has 6 integers each (thread, category, begin ns, duration ns, name,
    source; the last two index ``strings``), sorted by thread and time; ``memory`` has 2 (time ns, bytes). ``threads``
    holds the threads' names.
    """
    strings: dict[str, int] = {"": 0}
    threads: dict[int, str] = {}
    slices: list[tuple[int, ...]] = []
    memory: list[int] = []
    for e in events:
        if isinstance(e, Slice):
            name, source = (strings.setdefault(text or "", len(strings)) for text in (e.name, e.args.source))
            slices.append((e.tid, _NUMBER[e.cat], round(e.ts * 1000), round(e.dur * 1000), name, source))
        elif isinstance(e, Counter):
            memory += round(e.ts * 1000), e.args.bytes
        elif isinstance(e, Metadata) and e.name == "thread_name" and e.args.name:
            threads[e.tid] = e.args.name
    slices.sort(key=lambda one: (one[0], one[2], one[3]))
    return {
        "threads": [[thread, threads[thread]] for thread in sorted(threads)],
        "strings": list(strings),
        "slices": [number for one in slices for number in one],
        "memory": memory,
    }
