"""Starts the demo: finds a folder and a network interface, runs the ranks, writes the report.

Whatever goes wrong ends with one sentence on stderr that says what and what to do; everything that the ranks print to
stderr is in ``stderr.log`` beside the results. Each run has a folder of its own, so runs do not disturb each other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from tools.shared.launch import ROOT, environment_of_ranks

#: A rank that fails says why in this file of the run's folder.
FAILURE = "failure.txt"
#: Compiled code, traces and the report take about a tenth of this.
MIN_FREE_BYTES = 256 * 2**20
#: How long torchrun may take to end its ranks.
END_S = 60
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoError(RuntimeError):
    """The demo cannot go on; the message says what to do."""


class Interrupted(BaseException):
    """A signal asked the demo to end."""


def main(
    out: Annotated[Path, typer.Option(help="Each run makes a folder of its own in this one.")] = Path("out/demo"),
    steps: Annotated[int, typer.Option(min=1, help="Measured training steps of each contender.")] = 10,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 4,
    rate: Annotated[str, typer.Option(help="The link: balanced, compute-bound, bandwidth-bound, ...")] = "balanced",
    contender: Annotated[str, typer.Option(help="Ours: ours, ours-0, ours-25 or ours-100.")] = "ours",
) -> None:
    """Train a small Llama on two ranks over an emulated link: plain Inductor against inductor_passes."""
    try:
        with _signals():
            folder = new_folder(out.absolute())
            options = ["--steps", str(steps), "--layers", str(layers), "--rate", rate, "--contender", contender]
            environment = {**environment_of_ranks(), "TORCH_TRACE": str(folder / "trace")}
            _ranks(folder, options, environment)
            _report(folder, environment)
    except (DemoError, ValueError, OSError) as error:
        typer.echo(f"demo: {error}", err=True)
        raise typer.Exit(1) from None
    except Interrupted:
        typer.echo("demo: interrupted; its ranks have ended, and it can be started again", err=True)
        raise typer.Exit(130) from None


def new_folder(out: Path) -> Path:
    """A new folder in ``out`` in which files can be written.

    Raises:
        DemoError: it cannot be written to, or has no space.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = _unique(out)
        (folder / "stderr.log").write_bytes(bytes(2**16))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise DemoError(
            f"{out} cannot be written to ({error.strerror or error}); name another folder with --out"
        ) from None
    if free < MIN_FREE_BYTES:
        raise DemoError(
            f"{out} has {free / 2**20:.0f} MiB of free space; the demo needs {MIN_FREE_BYTES / 2**20:.0f} MiB: free "
            "some, or name another folder with --out"
        )
    return folder


def _unique(out: Path) -> Path:
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for number in range(100):
        folder = out / (f"{name}-{number}" if number else name)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder.resolve()
    raise DemoError(f"{out} holds too many folders named {name}; name another folder with --out")


def _ranks(folder: Path, options: list[str], environment: dict[str, str]) -> None:
    """Run both ranks to their end.

    Raises:
        DemoError: one of them failed.
    """
    # By address: a host name need not resolve.
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "-m", "tools.link.demo", "--folder", str(folder), *options]
    with (folder / "stderr.log").open("wb") as log:
        # In a session of its own: a signal reaches this process, which ends the ranks and says so.
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log, start_new_session=True)
        try:
            status = process.wait()
        except BaseException:
            _end(process)
            raise
    if status:
        raise DemoError(f"{_why(folder, status)}; the log is {folder / 'stderr.log'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask torchrun to end its ranks; killed, it would leave them behind."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _why(folder: Path, status: int) -> str:
    """What a rank said before it failed, or else the last error in the log, and what to do."""
    said = folder / FAILURE
    if said.is_file():
        return said.read_text(encoding="utf-8", errors="replace").strip()
    log = (folder / "stderr.log").read_text(encoding="utf-8", errors="replace")
    errors = [line.split("]: ")[-1].strip() for line in log.splitlines() if "Error: " in line]
    last = f" ({errors[-1][:300]})" if errors else ""
    return f"the ranks ended with status {status}{last}; `inductor-passes doctor` checks the environment"


def _report(folder: Path, environment: dict[str, str]) -> None:
    """Render the trace, and say where everything is.

    Raises:
        DemoError: there is no report.
    """
    trace, page = folder / "trace", folder / "report.html"
    done = _run(["report", str(trace), "-o", str(page)], environment)
    if done.returncode:
        raise DemoError(f"the report cannot be written: {_last(done)}")
    # tlparse is a program of its own, which some platforms lack: the report does without.
    rendered = _run(["report", str(trace), "--tlparse", str(folder / "tlparse")], environment)
    tlparse = str(folder / "tlparse" / "index.html") if rendered.returncode == 0 else f"none ({_last(rendered)})"
    lines = {
        "report": str(page),
        "tlparse page": tlparse,
        "figures": str(folder / "results.json"),
        "as text": f"inductor-passes report {trace}",
    }
    typer.echo("\n" + "\n".join(f"{name + ':':<16} {value}" for name, value in lines.items()))


def _run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inductor_passes.cli.main", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", check=False
    )


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Signals that end the demo raise :class:`Interrupted`, once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise Interrupted

    before = {one: signal.signal(one, interrupt) for one in _SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    app(prog_name="tools/demo")
