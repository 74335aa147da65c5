"""``inductor-passes simulate``: plan a captured graph again for other links, devices and memory budgets.

A problem file comes from ``dump_problem`` or from the ``inductor_passes_problem`` artifact of a trace at debug level.
A step file (``rank0_step_*.json``) has forward and backward: what is computed again and kept is chosen anew, too.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from inductor_passes.cli import terminal
from inductor_passes.cli.terminal import CommandError
from inductor_passes.records.convert import shown
from inductor_passes.records.limits import MOST

if TYPE_CHECKING:
    from inductor_passes.schedule.plan import Plan
    from inductor_passes.schedule.problem import Problem

app = typer.Typer(add_completion=False)
T = TypeVar("T")

#: Planning takes longer than anyone waits beyond these.
MAX_TASKS = 100_000
MAX_CASES = 1_000
MAX_EFFORT = 100
MOST_RANKS = 2**20
#: No link or device is so many times faster than another.
MOST_SCALE = 10**6
_NUMBER = re.compile(r"([+-]?\d{1,15}(?:\.\d{0,15})?|[+-]?\.\d{1,15})(?:/(\d{1,15}))?", re.ASCII)
_TIME = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(ns|us|ms|s)", re.ASCII)
_TIME_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}


@dataclass(frozen=True)
class Case:
    """One combination of what can be swept."""

    budget: str
    bandwidth: Fraction
    latency: Fraction
    added_ns: int
    compute: Fraction


@app.command()
def simulate(
    problem_file: Annotated[Path, typer.Argument(metavar="PROBLEM", help="A captured scheduling problem.")],
    budget: Annotated[
        str, typer.Option(help='Memory budgets, comma-separated: "0", "+5%", "2GiB", "+5% or 1MiB", "unlimited"; '
            'of a step "-30%" and "=12GiB", too.')
    ] = "+5% or 1MiB",
    bandwidth_scale: Annotated[str, typer.Option(help="Link rates, as multiples: 0.5,1,2.")] = "1",
    latency_scale: Annotated[str, typer.Option(help="Link latencies, as multiples, where sizes tell them.")] = "1",
    latency: Annotated[str, typer.Option(help="Time added to each collective: 0us,20us,1ms.")] = "0us",
    compute_scale: Annotated[str, typer.Option(help="Device speeds, as multiples: 1,2.")] = "1",
    effort: Annotated[int, typer.Option(min=0, max=MAX_EFFORT, help="Local search per plan; 0 only constructs.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a chart of the step over the swept option.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write the last case's timeline as a Chrome trace.")] = None,
    profile: Annotated[
        str, typer.Option(help="Of a step: links and device of this cost profile, a file or a device such as h100.")
    ] = "",
    ranks: Annotated[int, typer.Option(min=0, max=MOST_RANKS, help="Of a step, with --profile: so many share it.")] = 0,
    step: Annotated[str, typer.Option(help="Of a step: the least memory for these times, such as 120ms,100ms.")] = "",
) -> None:
    """Plan a captured graph again for other links, budgets and devices.

    Options with several comma-separated values are swept in all combinations.

    Example: inductor-passes simulate problem.json --budget "0,+5%" --svg curve.svg

    Exit status: 0 it was planned, 2 something cannot be read or written.
    """
    swept = (
        _values("--budget", budget, _budget),
        _values("--bandwidth-scale", bandwidth_scale, _positive),
        _values("--latency-scale", latency_scale, _fraction),
        _values("--latency", latency, _duration),
        _values("--compute-scale", compute_scale, _positive),
    )
    count = math.prod(len(values) for values in swept)
    if count > MAX_CASES:
        raise CommandError(f"the options make {count} combinations; expected at most {MAX_CASES}")
    data = _read(problem_file)
    if isinstance(data, dict) and "forward" in data:
        if svg is not None or perfetto is not None:
            raise CommandError("--svg and --perfetto are for a problem of one graph; this is a whole step")
        from inductor_passes.cli import simulate_step

        links = [Case("", *values) for values in itertools.product(*swept[1:])]
        labels = [", ".join(f"{name} {_SWEPT[name](case)}" for name in _different(links)) for case in links]
        changes = [functools.partial(_change, case=case) for case in links]
        asked = _values("--step", step, _duration) if step else []
        wanted = simulate_step.Wanted(swept[0], asked, profile, ranks or None)
        simulate_step.answer(problem_file, data, list(zip(labels, changes)), wanted, as_json=as_json)
        return
    if profile or ranks or step:
        raise CommandError("--profile, --ranks and --step are for a whole step (rank0_step_*.json of dump_problem)")
    problem, curve = _load(problem_file, data)
    cases = [Case(*values) for values in itertools.product(*swept)]
    answers = [(case, changed, _plan(changed, case, effort)) for case in cases for changed in [_change(problem, case)]]
    # Files first: whoever reads the text may stop reading (`| head`), which ends us.
    wrote = [path for path in (svg, perfetto) if path is not None]
    if svg is not None:
        terminal.write(svg, _chart(problem, answers))
    if perfetto is not None:
        terminal.write(perfetto, _timeline(answers[-1]))
    if as_json:
        from inductor_passes.trace.payload import dumps

        record = {"schema_version": 1, "problem": problem.name, "cases": list(map(_record, answers))}
        print(dumps({**record, **({"step_curve": curve} if curve else {})}, indent=1))
    else:
        _print_table(problem, answers)
        _print_curve(curve)
    for path in wrote:
        terminal.say(f"wrote {path}", err=as_json)


def _read(path: Path) -> Any:
    from inductor_passes.records.json_text import RecordError, read

    try:
        return read(path, "a problem")
    except RecordError as error:
        raise CommandError(f"{path}: {error}") from error


def _load(path: Path, data: object) -> tuple[Problem, list[tuple[int, int]]]:
    """A problem, and the curve of its step where it has one."""
    from inductor_passes.records.json_text import RecordError
    from inductor_passes.schedule.curve import curve_of
    from inductor_passes.schedule.problem import Problem, ProblemError

    try:
        problem = Problem.from_json(data)
        if len(problem) > MAX_TASKS:
            raise ProblemError(f"{len(problem)} tasks are too many; expected at most {MAX_TASKS}")
        return problem, curve_of(problem)
    except RecordError as error:
        raise CommandError(f"{path}: {error}") from error


def _values(option: str, text: str, parse: Callable[[str], T]) -> list[T]:
    result = []
    for part in text.split(","):
        try:
            result.append(parse(part.strip()))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"'{option}'") from error
    return result


def _budget(text: str) -> str:
    from inductor_passes.settings.budget import MemoryBudget

    MemoryBudget.parse(text, "--budget")
    return text


def _fraction(text: str, least: str = "0 or more") -> Fraction:
    """A number of 0 or more, as a decimal or a fraction; ``least``: what is expected of it."""
    match = _NUMBER.fullmatch(text)
    if match is None or (match[2] and not int(match[2])):
        raise ValueError(f"{shown(text)} is no number; expected one such as 2, 0.5 or 1/3")
    value = Fraction(match[1]) / int(match[2] or 1)
    if value < 0:
        raise ValueError(f"{shown(text)} is negative; expected {least}")
    if value > MOST_SCALE or 0 < value < 1 / Fraction(MOST_SCALE):
        raise ValueError(f"{shown(text)} is out of range; expected 0 or 1/{MOST_SCALE} to {MOST_SCALE}")
    return value


def _positive(text: str) -> Fraction:
    value = _fraction(text, "a number above 0")
    if value == 0:
        raise ValueError("0 is not allowed; expected a number above 0")
    return value


def _duration(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{shown(text)} is no duration; expected a number (at most 15 digits) and a unit of "
            + ", ".join(_TIME_UNITS)
        )
    value = int(Fraction(match[1]) * _TIME_UNITS[match[2]])
    if value > MOST:
        raise ValueError(f"{shown(text)} is too long; expected at most {MOST} ns")
    return value


def _change(problem: Problem, case: Case) -> Problem:
    from inductor_passes.trace.whatif import scale_compute, scale_links

    if case.compute != 1:
        problem = scale_compute(problem, case.compute)
    if case.bandwidth != 1 or case.latency != 1 or case.added_ns:
        problem = scale_links(problem, bandwidth=case.bandwidth, latency=case.latency, added_ns=case.added_ns)
    return problem


def _plan(problem: Problem, case: Case, effort: int) -> Plan:
    from inductor_passes.schedule.least_memory import least_peak
    from inductor_passes.schedule.plan import plan
    from inductor_passes.schedule.tables import tables
    from inductor_passes.settings.budget import MemoryBudget

    return plan(problem, MemoryBudget.parse(case.budget).limit_bytes(least_peak(tables(problem))), effort=effort)


Answer = tuple[Case, "Problem", "Plan"]

#: Swept option -> how a case shows its value.
_SWEPT: dict[str, Callable[[Case], str]] = {
    "budget": lambda case: case.budget,
    "bandwidth": lambda case: f"x{float(case.bandwidth):g}",
    "latency": lambda case: f"x{float(case.latency):g}",
    "added latency": lambda case: f"{case.added_ns / 1000:g} us",
    "compute": lambda case: f"x{float(case.compute):g}",
}


def _record(answer: Answer) -> dict[str, object]:
    from inductor_passes.schedule.simulate import simulate as replay

    case, problem, plan = answer
    after = replay(problem, plan.order)
    return {
        "budget": case.budget,
        "bandwidth_scale": float(case.bandwidth),
        "latency_scale": float(case.latency),
        "added_latency_ns": case.added_ns,
        "compute_scale": float(case.compute),
        "makespan_before_ns": plan.input_makespan_ns,
        "makespan_after_ns": plan.makespan_ns,
        "disturbed_after_ns": plan.disturbed_ns,
        "lower_bound_ns": plan.lower_bound_ns,
        "gap": plan.gap,
        "bound_on": plan.bound_on,
        "exposed_before_ns": replay(problem).total_exposed_ns,
        "exposed_after_ns": after.total_exposed_ns,
        "peak_before_bytes": plan.input_peak_bytes,
        "peak_after_bytes": plan.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "method": plan.method,
        "digest": problem.digest(plan.order),
    }


def _varying(answers: Iterable[Answer]) -> list[str]:
    """Swept options with more than one value."""
    return _different([case for case, _, _ in answers])


def _different(cases: Iterable[Case]) -> list[str]:
    """Options whose value is not the same in all cases."""
    cases = list(cases)
    return [name for name, show in _SWEPT.items() if len({show(case) for case in cases}) > 1]


def _print_table(problem: Problem, answers: list[Answer]) -> None:
    from inductor_passes.schedule.robust import SPREAD
    from inductor_passes.trace.table import PlainTable
    from inductor_passes.trace.units import change, duration, percent, size

    table = PlainTable(title=problem.name or "problem")
    swept = _varying(answers) or ["budget"]
    off = f"if off by {SPREAD}%"
    figures = ("step before", "step after", "change", off, "exposed", "peak before", "peak after", "gap", "method")
    for head in (*swept, *figures):
        table.add_column(head, justify="left" if head == "method" else "right")
    for answer in answers:
        case, _, plan = answer
        record = _record(answer)
        table.add_row(
            *(_SWEPT[name](case) for name in swept),
            duration(plan.input_makespan_ns),
            duration(plan.makespan_ns),
            change(plan.input_makespan_ns, plan.makespan_ns),
            duration(plan.disturbed_ns),
            duration(int(str(record["exposed_after_ns"]))),
            size(plan.input_peak_bytes),
            size(plan.peak_bytes),
            percent(plan.gap),
            plan.method if plan.feasible else f"{plan.method}, above the budget",
        )
    terminal.console(150).print(table)


def _print_curve(curve: list[tuple[int, int]]) -> None:
    """The step over its peak, as it was found when the problem was written: for both graphs and the links it had."""
    if not curve:
        return
    from inductor_passes.trace.table import PlainTable
    from inductor_passes.trace.units import change, duration, size

    table = PlainTable(title="the whole step over its peak, as compiled")
    for head in ("step's peak", "planned step", "against the fastest"):
        table.add_column(head, justify="right")
    for peak, ns in curve:
        table.add_row(size(peak), duration(ns), change(curve[-1][1], ns))
    terminal.console(150).print(table)


def _timeline(answer: Answer) -> str:
    from inductor_passes.schedule.simulate import simulate as replay
    from inductor_passes.trace.chrome import chrome_trace

    _, problem, plan = answer
    return chrome_trace(problem, plan.order, replay(problem, plan.order), budget_bytes=plan.budget_bytes)


def _chart(problem: Problem, answers: list[Answer]) -> str:
    from inductor_passes.trace.svg import line_chart
    from inductor_passes.trace.units import duration

    swept = _varying(answers) or ["budget"]
    return line_chart(
        f"Predicted step of {problem.name or 'the problem'}",
        ", ".join(swept),
        [" ".join(_SWEPT[name](case) for name in swept) for case, _, _ in answers],
        {
            "input order": [plan.input_makespan_ns for _, _, plan in answers],
            "planned": [plan.makespan_ns for _, _, plan in answers],
            "lower bound": [plan.lower_bound_ns for _, _, plan in answers],
        },
        duration,
    )
