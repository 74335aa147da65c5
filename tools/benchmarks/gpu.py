"""What one GPU can show: how good the built-in costs are for it, and whether planned overlap becomes real overlap.

Costs: matmuls and memory traffic are measured as ``inductor-passes calibrate`` measures them and compared with the
datasheet defaults. Schedules: a Llama under ``simple_fsdp`` in a process group whose collectives are real copies on a
stream of their own (``loopback_group``), timed with CUDA events, contenders in turn. Kernels: see ``kernels``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.cost.calibrate import calibrate
from inductor_passes.cost.profile import CostProfile
from inductor_passes.models import LlamaConfig, language_batch, language_model
from inductor_passes.simple_fsdp import simple_fsdp
from tools.benchmarks import kernels as bench_kernels
from tools.benchmarks import loopback_group
from tools.link.lab import CONTENDERS, own_code
from tools.shared.record import RESULTS, markdown_table, write

RANKS = 8
SIZES = LlamaConfig(vocab=32000, dim=4096, layers=8, heads=32, kv_heads=8, hidden=14336, batch=2, seq=2048, std=0.02)
NAMES = ("inductor", "reorder", "both", "ours-0", "ours")
SCHEDULE_HEADER = ("contender", "step ms", "spread", "/ default", "peak MB", "/ default", "loss")
COST_HEADER = ("matmul GFLOP", "dtype", "measured us", "default us", "default / measured")


def costs(device: torch.device) -> tuple[CostProfile, list[list[str]]]:
    """The device's calibrated profile (compute only), and its matmuls against the datasheet defaults."""
    profile = calibrate([], device=device, dtypes=[torch.bfloat16, torch.float32], ranks_per_host=RANKS)
    default = CostProfile.default(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
    rows = []
    for point in profile.matmul:
        assumed = default.compute_ns(point.flops, 0, point.dtype, 0)
        cells = (point.flops / 1e9, point.ns / 1e3, assumed / 1e3, assumed / point.ns)
        rows.append([f"{cells[0]:.3g}", point.dtype, *(f"{value:.3g}" for value in cells[1:])])
    return profile, rows


def _timer(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """Runs something and returns how many ms the device took."""

    def by_events(run: Callable[[], Any]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def by_watch(run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)

    return by_events if device.type == "cuda" else by_watch


def schedules(config: LlamaConfig, device: torch.device, profile: str, rounds: int) -> list[dict[str, Any]]:
    """Steps of every contender, in turn; inside a loopback group."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    tokens, targets = (t.to(device) for t in language_batch(config))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    steps, timed = {}, _timer(device)
    for name in NAMES:
        model = simple_fsdp(language_model(config).to(device, dtype), mesh)
        compiled = torch.compile(
            own_code(model, name), options=CONTENDERS[name].compile_options(profile), fullgraph=True
        )

        def step(compiled: Any = compiled, model: torch.nn.Module = model) -> torch.Tensor:
            loss = compiled(tokens, targets)
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = None
            return loss.detach()

        steps[name] = step
    rows: list[dict[str, Any]] = []
    for name, step in steps.items():
        for _ in range(2):
            loss = step()
        rows.append({"name": name, "title": CONTENDERS[name].title, "ms": [], "loss": float(loss), "peak_bytes": 0})
    for _ in range(rounds):
        for row in rows:
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            row["ms"].append(timed(steps[row["name"]]))
            if device.type == "cuda":
                row["peak_bytes"] = max(row["peak_bytes"], torch.cuda.max_memory_allocated() - before)
    return rows


def cells(row: dict[str, Any], default: dict[str, Any]) -> list[str]:
    """A row as text, by ``SCHEDULE_HEADER``; ``default`` is default Inductor's."""
    peak = f"{row['peak_bytes'] / default['peak_bytes']:.3f}" if default["peak_bytes"] else "-"
    return [
        row["title"],
        f"{median(row['ms']):.2f}",
        f"{min(row['ms']):.2f}-{max(row['ms']):.2f}",
        f"{median(row['ms']) / median(default['ms']):.3f}",
        f"{row['peak_bytes'] / 1e6:.0f}",
        peak,
        "equal" if row["loss"] == default["loss"] else f"{abs(row['loss'] / default['loss'] - 1):.0e}",
    ]


def gpu(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved steps per contender.")] = 10,
    layers: Annotated[int, typer.Option(min=1)] = SIZES.layers,
    repeats: Annotated[int, typer.Option(min=1, help="Copies per collective: a slower link.")] = 4,
    rows: Annotated[Path, typer.Option(help="Folder for the cost profile.")] = Path("out/bench_gpu"),
    out: Annotated[Path, typer.Option(help="Folder for the page and its figures.")] = RESULTS,
) -> None:
    """What one GPU can show: calibrated costs against defaults, and overlap that is really there."""
    console = Console(width=120)
    if not torch.cuda.is_available():
        console.print("skipped: torch sees no GPU here (torch.cuda.is_available() is False); nothing was written")
        return
    device = torch.device("cuda", 0)
    loopback_group.repeats = repeats
    loopback_group.start(RANKS)
    rows.mkdir(parents=True, exist_ok=True)
    profile, costed = costs(device)
    profile.save(rows / "profile.json")
    found = schedules(replace(SIZES, layers=layers), device, str(rows / "profile.json"), rounds)
    dist.destroy_process_group()
    timed = _timer(device)
    matmuls, norms = bench_kernels.gemms(device, timed, rounds), bench_kernels.norms(device, timed, rounds)
    checked = bench_kernels.check(device)
    console.print(checked)
    shown = [cells(row, found[0]) for row in found]
    kernels = ((bench_kernels.GEMM_HEADER, matmuls), (bench_kernels.NORM_HEADER, norms))
    for header, lines in ((COST_HEADER, costed), (SCHEDULE_HEADER, shown), *kernels):
        view = Table(*header)
        for line in lines:
            view.add_row(*line)
        console.print(view)
    body = [
        f"{torch.cuda.get_device_name(device)}. {layers} layers of width {SIZES.dim}, bf16, {SIZES.batch} x "
        f"{SIZES.seq} tokens, `simple_fsdp` over {RANKS} ranks that are all this GPU; a collective is {repeats} times "
        "the copies it would make, on a stream of its own. Communication costs are the defaults for the device, "
        "which do not know the loopback. Forward and backward, CUDA events.",
        "",
        *markdown_table(SCHEDULE_HEADER, shown),
        "",
        "## Costs against defaults",
        "",
        *markdown_table(COST_HEADER, costed),
        "",
        "## Kernels",
        "",
        f"{checked}. Matmuls as a world of one rank, without a link; a share of 1 is the library's rate.",
        "",
        *markdown_table(bench_kernels.GEMM_HEADER, matmuls),
        "",
        "All-reduce, residual and RMSNorm, all ranks at once on streams of one device, bf16; unfused: a sum over the "
        "ranks' buffers, an addition, torch's `rms_norm`.",
        "",
        *markdown_table(bench_kernels.NORM_HEADER, norms),
    ]
    figures = {"schedules": found, "profile": profile.to_json(), "matmuls": matmuls, "norms": norms}
    write("gpu", "One GPU", body, figures, folder=out)
