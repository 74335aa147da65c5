"""FSDP2 and DDP as they are, compiled as their users do, and adopted: real ranks on the emulated link, interleaved."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from tools.benchmarks.link import Batch, Layers, Out, Rounds, Timeout, contenders_of, run_job
from tools.link.lab import RATES, WRAPPED
from tools.link.models import WRAPPED as LAYOUTS
from tools.link.report import COLUMNS, errors, facts, lines, notes, table
from tools.shared.record import RESULTS, chosen, markdown_table, write


def against(results: dict[str, Any]) -> list[list[str]]:
    """Of each adopted contender: its step, also by the wall, and its peak over those of what torch wrapped."""
    rows = {row["name"]: row for row in results["rows"] if row["name"] in WRAPPED}
    found = []
    for name, row in rows.items():
        for other in ("wrapped", "wrapped-blocks", "wrapped-whole"):
            if WRAPPED[name].adopted and other in rows:
                step = median(row["virtual_ns"]) / median(rows[other]["virtual_ns"])
                wall = median(row["wall_ns"]) / median(rows[other]["wall_ns"])
                peak = row["peak_bytes"] / rows[other]["peak_bytes"]
                # DDP waits in a way that the clock does not see.
                shown = "-" if results["layout"] == "ddp" else f"{step:.3f}"
                found.append([row["title"], rows[other]["title"], shown, f"{wall:.3f}", f"{peak:.3f}"])
    return found


def page(everything: Sequence[dict[str, Any]]) -> list[str]:
    """The page's lines."""
    text = [
        "Real ranks exchange data with gloo on one machine; every collective takes as long as on the emulated link, "
        "whose rate the step of default Inductor under `simple_fsdp` sets. `step` is the median of forward and "
        "backward on a clock that other load does not move. Contenders take turns, step by step, with equal "
        "parameters and batches. `DistributedDataParallel` waits through futures, which that clock does not see: for "
        "DDP compare `wall`, which other load moves.",
    ]
    for results in everything:
        text += ["", f"## {results['title']}, {results['rate']}", "", facts(results), ""]
        text += markdown_table(["adopted", "against", "step", "wall", "peak memory"], against(results))
        text += ["", *markdown_table(["contender", *COLUMNS], lines(results))]
        remarks = [*errors(results), *notes(results)]
        text += [""] * bool(remarks) + [f"- {remark}" for remark in remarks]
    return text


def _draw(everything: Sequence[dict[str, Any]], path: Path) -> None:
    from tools.shared.plot import bars

    groups = [f"{results['title']}\n{results['rate']}" for results in everything]
    series: dict[str, list[float]] = {}
    for results in everything:
        clock = "wall_ns" if results["layout"] == "ddp" else "virtual_ns"
        steps = {row["name"]: median(row[clock]) for row in results["rows"]}
        for name, one in WRAPPED.items():
            series.setdefault(one.title, []).append(steps.get(name, float("nan")) / steps["wrapped"])
    bars(path, groups, series, "step / eager FSDP2's or DDP's", line=1.0)


def _models(asked: list[str] | None) -> list[str]:
    """Those asked for, else all whose framework is installed."""
    missing = [] if importlib.util.find_spec("torchtitan") else ["torchtitan"]
    if unmet := sorted(set(asked or ()) & set(missing)):
        raise typer.BadParameter(f"--model {unmet[0]} needs the package torchtitan: pip install torchtitan")
    return [key for key in chosen(asked, LAYOUTS, "model") if key not in missing]


def adopt(
    model: Annotated[list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(LAYOUTS)}. Default: all.")] = None,
    rate: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(RATES)}. Default: balanced.")] = None,
    rounds: Rounds = 7,
    layers: Layers = 4,
    batch: Batch = 8,
    timeout_s: Timeout = 7200,
    out: Out = RESULTS,
) -> None:
    """FSDP2 and DDP as they are, compiled, and adopted, on an emulated link."""
    models, rates = _models(model), chosen(rate or ["balanced"], RATES, "rate")
    console = Console(width=max(180, Console().width))
    everything: list[dict[str, Any]] = []
    for key in models:
        job = {
            "layout": key,
            "sizes": {"layers": layers, "batch": batch},
            "contenders": contenders_of(list(WRAPPED), LAYOUTS[key]),
            "rates": rates,
            "rounds": rounds,
        }
        for results in run_job(job, LAYOUTS[key].ranks, timeout_s, console):
            everything.append(results)
            console.print(table(results))
            for row in against(results):
                console.print(f"{row[0]} against {row[1]}: step {row[2]}, wall {row[3]}, peak {row[4]}", markup=False)
    written = write(
        "adopt",
        "FSDP2 and DDP, adopted",
        page(everything),
        everything,
        lambda path: _draw(everything, path),
        folder=out,
    )
    console.print(f"written: {written}")
