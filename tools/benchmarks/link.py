"""Real ranks on the emulated link: eager, Inductor, in-tree overlap settings, and ours, interleaved.

Each model is a torchrun job of its own that goes through all link rates. A contender that raises is reported; one that
takes the whole job down is reported too, and the job starts again without it.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from inductor_passes.schedule.robust import SPREAD
from tools.link import narrower
from tools.link.lab import ALL_CONTENDERS, CONTENDERS, NARROWER, RATES, TUNED
from tools.link.models import LAYOUTS, Layout
from tools.link.report import COLUMNS, best_in_tree, errors, facts, limit_ns, lines, notes, table
from tools.link.summary import HEADER, REFERENCE, means, standing, step_ns
from tools.link.worker import PEAKS
from tools.shared.launch import OUT_OF_TIME, torchrun
from tools.shared.record import RESULTS, chosen, markdown_table, write

Rounds = Annotated[int, typer.Option(min=1, help="Interleaved steps per contender and rate.")]
Layers = Annotated[int, typer.Option(min=1)]
Batch = Annotated[int, typer.Option(min=1, help="Sequences per rank.")]
Timeout = Annotated[int, typer.Option(min=1, help="Per model.")]
Out = Annotated[Path, typer.Option(help="Folder for the page, its figures and its chart.")]


def run_job(job: dict[str, Any], ranks: int, timeout_s: int, console: Console) -> list[dict[str, Any]]:
    """Run a job until it gets through, each time without the contender that took it down.

    A job that is out of time leaves the links that it has measured.

    Raises:
        RuntimeError: the reference itself fails.
    """
    died: dict[str, str] = {}
    while True:
        with tempfile.TemporaryDirectory() as folder:
            alive = [name for name in job["contenders"] if name not in died]
            contents = {**job, "contenders": alive, "folder": folder}
            Path(folder, "job.json").write_text(json.dumps(contents), encoding="utf-8")
            code, tail = torchrun("tools.link.worker", folder, ranks, timeout_s)
            results = Path(folder, "results.json")
            if results.exists() and code in (0, OUT_OF_TIME):
                data: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))
                for one in data:
                    one["failed"].update(died)
                if code == OUT_OF_TIME:
                    measured = f"{len(data)} of {len(job['rates'])} links are measured"
                    console.print(f"out of time after {timeout_s} s: {measured}")
                return data
            journal = Path(folder, "journal.jsonl")
            said = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
            last = json.loads(said[-1]) if said else {"phase": "starting", "contender": REFERENCE}
        console.print(tail, style="dim", markup=False)
        if last["contender"] == REFERENCE:
            raise RuntimeError(f"the job ended with status {code} while {last['phase']} {REFERENCE}")
        died[last["contender"]] = f"took the job down (status {code}) while {last['phase']}"
        console.print(f"{last['contender']} {died[last['contender']]}; starting again without it")


def contenders_of(names: Sequence[str], layout: Layout) -> list[str]:
    """Who runs: the reference always, eager FSDP2 and other ways to keep parameters only where they apply."""
    known = [(name, ALL_CONTENDERS[name]) for name in names]
    found = [
        name
        for name, one in known
        if (not one.wrapped or layout.native) and (one.reshard is True or layout.sharded)
    ]
    return found if REFERENCE in found else [REFERENCE, *found]


def summary(everything: Sequence[dict[str, Any]], ours: str = "ours") -> list[str]:
    """Lines of Markdown: what ours (at its defaults) is against each of the others, model by model and rate by rate."""
    found = [one for results in everything if (one := standing(results, ours)) is not None]
    rows = [[one.title, one.rate, *one.cells()] for one in found]
    return [*markdown_table(["model", "link", *HEADER], rows), "", means(found)]


def page(everything: Sequence[dict[str, Any]]) -> list[str]:
    """The page's lines."""
    text = [
        "Real ranks exchange data with gloo on one machine; every collective takes as long as on the link that the "
        "table names. `step` is the median of forward and backward on a clock that other load does not move: processor "
        "time of the main thread plus waits on the modelled link. Contenders take turns, step by step.",
        "",
        "The link is set by the reference's step. ratio: communication alone over compute alone; latency: its share of "
        "the communication. "
        + "; ".join(f"{r.name}: ratio {r.ratio:g}, latency {r.latency_share:.0%}" for r in RATES.values())
        + ".",
        "",
        "The limit is the larger of compute alone and communication alone (both measured unbucketed, so buckets can go "
        "below it), plus, for FSDP, the head and the tail that no order hides. For other layouts the limit ignores "
        "dependencies and cannot be reached.",
        "",
        "`predicted` is what our plan says of its step, `disturbed` the mean of what it says for durations that are "
        f"off by {SPREAD}% (`schedule/robust.py`).",
        "",
        f"`peak` is the lowest of {PEAKS} steps by the allocator's events, each of the rank that needs most: the "
        "profiler does not see what gloo's own threads free, so single steps can look higher.",
        "",
        *narrower.section(everything),
        "## Ours at its defaults",
        "",
        *summary(everything),
    ]
    for results in everything:
        text += ["", f"## {results['title']}, {results['rate']}", "", facts(results), ""]
        text += markdown_table(["contender", *COLUMNS], lines(results))
        remarks = [*errors(results), *notes(results)]
        text += [""] * bool(remarks) + [f"- {remark}" for remark in remarks]
    return text


def _draw(everything: Sequence[dict[str, Any]], path: Path) -> None:
    from tools.shared.plot import bars

    series: dict[str, list[float]] = {"best in-tree": [], "ours, default": [], "limit": []}
    for results in everything:
        default = step_ns(results, REFERENCE) or math.nan
        in_tree = best_in_tree(results)
        series["best in-tree"].append(median(in_tree["virtual_ns"]) / default if in_tree else math.nan)
        series["ours, default"].append((step_ns(results, "ours") or math.nan) / default)
        series["limit"].append(limit_ns(results) / default)
    groups = [f"{results['title']}\n{results['rate']}" for results in everything]
    bars(path, groups, series, "step / default Inductor's", line=1.0)


def link(
    model: Annotated[list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(LAYOUTS)}. Default: all.")] = None,
    rate: Annotated[list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(RATES)}. Default: all.")] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Repeatable; of {', '.join([*CONTENDERS, *NARROWER, *TUNED])}. "
            "Default: all that keep every bit and are not tuned."
        ),
    ] = None,
    rounds: Rounds = 7,
    layers: Layers = 4,
    batch: Batch = 8,
    timeout_s: Timeout = 7200,
    name: Annotated[str, typer.Option(help="Of the page and its files.")] = "link",
    title: Annotated[str, typer.Option(help="Of the page.")] = "The emulated link: contenders interleaved in one run",
    out: Out = RESULTS,
) -> None:
    """Real ranks on an emulated link: eager, Inductor, in-tree settings and ours, interleaved."""
    models, rates = chosen(model, LAYOUTS, "model"), chosen(rate, RATES, "rate")
    names = chosen(contender or list(CONTENDERS), {**CONTENDERS, **NARROWER, **TUNED}, "contender")
    console = Console(width=max(180, Console().width))
    everything: list[dict[str, Any]] = []
    wrong = []
    for key in models:
        layout = LAYOUTS[key]
        job = {
            "layout": key,
            "sizes": {"layers": layers, "batch": batch},
            "contenders": contenders_of(names, layout),
            "rates": rates,
            "rounds": rounds,
        }
        for results in run_job(job, layout.ranks, timeout_s, console):
            everything.append(results)
            console.print(table(results))
            console.print(facts(results))
            for note in notes(results):
                console.print(f"note: {note}", markup=False)
            for error in errors(results):
                console.print(f"wrong: {error}", style="red", markup=False)
                wrong.append(error)
        # After every model: a run that is cut short leaves what it has.
        written = write(
            name,
            title,
            page(everything),
            everything,
            lambda path: _draw(everything, path),
            folder=out,
        )
        console.print(f"written: {written}")
    if wrong:
        raise typer.Exit(1)
