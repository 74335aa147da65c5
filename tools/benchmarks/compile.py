"""What compiling costs: planning alone, the whole FX pass, and whole compilations with the compiler's memory.

Planning alone is measured on synthetic problems in the shape of training steps
(``tests/support/schedule_graphs.py``), by processor time of one thread; the whole FX pass on large FX graphs
(``whole_pass``). Whole compilations are of a small Llama under
``simple_fsdp`` in a fake process group, each in a process of its own (``compile_worker.py``) with empty caches, and
once more with what is in the caches then, with default Inductor and with ours in turn.
"""

from __future__ import annotations

import compileall
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Problem
from tests.support import schedule_graphs as graphs
from tools.benchmarks import whole_pass
from tools.shared.launch import ROOT, environment
from tools.shared.record import RESULTS, chosen, markdown_table, write

SHAPES: dict[str, Callable[[int], Problem]] = {
    "fsdp_forward": graphs.fsdp_forward,
    "fsdp_backward": graphs.fsdp_backward,
    "fsdp_backward_comm_bound": lambda n: graphs.fsdp_backward(n, gather_ns=1100, scatter_ns=1100),
    "tp_fsdp_backward": graphs.tp_fsdp_backward,
    "hsdp_backward": graphs.hsdp_backward,
    "moe_forward": graphs.moe_forward,
}
PLAN_HEADER = ("shape", "tasks", "plan s", "exponent", "input / bound", "plan / bound", "method")
COMPILE_HEADER = (
    "layers",
    "nodes",
    "compiler",
    "processor s",
    "spread",
    "/ default",
    "warm s",
    "warm / default",
    "C++ functions",
    "wall s",
    "our passes s",
    "share",
    "largest pass",
    "peak MB",
    "peak / default",
)


def planning(shapes: Sequence[str], sizes: Sequence[int], budget: str) -> list[dict[str, Any]]:
    """Plan every shape at every size; ``exponent`` is the growth against the row before (1 is linear)."""
    rows = []
    for shape in shapes:
        per_layer = len(SHAPES[shape](9)) - len(SHAPES[shape](8))
        last: tuple[int, float] | None = None
        for size in sizes:
            problem = SHAPES[shape](max(2, round(size / per_layer)))
            cap = peak_bytes(problem) if budget == "0" else None
            begin = time.process_time()
            found = plan(problem, cap)
            seconds = time.process_time() - begin
            exponent = math.log(seconds / last[1]) / math.log(len(problem) / last[0]) if last else None
            last = len(problem), seconds
            rows.append(
                {
                    "shape": shape,
                    "tasks": len(problem),
                    "seconds": seconds,
                    "exponent": exponent,
                    "input_over_bound": found.input_makespan_ns / found.lower_bound_ns,
                    "plan_over_bound": found.gap + 1,
                    "peak_over_input": found.peak_bytes / found.input_peak_bytes,
                    "method": found.method,
                }
            )
    return rows


def compiling(layers: int, ours: bool, timeout_s: int) -> dict[str, Any]:
    """One compilation in a process of its own with empty caches.

    ``warm_s`` is the processor time of a second one, which finds everything in these caches.

    Raises:
        RuntimeError: one of them failed; with the end of its output.
    """
    # An installed package has its bytecode, a checkout may be told to write none. Files that have it are left alone.
    compileall.compile_dir(ROOT / "inductor_passes", quiet=2)
    with tempfile.TemporaryDirectory() as cache:
        variables = {
            **environment(),
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tools.benchmarks.compile_worker", str(layers), "ours" if ours else "default"]
        cold, warm = (_ran(command, variables, timeout_s) for _ in range(2))
    return {**cold, "warm_s": warm["cpu_s"]}


def _ran(command: Sequence[str], variables: dict[str, str], timeout_s: int) -> dict[str, Any]:
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])} ended with {done.returncode}: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def turns(layers: int, rounds: int, timeout_s: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Default Inductor's and our compilation of median processor time, of so many each, in turns.

    ``spread_s`` is the least and the most processor time of them, ``warm_s`` the median of what a second compilation
    with their caches takes.
    """
    runs = [[compiling(layers, ours, timeout_s) for ours in (False, True)] for _ in range(rounds)]
    found = []
    for side in zip(*runs, strict=True):
        ordered = sorted(side, key=lambda row: float(row["cpu_s"]))
        middle = {**ordered[len(ordered) // 2], "warm_s": median(row["warm_s"] for row in side)}
        found.append({**middle, "spread_s": [ordered[0]["cpu_s"], ordered[-1]["cpu_s"]]})
    default, ours = found
    return default, ours


def plan_cells(row: dict[str, Any]) -> list[str]:
    """A planning row as text, by ``PLAN_HEADER``."""
    exponent = "-" if row["exponent"] is None else f"{row['exponent']:.2f}"
    ratios = (f"{row['input_over_bound']:.3f}", f"{row['plan_over_bound']:.4f}")
    return [row["shape"], str(row["tasks"]), f"{row['seconds']:.2f}", exponent, *ratios, row["method"]]


def compile_cells(row: dict[str, Any], default: dict[str, Any], nodes: int) -> list[str]:
    """A compilation as text, by ``COMPILE_HEADER``."""
    passes = row["passes_s"]
    ours = sum(passes.values())
    largest = max(passes, key=lambda name: passes[name], default="")
    return [
        str(row["layers"]),
        str(nodes),
        row["compiler"],
        f"{row['cpu_s']:.1f}",
        "-".join(f"{s:.1f}" for s in row.get("spread_s", ())) or "-",
        f"{row['cpu_s'] / default['cpu_s']:.3f}",
        f"{row['warm_s']:.1f}",
        f"{row['warm_s'] / default['warm_s']:.3f}",
        str(row["functions"]),
        f"{row['wall_s']:.1f}",
        f"{ours:.2f}" if passes else "-",
        f"{ours / row['wall_s']:.1%}" if passes else "-",
        f"{largest} {passes[largest]:.2f}" if passes else "-",
        f"{row['peak_bytes'] / 1e6:.0f}",
        f"{row['peak_bytes'] / default['peak_bytes']:.3f}",
    ]


def _draw(plans: Sequence[dict[str, Any]], compiled: Sequence[dict[str, Any]], path: Path) -> None:
    from tools.shared.plot import curves

    shapes: dict[str, list[tuple[float, float]]] = {}
    for row in plans:
        shapes.setdefault(row["shape"], []).append((row["tasks"], max(row["seconds"], 1e-3)))
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    if shapes:
        panels["planning alone, s over tasks"] = shapes
    nodes = {row["layers"]: row["nodes"] for row in compiled if row["compiler"] == "ours"}
    for title, key in (("whole compilation, processor s over nodes", "cpu_s"), ("peak bytes over nodes", "peak_bytes")):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in compiled:
            series.setdefault(row["compiler"], []).append((nodes[row["layers"]], row[key]))
        if series:
            panels[title] = series
    curves(path, panels, "", "", log_y=True)


def compile_time(
    size: Annotated[
        list[int] | None, typer.Option(help="Tasks to plan; repeatable. Default: 1000 4000 13000 36000.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(SHAPES)}. Default: all.")] = None,
    budget: Annotated[str, typer.Option(help='For planning alone: "0" (the input\'s peak) or "unlimited".')] = "0",
    whole_size: Annotated[
        list[int] | None, typer.Option(help="Nodes of the graphs of the whole FX pass; repeatable. Default: 13000.")
    ] = None,
    whole_shape: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(whole_pass.SHAPES)}. Default: all.")
    ] = None,
    only_whole_pass: Annotated[bool, typer.Option(help="Measure nothing but the whole FX pass; no page.")] = False,
    layers: Annotated[list[int] | None, typer.Option(help="Depths to compile; repeatable. Default: 2 4 8 16.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Compilations of each side per depth, in turns.")] = 3,
    timeout_s: Annotated[int, typer.Option(min=1, help="Per compilation.")] = 1800,
    out: Annotated[Path, typer.Option(help="Folder for the page, its figures and its chart.")] = RESULTS,
) -> None:
    """Planning, the whole FX pass and compile time, and the compiler's memory, against the number of nodes."""
    shapes = chosen(shape, SHAPES, "shape")
    chosen([budget], ("0", "unlimited"), "budget")
    whole_shapes = chosen(whole_shape, whole_pass.SHAPES, "whole-shape")
    console = Console(width=150)
    whole = whole_pass.whole_passes(
        whole_shapes,
        list(whole_size or whole_pass.SIZES),
        whole_pass.BUDGETS,
        lambda row: console.print("  ".join(whole_pass.cells(row))),
    )
    if only_whole_pass:
        return
    plans = planning(shapes, list(size or (1000, 4000, 13000, 36000)), budget)
    view = Table(*PLAN_HEADER, title=f"planning alone, memory budget {budget}")
    for row in plans:
        view.add_row(*plan_cells(row))
    console.print(view)
    compiled: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for depth in layers or (2, 4, 8, 16):
        default, ours = turns(depth, rounds, timeout_s)
        compiled += [default, ours]
        rows += [compile_cells(row, default, ours["nodes"]) for row in (default, ours)]
    view = Table(*COMPILE_HEADER, title="whole compilations")
    for cells in rows:
        view.add_row(*cells)
    console.print(view)
    body = [
        "## Planning alone",
        "",
        f"Synthetic problems in the shape of training steps, memory budget {budget}, processor time of one thread. "
        "`exponent` is the growth against the row before: 1 is linear.",
        "",
        *markdown_table(PLAN_HEADER, [plan_cells(row) for row in plans]),
        "",
        "## Whole FX pass",
        "",
        "All passes with the verifier on, over FX graphs of several shapes (a few traced layers, repeated), buckets "
        "on, processor time of one thread. The makespan is over the bound of the graph as it came, which knows no "
        "buckets.",
        "",
        *markdown_table(whole_pass.HEADER, [whole_pass.cells(row) for row in whole]),
        "",
        "## Whole compilations",
        "",
        "Forward and backward of a small Llama under `simple_fsdp` in a fake process group of 8 ranks, each in a "
        f"process of its own with empty caches; of {rounds} each, in turns, the one of median processor time, and the "
        "least and the most. `warm` is the median of a second compilation each, in another process, which finds "
        "everything in these caches. Processor time includes the C++ compiler's, whose work grows with the number of "
        "C++ functions, large or small. The planner's core, Inductor's precompiled headers and our package's bytecode "
        "are kept outside of these caches: only the first compilation of a machine pays for them. `our passes` is by "
        "the watch (planning, rewriting and verifying, as far as the reports time it), `share` is its share of the "
        "wall time. The peak is the process's resident set.",
        "",
        *markdown_table(COMPILE_HEADER, rows),
    ]
    data = {"planning": plans, "whole_pass": whole, "compiling": compiled}
    write("compile", "Compile time and memory", body, data, lambda path: _draw(plans, compiled, path), folder=out)
