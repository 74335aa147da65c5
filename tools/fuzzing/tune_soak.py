"""Ranks that are killed and held up while they tune: many short runs, at random moments, with random caches.

    tools/tune_soak --runs 30

Each run trains with ``tune`` and ``tune_swap`` on two to four ranks over gloo. One of them may be killed, stopped for a
while, have no part in the exchange, or fail in some stage of the second plan; each may be held up in any stage; some
find their code in a cache, some do not. Afterwards: nobody hangs, no two ranks hold different results or changed plans
at different calls, losses are those without tuning, and where no profile or no change came of it one sentence says why.
A rank whose peer was killed within a step may end with an error of its collective: that is torch's.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer

from inductor_passes.report import SwapOutcome
from tools.shared.launch import ROOT

#: No run takes longer unless somebody hangs; ranks wait for each other for so long.
LIMIT_S, PATIENCE = 240.0, "3s"
STEPS = 3
#: Steps of a run at most, and the time after which it ends whatever became of the second plan.
MOST, LONGEST_S = 800, 120.0
#: Between two steps, so that compiling in the background does not take thousands of them.
PAUSE_S = 0.05
HOW = (
    *("nothing", "nothing", "kill", "kill in the exchange", "stop", "stay away", "come late"),
    *("kill in the compilation", "kill at the call", "late at the call", "do not compile", "plan something else"),
)
#: Where a rank may be held up besides, how often, and for how long at most: ranks wait for each other for ``PATIENCE``.
WAITS = {"patience": PATIENCE, "longest_s": LONGEST_S}
STAGES, SHARE, DELAY_S = ("step", "exchange", "compilation", "call"), 0.5, 2.0
#: A reason that only a mistake in this file can lead to.
OWN_MISTAKE = "do not fit together"
OVER = tuple(one.value for one in SwapOutcome if one not in (SwapOutcome.AGREED, SwapOutcome.SWAPPED))


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

    how = job["how"] if rank == job["victim"] else "nothing"
    torch.manual_seed(0)
    model = inductor_passes.simple_fsdp(mlp(MLPConfig()), init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    # Behind the calls with which ranks share the model out: a rank that is gone there is none of ours to survive.
    if how in ("kill", "stop"):
        number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        timer = threading.Timer(job["after_s"], lambda: os.kill(os.getpid(), number))
        timer.daemon = True
        timer.start()
    settings: dict[str, Any] = {"rank_agreement": job["patience"], "memory_budget": "unlimited"}
    settings["cost_profile"] = f"{job['folder']}/assumed.json"
    if job["tune"]:
        settings |= {"tune": job["tune"], "tune_file": f"{job['folder']}/tuned.json", "tune_swap": "on"}
    # Without caches for graphs most runs have one to plan again; kernels are compiled once.
    graphs = {"fx_graph_cache": rank in job["warm"]}
    torch._functorch.config.enable_autograd_cache = rank in job["warm"]
    step = torch.compile(model, options=inductor_passes.options(inductor=graphs, **settings), fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = mlp_batch(MLPConfig(), seed=rank + 1)[0]
    held: dict[str, Any] = {"losses": [], "timings": [], "error": "", "delayed": []}
    began = time.monotonic()
    delays = Delays(job["delays"].get(str(rank), {}), held["delayed"])
    late = job["late_step"]
    with hindered(how, job, delays), collect(what_if=False) as reports:
        try:
            while len(held["losses"]) < job["steps"]:
                if len(held["losses"]) == late:
                    delays.at("step")
                loss = step(x).square().mean()
                loss.backward()
                held["losses"].append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
                over = _over([r.to_json()["timing"] for r in reports])
                said = torch.tensor([float(over or time.monotonic() - began > job["longest_s"])])
                torch.distributed.all_reduce(said)
                if job["tune"] and said.item() == world:
                    break
                time.sleep(PAUSE_S if job["tune"] else 0.0)
        except RuntimeError as error:
            held["error"] = str(error)[:200]
        held["finished"] = measuring.finished(120.0)
    held["timings"] = [r.to_json()["timing"] for r in reports]
    Path(job["folder"], f"held-{job['tune']}-{rank}").write_text(json.dumps(held), encoding="utf-8")
    if held["error"]:
        # A program that ends closes its connections; a rank that stayed would leave those waiting that wait for it.
        os._exit(1)


def _over(timings: list[Any]) -> bool:
    """Whether nothing more is going to come of the graphs."""
    if len(timings) < 2 or None in timings:
        return False
    return all(
        (one["swap"] or {}).get("outcome") in OVER if one["profile_hash"] else bool(one["note"]) for one in timings
    )


class Delays:
    """What holds a rank up: seconds by stage, each once.

    Args:
        seconds: the stages at which the rank sleeps.
        happened: gets the stages at which it did.
    """

    def __init__(self, seconds: dict[str, float], happened: list[str]) -> None:
        self._seconds, self._happened = dict(seconds), happened

    def sleep(self, why: str, seconds: float) -> None:
        """Sleep, and say so."""
        self._happened.append(why)
        time.sleep(seconds)

    def at(self, stage: str) -> None:
        """Sleep, where that is asked for."""
        if stage in self._seconds:
            self.sleep(stage, self._seconds.pop(stage))


@contextlib.contextmanager
def hindered(how: str, job: dict[str, Any], delays: Delays) -> Iterator[None]:
    """While it is entered, a rank that is hindered is, and the corrected profile is one with which plans differ."""
    from inductor_passes import _torch
    from inductor_passes.cost.profile import CostProfile
    from inductor_passes.tuning import measuring
    from inductor_passes.tuning.replanning import Replanning
    from inductor_passes.tuning.swap import Vote

    exchange, cast = vars(measuring)["exchange"], Vote.cast
    lower_again, shared = _torch.lower_again, Replanning._shared_profile
    corrected, other = (CostProfile.load(f"{job['folder']}/{name}.json") for name in ("corrected", "other"))

    def killed() -> None:
        time.sleep(job["after_s"] / 4)
        os.kill(os.getpid(), signal.SIGKILL)

    def exchanged(*arguments: Any) -> Any:
        delays.at("exchange")
        if how == "kill in the exchange":
            killed()
        if how == "stay away":
            raise RuntimeError("it stays away")
        if how == "come late":
            delays.sleep(how, 2 * job["after_s"] + 1)
        return exchange(*arguments)

    def compiled(*arguments: Any) -> Any:
        delays.at("compilation")
        if how == "kill in the compilation":
            threading.Thread(target=killed, daemon=True).start()
        if how == "do not compile":
            raise RuntimeError("it does not compile")
        return lower_again(*arguments)

    def voted(self: Any) -> Any:
        delays.at("call")
        if how == "kill at the call":
            killed()
        if how == "late at the call":
            delays.sleep(how, job["after_s"])
        return cast(self)

    def profile(self: Any) -> Any:
        found = shared(self)
        return other if how == "plan something else" else found

    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (measuring, "corrected", lambda *arguments: corrected),
            (measuring, "exchange", exchanged),
            (_torch, "lower_again", compiled),
            (Vote, "cast", voted),
            (Replanning, "_shared_profile", profile),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def job_of(number: int, seed: int) -> tuple[int, dict[str, Any]]:
    """How many ranks a run has, and what happens in it."""
    rng = random.Random(f"{seed} {number}")
    world = rng.choice((2, 2, 2, 3, 4))
    return world, {
        "how": rng.choice(HOW),
        "victim": rng.randrange(world),
        "after_s": rng.uniform(0.0, 6.0),
        "delays": {
            str(rank): {stage: rng.uniform(0.0, DELAY_S) for stage in STAGES if rng.random() < SHARE}
            for rank in range(world)
        },
        "warm": [rank for rank in range(world) if rng.random() < 0.1],
        "late_step": rng.randrange(2 * STEPS),
        **WAITS,
        "tune": STEPS,
        "steps": MOST,
    }


def one_run(number: int, seed: int, folder: Path) -> Counter[str]:
    """A run; what came of it.

    Raises:
        TuneSoakError: something that must not.
    """
    world, job = job_of(number, seed)
    job["folder"] = str(folder / f"run{number}")
    Path(job["folder"]).mkdir()
    _profiles(Path(job["folder"]), world)
    _untouched(world, folder)
    began = time.monotonic()
    failed = _ranks(world, job, str(folder / "cache"))
    took = time.monotonic() - began
    if took > LIMIT_S:
        raise TuneSoakError(f"run {number} took {took:.0f} s: {job}")
    held = {}
    for rank in range(world):
        path = Path(job["folder"], f"held-{STEPS}-{rank}")
        if path.exists():
            held[rank] = json.loads(path.read_text(encoding="utf-8"))
    return _judged(number, world, job, held, folder, failed)


def _profiles(folder: Path, world: int) -> None:
    """Cost profiles with which plans differ: by what a message costs by itself."""
    from tests.support.compiled import save_profile

    for name, latency_ns in (("assumed", 0.0), ("other", 3e5), ("corrected", 4e6)):
        save_profile(folder / f"{name}.json", latency_ns, 10.0, 20_000, 0.1, ranks=world)


def _untouched(world: int, folder: Path) -> None:
    """Write down the losses of so many ranks without tuning, once."""
    if (folder / f"losses-{world}-0").exists():
        return
    job = {"how": "nothing", "victim": 0, "after_s": 0.0, "warm": [], "delays": {}, "late_step": 0, "tune": 0}
    job |= {"steps": MOST, "folder": str(folder), **WAITS}
    _profiles(folder, world)
    _ranks(world, job, str(folder / "cache"))
    for rank in range(world):
        losses = json.loads((folder / f"held-0-{rank}").read_text(encoding="utf-8"))["losses"]
        (folder / f"losses-{world}-{rank}").write_text(json.dumps(losses), encoding="utf-8")


def _judged(
    number: int, world: int, job: dict[str, Any], held: dict[int, Any], folder: Path, failed: str = ""
) -> Counter[str]:
    killed = str(job["how"]).startswith("kill")
    missing = [rank for rank in range(world) if rank not in held and not (killed and rank == job["victim"])]
    if missing:
        raise TuneSoakError(f"run {number}: ranks {missing} did not end: {job} {failed}")
    found: Counter[str] = Counter({"runs": 1, str(job["how"]): 1})
    found["kills"] = int(killed and job["victim"] not in held)
    found["ranks without a cache"] = world - len(job["warm"])
    found["ranks with a cache"] = len(job["warm"])
    found["delays"] = sum(len(one["delayed"]) for one in held.values())
    profiles: dict[int, set[str]] = {}
    calls: dict[tuple[int, str], set[int]] = {}
    for rank, one in held.items():
        if not one["finished"]:
            raise TuneSoakError(f"run {number}: rank {rank} was still exchanging after 120 s: {job}")
        if one["error"] and not killed:
            raise TuneSoakError(f"run {number}: rank {rank} ended with {one['error']}: {job}")
        wanted = json.loads((folder / f"losses-{world}-{rank}").read_text(encoding="utf-8"))
        if one["losses"] != wanted[: len(one["losses"])]:
            raise TuneSoakError(f"run {number}: losses of rank {rank} are {one['losses']}, not {wanted}: {job}")
        for k, timing in enumerate(one["timings"]):
            if timing is None:
                found["graphs not timed"] += 1
            elif timing["profile_hash"]:
                profiles.setdefault(k, set()).add(json.dumps(_shared(timing, killed), sort_keys=True))
                found["graphs tuned"] += 1
            elif OWN_MISTAKE in timing["note"]:
                raise TuneSoakError(f"run {number}: this file does not fit the code it hinders: {timing['note']}")
            elif not timing["note"] and not (killed or one["error"]):
                raise TuneSoakError(f"run {number}: rank {rank} has neither a profile nor a reason: {job}")
            else:
                found["graphs with a reason"] += 1
            swap = (timing or {}).get("swap")
            if swap is None:
                continue
            if swap["outcome"] not in OVER and not (killed or one["error"]):
                raise TuneSoakError(f"run {number}: rank {rank} does not know what became of the second plan: {job}")
            if swap["outcome"] == SwapOutcome.NOTHING.value and not swap["why"]:
                raise TuneSoakError(f"run {number}: rank {rank} has no reason why nothing was swapped: {job}")
            found[swap["outcome"]] += 1
            if swap["call"] and swap["outcome"] != SwapOutcome.AGREED.value:
                calls.setdefault((k, "in"), set()).add(swap["call"])
            if swap["back"]:
                calls.setdefault((k, "back"), set()).add(swap["back"])
    if any(len(one) > 1 for one in calls.values()):
        raise TuneSoakError(f"run {number}: ranks changed plans at different calls: {calls}, {job}")
    if any(len(one) > 1 for one in profiles.values()):
        differ = [one for one in profiles.values() if len(one) > 1]
        raise TuneSoakError(f"run {number}: ranks hold different results: {differ}: {job}")
    return found


def _shared(timing: dict[str, Any], killed: bool) -> dict[str, Any]:
    """What ranks must hold alike: what was measured, and what became of the second plan.

    Where shards have other sizes, a rank's kernels are others, and so are what they are predicted to take and the peak.
    """
    same = {key: value for key, value in timing.items() if key not in ("kernels", "predicted_ns")}
    own = ("name", "predicted_ns", "predicted_stall_ns", "cause")
    same["collectives"] = [
        {key: value for key, value in one.items() if key not in own} for one in timing.get("collectives", ())
    ]
    if same.get("swap"):
        same["swap"] = {key: value for key, value in same["swap"].items() if key not in ("predicted_ns", "peak_bytes")}
    if killed:
        same.pop("swap", None)
    return same


def _ranks(world: int, job: dict[str, Any], cache: str) -> str:
    """Start ranks, wait for them, let those go on that stopped themselves; what they failed with, if one was killed."""
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
            return str(error)
        finally:
            done.set()
    return ""


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
