"""What the plans of a step say of its time and of its memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from inductor_passes.emulation.link_model import Record
from inductor_passes.report import GraphReport
from inductor_passes.schedule.problem import INPUT, Problem
from inductor_passes.step import recompute


def foretold(reports: Sequence[GraphReport]) -> dict[str, int]:
    """What a plan says of its step in ns, and when durations are not as estimated; 0 where nobody planned."""
    schedules = [report.schedule for report in reports if report.schedule is not None]
    return {
        "predicted_ns": sum(s.makespan_after_ns for s in schedules),
        "disturbed_ns": sum(s.disturbed_after_ns for s in schedules),
        "disturbed_worst_ns": sum(s.disturbed_worst_ns for s in schedules),
    }


def planned_stalls(reports: Sequence[GraphReport]) -> list[tuple[str, int]]:
    """(kind, ns that the plan has the compute lane stand still for it) per collective of a step, in order of issue."""
    return [(one.kind, one.exposed_ns) for report in reports for one in report.collectives]


def measured_stalls(records: Sequence[Record]) -> list[tuple[str, int]]:
    """As :func:`planned_stalls`, of a step on the emulated link: a wait stands still for what goes ahead on the link.

    A stall is charged to the transfers that fill it, as reports charge those of a plan: from its end back to where the
    wait began, through the queue of the link.
    """
    sent = [r for r in records if r.kind != "barrier"]
    found = {id(r): 0 for r in sent}
    ends = {(r.link, r.virtual.end_ns): r for r in sent}
    for one in sent:
        left, filling = one.virtual.exposed_ns, one
        while left > 0:
            times = filling.virtual
            part = min(left, times.end_ns - times.begin_ns)
            found[id(filling)] += part
            left -= part
            before = ends.get((filling.link, times.begin_ns))
            if before is None or before is filling:
                # The link was idle, or waited for another rank.
                found[id(filling)] += left
                break
            filling = before
    return [(r.kind, found[id(r)]) for r in sent]


def predicted_peak(reports: Sequence[GraphReport], problems: Path, rank: int) -> int:
    """The planned peak of a step in bytes above what its caller holds; 0 where nobody planned or nothing is known.

    Args:
        problems: folder with the graphs' problems, which code from a cache does not write again: the newest count.
    """
    held = {}
    for path in sorted(problems.glob(f"rank{rank}_*ward_*.json"), key=lambda p: p.stat().st_mtime_ns):
        problem = Problem.from_json(json.loads(path.read_text(encoding="utf-8")))
        inputs = (s.size_bytes for s in problem.storages if s.producer == INPUT and s.pinned)
        held[problem.name.split("_")[0]] = sum(inputs)
    planned = [(r.phase, r.schedules[-1].peak_after_bytes) for r in reports if r.schedules]
    return max((peak - held[phase] for phase, peak in planned if phase in held), default=0)


def step_peak(reports: Sequence[GraphReport]) -> int | None:
    """The peak of the step as Inductor would run it, where a budget below it made us look; equal on all ranks."""
    found = [p.metrics.get("peak_saved_bytes") for r in reports for p in r.passes if p.name == recompute.NAME]
    return next((int(peak) for peak in found if peak is not None), None)
