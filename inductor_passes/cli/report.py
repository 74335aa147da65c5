"""``inductor-passes report``: a run's trace as text, JSON, a page or a Perfetto trace; ``report diff`` for two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from inductor_passes.cli import terminal
from inductor_passes.cli.terminal import CommandError
from inductor_passes.records.convert import shown
from inductor_passes.records.json_text import RecordError
from inductor_passes.records.text import printable

if TYPE_CHECKING:
    from inductor_passes.report import GraphReport
    from inductor_passes.trace.profiled import Measured
    from inductor_passes.trace.reader import Trace


class _ShowByDefault(TyperGroup):
    """``report DIR`` is ``report show DIR``: people type the former."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_ShowByDefault, add_completion=False)


@app.command()
def show(
    trace_dir: Annotated[
        Path, typer.Argument(metavar="TRACE_DIR", help="The directory that TORCH_TRACE named, or one log of it.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write one self-contained HTML page, for offline use.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON instead of text.")] = False,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write the planned timelines of all ranks as one Chrome trace.")
    ] = None,
    tlparse: Annotated[
        Path | None,
        typer.Option(help="Run tlparse into this new directory, with our page linked from its index."),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="Show only this many collectives per graph, most exposed first.")
    ] = None,
    plans: Annotated[
        Path | None, typer.Option(help="Write the plan of every graph into this directory, for the setting `plan`.")
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="torch.profiler Chrome trace of a real step of this run; one per rank, may be repeated."),
    ] = None,
    write_cost_profile: Annotated[
        Path | None,
        typer.Option(help="With --profile: write a cost profile corrected by it, for the setting `cost_profile`."),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
) -> None:
    """What happened to each graph of a TORCH_TRACE directory, and why.

    Example: inductor-passes report trace -o report.html

    Compare two runs: inductor-passes report diff A B

    Exit status: 0 graphs were reported, 1 there are none, 2 something cannot be read or written.
    """
    trace = _read(trace_dir)
    if rank is not None:
        _keep_rank(trace, rank)
    if write_cost_profile is not None and not profile:
        raise CommandError("--write-cost-profile needs --profile: there is nothing to correct a cost profile by")
    measured = _match(trace, profile) if profile else []
    # The files first: whoever reads the text may stop reading (`| head`), which ends us.
    wrote: list[str] = []
    untold: list[str] = []
    if write_cost_profile is not None:
        untold = _correct(measured, write_cost_profile)
        wrote.append(str(write_cost_profile))
    wrote += _write_files(trace, trace_dir, output, perfetto, tlparse, plans, measured)
    if as_json:
        _print_json(trace, measured)
    elif measured:
        _print_measured(measured)
    elif not wrote:
        _print(trace, top)
    for line in wrote:
        terminal.say(f"wrote {line}", err=as_json)
    for line in untold:
        terminal.say(f"note: {line}", err=as_json)
    if not any(graph.report for graph in trace.graphs):
        raise CommandError(f"{trace_dir} {_why_nothing(trace)}", status=1)


def _why_nothing(trace: Trace) -> str:
    """Why there is no graph to report."""
    if trace.nothing_planned:
        return "holds no planned graph; the note says why"
    none = "holds no readable graph of inductor_passes"
    if trace.notes:
        return f"{none}; the notes say what could not be read"
    if trace.compiled:
        graphs = "1 graph" if trace.compiled == 1 else f"{trace.compiled} graphs"
        advice = "add options=inductor_passes.options() to torch.compile"
        if trace.cached:
            # Code that was made on one rank does not say that there was nothing to plan.
            advice += f". {trace.cached} came out of a cache: with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 a run says why"
        return f"{none}: Inductor compiled {graphs} without it; {advice}"
    return f"{none}: Inductor compiled none in this run; expected the trace of a run that calls torch.compile"


def _keep_rank(trace: Trace, rank: int) -> None:
    if rank not in trace.ranks:
        known = ", ".join(map(str, trace.ranks)) or "none, as there is no graph"
        raise CommandError(f"--rank is {shown(rank)}; the trace has graphs of rank {known}")
    trace.graphs = [graph for graph in trace.graphs if graph.rank == rank]


def _match(trace: Trace, profiles: list[Path]) -> list[Measured]:
    """Predicted and measured side by side."""
    from inductor_passes.trace.profiled import match

    try:
        return match(trace, profiles)
    except RecordError as error:
        raise CommandError(str(error)) from error


def _correct(measured: Sequence[Measured], output: Path) -> list[str]:
    """Write the cost profile of the run, corrected by what was measured; what the times do not tell, in sentences."""
    from inductor_passes.cost.profile import CostProfile
    from inductor_passes.trace.reprofile import unfitted, updated_profile

    try:
        report = measured[0].graph.report
        named = str(report.config.get("cost_profile", "")) if report is not None else ""
        base = CostProfile.load(named) if named else CostProfile.default(_planned_for(report))
        if report is not None and not report.cost_profile.endswith(base.hash()):
            raise CommandError(
                f"the trace was planned with cost profile {report.cost_profile!r}, but {named or base.name!r} is "
                f"another one now ({base.hash()}); expected the profile of that run in its place"
            )
        corrected = updated_profile(base, list(measured))
        with terminal.naming(output):
            corrected.save(output)
    except RecordError as error:
        raise CommandError(str(error)) from error
    return unfitted(base, [pair for one in measured for pair in one.pairs])


def _planned_for(report: GraphReport | None) -> str:
    """The device whose defaults a run without a profile was planned with, wherever its trace is read."""
    name = "" if report is None else report.cost_profile.rpartition(" ")[0]
    return name.removeprefix("defaults for ") or "cpu"


def _print_json(trace: Trace, measured: Sequence[Measured]) -> None:
    """Print the reports, and what was measured, as JSON and nothing else."""
    from inductor_passes.records.convert import plain
    from inductor_passes.trace.payload import dumps

    reports = [graph.report.to_json() for graph in trace.graphs if graph.report is not None]
    found: dict[str, Any] = {"schema_version": 1, "graphs": reports, "notes": trace.notes}
    if measured:
        found["measured"] = [
            {"graph": one.graph.title, "rank": one.graph.rank, "steps": one.steps, "pairs": plain(one.pairs)}
            for one in measured
        ]
    print(dumps(found, indent=1))


def _print_measured(measured: Sequence[Measured]) -> None:
    from inductor_passes.trace.text import render_measured

    console = terminal.console()
    for one in measured:
        console.print(render_measured(one))


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="TORCH_TRACE directory of the first run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="TORCH_TRACE directory of the second run.")],
) -> None:
    """Compare two runs graph by graph: figures, settings, verdicts.

    Example: inductor-passes report diff trace-a trace-b

    Exit status: 0 both were read, 2 one cannot be read.
    """
    from inductor_passes.trace.compare import across_runs
    from inductor_passes.trace.text import render_diff

    names = (a.name, b.name) if a.name != b.name else (str(a), str(b))
    terminal.console().print(render_diff(across_runs(_read(a).graphs, _read(b).graphs), names))


def _write_files(
    trace: Trace,
    trace_dir: Path,
    output: Path | None,
    perfetto: Path | None,
    tlparse: Path | None,
    plans: Path | None,
    measured: Sequence[Measured],
) -> Iterator[str]:
    """Write what was asked for; yields what to tell the user about each file."""
    if output is not None:
        from inductor_passes.trace.html import write_page

        try:
            with terminal.naming(output):
                write_page(trace, output, title=printable(trace_dir.name), measured=measured)
        except ModuleNotFoundError as error:
            raise CommandError(str(error)) from error
        yield str(output)
    if plans is not None:
        from inductor_passes.pin.file import PlanFileError
        from inductor_passes.trace.plans import write_plans

        try:
            with terminal.naming(plans):
                written = list(write_plans(trace, plans))
        except PlanFileError as error:
            raise CommandError(f"--plans: {error}") from error
        yield from map(str, written)
    if perfetto is not None:
        from inductor_passes.trace.perfetto import write_perfetto

        with terminal.naming(perfetto):
            count = write_perfetto(trace, perfetto)
        yield f"{perfetto} ({count} timelines); open it in ui.perfetto.dev"
    if tlparse is not None:
        from inductor_passes.trace.tlparse import TlparseError, run_tlparse

        try:
            with terminal.naming(tlparse):
                index = run_tlparse(trace_dir, tlparse, trace, page=output)
        except TlparseError as error:
            raise CommandError(f"--tlparse: {error}") from error
        yield str(index)


def _read(path: Path) -> Trace:
    from inductor_passes.trace.reader import TraceError, read_trace

    try:
        return read_trace(path)
    except TraceError as error:
        raise CommandError(str(error)) from error


def _print(trace: Trace, top: int | None) -> None:
    from rich.text import Text

    from inductor_passes.trace.compare import across_ranks
    from inductor_passes.trace.text import render_group

    console = terminal.console()
    for group in across_ranks(trace.graphs):
        console.print(render_group(group, top=top))
    for note in trace.notes:
        console.print(Text(f"note: {note}", style="yellow"))
