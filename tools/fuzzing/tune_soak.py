"""Ranks that are killed and held up while they tune: many short runs, at random moments, with random caches.

    tools/tune_soak --runs 30

Each run trains some steps with ``tune`` on two to four ranks over gloo. One of them may be killed, stopped for a
while, or have no part in the exchange; some find their code in a cache, some do not. Afterwards: nobody hangs, no two
ranks hold different results, losses are those without tuning, and where no profile came of it one sentence says why. A
rank whose peer was killed within a step may end with an error of its collective: that is torch's.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer

from tools.shared.launch import ROOT

#: No run takes longer unless somebody hangs; ranks wait for each other for so long.
LIMIT_S, PATIENCE = 240.0, "3s"
STEPS, MORE = 3, 2
HOW = ("nothing", "kill", "kill in the exchange", "stop", "stay away", "come late")


class TuneSoakError(RuntimeError):
    """Something happened that must not."""


def worker(rank: int, world: int, job: dict[str, Any]) -> None:
    """One rank of a run; writes what it holds in the end."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    import inductor_passes
    from inductor_passes.models import MLPConfig, mlp, mlp_batch
    from inductor_passes.trace.collector import collect
    from inductor_passes.tuning import measuring

    real = vars(measuring)["exchange"]
    how = job["how"] if rank == job["victim"] else "nothing"

    def exchange(*arguments: Any) -> Any:
        if how == "kill in the exchange":
            time.sleep(job["after_s"] / 4)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stay away":
            raise RuntimeError("it stays away")
        if how == "come late":
            time.sleep(2 * job["after_s"] + 1)
        return real(*arguments)

    if how in ("kill", "stop"):
        number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        timer = threading.Timer(job["after_s"], lambda: os.kill(os.getpid(), number))
        timer.daemon = True
        timer.start()
    if rank in job["cold"]:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=job["folder"])
    model = inductor_passes.simple_fsdp(mlp(MLPConfig()), init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    settings = {"tune": job["tune"], "tune_file": f"{job['folder']}/tuned.json", "rank_agreement": PATIENCE}
    step = torch.compile(model, options=inductor_passes.options(**settings), fullgraph=True)
    x = mlp_batch(MLPConfig(), seed=rank + 1)[0]
    held: dict[str, Any] = {"losses": [], "timings": [], "error": ""}
    with mock.patch.object(measuring, "exchange", exchange), collect(what_if=False) as reports:
        try:
            for _ in range(STEPS + 1 + MORE):
                loss = step(x).square().mean()
                loss.backward()
                held["losses"].append(loss.item())
        except RuntimeError as error:
            held["error"] = str(error)[:200]
        held["finished"] = measuring.finished(60.0)
    held["timings"] = [r.to_json()["timing"] for r in reports]
    Path(job["folder"], f"held-{job['tune']}-{rank}").write_text(json.dumps(held), encoding="utf-8")


def job_of(number: int, seed: int) -> tuple[int, dict[str, Any]]:
    """How many ranks a run has, and what happens in it."""
    rng = random.Random(f"{seed} {number}")
    world = rng.choice((2, 2, 2, 3, 4))
    return world, {
        "how": rng.choice(HOW),
        "victim": rng.randrange(world),
        "after_s": rng.uniform(0.0, 6.0),
        "cold": [rank for rank in range(world) if rng.random() < 0.15],
        "tune": STEPS,
    }


def one_run(number: int, seed: int, folder: Path) -> Counter[str]:
    """A run; what came of it.

    Raises:
        TuneSoakError: something that must not.
    """
    world, job = job_of(number, seed)
    job["folder"] = str(folder / f"run{number}")
    Path(job["folder"]).mkdir()
    _untouched(world, folder)
    began = time.monotonic()
    _ranks(world, job, str(folder / "cache"))
    took = time.monotonic() - began
    if took > LIMIT_S:
        raise TuneSoakError(f"run {number} took {took:.0f} s: {job}")
    held = {}
    for rank in range(world):
        path = Path(job["folder"], f"held-{STEPS}-{rank}")
        if path.exists():
            held[rank] = json.loads(path.read_text(encoding="utf-8"))
    return _judged(number, world, job, held, folder)


def _untouched(world: int, folder: Path) -> None:
    """Write down the losses of so many ranks without tuning, once."""
    if (folder / f"losses-{world}-0").exists():
        return
    job = {"how": "nothing", "victim": 0, "after_s": 0.0, "cold": [], "folder": str(folder), "tune": 0}
    _ranks(world, job, str(folder / "cache"))
    for rank in range(world):
        losses = json.loads((folder / f"held-0-{rank}").read_text(encoding="utf-8"))["losses"]
        (folder / f"losses-{world}-{rank}").write_text(json.dumps(losses), encoding="utf-8")


def _judged(number: int, world: int, job: dict[str, Any], held: dict[int, Any], folder: Path) -> Counter[str]:
    killed = str(job["how"]).startswith("kill")
    missing = [rank for rank in range(world) if rank not in held and not (killed and rank == job["victim"])]
    if missing:
        raise TuneSoakError(f"run {number}: ranks {missing} did not end: {job}")
    found: Counter[str] = Counter({"runs": 1, str(job["how"]): 1})
    profiles: dict[int, set[str]] = {}
    for rank, one in held.items():
        if not one["finished"]:
            raise TuneSoakError(f"run {number}: rank {rank} was still exchanging after 60 s: {job}")
        if one["error"] and not killed:
            raise TuneSoakError(f"run {number}: rank {rank} ended with {one['error']}: {job}")
        wanted = json.loads((folder / f"losses-{world}-{rank}").read_text(encoding="utf-8"))
        if one["losses"] != wanted[: len(one["losses"])]:
            raise TuneSoakError(f"run {number}: losses of rank {rank} are {one['losses']}, not {wanted}: {job}")
        for k, timing in enumerate(one["timings"]):
            if timing is None:
                found["graphs not timed"] += 1
            elif timing["profile_hash"]:
                profiles.setdefault(k, set()).add(json.dumps(timing, sort_keys=True))
                found["graphs tuned"] += 1
            elif not timing["note"] and not (killed or one["error"]):
                raise TuneSoakError(f"run {number}: rank {rank} has neither a profile nor a reason: {job}")
            else:
                found["graphs with a reason"] += 1
    if any(len(one) > 1 for one in profiles.values()):
        raise TuneSoakError(f"run {number}: ranks hold different results: {job}")
    return found


def _ranks(world: int, job: dict[str, Any], cache: str) -> None:
    """Start ranks, wait for them, let those go on that stopped themselves."""
    from tests.support import ranks
    from tools.fuzzing import tune_soak  # ranks import functions of modules, and this one may be the program

    with ranks.Ranks(world, env={"TORCHINDUCTOR_CACHE_DIR": cache}) as pool:
        done = threading.Event()

        def wake() -> None:
            while not done.wait(1.0):
                # A rank that stopped itself sleeps for some seconds, and goes on.
                if job["how"] == "stop" and done.wait(job["after_s"] + 4):
                    return
                pool._signal(signal.SIGCONT)

        threading.Thread(target=wake, daemon=True).start()
        try:
            with mock.patch.object(ranks, "GRACE_S", LIMIT_S):
                pool.run(tune_soak.worker, job, timeout=LIMIT_S)
        except ranks.RankError as error:
            if not str(job["how"]).startswith("kill"):
                raise TuneSoakError(f"{job}: {error}") from None
        finally:
            done.set()


def main(
    runs: Annotated[int, typer.Option(min=1)] = 30,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="Where to write the counts as JSON.")] = None,
) -> None:
    """Run, and print what came of it; exit status 1 when something happened that must not."""
    os.chdir(ROOT)
    total: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(runs):
            try:
                total += one_run(number, seed, folder)
            except TuneSoakError as error:
                print(f"seed {seed}: {error}", flush=True)
                sys.exit(1)
            print(f"{number + 1} of {runs} runs, {time.monotonic() - began:.0f} s: {dict(total)}", flush=True)
    if out is not None:
        out.write_text(json.dumps(dict(total), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
