"""A long training job on real ranks: recompilations, changing batch sizes, ranks that are killed and restarted.

    tools/soak --minutes 30
    tools/soak --minutes 5 --kill-every 60 --codegen aot_eager

Supervises the ranks (``soak_worker``) as an elastic launcher does: every ``--kill-every`` seconds one of them is
killed; the others have to notice by themselves, and then all start again from the last cycle that every rank has on
disk. Exits with 1 when a rank hangs or ends by itself, when losses or weights differ from those without our passes, or
when graphs or objects of ours stay alive.
"""

from __future__ import annotations

import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import typer

from tools.fuzzing.soak_worker import Task
from tools.shared.launch import ROOT, environment

#: A rank that says nothing for so long hangs: the first cycle compiles, on a busy machine.
PATIENCE_S = 300.0
#: How long the others may take to notice that one was killed.
NOTICE_S = 150.0

#: Torch itself keeps the graphs of the last few compiled frames, not always as many after either pass. A pass compiles
#: at least two frames: whoever kept theirs would keep at least two graphs per pass more.
GRAPHS_TOLERATED = 1.0


class SoakError(RuntimeError):
    """Something happened that must not."""


@dataclass
class Process:
    """One rank of one generation."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)
    _read: int = 0

    def listen(self) -> None:
        """Take what it has printed since."""
        with self.log.open("rb") as f:
            f.seek(self._read)
            for line in f:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                if line.startswith(b"{"):
                    self.records.append(json.loads(line))
                    self.heard = time.monotonic()

    def tail(self) -> str:
        """The end of its output."""
        return self.log.read_bytes()[-3000:].decode(errors="replace")


@dataclass
class Soak:
    """All generations of a job.

    Attributes:
        generations: the records of every rank of every generation.
        noticed_s: how long the others took to end after one was killed.
    """

    folder: Path
    ranks: int
    until: float
    cycles: int
    codegen: str
    seed: int
    generations: list[list[list[dict[str, Any]]]] = field(default_factory=list)
    noticed_s: list[float] = field(default_factory=list)

    def run(self, kill_every: float) -> None:
        """Until the time is over or all cycles are done.

        Raises:
            SoakError: a rank hung, or ended without having been killed.
        """
        while True:
            processes, store = self._start()
            try:
                killed = self._watch(processes, time.monotonic() + kill_every)
            finally:
                for one in processes:
                    if one.process.poll() is None:
                        one.process.kill()
                    one.process.wait()
                    one.listen()
                self.generations.append([one.records for one in processes])
                del store
            if not killed:
                return

    def _start(self) -> tuple[list[Process], dist.TCPStore]:
        store = dist.TCPStore("127.0.0.1", 0, self.ranks, is_master=True, wait_for_workers=False)
        environ = {**environment(), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "cache")
        if sys.platform == "linux":
            environ["GLOO_SOCKET_IFNAME"] = "lo"
        started = []
        for rank in range(self.ranks):
            task = Task(
                str(self.folder), rank, self.ranks, store.port, self.until, self.cycles, self.codegen, self.seed
            )
            log = self.folder / f"log-{len(self.generations)}-{rank}"
            with log.open("wb") as out:
                command = [sys.executable, "-m", "tools.fuzzing.soak_worker", task.to_json()]
                process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environ)
            started.append(Process(rank, process, log))
        return started, store

    def _watch(self, processes: list[Process], kill_at: float) -> bool:
        """Whether one was killed; False when all are done."""
        while True:
            time.sleep(0.2)
            for one in processes:
                one.listen()
                if one.process.poll() not in (None, 0):
                    raise SoakError(f"rank {one.rank} ended with {one.process.returncode}:\n{one.tail()}")
                if one.process.poll() is None and time.monotonic() - one.heard > PATIENCE_S:
                    one.process.send_signal(signal.SIGABRT)
                    one.process.wait()
                    raise SoakError(f"rank {one.rank} said nothing for {PATIENCE_S:.0f} s:\n{one.tail()}")
            if all(one.process.poll() == 0 for one in processes):
                return False
            busy = all(one.process.poll() is None and len(one.records) > 1 for one in processes)
            if time.monotonic() >= kill_at and busy:
                self._kill(processes)
                return True

    def _kill(self, processes: list[Process]) -> None:
        """Kill a rank in the middle of its work; the others notice."""
        victim = processes[len(self.generations) % self.ranks]
        victim.process.kill()
        began = time.monotonic()
        for one in processes:
            try:
                one.process.wait(NOTICE_S)
            except subprocess.TimeoutExpired:
                gone = f"rank {one.rank} did not notice within {NOTICE_S:.0f} s that rank {victim.rank} is gone"
                raise SoakError(f"{gone}:\n{one.tail()}") from None
        self.noticed_s.append(time.monotonic() - began)

    def records(self) -> list[dict[str, Any]]:
        """One record per cycle and rank."""
        return [r for generation in self.generations for rank in generation for r in rank if "cycle" in r]


def growth(generations: list[list[list[dict[str, Any]]]], name: str, which: str) -> list[int]:
    """By how much a count grew in each pass of a kind, once a process has done two cycles."""
    found = []
    other = {"with us": "without us", "without us": "with us"}[which]
    for records in (rank for generation in generations for rank in generation):
        cycles = [r for r in records if "cycle" in r]
        for before, now in list(itertools.pairwise(cycles))[1:]:
            # The pass before this one is the other of the same cycle, or the last of the previous cycle.
            last = "without us" if before["first"] == "with us" else "with us"
            base = before[f"{name} {last}"] if now["first"] == which else now[f"{name} {other}"]
            found.append(now[f"{name} {which}"] - base)
    return found


def summary(soak: Soak, seconds: float) -> dict[str, Any]:
    """The figures of a soak."""
    records = soak.records()
    grown = {
        name: {which: growth(soak.generations, name, which) for which in ("with us", "without us")}
        for name in ("graphs", "ours", "resident")
    }
    return {
        "minutes": round(seconds / 60, 1),
        "ranks": soak.ranks,
        "codegen": soak.codegen,
        "seed": soak.seed,
        "generations": len(soak.generations),
        "killed": len(soak.noticed_s),
        "slowest_to_notice_s": round(max(soak.noticed_s, default=0.0), 1),
        "cycles": max((r["cycle"] for r in records), default=-1) + 1,
        "passes": 2 * len(records),
        "frames_compiled": sum(r["frames_compiled"] for r in records),
        "graphs_planned": sum(r["graphs_planned"] for r in records),
        "losses": sum(r["losses"] for r in records),
        "different_losses": sum(r["different_losses"] for r in records),
        "different_weights": sum(r["different_weights"] for r in records),
        "growth_per_pass": {
            {"ours": "objects of ours", "resident": "resident KiB"}.get(name, name): {
                which: round(statistics.fmean(g), 2) if g else 0.0 for which, g in both.items()
            }
            for name, both in grown.items()
        },
        "resident_mib": {
            "least": min((r["resident with us"] for r in records), default=0) // 1024,
            "most": max((r["resident with us"] for r in records), default=0) // 1024,
        },
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """What is wrong; empty when nothing is."""
    wrong = []
    if not figures["graphs_planned"] or not figures["losses"]:
        wrong.append("nothing was planned or trained")
    for name in ("different_losses", "different_weights"):
        if figures[name]:
            wrong.append(f"{name}: {figures[name]}")
    for name, tolerated in (("graphs", GRAPHS_TOLERATED), ("objects of ours", 0.0)):
        grown = figures["growth_per_pass"][name]
        if grown["with us"] > max(grown["without us"], 0) + tolerated:
            wrong.append(f"{name} stay alive: {grown} more per pass")
    return wrong


OUT = typer.Option(None, help="Write figures and records here, as JSON.")


def run(
    minutes: float = typer.Option(30.0, help="How long."),
    cycles: int = typer.Option(1_000_000, help="Stop after so many cycles."),
    ranks: int = typer.Option(2, help="Size of the world."),
    kill_every: float = typer.Option(240.0, help="Seconds between two kills."),
    codegen: str = typer.Option("inductor", help="inductor, or aot_eager to do without code generation."),
    seed: int = typer.Option(0, help="Batch sizes depend on the seed and the cycle only."),
    out: Path | None = OUT,
) -> None:
    """Run; exits with 1 when something is wrong."""
    if codegen not in ("inductor", "aot_eager"):
        raise typer.BadParameter(f"--codegen {codegen}: expected inductor or aot_eager")
    if minutes <= 0 or cycles < 1 or ranks < 1 or kill_every <= 0:
        raise typer.BadParameter("--minutes and --kill-every are above 0, --cycles and --ranks at least 1")
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), ranks, began + 60 * minutes, cycles, codegen, seed)
        trouble = []
        try:
            soak.run(kill_every)
        except SoakError as error:
            trouble = [str(error)]
    figures = summary(soak, time.time() - began)
    if out is not None:
        out.write_text(json.dumps({"figures": figures, "records": soak.records()}, indent=1))
    typer.echo(json.dumps(figures, indent=1))
    trouble += verdict(figures)
    for line in trouble:
        typer.echo(f"WRONG: {line}")
    raise typer.Exit(int(bool(trouble)))


if __name__ == "__main__":
    typer.run(run)
