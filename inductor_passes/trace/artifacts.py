"""The artifacts of one planned graph in torch's structured trace (``TORCH_TRACE``), readable in tlparse.

Forward and backward share a compile id, so phase and graph index are part of every artifact's name and payload. The
names start with ``inductor_passes_`` and never with a name that tlparse reserves for Inductor's own records: it takes
the first record whose name matches. Payloads are built only when a trace is written, and nothing that goes wrong here
reaches the compilation: the first failure is logged as a warning, further ones are silent.
"""

from __future__ import annotations

import itertools
import logging
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inductor_passes.records.convert import plain
from inductor_passes.report import SCHEMA_VERSION, GraphReport, NarrowedReport, NothingPlanned, PassReport, Timing
from inductor_passes.schedule.problem import Problem
from inductor_passes.trace.payload import dumps
from inductor_passes.trace.records import (
    CollectivesArtifact,
    ConfigArtifact,
    DecisionsArtifact,
    FailureArtifact,
    GroupRecord,
    MeasuredArtifact,
    MeasuredMessage,
    NothingPlannedArtifact,
    PassDecisions,
    TimingArtifact,
)

if TYPE_CHECKING:
    from inductor_passes.schedule.simulate import Timeline

PREFIX = "inductor_passes_"
#: Artifacts that every graph has; ``chrome_trace_*`` and ``schedule`` need a planned order.
ALWAYS = ("config", "summary", "decisions", "collectives")
PLANNED = ("schedule", "chrome_trace_before", "chrome_trace_after")
#: Only at debug level, i.e. when the logger ``inductor_passes`` is: ``TORCH_LOGS=+inductor_passes``.
DEBUG = ("problem", "graph_before", "graph_after")
FAILURE = "failure"
#: Of every graph with collectives; what ``inductor-passes report --plans`` writes and ``plan=...`` pins.
PLAN = "plan"
#: Why there is no report, once per process: of a graph that was compiled and not planned.
NOTHING_PLANNED = "nothing_planned"
#: What the setting ``tune`` measured: written when its steps are over, and again when all ranks' times are together.
TIMING = "timing"
#: While a graph runs whose narrowed messages are measured, more than once.
MEASURED = "measured"
KINDS = (*ALWAYS, *PLANNED, PLAN, *DEBUG, FAILURE, NOTHING_PLANNED, TIMING, MEASURED)

_log = logging.getLogger("inductor_passes")
_warned = False


def graphs_wanted() -> bool:
    """Whether somebody debugs: a trace is written, and the logger ``inductor_passes`` is at debug level."""
    from inductor_passes._torch import trace_enabled

    return _log.isEnabledFor(logging.DEBUG) and trace_enabled()


def artifact_name(kind: str, report: GraphReport) -> str:
    """``inductor_passes_<kind>_<phase>_<graph index>``, unique among the graphs of one compile id."""
    phase = re.sub(r"[^a-z0-9]+", "_", report.phase.lower()) or "graph"
    return f"{PREFIX}{kind}_{phase}_{report.graph_index}"


def emit(
    report: GraphReport,
    *,
    problem: Problem | None,
    order_before: Sequence[int] | None,
    order_after: Sequence[int] | None,
    timeline_before: Timeline | None = None,
    timeline_after: Timeline | None = None,
    graph_before: str = "",
    graph_after: str = "",
) -> None:
    """Write everything about one planned graph into the trace; does nothing without one, never raises.

    Args:
        report: the finished report; its decisions and collectives become artifacts of their own.
        problem: what was planned, or None for a graph that was left alone.
        order_before, order_after: orders of ``problem``, or None.
        timeline_before, timeline_after: their simulations, when at hand; else they are simulated here.
        graph_before, graph_after: readable graphs for the debug level, see :func:`graphs_wanted`; "" for none.
    """

    def write() -> None:
        from inductor_passes._torch import trace_enabled

        if not trace_enabled():
            return
        identity = identify(report)
        _write("config", report, "json", lambda: dumps(_config(report, identity)))
        _write("summary", report, "json", lambda: dumps(_summary(report)))
        _write("decisions", report, "json", lambda: dumps(_decisions(report, identity)))
        _write("collectives", report, "json", lambda: dumps(_collectives(report, identity)))
        if report.plan:
            _write(PLAN, report, "json", lambda: dumps({**report.plan, **identity}))
        if problem is not None and order_before is not None and order_after is not None:
            _planned(report, identity, problem, order_before, order_after, timeline_before, timeline_after)
        if graphs_wanted():
            if problem is not None:
                planned = problem
                _write("problem", report, "json", lambda: dumps({**planned.to_json(), **identity}, indent=None))
            for kind, graph in (("graph_before", graph_before), ("graph_after", graph_after)):
                if graph:
                    _write(kind, report, "string", _headed(identity, lambda text=graph: text))  # type: ignore[misc]

    guarded(write)


def emit_failure(report: GraphReport, failed: PassReport, graph: Callable[[], str] | None = None) -> None:
    """Write why a pass was rolled back, with the graph that was refused; never raises.

    ``graph`` gives the refused graph as text and is called only when a trace is written.
    """

    def write() -> None:
        from inductor_passes._torch import trace_enabled

        if trace_enabled():
            _write(
                f"{FAILURE}_{re.sub(r'[^a-z0-9]+', '_', failed.name.lower())}",
                report,
                "json",
                lambda: dumps(_failure(report, failed, graph)),
            )

    guarded(write)


def emit_nothing_planned(about: GraphReport, reason: NothingPlanned, line: str) -> None:
    """Write why nothing was planned, under a graph that was left alone; never raises."""

    def write() -> None:
        from inductor_passes._torch import trace_enabled

        if trace_enabled():
            record = NothingPlannedArtifact(
                **identify(about), reason=reason.value, line=line, world_size=about.world_size
            )
            _write(NOTHING_PLANNED, about, "json", lambda: dumps(plain(record)))

    guarded(write)


def emit_timing(phase: str, graph_index: int, compile_id: str, rank: int, found: Timing) -> None:
    """Write what was measured of a graph, outside of its compilation; never raises."""

    def write() -> None:
        from inductor_passes._torch import trace_artifact, trace_enabled

        if trace_enabled():
            about = GraphReport(phase, graph_index, compile_id=compile_id, rank=rank)
            record = TimingArtifact(**identify(about), timing=found)
            trace_artifact(artifact_name(TIMING, about), "json", lambda: dumps(plain(record)), compile_id)

    guarded(write)


def emit_measured(identity: dict[str, Any], name: str, narrowed: Sequence[NarrowedReport]) -> None:
    """Write measured errors so far, while the graph runs; never raises.

    Args:
        identity: of the graph, see :func:`identify`.
        name: of the artifact.
    """

    def write() -> None:
        from inductor_passes._torch import trace_artifact, trace_enabled

        if trace_enabled():
            found = [
                MeasuredMessage(one.name, one.measured, one.largest, one.runs)
                for one in narrowed
                if one.measured is not None
            ]
            record = MeasuredArtifact(**identity, narrowed=found)
            trace_artifact(name, "json", lambda: dumps(plain(record)), identity["compile_id"])

    guarded(write)


def guarded(action: Callable[[], None]) -> None:
    """Run ``action``; the first exception in this process becomes a warning, and the compilation goes on."""
    global _warned
    try:
        action()
    except Exception as error:
        if not _warned:
            _warned = True
            _log.warning(
                "could not write a trace artifact (%s: %s); compilation goes on without. Check that the directory in "
                "TORCH_TRACE can be written to and has space.",
                type(error).__name__,
                error,
            )


def identify(report: GraphReport) -> dict[str, Any]:
    """What every payload carries so that a reader can put the artifacts of one graph together."""
    return {
        "schema_version": SCHEMA_VERSION,
        "phase": report.phase,
        "graph_index": report.graph_index,
        "compile_id": report.compile_id,
        "rank": report.rank,
    }


def _write(kind: str, report: GraphReport, encoding: str, payload: Callable[[], str]) -> None:
    from inductor_passes._torch import trace_artifact

    # Each on its own, so that one that cannot be built does not take the others with it.
    guarded(lambda: trace_artifact(artifact_name(kind, report), encoding, payload))


def _config(report: GraphReport, identity: dict[str, Any]) -> Any:
    return plain(
        ConfigArtifact(
            **identity,
            config=report.config,
            cost_profile=report.cost_profile,
            torch_version=report.torch_version,
            world_size=report.world_size,
        )
    )


def _summary(report: GraphReport) -> dict[str, Any]:
    """The report without what has an artifact of its own."""
    data = report.to_json()
    del data["collectives"], data["config"], data["plan"], data["timing"]
    for one in data["passes"]:
        del one["decisions"]
    for schedule in data["schedules"]:
        del schedule["schedule_before"], schedule["schedule_after"]
    return data


def _decisions(report: GraphReport, identity: dict[str, Any]) -> Any:
    return plain(
        DecisionsArtifact(**identity, passes=[PassDecisions(one.name, one.decisions) for one in report.passes])
    )


def _collectives(report: GraphReport, identity: dict[str, Any]) -> Any:
    lanes = {one.lane: one.ranks for one in report.collectives}
    groups = [_group(lane, ranks) for lane, ranks in sorted(lanes.items())]
    return plain(CollectivesArtifact(**identity, groups=groups, collectives=report.collectives))


def _group(lane: str, ranks: tuple[int, ...]) -> GroupRecord:
    strides = {b - a for a, b in itertools.pairwise(ranks)}
    stride = strides.pop() if len(strides) == 1 else (1 if len(ranks) == 1 else None)
    return GroupRecord(lane, ranks, ranks[0] if ranks else None, stride)


def _failure(report: GraphReport, failed: PassReport, graph: Callable[[], str] | None) -> Any:
    text = ""
    if graph is not None:
        try:
            text = graph()
        except Exception as error:
            text = f"(the graph cannot be printed: {type(error).__name__}: {error})"
    return plain(FailureArtifact(**identify(report), pass_=failed, graph=text.splitlines()))


def _headed(identity: dict[str, Any], text: Callable[[], str]) -> Callable[[], str]:
    head = "".join(f"# {key}: {value}\n" for key, value in identity.items())
    return lambda: (head + text()).encode("utf-8", "replace").decode("utf-8")


def _planned(
    report: GraphReport,
    identity: dict[str, Any],
    problem: Problem,
    order_before: Sequence[int],
    order_after: Sequence[int],
    timeline_before: Timeline | None,
    timeline_after: Timeline | None,
) -> None:
    def schedule() -> str:
        return "".join(
            f"{title}:\n{textwrap.fill(problem.schedule_text(order), 110, break_long_words=False)}\n"
            for title, order in (("before", order_before), ("after", order_after))
        )

    _write("schedule", report, "string", _headed(identity, schedule))
    schedule_report = report.schedule
    budget = None if schedule_report is None else schedule_report.budget_bytes

    def chrome(order: Sequence[int], timeline: Timeline | None) -> Callable[[], str]:
        def payload() -> str:
            from inductor_passes.schedule.simulate import simulate
            from inductor_passes.trace.chrome import chrome_trace

            at = simulate(problem, order) if timeline is None else timeline
            names = {one.name: [p.name for p in one.parameters] for one in report.collectives}
            return chrome_trace(
                problem, order, at, rank=report.rank, head=identity, budget_bytes=budget, parameters=names
            )

        return payload

    _write("chrome_trace_before", report, "json", chrome(order_before, timeline_before))
    _write("chrome_trace_after", report, "json", chrome(order_after, timeline_after))
