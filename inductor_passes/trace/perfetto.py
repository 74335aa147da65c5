"""All planned timelines of a run as one Chrome trace: rank by rank, graph by graph, before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inductor_passes.trace.payload import dumps_records
from inductor_passes.trace.reader import GraphTrace, Trace


def write_perfetto(trace: Trace, path: Path) -> int:
    """Write the trace and return how many timelines it holds.

    Every timeline is a process of its own (process ids are numbered, names tell rank, graph and before/after), so that
    before and after of one graph lie on top of each other from time 0.
    """
    events: list[str] = []
    process = 0
    for graph in trace.graphs:
        for when, data in timelines(graph).items():
            process += 1
            title = f"rank {graph.rank} {graph.title} {when}"
            events += _renumbered(data["traceEvents"], process, title)
    path.write_text(dumps_records({"displayTimeUnit": "ns"}, "traceEvents", events), encoding="utf-8")
    return process


def _renumbered(source: list[Any], process: int, title: str) -> list[str]:
    result = []
    for event in source:
        if not isinstance(event, dict):
            continue
        event["pid"] = process
        if "id" in event:
            event["id"] = f"{process}/{event['id']}"
        if event.get("ph") == "M" and event.get("name") == "process_name":
            event["args"] = {"name": title}
        if event.get("ph") == "M" and event.get("name") == "process_sort_index":
            event["args"] = {"sort_index": process}
        result.append(json.dumps(event, allow_nan=False, separators=(",", ":")))
    return result


def timelines(graph: GraphTrace) -> dict[str, dict[str, Any]]:
    """The graph's Chrome traces that can be read, by ``before`` and ``after``."""
    found = ((when, graph.payload(f"chrome_trace_{when}")) for when in ("before", "after"))
    return {when: data for when, data in found if data is not None and isinstance(data.get("traceEvents"), list)}
