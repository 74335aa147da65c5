"""The demo inside its ranks; start it with ``tools/demo``.

Trains the same small Llama twice, steps interleaved: compiled by plain Inductor, and with
``inductor_passes``. The link between the ranks is emulated and tuned so that communication takes as long as
compute. Losses must be equal, and every parameter and gradient must travel as often as it has to. A rank that cannot go
on writes why into the run's folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import traceback
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tools.link.lab import CONTENDERS, RATES
from tools.link.report import LOSS_TOLERANCE, errors, facts, notes, row_of, summary
from tools.link.start import FAILURE
from tools.link.worker import REFERENCE, Job, join, run
from tools.shared.leave import leave

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
    folder.mkdir(parents=True, exist_ok=True)
    try:
        wrong = _run(folder, steps, layers, rate, contender)
    except Exception as error:
        traceback.print_exc()
        wrong = _sentence(error)
    if wrong:
        # Both ranks may fail, one because the other did: the first one knows why.
        with contextlib.suppress(OSError), (folder / FAILURE).open("x", encoding="utf-8") as file:
            file.write(wrong + "\n")
    leave(1 if wrong else 0)


def _run(folder: Path, steps: int, layers: int, rate: str, contender: str) -> str:
    """Everything; returns what is wrong with the outcome, or ""."""
    if rate not in RATES:
        raise ValueError(f"--rate is {rate!r}; expected one of {', '.join(RATES)}")
    ours = [name for name, one in CONTENDERS.items() if one.family == "ours"]
    if contender not in ours:
        raise ValueError(f"--contender is {contender!r}; expected one of {', '.join(ours)}")
    join()
    job = Job(
        layout="fsdp",
        sizes={"layers": layers},
        contenders=[REFERENCE, contender],
        rates=[rate],
        rounds=steps,
        folder=str(folder),
    )
    if dist.get_rank() != 0:
        run(job)
        return ""
    console = Console(width=max(110, Console().width))
    results = _with_progress(job, steps, console)
    job.file("results.json").write_text(json.dumps(results, indent=1, allow_nan=False), encoding="utf-8")
    return _show(results, contender, console)


def _sentence(error: Exception) -> str:
    """What a user reads about an exception: what happened, and what to do."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, ValueError) and lines:
        return lines[0]
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space is left on the device ({said}); free some, or set TMPDIR and TORCHINDUCTOR_CACHE_DIR"
    return f"a rank failed with {said}; `inductor-passes doctor` checks the environment"


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


def _show(results: dict[str, Any], contender: str, console: Console) -> str:
    """Print the outcome; returns what is wrong with it, or ""."""
    failed = [f"{name} failed: {why}" for name, why in results["failed"].items()]
    if failed:
        return f"{'; '.join(failed)}; `inductor-passes doctor` checks the environment"
    console.print(summary(results))
    console.print(facts(results))
    for note in notes(results):
        console.print(f"note: {note}", style="yellow", markup=False)
    wrong = errors(results)
    for error in wrong:
        console.print(f"wrong: {error}", style="red", markup=False)
    mine = row_of(results, contender)
    losses, difference = mine["losses"], mine["worst_loss_difference"]
    how = "bit for bit" if difference == 0 else f"within {difference:.0e}"
    equal = "equal to" if difference <= LOSS_TOLERANCE else "NOT equal to"
    console.print(
        f"{len(losses)} training steps, {results['rounds']} of them measured, loss {_loss(losses[0])} -> "
        f"{_loss(losses[-1])}; {equal} plain Inductor's {how}"
    )
    return f"the contenders do not do the same work: {'; '.join(wrong)}; this is a defect to report" if wrong else ""


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    typer.run(main)
