"""The demo inside its ranks; start it with ``tools/demo``.

Trains the same small Llama twice, steps interleaved: compiled by plain Inductor, and with
``inductor_passes``. The link between the ranks is emulated and tuned so that communication takes as long as
compute. Losses must be equal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from leave import leave
from link_lab import RATES
from link_report import LOSS_TOLERANCE, errors, facts, notes, row_of, summary
from link_worker import REFERENCE, Job, join, run
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

#: How long the phases take relative to one step.
_WEIGHTS = {"compiling": 40, "compute alone": 8, "calibrating": 10, "measuring": 1, "memory": 3}


def main(
    folder: Annotated[Path, typer.Option(help="Where results go.")],
    steps: Annotated[int, typer.Option(min=1, help="Measured training steps of each.")] = 10,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    rate: Annotated[str, typer.Option(help=f"The link, of {', '.join(RATES)}.")] = "balanced",
    contender: Annotated[str, typer.Option(help="Ours: ours, ours-0, ours-25 or ours-100.")] = "ours",
) -> None:
    """Train, compare, print the table."""
    if rate not in RATES:
        raise typer.BadParameter(f"rate is {rate!r}; expected one of {', '.join(RATES)}")
    join()
    job = Job(
        layout="fsdp",
        sizes={"layers": layers},
        contenders=[REFERENCE, contender],
        rates=[rate],
        rounds=steps,
        folder=str(folder),
    )
    if dist.get_rank() == 0:
        console = Console(width=max(110, Console().width))
        results = _with_progress(job, steps, console)
        job.file("results.json").write_text(json.dumps(results, indent=1, allow_nan=False), encoding="utf-8")
        failed = _show(results, contender, console)
    else:
        failed = bool(run(job)[0]["failed"])
    leave(1 if failed else 0)


def _with_progress(job: Job, steps: int, console: Console) -> dict[str, Any]:
    """Run the job under a progress bar."""
    # A round measures both contenders, and compute alone.
    total = 2 * (_WEIGHTS["compiling"] + _WEIGHTS["memory"]) + 3 * steps * _WEIGHTS["measuring"]
    total += _WEIGHTS["compute alone"] + _WEIGHTS["calibrating"]
    columns = (TextColumn("{task.description:<36}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=total)
        done = 0

        def say(phase: str, contender: str) -> None:
            nonlocal done
            progress.update(task, completed=done, description=f"{phase}: {contender}")
            done += _WEIGHTS[phase]

        (results,) = run(job, say)
        progress.update(task, completed=total, description="done")
    return results


def _show(results: dict[str, Any], contender: str, console: Console) -> bool:
    """Print the outcome; True when something is wrong."""
    for name, why in results["failed"].items():
        console.print(f"{name} failed: {why}", style="red", markup=False)
    if results["failed"]:
        return True
    console.print(summary(results))
    console.print(facts(results))
    for note in notes(results):
        console.print(f"note: {note}", style="yellow", markup=False)
    wrong = errors(results)
    for error in wrong:
        console.print(f"wrong: {error}", style="red", markup=False)
    mine = row_of(results, contender)
    losses = mine["losses"]
    equal = mine["worst_loss_difference"] <= LOSS_TOLERANCE
    how = "bit for bit" if mine["worst_loss_difference"] == 0 else f"within {mine['worst_loss_difference']:.0e}"
    console.print(
        f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}; "
        + (f"equal to plain Inductor's {how}" if equal else f"NOT equal to plain Inductor's, {how} (relative)")
    )
    return bool(wrong)


if __name__ == "__main__":
    typer.run(main)
