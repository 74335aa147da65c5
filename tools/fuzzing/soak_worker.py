"""One rank of a soak: trains in cycles, each once with our passes and once without, and tells whether they agree.

A cycle compiles a model anew, trains some steps on batches of changing sizes (so that it compiles again and again) and
throws everything compiled away. It is done twice from the same weights: losses and weights must be equal to the bit.
What is left in memory is counted after either, so that growth that torch has without us is not taken for ours.
After a cycle the weights are written to disk; a rank that starts again goes on from the last cycle that all ranks have.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes.models import MLPConfig, mlp
from inductor_passes.trace.collector import collect
from tools.shared.leave import leave

Which = Literal["with us", "without us"]
WIDTH = 64
#: Longest wait for another rank; one that was killed is noticed earlier, by its closed connection.
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Task:
    """What a rank is to do; travels as JSON.

    Attributes:
        folder: where checkpoints lie.
        rank, world_size, port: of the job; the store that ranks meet at listens on ``port``.
        until: when to stop, in seconds since the epoch.
        cycles: after how many cycles to stop.
        codegen: ``inductor`` or ``aot_eager``.
    """

    folder: str
    rank: int
    world_size: int
    port: int
    until: float
    cycles: int
    codegen: str
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Pass:
    """What one pass through a cycle left behind; sizes in KiB."""

    losses: list[float]
    weights: list[torch.Tensor]
    graphs_planned: int
    frames_compiled: int
    resident: int
    live_graphs: int
    live_of_ours: int


def batches(seed: int, rank: int, cycle: int) -> tuple[bool | None, list[torch.Tensor]]:
    """(``dynamic`` of torch.compile, batches of a cycle); sizes are equal on all ranks, values are not."""
    rng = random.Random(f"{seed}/{cycle}")
    sizes = rng.sample((3, 4, 6, 8), 2)
    rows = [*sizes, *rng.choices(sizes, k=30)]
    values = torch.Generator().manual_seed(1000 * cycle + rank)
    return rng.choice([False, None]), [torch.randn(n, WIDTH, generator=values) for n in rows]


def compile_arguments(which: Which, codegen: str) -> dict[str, Any]:
    """How a model is compiled."""
    if codegen == "aot_eager":
        # Without us: the same decompositions, which torch's own backend of that name does not have, and no pass.
        off = dict.fromkeys(("bucket", "schedule", "redistribute"), "off")
        settings = {"codegen": "aot_eager", **({"rank_check": "error"} if which == "with us" else off)}
        return {"backend": "inductor_passes", "options": {f"inductor_passes.{k}": v for k, v in settings.items()}}
    if which == "with us":
        return {"options": inductor_passes.options(memory_budget="+20%", rank_check="error")}
    return {}


def resident_kib() -> int:
    """Memory of this process, free lists given back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


#: Modules of what describes a graph, a plan or a compilation; not the model's layers or a backend's settings.
OURS = tuple(
    f"inductor_passes.{name}."
    for name in ("ir", "bucket", "redistribute", "async_tp", "reorder", "schedule", "replay", "verify", "cost")
)
OURS += ("inductor_passes.engine.pipeline", "inductor_passes.report")


def live_objects() -> tuple[int, int]:
    """(FX graphs, objects of ours that describe graphs) that something still refers to."""
    gc.collect()
    graphs = ours = 0
    for thing in gc.get_objects():
        kind = type(thing)
        graphs += issubclass(kind, torch.fx.Graph)
        ours += f"{kind.__module__}.".startswith(OURS)
    return graphs, ours


class Rank:
    """The training job of one rank."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = inductor_passes.simple_fsdp(
            mlp(MLPConfig(width=WIDTH, hidden=96, layers=2)), init_device_mesh("cpu", (task.world_size,))
        )

    def local(self) -> list[torch.Tensor]:
        """This rank's shards."""
        return [p.to_local() for p in self.model.parameters()]  # type: ignore[attr-defined]

    @torch.no_grad()
    def restore(self, weights: list[torch.Tensor]) -> None:
        for shard, value in zip(self.local(), weights):
            shard.copy_(value)

    def train(self, which: Which, cycle: int) -> Pass:
        """One pass through a cycle."""
        dynamic, data = batches(self.task.seed, self.task.rank, cycle)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        losses = []
        frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with collect(what_if=False) as reports:
            compiled = torch.compile(self.model, dynamic=dynamic, **compile_arguments(which, self.task.codegen))
            for batch in data:
                loss = nn.functional.mse_loss(compiled(batch), batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        frames = torch._dynamo.utils.counters["stats"]["unique_graphs"] - frames
        planned = len(reports)
        del reports, compiled, optimizer, loss
        torch._dynamo.reset()
        graphs, ours = live_objects()
        weights = [w.detach().clone() for w in self.local()]
        return Pass(losses, weights, planned, frames, resident_kib(), graphs, ours)

    def cycle(self, number: int) -> dict[str, Any]:
        """A cycle with and without us, in turns which comes first."""
        # Every fourth cycle may take what an earlier one compiled from the cache; then our passes do not run.
        began = time.monotonic()
        cached = number % 4 == 3
        torch._inductor.config.fx_graph_cache = cached
        torch._functorch.config.enable_autograd_cache = cached
        start = [w.detach().clone() for w in self.local()]
        order: tuple[Which, Which] = ("with us", "without us")
        done: dict[str, Pass] = {}
        for which in order if number % 2 else order[::-1]:
            self.restore(start)
            done[which] = self.train(which, number)
        ours, plain = done["with us"], done["without us"]
        return {
            "cycle": number,
            "seconds": round(time.monotonic() - began, 2),
            "cached": cached,
            "losses": len(ours.losses),
            "last_loss": ours.losses[-1],
            "different_losses": sum(a != b for a, b in zip(ours.losses, plain.losses)),
            "different_weights": sum(not torch.equal(a, b) for a, b in zip(ours.weights, plain.weights)),
            "frames_compiled": ours.frames_compiled,
            "graphs_planned": ours.graphs_planned,
            "first": "with us" if number % 2 else "without us",
            **{f"resident {which}": done[which].resident for which in order},
            **{f"graphs {which}": done[which].live_graphs for which in order},
            **{f"ours {which}": done[which].live_of_ours for which in order},
        }

    # Checkpoints: the last two of every rank, as raw tensors.

    def _file(self, cycle: int) -> Path:
        return Path(self.task.folder) / f"rank{self.task.rank}-{cycle}.pt"

    def save(self, cycle: int) -> None:
        fresh = self._file(cycle).with_suffix(".new")
        torch.save(self.local(), fresh)
        fresh.replace(self._file(cycle))
        self._file(cycle - 2).unlink(missing_ok=True)

    def resume(self) -> int:
        """The first cycle to do, equal on all ranks."""
        have = [int(f.stem.partition("-")[2]) for f in Path(self.task.folder).glob(f"rank{self.task.rank}-*.pt")]
        last = torch.tensor(max(have, default=-1))
        dist.all_reduce(last, dist.ReduceOp.MIN)
        if last >= 0:
            self.restore(torch.load(self._file(int(last)), weights_only=True))
        return int(last) + 1

    def goes_on(self, cycle: int) -> bool:
        """Whether there is another cycle; all ranks agree."""
        over = torch.tensor(int(time.time() > self.task.until or cycle >= self.task.cycles))
        dist.all_reduce(over, dist.ReduceOp.MAX)
        return not over


def main() -> None:
    faulthandler.enable()
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    store = dist.TCPStore("127.0.0.1", task.port, task.world_size, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=TIMEOUT)
    rank = Rank(task)
    cycle = rank.resume()
    print(json.dumps({"resumed": cycle}), flush=True)
    while rank.goes_on(cycle):
        print(json.dumps(rank.cycle(cycle)), flush=True)
        rank.save(cycle)
        cycle += 1
    leave()


if __name__ == "__main__":
    main()
