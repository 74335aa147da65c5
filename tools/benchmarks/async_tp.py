"""Async TP against default Inductor on the emulated link: medians of interleaved steps."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tools.benchmarks.async_tp_worker import CASES, LATENCY_NS
from tools.link import wire
from tools.shared.launch import torchrun
from tools.shared.record import RESULTS, chosen, geometric_mean, markdown_table, write

HEADER = ("case", "default Inductor", "exposed", "planned", "async TP", "exposed", "speed-up", "wall", "difference")
WORKER = "tools.benchmarks.async_tp_worker"
_MODES = ("auto", "force", "off")
_WIRE = (
    "Milliseconds by the watch, medians, slower rank; two ranks with one thread each in two network namespaces, gloo "
    'over real sockets, the rate enforced by a token-bucket filter. "planned" is the plugin at its defaults, '
    '"async TP" with async_tp on as well, both with costs calibrated on this link. Nobody can tell here what is '
    "exposed. The speed-up is default Inductor's time over async TP's."
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, by ``HEADER``."""
    base, planned, ours = row["inductor"], row["planned"], row["async_tp"]
    times = (base["virtual_ms"], base["exposed_ms"], planned["virtual_ms"], ours["virtual_ms"], ours["exposed_ms"])
    return [
        row["case"],
        *(f"{t:.1f}" for t in times),
        f"{base['virtual_ms'] / ours['virtual_ms']:.2f}",
        f"{base['wall_ms'] / ours['wall_ms']:.2f}",
        f"{row['difference']:.0e}",
    ]


def measure(
    mbit: float, ranks: int, rounds: int, mode: str, cases: Sequence[str], on_wire: bool
) -> list[dict[str, Any]]:
    """Rows of one link rate.

    Raises:
        RuntimeError: the ranks did not finish; with the end of their output.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = {"mbit": mbit, "rounds": rounds, "mode": mode, "cases": list(cases), "wire": on_wire}
        Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
        if on_wire:
            code, tail = wire.run(WORKER, folder, mbit, timeout_s=3600)
        else:
            code, tail = torchrun(WORKER, folder, ranks, timeout_s=3600)
        rows = Path(folder, "rows.json")
        if not rows.exists():
            raise RuntimeError(f"the ranks ended with status {code}: {tail}")
        found: list[dict[str, Any]] = json.loads(rows.read_text(encoding="utf-8"))
        return found


def _draw(everything: dict[float, list[dict[str, Any]]], path: Path) -> None:
    from tools.shared.plot import bars

    cases = list(dict.fromkeys(row["case"] for rows in everything.values() for row in rows))
    series = {}
    for mbit, rows in everything.items():
        at = {row["case"]: row["inductor"]["virtual_ms"] / row["async_tp"]["virtual_ms"] for row in rows}
        series[_title(mbit)] = [at.get(case, float("nan")) for case in cases]
    bars(path, cases, series, "speed-up over default Inductor", line=1.0)


def _title(mbit: float) -> str:
    return f"{mbit:g} Mbit/s" if mbit else "infinitely fast link"


def async_tp(
    mbit: Annotated[
        list[float] | None, typer.Option(help="Link rate in Mbit/s, 0: infinitely fast. Repeatable. Default: 400, 0.")
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(CASES)}. Default: all.")] = None,
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved steps per contender.")] = 7,
    mode: Annotated[str, typer.Option(help=f"Of the pass: {', '.join(_MODES)}.")] = "auto",
    on_wire: Annotated[
        bool,
        typer.Option("--wire", help="Real sockets between two network namespaces, by the watch. Needs root and Linux."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the page, its figures and its chart.")] = RESULTS,
) -> None:
    """Matmuls and collectives cut into parts that overlap, against default Inductor, case by case."""
    cases = chosen(case, CASES, "case")
    chosen([mode], _MODES, "mode")
    if on_wire:
        why = wire.unavailable() or ("" if ranks == 2 and all(mbit or (400,)) else "a wire has two ends and a rate")
        if why:
            raise typer.BadParameter(why, param_hint="--wire")
    body = [_WIRE] if on_wire else [
        "Milliseconds on the load-insensitive clock (processor time of the compute thread plus waits on the modelled "
        'link), medians, slower rank. "exposed" is the time in which the compute thread stood still. "planned" is '
        "the planner without async TP. The speed-up is default Inductor's time over async TP's; wall is the same by "
        f"the watch. Latency {LATENCY_NS / 1e6:g} ms where the link has a rate. {ranks} ranks, one thread each.",
    ]
    everything: dict[float, list[dict[str, Any]]] = {}
    for rate in mbit if mbit else (400.0,) if on_wire else (400.0, 0.0):
        rows = everything[rate] = measure(rate, ranks, rounds, mode, cases, on_wire)
        view = Table(*HEADER, title=_title(rate))
        for row in rows:
            view.add_row(*cells(row))
        Console(width=160).print(view)
        mean = geometric_mean(r["inductor"]["virtual_ms"] / r["async_tp"]["virtual_ms"] for r in rows)
        body += ["", f"## {_title(rate)}", "", *markdown_table(HEADER, [cells(r) for r in rows])]
        body += ["", f"Speed-up, geometric mean: {mean:.2f}."]
    data = [{"mbit": rate, "rows": rows} for rate, rows in everything.items()]
    title = "Async TP on a real link" if on_wire else "Async TP on the emulated link"
    name = "async_tp_wire" if on_wire else "async_tp"
    write(name, title, body, data, lambda path: _draw(everything, path), folder=out)
