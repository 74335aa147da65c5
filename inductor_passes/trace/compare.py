"""Comparisons: the same graph on several ranks, and the same graph in two runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inductor_passes.report import GraphReport, Reason
from inductor_passes.trace.reader import GraphTrace

#: What identifies a graph across ranks and runs: (compile id, phase, graph index).
GraphKey = tuple[str, str, int]
#: What a schedule is summed up in, and in which unit.
_FIGURES = (
    ("makespan_after_ns", "ns"),
    ("exposed_after_ns", "ns"),
    ("peak_after_bytes", "bytes"),
    ("budget_bytes", "bytes"),
    ("lower_bound_ns", "ns"),
    ("tasks", ""),
    ("method", ""),
)


@dataclass
class RankGroup:
    """One graph on all ranks that compiled it.

    Attributes:
        graph: of the lowest rank; the one that is shown.
        agreeing: ranks whose plan digest equals its digest (its own rank included).
        differences: (rank, first difference) for every other rank.
    """

    key: GraphKey
    graph: GraphTrace
    agreeing: list[int]
    differences: list[tuple[int, str]]


def key_of(graph: GraphTrace) -> GraphKey:
    """The graph's identity across ranks and runs."""
    return graph.compile_id, graph.phase, graph.graph_index


def across_ranks(graphs: Iterable[GraphTrace]) -> list[RankGroup]:
    """Readable graphs, grouped over ranks, in the order in which the lowest rank compiled them."""
    groups: dict[GraphKey, RankGroup] = {}
    for graph in graphs:
        if graph.report is None:
            continue
        group = groups.get(key_of(graph))
        if group is None:
            groups[key_of(graph)] = RankGroup(key_of(graph), graph, [graph.rank], [])
            continue
        difference = _difference(group.graph, graph)
        if difference:
            group.differences.append((graph.rank, difference))
        else:
            group.agreeing.append(graph.rank)
    return list(groups.values())


def _difference(first: GraphTrace, other: GraphTrace) -> str:
    """The first difference between two ranks' plans, or ""."""
    assert first.report is not None and other.report is not None
    if first.report.digest == other.report.digest:
        return ""
    ours, theirs = schedule_labels(first), schedule_labels(other)
    for k, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            return f"schedule differs at label {k}: {a} on rank {first.rank}, {b} on rank {other.rank}"
    if len(ours) != len(theirs):
        return f"schedule has {len(ours)} labels on rank {first.rank}, {len(theirs)} on rank {other.rank}"
    return _figures(first, other) or (
        "same labels in the same order and the same totals; other durations, memory or dependencies: "
        f"digest {first.report.digest} on rank {first.rank}, {other.report.digest} on rank {other.rank}"
    )


def _figures(first: GraphTrace, other: GraphTrace) -> str:
    """The first figure in which two plans of equal labels differ, the earliest level first; "" where none does."""
    assert first.report is not None and other.report is not None
    for ours, theirs in zip(first.report.schedules, other.report.schedules):
        if ours.level != theirs.level or ours.digest == theirs.digest:
            continue
        for name, unit in _FIGURES:
            a, b = getattr(ours, name), getattr(theirs, name)
            if a != b:
                said = " and ".join(f"{x} {unit}".strip() + f" on rank {g.rank}" for x, g in ((a, first), (b, other)))
                return f"same labels in the same order; {_called(name)} ({ours.level}) is {said}"
    return ""


def _called(figure: str) -> str:
    return figure.removesuffix("_ns").removesuffix("_bytes").replace("_", " ")


def schedule_labels(graph: GraphTrace, when: str = "after") -> list[str]:
    """The labels of the schedule artifact, in order; empty without one."""
    labels: list[str] = []
    taking = False
    for line in graph.text("schedule").split("\n"):
        if line in ("before:", "after:"):
            taking = line == f"{when}:"
        elif taking:
            labels += line.split()
    return labels


@dataclass(frozen=True)
class Change:
    """One quantity of a graph in run A and run B; None where the run lacks it. ``unit``: ``ns``, ``bytes`` or ""."""

    what: str
    a: int | float | str | None
    b: int | float | str | None
    unit: str = ""


@dataclass
class GraphDiff:
    """What changed in one graph between two runs.

    Attributes:
        only: the run that alone has the graph, ``A`` or ``B``; "" where both do.
        nodes: of the graph as it came, in run A and run B, where these differ: it is another graph then.
    """

    key: GraphKey
    changes: list[Change]
    only: str = ""
    nodes: tuple[int, int] | None = None


def across_runs(a: Sequence[GraphTrace], b: Sequence[GraphTrace]) -> list[GraphDiff]:
    """Graph by graph (lowest rank of each run): figures, settings and verdicts that differ.

    Graphs are matched by compile id, phase and index.
    """
    first = {group.key: group.graph.report for group in across_ranks(a)}
    second = {group.key: group.graph.report for group in across_ranks(b)}
    result = []
    for key in [*first, *(k for k in second if k not in first)]:
        ours, theirs = first.get(key), second.get(key)
        if ours is None or theirs is None:
            result.append(GraphDiff(key, [], only="A" if theirs is None else "B"))
        else:
            nodes = None if ours.nodes == theirs.nodes else (ours.nodes, theirs.nodes)
            result.append(GraphDiff(key, list(_changes(ours, theirs)), nodes=nodes))
    return result


def _changes(a: GraphReport, b: GraphReport) -> Iterable[Change]:
    for name in sorted({*a.config, *b.config}):
        ours, theirs = a.config.get(name), b.config.get(name)
        if ours != theirs:
            yield Change(f"setting {name}", str(ours), str(theirs))
    for name, unit in _FIGURES:
        ours, theirs = getattr(a.schedule, name, None), getattr(b.schedule, name, None)
        if ours != theirs:
            yield Change(_called(name), ours, theirs, unit)
    if a.digest != b.digest:
        yield Change("plan digest", a.digest, b.digest)
    before = {c.name: c for c in a.collectives}
    after = {c.name: c for c in b.collectives}
    if before.keys() != after.keys():
        # Another program (buckets, rewrites): equal names need not mean the same collective.
        yield Change("collectives", len(a.collectives), len(b.collectives))
        totals = [_exposed_by_reason(report) for report in (a, b)]
        for reason in Reason:
            ours, theirs = (total.get(reason, 0) for total in totals)
            if ours != theirs:
                yield Change(f"exposed, {reason.value}", ours, theirs, "ns")
        return
    for name, x in before.items():
        y = after[name]
        if x.exposed_ns != y.exposed_ns:
            yield Change(f"{x.label} exposed", x.exposed_ns, y.exposed_ns, "ns")
        if x.reason != y.reason:
            yield Change(f"{x.label} reason", x.reason.value, y.reason.value)


def _exposed_by_reason(report: GraphReport) -> dict[Reason, int]:
    totals: dict[Reason, int] = {}
    for one in report.collectives:
        totals[one.reason] = totals.get(one.reason, 0) + one.exposed_ns
    return totals
