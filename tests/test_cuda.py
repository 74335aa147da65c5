"""What only a GPU can show: Inductor's code for it behind our passes, its allocator, its streams, recorded graphs.

Ranks share a GPU where there are fewer of them (``tests.support.device``). On a machine without one everything here is
skipped; ``PASSES_TEST_DEVICE=cuda`` runs it, and the other tests of ranks that are not about a CPU.
"""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import inductor_passes
from inductor_passes.cost.calibrate import calibrate
from inductor_passes.cost.profile import CostProfile
from inductor_passes.models import LlamaConfig, language_batch, language_model, tensor_parallel
from inductor_passes.problems.inside import inside_bytes
from inductor_passes.report import GraphReport, SwapOutcome, Verdict
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from inductor_passes.tuning import measuring
from tests.support.device import DEVICE, ON_CPU, on_device
from tests.support.processes import ROOT, environment
from tests.support.ranks import Ranks
from tests.test_inside_memory import call_in, graph_of

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(ON_CPU, reason="PASSES_TEST_DEVICE is not cuda")]

#: Large enough that what libraries take beside is little.
SIZES = LlamaConfig(
    vocab=4096, dim=1024, layers=2, heads=16, kv_heads=8, hidden=2816, batch=4, seq=1024, std=0.02,
    dtype=torch.bfloat16,
)  # fmt: skip
SMALL = LlamaConfig(layers=2, dim=64, heads=4, kv_heads=4, hidden=96, batch=4, seq=64, vocab=128)
#: A rank that hangs is ended; ranks of other tests compile beside it.
LIMIT_S = 240.0
MOST_STEPS = 200
#: How an attempt to change plans can end.
OVER = {one.value for one in SwapOutcome} - {SwapOutcome.AGREED.value, SwapOutcome.SWAPPED.value}


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def sharded(model: nn.Module, reshard: Any = True) -> nn.Module:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("dp",))
    return simple_fsdp(model, mesh, reshard_after_forward=reshard)


def ours(**settings: Any) -> dict[str, Any]:
    return inductor_passes.options(verify="strict", rank_agreement="120s", **settings)


def memory_to_measure() -> int:
    """Begin to measure the most bytes in use; how many are in use now."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def trained(
    rank: int,
    config: LlamaConfig,
    options: dict[str, Any],
    steps: int = 3,
    reshard: Any = True,
    until: Callable[[list[GraphReport]], bool] = lambda _: False,
) -> tuple[list[float], dict[str, torch.Tensor], list[GraphReport], list[int]]:
    """Losses, parameters, reports, and what each step needs beside what there was before it, of one's own batches."""
    torch._dynamo.reset()
    model = sharded(on_device(language_model(config)), reshard)
    step = torch.compile(model, fullgraph=True, options=options)
    losses, peaks = [], []
    with collect(what_if=False) as reports:
        for number in range(steps):
            tokens, targets = (on_device(t) for t in language_batch(config, 1000 * rank + number))
            before = memory_to_measure()
            loss = step(tokens, targets)
            loss.backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
                    parameter.grad = None
            losses.append(loss.item())
            if until(reports):
                break
    parameters = {n: p.to_local().detach().cpu() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    return losses, parameters, reports, peaks


def off_by(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two models' parameters, relative to the largest element of each."""
    assert list(one) == list(other)
    return max(float((one[n] - other[n]).abs().max() / one[n].abs().max()) for n in one if one[n].numel())


def compare(rank: int, world: int, settings: dict[str, Any], reshard: Any = True) -> dict[str, Any]:
    """A bf16 Llama, default Inductor and ours: what differs, what was planned, what memory was measured."""
    first = trained(rank, SIZES, {}, reshard=True)
    second = trained(rank, SIZES, ours(**settings), reshard=reshard)
    reports = second[2]
    passes = [p for r in reports for p in r.passes]
    # The plan counts the shards and the batch, which were there before the step.
    held = sum(p.nbytes for p in second[1].values()) + 2 * 8 * SIZES.batch * SIZES.seq
    return {
        "losses": (first[0], second[0]),
        "off": off_by(first[1], second[1]),
        "steps": (first[3], second[3]),
        "phases": [r.phase for r in reports],
        "order": [r.order_check for r in reports],
        "undone": [f"{p.name}: {p.detail}" for p in passes if p.rolled_back is not None],
        "applied": {p.name: sum(d.verdict is Verdict.APPLIED for d in p.decisions) for p in passes if p.decisions},
        "starts": [len(r.collectives) for r in reports],
        "predicted": max(r.schedules[-1].peak_after_bytes for r in reports) - held,
        "measured": (first[3][-1], second[3][-1]),
        "notes": [note for r in reports for note in r.notes],
        "attention": [d for p in passes if p.name == "recompute" for d in p.decisions if "attention" in d.node],
    }


def _planned(found: list[dict[str, Any]]) -> dict[str, Any]:
    one = found[0]
    print(one)
    assert one["phases"] == ["forward", "backward"] and one["order"] == ["as planned"] * 2, one
    assert not one["undone"], one["undone"]
    return one


@pytest.mark.parametrize("settings", [{}, {"memory_budget": "0"}, {"unpack": "kernel"}], ids=str)
def test_a_half_precision_model_trains_as_with_default_inductor(pair: Ranks, settings: dict[str, Any]) -> None:
    one = _planned(pair.run(compare, settings, timeout=LIMIT_S))
    assert one["off"] < 2e-2
    assert 0.95 < one["measured"][1] / one["predicted"] < 1.1


def test_a_budget_below_the_peak_holds_as_measured(pair: Ranks) -> None:
    """Attention runs again among what is not saved: on a GPU its state of the generator is a value of the graph."""
    one = _planned(pair.run(compare, {"memory_budget": "-25%"}, "auto", timeout=LIMIT_S))
    assert one["off"] < 2e-2 and one["applied"].get("recompute")
    assert one["measured"][1] < one["measured"][0]


@pytest.mark.parametrize("kind", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("in_order", [True, False])
def test_what_attention_takes_while_it_runs(kind: str, in_order: bool) -> None:
    """Backward's temporaries, as the allocator counts them, beside what plans assume."""
    aten, shape, dtype = torch.ops.aten, (2, 8, 8, 1280, 1280, 128), torch.bfloat16
    graph = graph_of(kind, shape, 2, in_order)

    def operand() -> torch.Tensor:
        if in_order:
            return torch.randn(2, 1280, 8, 128, device=DEVICE, dtype=dtype).transpose(1, 2)
        return torch.randn(2, 8, 1280, 128, device=DEVICE, dtype=dtype)

    grad, q, k, v = (operand() for _ in range(4))
    if kind == "flash":
        f = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
        rest = (f[0], f[1], None, None, 1280, 1280, 0.0, True, f[6], f[7])
    elif kind == "cudnn":
        f = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
        rest = (f[0], f[1], f[6], f[7], None, None, None, 1280, 1280, 0.0, True)
    else:
        f = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
        rest = (None, f[0], f[1], f[2], f[3], 0.0, [True, True, True, False], True)
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
    for _ in range(2):
        memory_to_measure()
        results = backward(grad, q, k, v, *rest)
        inside = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        del results
    print(kind, in_order, inside, inside_bytes(call_in(graph)))
    assert 0.97 < inside / inside_bytes(call_in(graph)) < 1.05


def with_dropout(rank: int, world: int) -> list[float]:
    """Differences of gradients with dropout in attention, default Inductor and ours from equal generators."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(256, 768, bias=False), nn.Linear(256, 256, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.into(x).view(*x.shape[:2], 4, 192).transpose(1, 2).chunk(3, -1)
            y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            return x + self.out(nn.functional.dropout(y.transpose(1, 2).flatten(2), 0.1))

    torch.manual_seed(0)
    whole = on_device(nn.Sequential(*(Attend() for _ in range(3))).to(torch.bfloat16))
    torch.manual_seed(rank + 1)
    x = on_device(torch.randn(4, 128, 256, dtype=torch.bfloat16))
    found = []
    for options in ({}, ours(memory_budget="-10%"), ours(bucket="off")):
        torch._dynamo.reset()
        model = sharded(copy.deepcopy(whole))
        torch.manual_seed(7)
        torch.compile(model, fullgraph=True, options=options)(x).float().square().mean().backward()
        found.append({n: p.grad.to_local().float().cpu() for n, p in model.named_parameters()})
    return [off_by(found[0], one) for one in found[1:]]


def test_dropout_draws_the_same(pair: Ranks) -> None:
    for differences in pair.run(with_dropout, timeout=LIMIT_S):
        print(differences)
        assert max(differences) < 2e-2


def recorded(rank: int, world: int) -> dict[str, Any]:
    """Steps whose kernels a CUDA graph replays."""
    graphs = {"triton.cudagraphs": True}
    first = trained(rank, SMALL, graphs, steps=6)
    second = trained(rank, SMALL, ours(inductor=graphs), steps=6)
    return {"losses": (first[0], second[0]), "off": off_by(first[1], second[1]), "phases": [r.phase for r in second[2]]}


def test_recorded_graphs(pair: Ranks) -> None:
    """Planned collectives in CUDA graphs: the sixth step replays what the second or third recorded."""
    for one in pair.run(recorded, timeout=LIMIT_S):
        print(one)
        assert one["off"] < 1e-5


def tuned(rank: int, world: int, file: str) -> dict[str, Any]:
    first = trained(rank, SIZES, ours(), steps=6)
    second = trained(rank, SIZES, ours(tune=3, tune_file=file), steps=6)
    assert measuring.finished()
    return {
        "losses": (first[0], second[0]),
        "notes": [note for r in second[2] for note in r.notes],
        "reports": [r.to_json()["timing"] for r in second[2]],
    }


def test_tuned_by_events(pair: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    for one in pair.run(tuned, str(file), timeout=LIMIT_S):
        for found in one["reports"]:
            assert found is not None, one["notes"]
            print({k: v for k, v in found.items() if k not in ("kernels", "collectives")})
            print(found["kernels"], found["collectives"][:3])
            parts = sum(k["measured_ns"] for k in found["kernels"])
            parts += sum(c["measured_stall_ns"] for c in found["collectives"])
            assert found["measured_ns"] > 0.5 * parts > 0
        assert one["losses"][0] == one["losses"][1]
    assert CostProfile.load(file).measured


def swapped(rank: int, world: int, file: str) -> dict[str, Any]:
    """Steps with ``tune_swap`` until all ranks know what becomes of both graphs; then the same number without."""
    found: list[dict[str, Any]] = []

    def enough(reports: list[GraphReport]) -> bool:
        time.sleep(0.1)
        timings = [r.to_json()["timing"] for r in reports]
        found[:] = [t["swap"] for t in timings if t is not None and t["swap"] is not None]
        over = torch.tensor([float(len(found) == 2 and all(one["outcome"] in OVER for one in found))])
        dist.all_reduce(over)
        return over.item() == world

    first = trained(rank, SIZES, ours(tune=3, tune_file=file, tune_swap="on"), steps=MOST_STEPS, until=enough)
    second = trained(rank, SIZES, ours(), steps=len(first[0]))
    return {"losses": (first[0], second[0]), "swaps": found, "notes": [note for r in first[2] for note in r.notes]}


def test_a_second_plan_while_it_runs(pair: Ranks, tmp_path: Path) -> None:
    """The datasheet's link is not the one that there is: both graphs are planned again, and both ranks do the same."""
    first, second = pair.run(swapped, str(tmp_path / "tuned.json"), timeout=LIMIT_S)
    print(len(first["losses"][0]), first["swaps"], first["notes"])
    assert [s["outcome"] for s in first["swaps"]] == [s["outcome"] for s in second["swaps"]]
    assert len(first["swaps"]) == 2 and len(first["losses"][0]) < MOST_STEPS
    for one in (first, second):
        assert one["losses"][0] == one["losses"][1]


def profiled(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A profile of a step of each rank, and the stream of every kernel in it, in order of their begins."""
    torch._dynamo.reset()
    model = sharded(on_device(language_model(SIZES)))
    tokens, targets = (on_device(t) for t in language_batch(SIZES, rank))
    step = torch.compile(model, fullgraph=True, options=ours(memory_budget="+25%"))
    with collect(what_if=False) as reports:
        for number in range(4):
            if number == 3:
                profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
                profiler.start()
            step(tokens, targets).backward()
            torch.cuda.synchronize()
    profiler.stop()
    path = f"{folder}/step{rank}.json"
    profiler.export_chrome_trace(path)
    with open(path) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("cat") == "kernel"]
    kernels = [(e["args"]["stream"], e["name"]) for e in sorted(events, key=lambda e: e["ts"])]
    return {"kernels": kernels, "order": [r.collectives and [c.label for c in r.collectives] for r in reports]}


def test_streams_follow_the_plan(tmp_path: Path) -> None:
    """Transfers run on streams of their own, in the planned order, and the report finds each of them."""
    traces = tmp_path / "trace"
    with Ranks(2, env={"TORCH_TRACE": str(traces)}) as ranks:
        found = ranks.run(profiled, str(tmp_path), timeout=LIMIT_S)
    for one in found:
        transfers = [(stream, name) for stream, name in one["kernels"] if "nccl" in name.lower()]
        others = {stream for stream, name in one["kernels"] if "nccl" not in name.lower()}
        print(len(one["kernels"]), {s for s, _ in transfers}, others, one["order"])
        assert transfers and not {s for s, _ in transfers} & others
        planned = ["Gather" in name for _, name in transfers]
        wanted = [label.startswith("AG") for order in one["order"] for label in order]
        assert planned == wanted, (transfers, one["order"])
    profiles = [word for rank in range(2) for word in ("--profile", f"{tmp_path}/step{rank}.json")]
    written = ["--write-cost-profile", f"{tmp_path}/costs.json"]
    done = subprocess.run(
        [*(sys.executable, "-m", "inductor_passes.cli.main", "report", str(traces)), *profiles, *written],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout[-6000:], done.stderr[-3000:])
    assert done.returncode == 0 and CostProfile.load(tmp_path / "costs.json").measured


def calibrated(rank: int, world: int) -> dict[str, Any]:
    mesh = init_device_mesh(DEVICE, (world,), mesh_dim_names=("dp",))
    device = torch.device(DEVICE, torch.cuda.current_device())
    return calibrate([mesh.get_group()], device=device, repeats=3, ranks_per_host=world).to_json()


def test_calibrate(pair: Ranks) -> None:
    first, second = pair.run(calibrated, timeout=LIMIT_S)
    print({k: v for k, v in first.items() if k != "matmul"}, first["matmul"])
    assert first == second and first["measured"]
    assert {c["kind"] for group in first["groups"] for c in group["costs"]} >= {"all_gather", "reduce_scatter"}


def async_tp(rank: int, world: int, lowering: str) -> dict[str, Any]:
    """A tensor- and sequence-parallel Llama, default Inductor and with its matmuls cut."""
    config = LlamaConfig(
        layers=2, dim=512, heads=8, kv_heads=8, hidden=1024, batch=1, seq=512, vocab=512, std=0.02, dtype=torch.bfloat16
    )
    mesh = init_device_mesh(DEVICE, (world,), mesh_dim_names=("tp",))
    inductor_passes.prepare_groups(mesh)
    reference = on_device(language_model(config))
    batch = tuple(on_device(t) for t in language_batch(config))
    found, details, undone = [], [], []
    for options in ({}, ours(async_tp="force", async_tp_lowering=lowering, memory_budget="unlimited")):
        torch._dynamo.reset()
        model = tensor_parallel(copy.deepcopy(reference), mesh, sequence_parallel=True)
        step = torch.compile(model, fullgraph=True, options=options)
        with collect(what_if=False) as reports:
            for _ in range(3):
                model.zero_grad()
                loss = step(*batch)
                loss.backward()
        one = {n: p.grad.to_local().float().cpu() for n, p in model.named_parameters()}
        found.append(one | {"loss": loss.detach().float().cpu()[None]})
        passes = [p for r in reports for p in r.passes]
        undone += [f"{p.name}: {p.detail}" for p in passes if p.rolled_back is not None]
        details += [d.detail for p in passes if p.name == "async_tp" for d in p.decisions]
    return {"off": off_by(found[0], found[1]), "details": details, "undone": undone}


@pytest.mark.parametrize("lowering", ["decompose", "symm_mem", "kernels"])
def test_async_tensor_parallel_training(pair: Ranks, lowering: str) -> None:
    for one in pair.run(async_tp, lowering, timeout=LIMIT_S):
        print(one["off"], one["undone"], *one["details"], sep="\n")
        assert one["off"] < 5e-2 and not one["undone"]
        assert sum(d.startswith(f"{lowering},") for d in one["details"]) >= 4
