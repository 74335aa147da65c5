"""What one GPU can show: how good the built-in costs are for it, and whether planned overlap becomes real overlap.

Costs: matmuls, memory traffic and the loopback's collectives are measured as ``inductor-passes calibrate`` measures
them; matmuls are compared with the datasheet defaults. Contention: a matmul beside a copy. Schedules: a Llama under
``simple_fsdp`` in a process group whose collectives are real copies on a stream of their own (``loopback_group``),
timed with CUDA events, contenders in turn, also as CUDA graphs. Kernels: see ``kernels``.
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

import inductor_passes
from inductor_passes import _torch
from inductor_passes.cost.calibrate import calibrate
from inductor_passes.cost.profile import CostProfile
from inductor_passes.models import LlamaConfig, language_batch, language_model
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tools.benchmarks import kernels as bench_kernels
from tools.benchmarks import loopback_group
from tools.link.lab import CONTENDERS as OF_LINK
from tools.link.lab import Contender, local, own_code
from tools.shared.record import RESULTS, chosen, markdown_table, write

RANKS = 8
SIZES = LlamaConfig(vocab=32000, dim=4096, layers=8, heads=32, kv_heads=8, hidden=14336, batch=2, seq=2048, std=0.02)
CONTENDERS = OF_LINK | {
    c.name: c
    for c in (
        Contender("ours-unpack", "ours, unpack kernel", "ours", None, {"unpack": "kernel"}),
        Contender("ours-order", "ours, no buckets", "ours", None, {"bucket": "off"}),
        Contender("ours-less-40", 'ours, "auto", "-40%"', "ours", None, {"memory_budget": "-40%"}, reshard="auto"),
        Contender("ours-less-50", 'ours, "auto", "-50%"', "ours", None, {"memory_budget": "-50%"}, reshard="auto"),
    )
}
#: Not in-tree overlap scheduling: it needs a backend that torch knows.
NAMES = ("inductor", "reorder", "both", "ours-0", "ours", "ours-unpack", "ours-order")
#: Of these, the ones whose kernels are recorded as CUDA graphs too.
RECORDED = ("inductor", "both", "ours", "ours-unpack", "ours-order")
#: For budgets that shrink a step, not measured unless asked for.
BUDGETS = ("inductor", "half", "ours", "ours-auto", "ours-less-20", "ours-less-30", "ours-less-40", "ours-less-50")
PARTS = ("schedules", "contention", "kernels")
SCHEDULE_HEADER = (
    *("contender", "step ms", "spread", "/ default", "peak MB", "/ default", "predicted ms", "predicted MB", "loss"),
)
CONTENTION_HEADER = ("matmul", "alone ms", "beside a copy ms", "slower by", "copy GB/s alone", "beside the matmul")
COST_HEADER = ("matmul GFLOP", "dtype", "measured us", "default us", "default / measured")


def costs(device: torch.device) -> tuple[CostProfile, list[list[str]]]:
    """The calibrated profile of the device and of the loopback, and matmuls against the datasheet defaults."""
    profile = calibrate(device=device, dtypes=[torch.bfloat16, torch.float32], ranks_per_host=RANKS)
    default = CostProfile.default(_torch.device_name(device), device_type=device.type)
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


def contention(device: torch.device, timed: Callable[[Callable[[], Any]], float], rounds: int) -> list[list[str]]:
    """Rows of ``CONTENTION_HEADER``: square bf16 matmuls, with and without device copies on another stream."""
    side, rows = torch.cuda.Stream(device), []
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes

    def copies(count: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(count):
                target.copy_(source)

    def copied() -> None:
        copies(1)
        torch.cuda.current_stream().wait_stream(side)

    def beside(run: Callable[[], None], count: int) -> tuple[float, float]:
        """(ms of ``run``, ms until the copies beside it had ended as well)."""
        begin, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        copies(count)
        begin.record()
        run()
        end.record()
        last.record(side)
        last.synchronize()
        end.synchronize()
        torch.cuda.current_stream().wait_stream(side)
        return begin.elapsed_time(end), begin.elapsed_time(last)

    for size in (2048, 4096, 8192):
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        count = max(1, 8192**3 // size**3)

        def matmuls(a: torch.Tensor = a, b: torch.Tensor = b, count: int = count) -> None:
            for _ in range(count):
                torch.mm(a, b)

        timed(matmuls)
        timed(copied)
        alone = median(timed(matmuls) for _ in range(rounds))
        one = median(timed(copied) for _ in range(rounds))
        # So many copies that the matmuls are never alone, also when each slows the other down.
        many = max(2, round(3 * alone / one))
        spans = [beside(matmuls, many) for _ in range(rounds)]
        together, whole = median(run for run, _ in spans), median(last for _, last in spans)
        # What was not copied after the matmuls, at the copies' own speed, was copied beside them.
        during = max(0.0, many - (whole - together) / one) * moved / together
        rows.append(
            [f"{count} x {size}^3", f"{alone:.3f}", f"{together:.3f}", f"{together / alone:.2f}"]
            + [f"{moved / one / 1e6:.0f}", f"{during / 1e6:.0f}"]
        )
    return rows


def _options(name: str, profile: str, recorded: bool) -> dict[str, Any]:
    graphs = {"triton.cudagraphs": True} if recorded else {}
    found = CONTENDERS[name].compile_options(profile) or {}
    if CONTENDERS[name].family != "ours":
        return {**found, **graphs}
    # The other ranks of a loopback group are this one.
    settings = {**CONTENDERS[name].settings, "cost_profile": profile, "rank_agreement": "trust"}
    return inductor_passes.options(**settings, inductor=graphs)


def schedules(
    config: LlamaConfig,
    device: torch.device,
    profile: str,
    rounds: int,
    names: tuple[str, ...] = NAMES,
    recorded: tuple[str, ...] = RECORDED,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Steps of every contender, in turn; inside a loopback group. One that fails has ``failed`` in its row."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    tokens, targets = (t.to(device) for t in language_batch(config))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    steps, timed = {}, _timer(device)
    rows: list[dict[str, Any]] = []
    for name, graphs in [(n, False) for n in names] + [(n, True) for n in recorded]:
        key = name + (" recorded" if graphs else "")
        with device:
            whole = language_model(config)
        model = simple_fsdp(whole.to(dtype), mesh, reshard_after_forward=CONTENDERS[name].reshard)
        row: dict[str, Any] = {"name": key, "title": CONTENDERS[name].title, "ms": [], "loss": 0.0, "peak_bytes": 0}
        row["title"] += ", CUDA graphs" if graphs else ""
        rows.append(row)
        began = time.perf_counter()
        try:
            compiled = CONTENDERS[name].limited(
                torch.compile(own_code(model, key), options=_options(name, profile, graphs), fullgraph=True)
            )

            def step(compiled: Any = compiled, model: torch.nn.Module = model) -> torch.Tensor:
                loss = compiled(tokens, targets)
                loss.backward()
                for parameter in model.parameters():
                    parameter.grad = None
                return loss.detach()

            with collect(what_if=False) as reports:
                for _ in range(4 if graphs else 2):
                    loss = step()
                row["loss"] = float(loss)
        except Exception as error:  # a contender that this torch cannot compile is a row, not the end of the others
            row["failed"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
            progress(f"{key}: {row['failed']}")
            continue
        row["compile_s"] = time.perf_counter() - began
        plans = [report.schedules[-1] for report in reports if report.schedules]
        row["predicted_ms"] = sum(plan.makespan_after_ns for plan in plans) / 1e6
        # The plan counts what was there before the step, too: shards, tokens and targets.
        held = sum(local(p).nbytes for p in model.parameters()) + tokens.nbytes + targets.nbytes
        row["predicted_peak_bytes"] = max((plan.peak_after_bytes - held for plan in plans), default=0)
        row["collectives"] = [len(report.collectives) for report in reports]
        row["undone"] = [f"{p.name}: {p.detail}" for r in reports for p in r.passes if p.rolled_back is not None]
        steps[key] = step
        progress(f"{key}: compiled in {row['compile_s']:.0f} s, collectives {row['collectives']}")
    for _ in range(rounds):
        for row in rows:
            if row["name"] not in steps:
                continue
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
    if "failed" in row:
        return [row["title"], "failed", row["failed"], *["-"] * (len(SCHEDULE_HEADER) - 3)]
    peak = f"{row['peak_bytes'] / default['peak_bytes']:.3f}" if default["peak_bytes"] else "-"
    return [
        row["title"],
        f"{median(row['ms']):.2f}",
        f"{min(row['ms']):.2f}-{max(row['ms']):.2f}",
        f"{median(row['ms']) / median(default['ms']):.3f}",
        f"{row['peak_bytes'] / 1e6:.0f}",
        peak,
        f"{row['predicted_ms']:.2f}" if row["predicted_ms"] else "-",
        f"{row['predicted_peak_bytes'] / 1e6:.0f}" if row["predicted_ms"] else "-",
        "equal" if row["loss"] == default["loss"] else f"{abs(row['loss'] / default['loss'] - 1):.0e}",
    ]


def gpu(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved steps per contender.")] = 10,
    layers: Annotated[int, typer.Option(min=1)] = SIZES.layers,
    repeats: Annotated[int, typer.Option(min=1, help="Copies per collective: a slower link.")] = 4,
    part: Annotated[list[str] | None, typer.Option(help=f"Repeatable, of {', '.join(PARTS)}. Default: all.")] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable; default: {', '.join(NAMES)}. Budgets: {', '.join(BUDGETS)}.")
    ] = None,
    recorded: Annotated[
        list[str] | None,
        typer.Option(help=f"As CUDA graphs too; repeatable. Default: {', '.join(RECORDED)}, as far as they take part."),
    ] = None,
    rows: Annotated[Path, typer.Option(help="Folder for the cost profile.")] = Path("out/bench_gpu"),
    out: Annotated[Path, typer.Option(help="Folder for the page and its figures.")] = RESULTS,
) -> None:
    """What one GPU can show: calibrated costs against defaults, and overlap that is really there."""
    parts = chosen(part, PARTS, "part")
    names = tuple(chosen(contender or NAMES, CONTENDERS, "contender"))
    again = tuple(chosen(recorded or [n for n in RECORDED if n in names], CONTENDERS, "recorded contender"))
    console = Console(width=140)
    if not torch.cuda.is_available():
        console.print("skipped: torch sees no GPU here (torch.cuda.is_available() is False); nothing was written")
        return
    device = torch.device("cuda", 0)
    timed = _timer(device)

    def show(header: tuple[str, ...], lines: list[list[str]]) -> list[list[str]]:
        view = Table(*header)
        for line in lines:
            view.add_row(*line)
        console.print(view)
        return lines

    body = [f"{torch.cuda.get_device_name(device)}."]
    figures: dict[str, Any] = {}
    if "schedules" in parts:
        loopback_group.repeats = repeats
        rows.mkdir(parents=True, exist_ok=True)
        loopback_group.start(RANKS)
        profile, costed = costs(device)
        profile.save(rows / "profile.json")
        show(COST_HEADER, costed)
        config = replace(SIZES, layers=layers)
        found = schedules(config, device, str(rows / "profile.json"), rounds, names, again, console.print)
        shown = show(SCHEDULE_HEADER, [cells(row, found[0]) for row in found])
        dist.destroy_process_group()
        body[0] += (
            f" {layers} layers of width {SIZES.dim}, bf16, {SIZES.batch} x {SIZES.seq} tokens, `simple_fsdp` over "
            f"{RANKS} ranks that are all this GPU; a collective is {repeats} times the copies it would make, on a "
            "stream of its own. Ours knows what compute and the loopback's collectives were measured to take. Forward "
            "and backward, CUDA events; `predicted`: by our plan, beside what there was before the step."
        )
        body += ["", *markdown_table(SCHEDULE_HEADER, shown)]
        body += ["", "## Costs against defaults", "", *markdown_table(COST_HEADER, costed)]
        figures |= {"schedules": found, "profile": profile.to_json()}
    if "contention" in parts:
        figures["contention"] = show(CONTENTION_HEADER, contention(device, timed, rounds))
        body += [
            "",
            "## Contention",
            "",
            "Matmuls in bf16 while copies of 1 GiB run on another stream from before they begin until after they end; "
            "bytes that are read and written.",
            "",
            *markdown_table(CONTENTION_HEADER, figures["contention"]),
        ]
    if "kernels" in parts:
        figures["matmuls"] = show(bench_kernels.GEMM_HEADER, bench_kernels.gemms(device, timed, rounds))
        figures["norms"] = show(bench_kernels.NORM_HEADER, bench_kernels.norms(device, timed, rounds))
        checked = bench_kernels.check(device)
        console.print(checked)
        body += [
            "",
            "## Kernels",
            "",
            f"{checked}. Matmuls as a world of one rank, without a link; a share of 1 is the library's rate.",
            "",
            *markdown_table(bench_kernels.GEMM_HEADER, figures["matmuls"]),
            "",
            "All-reduce, residual and RMSNorm, all ranks at once on streams of one device, bf16; unfused: a sum over "
            "the ranks' buffers, an addition, torch's `rms_norm`.",
            "",
            *markdown_table(bench_kernels.NORM_HEADER, figures["norms"]),
        ]
    write("gpu", "One GPU", body, figures, folder=out)
