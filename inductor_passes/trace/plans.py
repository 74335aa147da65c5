"""Plan files out of a trace: one per graph, of the lowest rank that compiled it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from inductor_passes.pin.file import GraphPlan, PlanFileError, text_of
from inductor_passes.report import SCHEMA_VERSION
from inductor_passes.trace.reader import Trace


def write_plans(trace: Trace, directory: Path) -> Iterator[Path]:
    """Write ``<phase>_<index>.json`` for every graph into ``directory``; yields the files.

    Raises:
        PlanFileError: the trace holds no plan, or one that is malformed.
    """
    written: set[str] = set()
    for graph in sorted(trace.graphs, key=lambda g: g.rank):
        payload = graph.payload("plan")
        if payload is None:
            continue
        if payload.pop("schema_version", None) != SCHEMA_VERSION:
            raise PlanFileError(f"{graph.log}: {graph.title} has a plan of another schema version")
        payload["compile_id"] = graph.compile_id
        plan = GraphPlan.from_json(payload, f"{graph.log}: {graph.title}")
        # A later compilation in the same process has another index, so a name that is taken is another rank's.
        if plan.title in written:
            continue
        written.add(plan.title)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{plan.title}.json"
        path.write_text(text_of([plan]), encoding="utf-8")
        yield path
    if not written:
        raise PlanFileError("the trace holds no plan of any graph")
