"""Benchmark on real ranks over the emulated link: eager, Inductor, in-tree overlap settings, and ours,
interleaved.

    python tools/bench_link.py --ratio 1 --out out/link.json

Each ratio of communication to compute is a torchrun job of its own. A contender that raises is reported; one
that takes the whole job down is reported too, and the job starts again without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from link_report import errors, facts, notes, table
from rich.console import Console

from inductor_passes.demo_model import Sizes

_CONTENDERS = ("eager", "fsdp2", "inductor", "reorder", "bucket", "both", "ours-0", "ours", "ours-25", "ours-100")
_REFERENCE = "inductor"


def run_job(job: dict[str, Any], ranks: int, timeout_s: int, console: Console) -> dict[str, Any]:
    """Run a job until it gets through, each time without the contender that took it down.

    Raises:
        RuntimeError: the reference itself fails.
    """
    died: dict[str, str] = {}
    while True:
        with tempfile.TemporaryDirectory() as folder:
            alive = [name for name in job["contenders"] if name not in died]
            contents = {**job, "contenders": alive, "folder": folder}
            Path(folder, "job.json").write_text(json.dumps(contents), encoding="utf-8")
            code, tail = _torchrun(folder, ranks, timeout_s)
            results = Path(folder, "results.json")
            if results.exists():
                data: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
                data["failed"].update(died)
                return data
            journal = Path(folder, "journal.jsonl")
            lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
            last = json.loads(lines[-1]) if lines else {"phase": "starting", "contender": _REFERENCE}
        console.print(tail, style="dim", markup=False)
        if last["contender"] == _REFERENCE:
            raise RuntimeError(f"the job ended with status {code} while {last['phase']} {_REFERENCE}")
        died[last["contender"]] = f"took the job down (status {code}) while {last['phase']}"
        console.print(f"{last['contender']} {died[last['contender']]}; starting again without it")


def _torchrun(folder: str, ranks: int, timeout_s: int) -> tuple[int, str]:
    """Exit status (-1: out of time) and the end of the output."""
    here = Path(__file__).resolve().parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here.parent), environment.get("PYTHONPATH", "")]))
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    log = Path(folder, "output.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(here / "link_worker.py"), folder], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            # Asked politely, torchrun ends its ranks; killed, it leaves them behind.
            process.terminate()
            process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")[-3000:]


def main(
    ratio: Annotated[
        list[float] | None, typer.Option(help="Communication alone over compute alone; repeatable.")
    ] = None,
    contender: Annotated[list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(_CONTENDERS)}.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved steps per contender.")] = 7,
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    layers: Annotated[int, typer.Option(min=1)] = 6,
    dim: Annotated[int, typer.Option(min=8)] = 256,
    hidden: Annotated[int, typer.Option(min=8)] = 704,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    sequence: Annotated[int, typer.Option(min=2)] = 256,
    latency_us: Annotated[float, typer.Option(min=0, help="Of each collective.")] = 200.0,
    timeout_s: Annotated[int, typer.Option(min=1, help="Per job.")] = 3600,
    out: Annotated[Path | None, typer.Option(help="Where to write the results as JSON.")] = None,
) -> None:
    """Measure, print a table per ratio, and write JSON."""
    names = list(contender or _CONTENDERS)
    for name in names:
        if name not in _CONTENDERS:
            raise typer.BadParameter(f"contender is {name!r}; expected one of {', '.join(_CONTENDERS)}")
    if _REFERENCE not in names:
        names.insert(0, _REFERENCE)
    sizes = Sizes(layers=layers, dim=dim, hidden=hidden, batch=batch, sequence=sequence)
    console = Console(width=max(180, Console().width))
    everything = []
    for value in ratio or [1.0]:
        job = {
            "sizes": vars(sizes),
            "contenders": names,
            "ratio": value,
            "latency_ns": round(latency_us * 1000),
            "rounds": rounds,
        }
        results = run_job(job, ranks, timeout_s, console)
        everything.append(results)
        console.print(table(results))
        console.print(facts(results))
        for note in notes(results):
            console.print(f"note: {note}", markup=False)
        for error in errors(results):
            console.print(f"wrong: {error}", style="red", markup=False)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(everything, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if any(errors(results) for results in everything):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
