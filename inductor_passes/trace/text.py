"""The text report: what happened to each graph and why each exposed collective is exposed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from inductor_passes.records.words import BoundOn
from inductor_passes.report import (
    GAIN_AT_MOST,
    CollectiveReport,
    CollectiveTiming,
    GraphReport,
    NarrowedReport,
    Reason,
    RedistributionReport,
    ScheduleReport,
    Swap,
    SwapOutcome,
    Timing,
)
from inductor_passes.schedule.robust import SPREAD
from inductor_passes.trace.compare import Change, GraphDiff, RankGroup
from inductor_passes.trace.profiled import Measured
from inductor_passes.trace.table import PlainTable
from inductor_passes.trace.units import change, duration, percent, size

#: What the limit on the step holds for.
_BOUND_ON: dict[BoundOn, str] = {
    "any memory": "with any memory",
    "this budget": "within the budget",
    "all orders tried": "(all orders tried)",
}
#: Members of a bucket that a table lists; the page and JSON have all.
MOST_NAMES = 6


def render_group(group: RankGroup, *, top: int | None = None) -> RenderableType:
    """One graph of a trace on all its ranks; see :func:`render_graph`."""
    assert group.graph.report is not None
    title = f"{group.graph.title}  " + _ranks(group.agreeing)
    parts = [render_graph(group.graph.report, title=title, top=top)]
    for rank, difference in group.differences:
        parts.append(Text(f"rank {rank} has another plan: {difference}", style="bold red"))
    return Group(*parts)


def render_graph(report: GraphReport, *, title: str = "", top: int | None = None) -> RenderableType:
    """One graph: figures before and after, passes that were rolled back, one line per collective.

    Args:
        top: show only that many collectives, most exposed first; None shows all, in order of issue.
    """
    parts: list[RenderableType] = [Text(title or f"{report.phase}_{report.graph_index}", style="bold")]
    if report.from_cache:
        parts.append(Text("from cache: compiled earlier, its stored report is shown", style="cyan"))
    schedule = report.schedule
    if schedule is None:
        parts.append(Text(_unplanned(report)))
    else:
        parts += [_figures(schedule, _all_passes(report)), Text(_plan_line(report, schedule))]
    parts += [Text(line, style="yellow") for line in _rollbacks(report)]
    parts += [Text(note, style="dim") for note in report.notes]
    if report.region:
        parts.append(Text(f"names of parameters are those of the compiled region, a {report.region}", style="dim"))
    if report.collectives:
        parts += [_collectives(report.collectives, top), *_help(report.collectives)]
    if report.timing is not None:
        parts += _timing(report.timing, top)
    if report.narrowed:
        parts.append(_narrowed(report.narrowed, top))
    if report.redistributions:
        parts.append(_redistributions(report.redistributions, top))
    return Group(*parts, Text(""))


def _timing(timing: Timing, top: int | None) -> list[RenderableType]:
    """What the setting ``tune`` measured: the step, each collective, each class of kernels."""
    of = f"rank {timing.ranks[0]}" if len(timing.ranks) == 1 else f"{len(timing.ranks)} ranks ({_listed(timing.ranks)})"
    off = percent(abs(timing.measured_ns - timing.predicted_ns) / timing.measured_ns if timing.measured_ns else None)
    parts: list[RenderableType] = [
        Text(
            f"measured in {timing.steps} step{'s' * (timing.steps != 1)} of {of}: step {duration(timing.measured_ns)}, "
            f"predicted {duration(timing.predicted_ns)}, off by {off}"
        )
    ]
    if timing.collectives:
        parts.append(_measured_collectives(timing.collectives, top))
    if timing.kernels:
        table = PlainTable()
        for head in ("kernels", "calls", "predicted", "measured", "beside transfers", "why"):
            table.add_column(head, justify="left" if head in ("kernels", "why") else "right")
        for one in timing.kernels:
            times = (str(one.calls), duration(one.predicted_ns), duration(one.measured_ns))
            beside = f"{one.beside:.2f} times" if one.beside else "-"
            table.add_row(one.kernels, *times, beside, one.cause.value)
        parts.append(table)
    if timing.profile:
        parts.append(Text(f"corrected cost profile {timing.profile_hash}: {timing.profile}", style="green"))
    if timing.note:
        parts.append(Text(timing.note, style="yellow"))
    if timing.swap is not None:
        parts.append(_swap(timing.swap))
    return parts


def _whose(swap: Swap) -> str:
    return "the first plan" if swap.outcome is SwapOutcome.RETURNED else "plan"


def _swap(swap: Swap) -> Text:
    """What became of the second plan, in one line."""
    outcome, came, rest = swap.outcome.value.partition(SwapOutcome.SWAPPED.value)
    said = f"planned again: {outcome}{came}" + f" at call {swap.call}" * bool(swap.call) + rest
    said += f" at call {swap.back}" * bool(swap.back)
    if swap.after_ns:
        said += f"; step {duration(swap.before_ns)} before, {duration(swap.after_ns)} after"
    said += f"; its planned peak {size(swap.peak_bytes)}" * bool(swap.peak_bytes and swap.call)
    said += f"; {swap.why}" * bool(swap.why) + f"; {_whose(swap)} in {swap.plan}" * bool(swap.plan)
    return Text(said, style="green" if swap.outcome is SwapOutcome.KEPT else "yellow")


def _measured_collectives(collectives: Sequence[CollectiveTiming], top: int | None) -> Table:
    shown = list(collectives)
    if top is not None and len(shown) > top:
        shown = sorted(shown, key=lambda c: -abs(c.measured_stall_ns - c.predicted_stall_ns))[:top]
    table = PlainTable()
    heads = ("", "size", "transfer, predicted", "measured", "stall, predicted", "measured", "ranks apart", "why")
    for head in heads:
        table.add_column(head, justify="left" if head in ("", "why") else "right")
    for one in shown:
        measured = duration(one.measured_ns) if one.known else "-"
        table.add_row(
            one.label,
            size(one.size_bytes),
            duration(one.predicted_ns),
            {"shared": f"{measured}, shared", "at most": f"at most {measured}"}.get(one.known, measured),
            duration(one.predicted_stall_ns),
            duration(one.measured_stall_ns),
            "-" if one.late < 0 else f"{duration(one.skew_ns)}, rank {one.late} last",
            one.cause.value,
        )
    if len(shown) < len(collectives):
        table.caption = Text(f"{len(shown)} of {len(collectives)} collectives, furthest from predicted first")
    return table


def render_measured(one: Measured) -> RenderableType:
    """One graph against a profile: each collective, then how far off each kind of quantity is."""
    steps = f"{one.steps} profiled step{'s' * (one.steps > 1)}"
    parts: list[RenderableType] = [Text(f"{one.graph.title}  rank {one.graph.rank}, {steps}", style="bold")]
    table = PlainTable()
    heads = ("", "kind", "size", "exposed, predicted", "measured", "transfer, predicted", "measured")
    for head in heads:
        table.add_column(head, justify="left" if head in ("", "kind") else "right")
    transfers = {p.label: p for p in one.pairs if p.what == "transfer"}
    for pair in one.pairs:
        if pair.what != "exposed":
            continue
        transfer = transfers.get(pair.label)
        table.add_row(
            pair.label,
            pair.kind,
            size(pair.size_bytes),
            duration(pair.predicted_ns),
            duration(pair.measured_ns),
            "" if transfer is None else duration(transfer.predicted_ns),
            "hidden" if transfer is None else duration(transfer.measured_ns),
        )
    parts.append(table)
    errors = PlainTable()
    for head in ("relative error", "measured", "median", "90%", "worst"):
        errors.add_column(head, justify="left" if head == "relative error" else "right")
    for what in ("step", "transfer", "exposed", "issue", "block", "library"):
        found = one.errors(what)
        if found:
            at = [found[min(len(found) - 1, round(q * (len(found) - 1)))] for q in (0.5, 0.9, 1.0)]
            errors.add_row(what, str(len(found)), *(percent(e) for e in at))
    return Group(*parts, errors, Text(""))


def render_diff(diffs: Sequence[GraphDiff], names: tuple[str, str]) -> RenderableType:
    """Two runs, graph by graph; ``names`` are what A and B are called."""
    parts: list[RenderableType] = []
    for diff in diffs:
        compile_id, phase, index = diff.key
        parts.append(Text(f"{phase}_{index}" + (f" [{compile_id}]" if compile_id else ""), style="bold"))
        if diff.only:
            parts.append(Text(f"only in {names[0] if diff.only == 'A' else names[1]}", style="yellow"))
        elif not diff.changes:
            parts.append(Text("equal"))
        else:
            table = PlainTable()
            for head in ("what", *names, "change"):
                table.add_column(head, justify="left" if head == "what" else "right")
            for one in diff.changes:
                table.add_row(one.what, _value(one, one.a), _value(one, one.b), _relative(one))
            parts.append(table)
        if diff.nodes is not None:
            a, b = diff.nodes
            set_otherwise = any(one.what.startswith("setting ") for one in diff.changes)
            why = "another program, or what a setting changes before" if set_otherwise else "another program"
            came = f"it came with {a} nodes in {names[0]} and with {b} in {names[1]}"
            parts.append(Text(f"{came}: {why}", style="yellow"))
    return Group(*parts) if parts else Text("no graphs in either run")


def _value(one: Change, value: int | float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return {"ns": duration, "bytes": size}.get(one.unit, str)(value)


def _relative(one: Change) -> str:
    if isinstance(one.a, int) and isinstance(one.b, int):
        return change(one.a, one.b)
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {_listed(ranks)}, same plan"


def _listed(ranks: Sequence[int]) -> str:
    """``0-3``, or one by one where some are missing."""
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _unplanned(report: GraphReport) -> str:
    """What is said in the place of a schedule."""
    changed = [p.name for p in report.passes if p.changed and p.rolled_back is None]
    if changed:
        return f"no order was planned; what {' and '.join(changed)} changed stays"
    if any(d.reason is Reason.NO_COLLECTIVES for p in report.passes for d in p.decisions):
        return f"nothing was planned: {Reason.NO_COLLECTIVES.value}"
    return "nothing was planned"


def _all_passes(report: GraphReport) -> ScheduleReport | None:
    """The plan before fusion, where passes before the order changed what the step takes; None where they did not."""
    found = next((s for s in report.schedules if s.came_ns), None)
    return None if found is None or found.came_ns == found.makespan_before_ns else found


def _figures(s: ScheduleReport, all_passes: ScheduleReport | None) -> Table:
    table = PlainTable()
    table.add_column("predicted")
    for head in ("before", "after", "change", "limit"):
        table.add_column(head, justify="right")
    table.add_row(
        "step",
        duration(s.makespan_before_ns),
        duration(s.makespan_after_ns),
        change(s.makespan_before_ns, s.makespan_after_ns),
        f"at least {duration(s.lower_bound_ns)} {_BOUND_ON[s.bound_on]}, gap {percent(s.gap)}",
    )
    if all_passes is not None:
        table.add_row(
            "step with all passes",
            duration(all_passes.came_ns),
            duration(all_passes.makespan_after_ns),
            change(all_passes.came_ns, all_passes.makespan_after_ns),
            "the graph as it came, before fusion" + (", by the plan's own costs" if all_passes.costs else ""),
        )
    if s.disturbed_after_ns:
        table.add_row(
            f"mean step if durations are off by {SPREAD}%",
            duration(s.disturbed_before_ns),
            duration(s.disturbed_after_ns),
            change(s.disturbed_before_ns, s.disturbed_after_ns),
            f"worst {duration(s.disturbed_worst_ns)}",
        )
    table.add_row(
        "exposed communication",
        duration(s.exposed_before_ns),
        duration(s.exposed_after_ns),
        change(s.exposed_before_ns, s.exposed_after_ns),
        f"of {duration(s.communication_ns)}",
    )
    if s.contention_before_ns or s.contention_after_ns:
        table.add_row(
            "kernels slowed down by transfers",
            duration(s.contention_before_ns),
            duration(s.contention_after_ns),
            change(s.contention_before_ns, s.contention_after_ns),
            f"compute alone {duration(s.compute_ns)}",
        )
    over = s.budget_bytes is not None and s.peak_after_bytes > s.budget_bytes
    table.add_row(
        "peak memory",
        size(s.peak_before_bytes),
        Text(size(s.peak_after_bytes), style="bold red" if over else ""),
        change(s.peak_before_bytes, s.peak_after_bytes),
        "unlimited" if s.budget_bytes is None else f"budget {size(s.budget_bytes)}",
    )
    if all_passes is not None and all_passes.came_peak_bytes:
        table.add_row(
            "peak memory with all passes",
            size(all_passes.came_peak_bytes),
            size(all_passes.peak_after_bytes),
            change(all_passes.came_peak_bytes, all_passes.peak_after_bytes),
            "the graph as it came, before fusion",
        )
    return table


def _plan_line(report: GraphReport, s: ScheduleReport) -> str:
    parts = [
        f"plan {report.digest or s.digest}",
        f"method {s.method or '-'}",
        f"{s.tasks} tasks ({s.level})",
        f"costs: {report.cost_profile or '-'}",
    ]
    if report.order_check:
        parts.append(f"order: {report.order_check}")
    return ", ".join(parts)


def _rollbacks(report: GraphReport) -> Iterator[str]:
    for one in report.passes:
        if one.metrics.get("agreed") == 0:
            yield one.detail
        if one.rolled_back is not None:
            detail = f" ({one.detail})" if one.detail else ""
            yield f"pass {one.name} was rolled back: {one.rolled_back.value}{detail}"
            for finding in one.findings:
                about = f" ({', '.join(finding.parameters)})" if finding.parameters else ""
                yield f"  {finding.rule} at {finding.node}: {finding.message}{about}"


def _collectives(collectives: Sequence[CollectiveReport], top: int | None) -> Table:
    shown = list(collectives)
    if top is not None and len(shown) > top:
        shown = sorted(shown, key=lambda c: -c.exposed_ns)[:top]
    table = PlainTable()
    heads = ["", "kind", "size", "lane", "hidden", "exposed", "why", "what would help", "source"]
    named = any(one.parameters for one in shown)
    if named:
        heads.insert(1, "parameters")
    for head in heads:
        table.add_column(head, justify="right" if head in ("size", "hidden", "exposed") else "left")
    for one in shown:
        table.add_row(
            one.label + (f", {one.bucket}" if one.bucket else ""),
            *([_parameters(one)] if named else []),
            one.kind,
            size(one.size_bytes),
            one.lane,
            duration(one.hidden_ns),
            Text(duration(one.exposed_ns), style="bold" if one.exposed_ns else "dim"),
            one.reason.value,
            one.setting,
            one.source,
        )
    if len(shown) < len(collectives):
        table.caption = Text(f"{len(shown)} of {len(collectives)} collectives, most exposed first")
    return table


def _narrowed(found: Sequence[NarrowedReport], top: int | None) -> Table:
    """What was sent in a narrower type: what that saves, and what it costs in accuracy."""
    shown = sorted(found, key=lambda one: one.link_after_ns - one.link_before_ns)[:top]
    table = PlainTable()
    for head in ("", "parameters", "sent as", "sent each, before", "after", "link, before", "after", "error, at most"):
        table.add_column(head, justify="left" if head in ("", "parameters", "sent as") else "right")
    if runs := max(one.runs for one in found):
        table.add_column("measured last", justify="right")
        table.add_column(f"largest of {runs}", justify="right")
    for one in shown:
        errors = ["" if one.measured is None else f"{e:.2g}" for e in (one.measured, one.largest)] if runs else []
        above = one.measured is not None and one.largest > one.bound
        table.add_row(
            one.label,
            "\n".join(one.parameters[:MOST_NAMES]),
            one.form + (f", blocks of {one.block}" if one.block > 1 else ""),
            size(one.bytes_before),
            size(one.bytes_after),
            duration(one.link_before_ns),
            duration(one.link_after_ns),
            f"{one.bound:g}",
            *(Text(e, style="bold red" if above else "") for e in errors),
        )
    if len(shown) < len(found):
        table.caption = Text(f"{len(shown)} of {len(found)} narrowed collectives, those that save most first")
    return table


def _parameters(one: CollectiveReport) -> str:
    """What a collective carries, one name per line; where it is read, if that is another module than its own."""
    lines = []
    for parameter in one.parameters[:MOST_NAMES]:
        elsewhere = parameter.module != parameter.name.rpartition(".")[0]
        lines.append(parameter.name + (f" (read in {parameter.module or 'the region'})" if elsewhere else ""))
    more = len(one.parameters) - MOST_NAMES
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def _redistributions(found: Sequence[RedistributionReport], top: int | None) -> Table:
    # Every layer of a model redistributes alike: one line, and how often.
    alike = Counter(dataclasses.replace(one, names=(), refused=(), parameters=()) for one in found)
    shown = sorted(alike, key=lambda one: -one.bytes_before * alike[one])[:top]
    table = PlainTable()
    for head in ("times", "redistribution", "layouts", "kind", "sent each, before", "after", "rewrites", "source"):
        table.add_column(head, justify="right" if head in ("times", "sent each, before", "after") else "left")
    for one in shown:
        table.add_row(
            str(alike[one]),
            one.call or "unknown call",
            ", ".join(one.placements),
            "" if one.explicit is None else "asked for" if one.explicit else "implicit",
            size(one.bytes_before),
            size(one.bytes_after),
            ", ".join(one.rewrites),
            one.source,
        )
    return table


def _help(collectives: Sequence[CollectiveReport]) -> Iterator[Text]:
    """What would help, once per setting."""
    settings: dict[tuple[str, str], list[CollectiveReport]] = {}
    for one in collectives:
        if one.setting and one.gain_ns > 0:
            settings.setdefault((one.reason.value, one.setting), []).append(one)
    for (reason, setting), ones in sorted(settings.items(), key=lambda item: -item[1][0].gain_ns):
        gain = f"{GAIN_AT_MOST if GAIN_AT_MOST in ones[0].detail else 'gain'} {duration(ones[0].gain_ns)}"
        count = f"{len(ones)} collective{'s' * (len(ones) > 1)}"
        yield Text(f"{setting}: {gain} ({reason}, {count})", style="green")
