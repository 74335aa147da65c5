"""Measured against predicted: a torch.profiler trace of a real step, matched task by task with the planned timeline.

The profiler shows, on the thread that runs a compiled graph, each collective's start, each wait and each library call.
Generated code runs in the planned order, so the n-th start in the profile is the n-th start of the plan; a graph is
recognised by its sequence of starts and waits. Fused kernels of CPU code leave no events: what lies between two
neighbouring communication events is measured as one block. Where work runs on a device, its own times count
(:mod:`~inductor_passes.trace.profiled_device`).

On a CPU, what can be measured of a transfer depends on whether somebody waited for it: then it ended when the wait did,
and it began when it was issued or when the transfer before it on the same lane had ended. A transfer that nobody waited
for shows nothing by itself. Waiting for a slower rank counts as transfer on the faster one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from inductor_passes.cost.fit import spread
from inductor_passes.report import CollectiveReport
from inductor_passes.trace.profile_events import WAIT, Call, Event, ProfileTraceError, read_profile
from inductor_passes.trace.profiled_device import on_device
from inductor_passes.trace.reader import GraphTrace, Trace
from inductor_passes.trace.records import Slice

#: A wait up to this long, in ns, is the cost of asking, not a stall.
WAIT_NS = 50_000


@dataclass(frozen=True)
class Pair:
    """One quantity, predicted and measured in ns. ``what``: ``transfer``, ``exposed``, ``issue``, ``block``, ``step``,
    or ``library`` (a library call such as a matmul). ``shared``: how many transfers a measured time was divided among.
    ``spread_ns``: standard deviation of the time over steps, None where it was measured once.
    """

    what: str
    label: str
    predicted_ns: int
    measured_ns: int
    kind: str = ""
    size_bytes: int = 0
    ranks: tuple[int, ...] = ()
    shared: int = 1
    spread_ns: float | None = None

    @property
    def error(self) -> float | None:
        """``|predicted - measured| / measured``; None when nothing was measured."""
        return abs(self.predicted_ns - self.measured_ns) / self.measured_ns if self.measured_ns else None


@dataclass
class Measured:
    """One graph with the medians over the steps that the profile shows."""

    graph: GraphTrace
    steps: int
    pairs: list[Pair] = field(default_factory=list)

    def errors(self, what: str) -> list[float]:
        """Relative errors of one kind of quantity, sorted."""
        return sorted(e for p in self.pairs if p.what == what and (e := p.error) is not None)


@dataclass(frozen=True)
class _Planned:
    """A slice of the planned compute lane; ``kind`` as in :class:`Event`, "" for compute."""

    kind: str
    label: str
    ns: int
    begin_ns: int
    library: bool = False


def _plan(graph: GraphTrace) -> tuple[list[_Planned], dict[str, int]]:
    """The compute lane of the compiled order, and the planned transfer times by label."""
    kinds = {c.label: c.kind for c in graph.report.collectives} if graph.report is not None else {}
    lane: list[_Planned] = []
    transfers: dict[str, int] = {}
    for e in graph.timelines().get("after", ()):
        if not isinstance(e, Slice):
            continue
        ns, begin, name = round(e.dur * 1000), round(e.ts * 1000), e.name
        if e.cat == "transfer":
            transfers[name] = ns
        elif e.cat == "issue":
            label = name.removeprefix("issue ")
            lane.append(_Planned(kinds.get(label, "?"), label, ns, begin))
        elif e.cat == "wait":
            lane.append(_Planned(WAIT, name.removeprefix("wait "), ns, begin))
        else:
            label = e.args.label or ""
            lane.append(_Planned("", label or name, ns, begin, library=bool(label)))
    return lane, transfers


def planned_waits(graph: GraphTrace) -> list[tuple[str, str, int]]:
    """(kind, label, ns that the compute lane stands still) per collective of the compiled order, in order of issue."""
    lane, _ = _plan(graph)
    stalls: dict[str, int] = {}
    for p in lane:
        if p.kind == WAIT:
            stalls[p.label] = stalls.get(p.label, 0) + p.ns
    return [(p.kind, p.label, stalls.get(p.label, 0)) for p in lane if p.kind not in ("", WAIT)]


def match(trace: Trace, profiles: Sequence[Path]) -> list[Measured]:
    """Measured graphs of all profiles, by rank; graphs that no profile shows are left out.

    A profile that names no rank belongs to the rank of its position.

    Raises:
        ProfileTraceError: a profile cannot be read, or none of its calls belongs to a graph of the trace.
    """
    result = []
    for position, path in enumerate(profiles):
        rank, calls = read_profile(path)
        own = [g for g in trace.graphs if g.rank == (position if rank is None else rank) and g.report is not None]
        plans = [(graph, *_plan(graph)) for graph in own]
        by_graph: dict[int, list[Call]] = {}
        for call in calls:
            for k, (_, lane, _) in enumerate(plans):
                if call.signature and call.signature == [p.kind for p in lane if p.kind]:
                    by_graph.setdefault(k, []).append(call)
                    break
        if not by_graph:
            raise ProfileTraceError(
                f"{path}: none of its {len(calls)} graph calls has the collectives of a graph of the trace; expected a "
                "profile of the run that wrote the trace, same rank"
            )
        for k, found in sorted(by_graph.items()):
            graph, lane, transfers = plans[k]
            result.append(_measured(graph, lane, transfers, found))
    return result


def _measured(
    graph: GraphTrace, lane: Sequence[_Planned], transfers: Mapping[str, int], calls: Sequence[Call]
) -> Measured:
    assert graph.report is not None
    reports = {c.label: c for c in graph.report.collectives}
    # Steps are lined up by position: equal sequences of communication events give equal lists of quantities.
    rows = [list(_quantities(lane, transfers, reports, call)) for call in calls]
    merged: dict[tuple[str, str, int], list[Pair]] = {}
    for row in rows:
        seen: dict[tuple[str, str], int] = {}
        for pair in row:
            number = seen[pair.what, pair.label] = seen.get((pair.what, pair.label), 0) + 1
            merged.setdefault((pair.what, pair.label, number), []).append(pair)
    pairs = [
        Pair(
            p[0].what,
            p[0].label,
            p[0].predicted_ns,
            round(median(one.measured_ns for one in p)),
            p[0].kind,
            p[0].size_bytes,
            p[0].ranks,
            max(one.shared for one in p),
            spread([one.measured_ns for one in p]),
        )
        for p in merged.values()
    ]
    return Measured(graph, len(calls), pairs)


def _quantities(
    lane: Sequence[_Planned],
    transfers: Mapping[str, int],
    reports: Mapping[str, CollectiveReport],
    call: Call,
) -> Iterator[Pair]:
    if call.work:
        yield from _quantities_on_device(lane, transfers, reports, call)
        return
    events = [e for e in call.events if e.kind]
    planned = [p for p in lane if p.kind]
    for event, plan in zip(events, planned):
        what, ns = ("exposed", max(0, event.ns - WAIT_NS)) if plan.kind == WAIT else ("issue", event.ns)
        yield Pair(what, plan.label, plan.ns, ns, *_about(reports.get(plan.label)))
    for label, measured_ns, shared in _transfers(events, planned, reports, transfers):
        yield Pair("transfer", label, transfers[label], measured_ns, *_about(reports.get(label)), shared)
    yield from _blocks(lane, call.events)
    if events and planned:
        last = planned[-1].begin_ns + planned[-1].ns
        yield Pair("step", "", last - planned[0].begin_ns, events[-1].end_ns - events[0].begin_ns)


def _quantities_on_device(
    lane: Sequence[_Planned],
    transfers: Mapping[str, int],
    reports: Mapping[str, CollectiveReport],
    call: Call,
) -> Iterator[Pair]:
    planned = [p for p in lane if p.kind]
    starts = {p.label: k for k, p in enumerate(planned) if p.kind != WAIT}
    found = on_device(call, {k: starts[p.label] for k, p in enumerate(planned) if p.kind == WAIT and p.label in starts})
    for k, plan in enumerate(planned):
        about = _about(reports.get(plan.label))
        if k in found.stalls:
            yield Pair("exposed", plan.label, plan.ns, found.stalls[k], *about)
        if k in found.issues:
            yield Pair("issue", plan.label, plan.ns, found.issues[k], *about)
        if k in found.transfers and plan.label in transfers:
            yield Pair("transfer", plan.label, transfers[plan.label], found.transfers[k], *about)
    for number, (ours, theirs) in enumerate(zip(_split(lane), found.blocks)):
        if ours:
            yield Pair("block", f"block {number}", sum(p.ns for p in ours), theirs.busy_ns)
            yield from _library(number, ours, theirs.library)
    if planned:
        last = planned[-1].begin_ns + planned[-1].ns
        yield Pair("step", "", last - planned[0].begin_ns, found.step_ns)


def _library(number: int, ours: Sequence[_Planned], calls: Sequence[tuple[str, int]]) -> Iterator[Pair]:
    """Library calls of a block one by one, where profile and plan name the same ones."""
    library = [p for p in ours if p.library]
    calls = [c for c in calls if any(c[0] == p.label for p in library)]
    if [p.label for p in library] == [name for name, _ in calls]:
        for plan, (_, ns) in zip(library, calls):
            yield Pair("library", f"{plan.label} in block {number}", plan.ns, ns)


def _about(report: CollectiveReport | None) -> tuple[str, int, tuple[int, ...]]:
    return ("", 0, ()) if report is None else (report.kind, report.size_bytes, report.ranks)


def _transfers(
    events: Sequence[Event],
    planned: Sequence[_Planned],
    reports: Mapping[str, CollectiveReport],
    transfers: Mapping[str, int],
) -> Iterator[tuple[str, int, int]]:
    """(label, ns, how many share the measurement) of transfers whose time can be told, in order of issue per lane.

    A lane serves in order of issue. Where a stall shows when one transfer ended, it and those before it whose end
    nobody saw filled the lane together and share that time as they were predicted to, provided that each of them was
    issued before its turn came.
    """
    issues: dict[str, list[tuple[str, int]]] = {}
    waits: dict[str, Event] = {}
    for event, plan in zip(events, planned):
        if plan.kind == WAIT:
            waits.setdefault(plan.label, event)
        elif plan.label in transfers:
            report = reports.get(plan.label)
            issues.setdefault(report.lane if report is not None else "", []).append((plan.label, event.begin_ns))
    for lane in issues.values():
        run: list[tuple[str, int]] = []
        free = 0
        for position, (label, issued) in enumerate(lane):
            run.append((label, issued))
            wait = waits.get(label)
            if wait is None:
                continue
            later = [waits[other].end_ns for other, _ in lane[position + 1 :] if other in waits]
            if wait.ns <= WAIT_NS or any(end <= wait.begin_ns for end in later):
                if all(wait.end_ns <= when for _, when in lane[position + 1 :]):
                    # Over before the next one was issued: the lane was idle then.
                    run, free = [], wait.begin_ns
                continue
            begin = max(run[0][1], free)
            total, share = wait.end_ns - begin, sum(transfers[one] for one, _ in run)
            reached, fits = float(begin), True
            parts = []
            for one, when in run:
                fits = fits and when <= reached + 1
                part = total * transfers[one] / share if share else total / len(run)
                reached += part
                parts.append((one, round(part), len(run)))
            if fits or len(run) == 1:
                yield from parts
            run, free = [], wait.end_ns


def _blocks(lane: Sequence[_Planned], call: Sequence[Event]) -> Iterator[Pair]:
    """Compute between neighbouring communication events; library calls one by one where their number fits."""
    for number, (ours, theirs) in enumerate(zip(_split(lane), _split_events(call))):
        inside, begin, end = theirs
        if begin < 0 or end < 0 or not ours:
            continue
        yield Pair("block", f"block {number}", sum(p.ns for p in ours), max(0, end - begin))
        yield from _library(number, ours, [(e.name, e.ns) for e in inside])


def _split(lane: Sequence[_Planned]) -> list[list[_Planned]]:
    blocks: list[list[_Planned]] = [[]]
    for p in lane:
        if p.kind:
            blocks.append([])
        else:
            blocks[-1].append(p)
    return blocks


def _split_events(call: Sequence[Event]) -> list[tuple[list[Event], int, int]]:
    """(library calls, begin, end) between communication events; -1 where the graph's own ends are not known."""
    blocks: list[tuple[list[Event], int, int]] = []
    inside: list[Event] = []
    begin = -1
    for e in call:
        if e.kind:
            blocks.append((inside, begin, e.begin_ns))
            inside, begin = [], e.end_ns
        else:
            inside.append(e)
    blocks.append((inside, begin, inside[-1].end_ns if inside else -1))
    return blocks
