"""The report of a graph that comes out of a cache.

On a warm cache no pass runs. So the report (and what the timeline needs) travels inside the generated module, as one
compressed statement that runs when the module is loaded: the same report then appears in the trace, marked as coming
from the cache, wherever the cache entry came from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inductor_passes.records.once import warn_once
from inductor_passes.records.packed import pack, unpack
from inductor_passes.report import GraphReport
from inductor_passes.schedule.problem import Problem
from inductor_passes.trace import nothing

if TYPE_CHECKING:
    from inductor_passes.trace.files import AskedFile
    from inductor_passes.verify.rank_check import Steps

#: Reports that this process has just compiled: their first load is not a cache hit.
_compiled_here: set[str] = set()


def statement(
    report: GraphReport,
    problem: Problem,
    order: Sequence[int],
    rank_steps: Mapping[str, Steps] | None = None,
    files: Sequence[AskedFile] = (),
    said: Sequence[str] = (),
) -> str:
    """A Python statement that replays the report when it runs; deterministic for equal reports.

    ``rank_steps`` is what other ranks compare with (``rank_check``); it is published when the module is loaded.
    ``files`` are written again then, and so is the plan where one is asked for. ``said`` are warnings: they are given
    again then.
    """
    timeless = report.to_json()
    for one in timeless["passes"]:
        one["duration_ns"] = 0
    content = {"report": timeless, "problem": problem.to_json(), "order": list(order)}
    if files:
        content["files"] = [one.to_json() for one in files]
    text = pack(content)
    _compiled_here.add(report.digest)
    steps = {group: one.to_json() for group, one in (rank_steps or {}).items()}
    more = f", ranks={json.dumps([report.phase, steps])!r}" if steps else ""
    if files or report.config.get("dump_plan"):
        more += ", asked=True"
    if said:
        more += f", said={tuple(said)!r}"
    return f"__import__('inductor_passes.trace.cached', fromlist=['loaded']).loaded({report.digest!r}, {text!r}{more})"


def loaded(digest: str, packed: str, ranks: str = "", asked: bool = False, said: Sequence[str] = ()) -> None:
    """Called by a generated module while it is loaded; emits the stored report unless it was compiled just now.

    Args:
        asked: whether files are to be written.
        said: warnings that were given when it was compiled.
    """
    nothing.planned()
    if digest in _compiled_here:
        _compiled_here.discard(digest)
        return
    if ranks:
        _publish(ranks)
    for one in said:
        warn_once(one)
    try:
        _emit(packed, asked)
    except Exception as error:  # a report must never stop a compiled program from running
        logging.getLogger("inductor_passes").warning("inductor_passes: cannot replay a stored report: %s", error)


def _publish(ranks: str) -> None:
    """Tell ranks that compile this graph now what it is; they may be waiting for it."""
    from inductor_passes.verify import rank_check

    try:
        phase, steps = json.loads(ranks)
        rank_check.from_cache(steps, phase)
    except Exception as error:
        logging.getLogger("inductor_passes").warning("inductor_passes: cannot compare with other ranks: %s", error)


def _emit(packed: str, asked: bool) -> None:
    from inductor_passes import _torch
    from inductor_passes.trace import files
    from inductor_passes.trace.artifacts import emit
    from inductor_passes.trace.collector import deliver, listening

    looked_at = _torch.trace_enabled() or listening()
    if not (looked_at or asked):
        return
    content = stored(packed)
    report = GraphReport.from_json(content["report"])
    for one in (files.plan_of(report), *map(files.from_json, content.get("files", ()))):
        if one is not None:
            one.write()
    if not looked_at:
        return
    report.from_cache = True
    report.compile_id = _torch.compile_id()
    report.rank, report.world_size = _torch.rank_and_world_size()
    deliver(report)
    problem = Problem.from_json(content["problem"])
    emit(report, problem=problem, order_before=problem.input_order, order_after=content["order"])


def stored(packed: str) -> dict[str, Any]:
    """The report and what belongs to it, as :func:`statement` wrote it.

    Raises:
        ValueError: the content is larger than a report can be, or is no report.
    """
    content = unpack(packed)
    if not isinstance(content, dict):
        raise ValueError("stored report is no JSON object")
    return content
