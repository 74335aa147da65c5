"""One rank of the async TP benchmark: every case with all contenders interleaved; rank 0 writes the rows.

On the emulated link times are virtual (processor time of the compute thread plus the waits that the link makes it
take), so that a loaded machine does not change them; wall times stand beside them. On a real link (``wire``) there is
only the wall clock. A step's time is that of the slower rank.
"""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import inductor_passes
from inductor_passes import _torch
from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.config import PassConfig
from inductor_passes.cost.calibrate import calibrate
from inductor_passes.cost.profile import CostProfile
from inductor_passes.emulation import link as emulated_link
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.models import LlamaConfig, cross_entropy, llama, llama_batch, tensor_parallel
from tools.shared.leave import leave

LATENCY_NS = 100_000
WIRE_SIZES = (1 << 20, 1 << 21, 1 << 22)
Step = Callable[[], Any]


class AsyncTp(_torch.graph_pass_base()):  # type: ignore[misc]
    """The pass alone, in front of the planner."""

    def __init__(self, profile: CostProfile, mode: str, say: bool) -> None:
        self.profile, self.mode, self.say = profile, mode, say

    def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
        if not GraphView(graph).collectives:
            return
        settings = PassConfig(verify="strict", memory_budget="unlimited")
        one = AsyncTpPass(mode=self.mode)  # type: ignore[arg-type]
        report = run_passes(graph, [one], settings, self.profile).report
        for decision in report.passes[0].decisions if self.say else ():
            print(f"  {decision.node} {decision.verdict.value} ({decision.reason.value}): {decision.detail}")

    def uuid(self) -> None:
        return None


# -- what is measured --------------------------------------------------------------------------------------------------


def ag(x: torch.Tensor, dim: int) -> torch.Tensor:
    return funcol.all_gather_tensor(x, dim, dist.group.WORLD)


def rs(x: torch.Tensor, dim: int) -> torch.Tensor:
    return funcol.reduce_scatter_tensor(x, "sum", dim, dist.group.WORLD)


def ar(x: torch.Tensor) -> torch.Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def a2a(x: torch.Tensor) -> torch.Tensor:
    return funcol.all_to_all_single(x, None, None, dist.group.WORLD)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def _mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return rs(torch.relu(ag(x, 0) @ a) @ b, 0)


def _blocks(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for a, b in zip(weights[::2], weights[1::2]):
        x = _norm(x + ar(torch.relu(x @ a) @ b))
    return x


def _wgrad(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    full = ag(dy, 0)
    return full @ w, full.t() @ x


#: name -> (function, shapes of its inputs on a rank)
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "ag_mm": (lambda x, w: ag(x, 0) @ w, [(1024, 1024), (1024, 2560)]),
    "ag_mm_batch_1_bias": (
        lambda x, w, b: torch.nn.functional.linear(ag(x, 1), w, b),
        [(1, 1024, 1024), (2560, 1024), (2560,)],
    ),
    "mm_ag_weight": (lambda x, w: x @ ag(w, 0), [(2560, 1024), (512, 2048)]),
    "dgrad_wgrad": (_wgrad, [(512, 2048), (1024, 1024), (2048, 1024)]),
    "mm_rs": (lambda x, w: rs(x @ w, 0), [(2048, 2560), (2560, 1024)]),
    "mm_rs_dim1": (lambda x, w: rs(x @ w, 1), [(2, 1024, 2560), (2560, 1024)]),
    "mm_ar": (lambda x, w: ar(x @ w), [(1024, 5120), (5120, 1024)]),
    "ag_mlp_rs": (_mlp, [(1024, 512), (512, 1536), (1536, 512)]),
    "ag_mm_prime": (lambda x, w: ag(x, 0) @ w, [(1021, 1009), (1009, 2560)]),
    "two_gathers_mm": (
        lambda x, y, w: torch.cat([ag(x, 0), ag(y, 0)], 1) @ w, [(1024, 512), (1024, 512), (1024, 2560)]
    ),
    "ag_mm_ag": (lambda x, w: ag(x, 1) @ ag(w, 0), [(2048, 512), (512, 2560)]),
    "a2a_mm_prime": (lambda x, w: a2a(x) @ w, [(2042, 2048), (2048, 1280)]),
    "ag_mean_mm": (lambda x, w: ag(x, 0).mean(0, keepdim=True) @ w, [(1024, 1024), (1024, 256)]),
    "ar_blocks": (_blocks, [(1024, 512), *[(512, 1536), (1536, 512)] * 2]),
}


def _function_case(name: str) -> Callable[[Callable[[Any], Any]], Step]:
    fn, shapes = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]

    def make(compiler: Callable[[Any], Any]) -> Step:
        own = types.FunctionType(fn.__code__.replace(), fn.__globals__, name, None, fn.__closure__)
        compiled = compiler(own)
        return lambda: compiled(*inputs)

    return make


def _model_case(sequence_parallel: bool) -> Callable[[Callable[[Any], Any]], Step]:
    """Forward and backward of a small Llama under ``parallelize_module``."""
    from torch.distributed.device_mesh import init_device_mesh

    config = LlamaConfig(vocab=256, dim=1024, layers=2, heads=16, kv_heads=16, hidden=2048, batch=4, seq=128)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens, targets = llama_batch(config)

    def make(compiler: Callable[[Any], Any]) -> Step:
        model = tensor_parallel(llama(config), mesh, sequence_parallel=sequence_parallel)
        compiled = compiler(model)

        def step() -> torch.Tensor:
            model.zero_grad(set_to_none=True)
            loss = cross_entropy(compiled(tokens), targets)
            loss.backward()
            return loss.detach()

        return step

    return make


CASES: dict[str, Callable[[], Callable[[Callable[[Any], Any]], Step]]] = {
    **{name: (lambda name=name: _function_case(name)) for name in FUNCTIONS},  # type: ignore[misc]
    "llama_tp_sp": lambda: _model_case(True),
    "llama_tp": lambda: _model_case(False),
}


# -- a rank ------------------------------------------------------------------------------------------------------------


def contenders(profile: CostProfile, file: str, mode: str, say: bool, wire: bool) -> dict[str, dict[str, Any]]:
    """Compile options by name; the first is the reference. On a real link all of ours is on."""
    plan: dict[str, Any] = {"cost_profile": file, "memory_budget": "unlimited"}
    if wire:
        everything = inductor_passes.options(async_tp=mode, **plan)
        return {"inductor": {}, "planned": inductor_passes.options(**plan), "async_tp": everything}
    own_pass = AsyncTp(profile, mode, say)
    ours = inductor_passes.options(inductor={"post_grad_custom_post_pass": own_pass}, **plan)
    return {"inductor": {}, "planned": inductor_passes.options(**plan), "async_tp": ours}


def _largest(a: Any, b: Any) -> float:
    pairs = zip(a, b) if isinstance(a, (tuple, list)) else [(a, b)]
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-9)) for x, y in pairs)


def work(job: dict[str, Any], folder: str) -> None:
    """One rank: calibrate, then every case with all contenders interleaved."""
    torch.set_num_threads(1)
    wire = job["wire"]
    if wire:
        dist.init_process_group("gloo")
        # Small messages pass on the filter's credit, faster than the link is.
        profile = calibrate(dtypes=[torch.float32], sizes=WIRE_SIZES, repeats=5, ranks_per_host=1)
    else:
        emulated_link.register()
        dist.init_process_group("emulated")
        rate = job["mbit"] * 1e6 / 8 if job["mbit"] else float("inf")
        emulated_link.set_rate(LATENCY_NS if job["mbit"] else 0, rate)
        profile = calibrate(
            dtypes=[torch.float32], repeats=5, ranks_per_host=dist.get_world_size(), timed=emulated_link.timed
        )
    rank = dist.get_rank()
    file = f"{folder}/profile{rank}.json"
    profile.save(file)
    take = _by_the_watch if wire else _by_the_link
    rows = [
        measure(name, job["rounds"], contenders(profile, file, job["mode"], rank == 0, wire), take)
        for name in job["cases"]
    ]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    leave()


def _by_the_link(step: Step) -> tuple[int, int, int]:
    """Virtual, wall and exposed ns of a step."""
    with emulated_link.step_clock() as clock:
        step()
    return clock.time.virtual_ns, clock.time.wall_ns, clock.time.exposed_ns


def _by_the_watch(step: Step) -> tuple[int, int, int]:
    """Wall ns twice, and none exposed: nobody can tell."""
    dist.barrier()
    begin = time.perf_counter_ns()
    step()
    taken = time.perf_counter_ns() - begin
    return taken, taken, 0


def measure(
    name: str, rounds: int, everyone: dict[str, dict[str, Any]], take: Callable[[Step], tuple[int, int, int]]
) -> dict[str, Any]:
    """One case: compiled by every contender, then steps in turn."""
    make = CASES[name]()
    steps = {}
    for contender, options in everyone.items():
        if dist.get_rank() == 0 and contender == "async_tp":
            print(f"{name}:", flush=True)
        torch.manual_seed(0)
        steps[contender] = make(partial(torch.compile, options=options, fullgraph=True))
    results = {c: step() for c, step in steps.items()}
    row: dict[str, Any] = {"case": name, "difference": _largest(results["async_tp"], results["inductor"])}
    for step in steps.values():
        step()
    times: dict[str, list[tuple[int, int, int]]] = {c: [] for c in steps}
    for _ in range(rounds):
        for contender, step in steps.items():
            times[contender].append(take(step))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, times)
    for contender in steps:
        slowest = [max(one[contender][i] for one in ranks) for i in range(rounds)]
        row[contender] = {
            "virtual_ms": median(v for v, _, _ in slowest) / 1e6,
            "wall_ms": median(w for _, w, _ in slowest) / 1e6,
            "exposed_ms": median(e for _, _, e in slowest) / 1e6,
        }
    return row


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1], "job.json").read_text(encoding="utf-8")), sys.argv[1])
