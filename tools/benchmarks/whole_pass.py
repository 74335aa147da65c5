"""What the whole FX pass costs: all passes with the verifier on, over large graphs of several shapes.

A few layers of each scenario are traced, and their backward graph is repeated until it is as large as asked
(``tools.capture.stacked``). ``tiny`` and ``wide`` are made by hand: parameters that are mostly latency, and parameters
whose gathers are wide beside the compute that could hide them; ``thousands`` is ``tiny`` on 4,096 ranks. Times are
processor times of this process, one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.fx

from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import garbage
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.simulate import simulate
from tests.support.bucket_graphs import Program
from tests.support.graphs import aten
from tests.support.world import fake_world
from tools.capture.graphs import as_problem, capture, copied
from tools.capture.models import SCENARIOS
from tools.capture.stacked import stacked

#: Scenario and the depth that is traced, by shape.
CAPTURED = {
    "fsdp": ("llama8b_fsdp64", 4),
    "tp_fsdp": ("fsdp_tp_sp", 4),
    "hsdp": ("hybrid", 4),
    "moe": ("moe_ep", 3),
}
#: Numbers of elements of a gathered parameter and of ranks, by shape.
HAND_MADE = {"tiny": (1 << 10, 64), "wide": (1 << 26, 64), "thousands": (1 << 16, 4096)}
SHAPES = (*CAPTURED, *HAND_MADE)
BUDGETS = ("0", "+5%", "unlimited")
#: Nodes of the graphs by default.
SIZES = (13_000,)
HEADER = ("shape", "nodes", "budget", "processor s", "collectives", "makespan / bound", "slowest passes")


def graphs(shape: str, nodes: int) -> Iterator[torch.fx.GraphModule]:
    """The graph of a shape, inside its process group."""
    if shape in HAND_MADE:
        elements, ranks = HAND_MADE[shape]
        with fake_world(ranks) as group:
            yield _parameters(group, elements, ranks, nodes)
        return
    name, layers = CAPTURED[shape]
    with fake_world(SCENARIOS[name].world):
        yield stacked(capture(SCENARIOS[name], layers)["backward"], nodes)


def _parameters(group: str, elements: int, ranks: int, nodes: int) -> torch.fx.GraphModule:
    """Backward of many layers: gather a parameter, use it, reduce its gradient; about eight nodes each."""
    program = Program()
    shards = [program.input(elements // ranks) for _ in range(max(1, nodes // 8))]
    x = program.placeholder("tangents_1", elements)
    gradients = []
    for shard in shards:
        weight = program.collective("all_gather", shard, group)
        gradient = program.call(aten.mul.Tensor, weight, x)
        gradients.append(program.collective("reduce_scatter", gradient, group))
        x = program.copy_of(program.call(aten.add.Tensor, x, weight))
    return program.done(*gradients, x)


def measure(shape: str, gm: torch.fx.GraphModule, budget: str, profile: CostProfile) -> dict[str, Any]:
    """The whole pass over a copy of a graph; what goes wrong raises."""
    mine = copied(gm)
    settings = PassConfig(memory_budget=budget, verify="strict")
    passes = passes_of(settings)
    # As in a compilation.
    with garbage.paused():
        began = time.process_time()
        found = run_passes(mine.graph, passes, settings, profile)
        seconds = time.process_time() - began
    after = as_problem(mine, profile, shape).problem
    return {
        "shape": shape,
        "nodes": len(gm.graph.nodes),
        "budget": budget,
        "seconds": seconds,
        "collectives": sum(task.kind == 1 for task in after.tasks),
        "makespan_ns": simulate(after).makespan_ns,
        "bound_ns": lower_bound(as_problem(gm, profile, shape).problem),
        "passes_ns": {one.name: one.duration_ns for one in found.report.passes},
    }


def whole_passes(
    shapes: Sequence[str], sizes: Sequence[int], budgets: Sequence[str], shown: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Every shape at every size under every budget; ``shown`` gets each row at once."""
    profile = CostProfile.default("cuda")
    rows = []
    for shape in shapes:
        for size in sizes:
            for gm in graphs(shape, size):
                for budget in budgets:
                    rows.append(measure(shape, gm, budget, profile))
                    shown(rows[-1])
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, by ``HEADER``."""
    passes = row["passes_ns"]
    whole = max(1, sum(passes.values()))
    slowest = sorted(passes, key=lambda name: -passes[name])[:2]
    return [
        row["shape"],
        str(row["nodes"]),
        row["budget"],
        f"{row['seconds']:.2f}",
        str(row["collectives"]),
        f"{row['makespan_ns'] / max(1, row['bound_ns']):.4f}",
        ", ".join(f"{name} {passes[name] / whole:.0%}" for name in slowest),
    ]
