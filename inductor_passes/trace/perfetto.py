"""All planned timelines of a run as one Chrome trace: rank by rank, graph by graph, before and after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from inductor_passes.trace.payload import dumps_records
from inductor_passes.trace.reader import Trace
from inductor_passes.trace.records import ChromeEvent, FlowBegin, FlowEnd, FlowStep, Metadata, Named


def write_perfetto(trace: Trace, path: Path) -> int:
    """Write the trace and return how many timelines it holds.

    Every timeline is a process of its own (process ids are numbered, names tell rank, graph and before/after), so that
    before and after of one graph lie on top of each other from time 0.
    """
    events: list[str] = []
    process = 0
    for graph in trace.graphs:
        for when, found in graph.timelines().items():
            process += 1
            events += _renumbered(found, process, f"rank {graph.rank} {graph.title} {when}")
    path.write_text(dumps_records({"displayTimeUnit": "ns"}, "traceEvents", events), encoding="utf-8")
    return process


def _renumbered(source: list[ChromeEvent], process: int, title: str) -> Iterator[str]:
    for event in source:
        event.pid = process
        if isinstance(event, (FlowBegin, FlowStep, FlowEnd)):
            event.id = f"{process}/{event.id}"
        elif isinstance(event, Metadata) and event.name == "process_name":
            event.args = Named(name=title)
        elif isinstance(event, Metadata) and event.name == "process_sort_index":
            event.args = Named(sort_index=process)
        yield json.dumps(msgspec.to_builtins(event), allow_nan=False, separators=(",", ":"))
