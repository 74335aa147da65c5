"""Draws the documentation's pictures into docs/pictures from the planner and the cost model themselves.

tools/gen pictures
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from inductor_passes.cost.profile import CostProfile
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.simulate import simulate
from tests.support import schedule_graphs as graphs
from tools.shared.plot import curves
from tools.shared.record import ROOT

FOLDER = ROOT / "docs" / "pictures"
_COMPUTE, _LINK, _WAIT = "#2f6db3", "#d08a3a", "#c94f4f"


def overlap(path: Path, problem: Problem, orders: Mapping[str, Sequence[int]]) -> None:
    """Timelines one above the other: the compute lane with the time in which it stands still, and the link."""
    settings = {"font.size": 9, "svg.hashsalt": "inductor_passes", "svg.fonttype": "none"}
    with plt.rc_context(settings):
        figure, grid = plt.subplots(len(orders), 1, figsize=(8, 1.5 * len(orders)), sharex=True, squeeze=False)
        for axes, (title, order) in zip(grid.flat, orders.items()):
            timeline = simulate(problem, order)
            for i, task in enumerate(problem.tasks):
                begin, end = timeline.start_ns[i], timeline.end_ns[i]
                if task.kind is Kind.COMPUTE:
                    axes.broken_barh([(begin, end - begin)], (1.1, 0.8), color=_COMPUTE, edgecolor="white")
                elif task.kind is Kind.START:
                    begin, end = timeline.lane_begin_ns[i], timeline.lane_end_ns[i]
                    axes.broken_barh([(begin, end - begin)], (0.1, 0.8), color=_LINK, edgecolor="white")
                    axes.text((begin + end) / 2, 0.5, task.label, ha="center", va="center", fontsize=7)
                elif end > begin:
                    axes.broken_barh([(begin, end - begin)], (1.1, 0.8), color=_WAIT, hatch="//", alpha=0.5)
            axes.set_yticks([0.5, 1.5], ["link", "compute"])
            result = f"{timeline.makespan_ns} ns, peak {timeline.peak_bytes} bytes"
            axes.set_title(f"{title}: {result}", fontsize=9, loc="left")
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        grid[-1][0].set_xlabel("ns")
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)


def budgets(path: Path, problem: Problem) -> None:
    """Planned time against the memory that it may take."""
    base = peak_bytes(problem)
    points = []
    for percent in (0, 2, 5, 10, 15, 25, 50, 100):
        found = plan(problem, base + base * percent // 100)
        points.append((float(percent), found.makespan_ns / found.lower_bound_ns))
    curves(path, {problem.name: {"planned": points}}, "memory budget, % above the input", "time / bound", log_x=False)


def messages(path: Path) -> None:
    """Time of an all_gather over its size: flat where latency rules, a line where bandwidth does."""
    profile = CostProfile.default("cuda")
    sizes = [2**k for k in range(12, 32)]
    series = {
        f"{ranks} ranks": [
            (float(size), profile.communication_ns("all_gather", size // ranks, size, tuple(range(ranks))) / 1e3)
            for size in sizes
        ]
        for ranks in (8, 64, 512)
    }
    curves(path, {f"all_gather, {profile.spec.name} defaults": series}, "bytes", "us", log_y=True)


def main() -> None:
    """Write every picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    step = graphs.fsdp_backward(4, gather_ns=900, scatter_ns=900)
    orders = {
        "As the compiler leaves it": step.input_order,
        'memory_budget="0"': plan(step, peak_bytes(step)).order,
        "memory unlimited": plan(step, None).order,
    }
    overlap(FOLDER / "overlap.svg", step, orders)
    budgets(FOLDER / "budgets.svg", graphs.fsdp_backward(8))
    messages(FOLDER / "messages.svg")


if __name__ == "__main__":
    main()
