"""``inductor-passes simulate``: plan a captured graph again for other links, devices and memory budgets.

A problem file comes from ``dump_problem`` or from the ``inductor_passes_problem`` artifact of a trace at debug level.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from inductor_passes.schedule.plan import Plan
    from inductor_passes.schedule.problem import Problem

app = typer.Typer(add_completion=False)
T = TypeVar("T")

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
    problem_file: Annotated[Path, typer.Argument(metavar="PROBLEM.json", help="A captured scheduling problem.")],
    budget: Annotated[
        str, typer.Option(help='Memory budgets, comma-separated: "0", "+5%", "2GiB", "unlimited".')
    ] = "+5%",
    bandwidth_scale: Annotated[str, typer.Option(help="Link rates, as multiples: 0.5,1,2.")] = "1",
    latency_scale: Annotated[str, typer.Option(help="Link latencies, as multiples, where sizes tell them.")] = "1",
    latency: Annotated[str, typer.Option(help="Time added to each collective: 0us,20us,1ms.")] = "0us",
    compute_scale: Annotated[str, typer.Option(help="Device speeds, as multiples: 1,2.")] = "1",
    effort: Annotated[int, typer.Option(min=0, help="Local search per plan; 0 only constructs.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a chart of the step over the swept option.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write the last case's timeline as a Chrome trace.")] = None,
) -> None:
    """Plan a captured graph again. Options with several comma-separated values are swept in all combinations."""
    problem = _load(problem_file)
    cases = [
        Case(*values)
        for values in itertools.product(
            _values("--budget", budget, _budget),
            _values("--bandwidth-scale", bandwidth_scale, _positive),
            _values("--latency-scale", latency_scale, _fraction),
            _values("--latency", latency, _duration),
            _values("--compute-scale", compute_scale, _positive),
        )
    ]
    answers = [(case, changed, _plan(changed, case, effort)) for case in cases for changed in [_change(problem, case)]]
    if as_json:
        from inductor_passes.trace.payload import dumps

        print(dumps({"schema_version": 1, "problem": problem.name, "cases": list(map(_record, answers))}, indent=1))
    else:
        _print_table(problem, answers)
    if svg is not None:
        svg.write_text(_chart(problem, answers), encoding="utf-8")
        typer.echo(f"wrote {svg}", err=as_json)
    if perfetto is not None:
        from inductor_passes.schedule.simulate import simulate as replay
        from inductor_passes.trace.chrome import chrome_trace

        _, changed, plan = answers[-1]
        timeline = replay(changed, plan.order)
        text = chrome_trace(changed, plan.order, timeline, budget_bytes=plan.budget_bytes)
        perfetto.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {perfetto}", err=as_json)


def _load(path: Path) -> Problem:
    from inductor_passes.schedule.problem import Problem, ProblemError

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ProblemError(f"problem file holds a {type(data).__name__}; expected an object")
        return Problem.from_json(data)
    except (OSError, ValueError) as error:
        typer.secho(f"{path}: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(2) from error


def _values(option: str, text: str, parse: Callable[[str], T]) -> list[T]:
    result = []
    for part in text.split(","):
        try:
            result.append(parse(part.strip()))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=option) from error
    return result


def _budget(text: str) -> str:
    from inductor_passes.config import MemoryBudget

    MemoryBudget.parse(text, "--budget")
    return text


def _fraction(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{text!r} is no number") from error
    if value < 0:
        raise ValueError(f"{text} is negative; expected 0 or more")
    return value


def _positive(text: str) -> Fraction:
    value = _fraction(text)
    if value == 0:
        raise ValueError("0 is not allowed; expected a number above 0")
    return value


def _duration(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)", text)
    if match is None:
        raise ValueError(f"{text!r} is no duration; expected a number and a unit of {', '.join(_TIME_UNITS)}")
    return int(Fraction(match[1]) * _TIME_UNITS[match[2]])


def _change(problem: Problem, case: Case) -> Problem:
    from inductor_passes.trace.whatif import scale_compute, scale_links

    if case.compute != 1:
        problem = scale_compute(problem, case.compute)
    if case.bandwidth != 1 or case.latency != 1 or case.added_ns:
        problem = scale_links(problem, bandwidth=case.bandwidth, latency=case.latency, added_ns=case.added_ns)
    return problem


def _plan(problem: Problem, case: Case, effort: int) -> Plan:
    from inductor_passes.config import MemoryBudget
    from inductor_passes.schedule.memory import peak_bytes
    from inductor_passes.schedule.plan import plan

    return plan(problem, MemoryBudget.parse(case.budget).limit_bytes(peak_bytes(problem)), effort=effort)


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
        "lower_bound_ns": plan.lower_bound_ns,
        "gap": plan.gap,
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
    cases = [case for case, _, _ in answers]
    return [name for name, show in _SWEPT.items() if len({show(case) for case in cases}) > 1]


def _print_table(problem: Problem, answers: list[Answer]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from inductor_passes.trace.units import change, duration, percent, size

    table = Table(box=box.SIMPLE, title=escape(problem.name or "problem"), title_justify="left")
    swept = _varying(answers) or ["budget"]
    figures = ("step before", "step after", "change", "exposed", "peak before", "peak after", "gap", "method")
    for head in (*swept, *figures):
        table.add_column(head, justify="left" if head == "method" else "right")
    for answer in answers:
        case, _, plan = answer
        record = _record(answer)
        table.add_row(
            *(escape(_SWEPT[name](case)) for name in swept),
            duration(plan.input_makespan_ns),
            duration(plan.makespan_ns),
            change(plan.input_makespan_ns, plan.makespan_ns),
            duration(int(str(record["exposed_after_ns"]))),
            size(plan.input_peak_bytes),
            size(plan.peak_bytes),
            percent(plan.gap),
            escape(plan.method),
        )
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=150)).print(table)


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
