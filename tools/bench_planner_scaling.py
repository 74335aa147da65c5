"""How planning time grows with the number of tasks, and how far the plans are from the lower bound.

    python tools/bench_planner_scaling.py --sizes 1000 13000 36000 100000 --budget 0

Times are processor times of this process (the planner has one thread), so that other load on the machine counts less;
``exponent`` is the growth against the row before: 1 is linear.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import schedule_graphs as graphs  # noqa: E402

from inductor_passes.schedule.memory import peak_bytes  # noqa: E402
from inductor_passes.schedule.plan import plan  # noqa: E402
from inductor_passes.schedule.problem import Problem  # noqa: E402

SHAPES: dict[str, Callable[[int], Problem]] = {
    "fsdp_forward": graphs.fsdp_forward,
    "fsdp_backward": graphs.fsdp_backward,
    "fsdp_backward_comm_bound": lambda n: graphs.fsdp_backward(n, gather_ns=1100, scatter_ns=1100),
    "tp_fsdp_backward": graphs.tp_fsdp_backward,
    "hsdp_backward": graphs.hsdp_backward,
    "moe_forward": graphs.moe_forward,
}


def main(
    sizes: Annotated[list[int], typer.Option(help="Numbers of tasks.")] = [1000, 4000, 13000, 36000],  # noqa: B006
    budget: Annotated[str, typer.Option(help='"0" (the input\'s peak) or "unlimited".')] = "0",
    shapes: Annotated[list[str], typer.Option(help="Which programs.")] = list(SHAPES),  # noqa: B006
    effort: Annotated[int, typer.Option(help="Of the planner.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Plan every shape at every size and print a row for each."""
    if budget not in ("0", "unlimited"):
        raise typer.BadParameter(f'budget is {budget!r}; expected "0" or "unlimited"')
    unknown = sorted(set(shapes) - set(SHAPES))
    if unknown:
        raise typer.BadParameter(f"unknown shapes {unknown}; expected some of {', '.join(SHAPES)}")
    rows = []
    print(f"{'shape':26}{'tasks':>8}{'plan s':>8}{'exponent':>9}{'input/bound':>12}{'plan/bound':>11}  method")
    for shape in shapes:
        per_layer = len(SHAPES[shape](9)) - len(SHAPES[shape](8))
        last: tuple[int, float] | None = None
        for size in sizes:
            problem = SHAPES[shape](max(2, round(size / per_layer)))
            cap = peak_bytes(problem) if budget == "0" else None
            problem = Problem.from_json(problem.to_json())
            begin = time.process_time()
            found = plan(problem, cap, effort=effort)
            seconds = time.process_time() - begin
            exponent = math.log(seconds / last[1]) / math.log(len(problem) / last[0]) if last else math.nan
            last = len(problem), seconds
            before = found.input_makespan_ns / found.lower_bound_ns
            print(
                f"{shape:26}{len(problem):8d}{seconds:8.2f}{exponent:9.2f}{before:12.3f}{found.gap + 1:11.4f}"
                f"  {found.method}",
                flush=True,
            )
            rows.append(
                {
                    "shape": shape,
                    "tasks": len(problem),
                    "seconds": seconds,
                    "input_over_bound": before,
                    "plan_over_bound": found.gap + 1,
                    "peak_over_input": found.peak_bytes / found.input_peak_bytes,
                    "method": found.method,
                }
            )
    if out is not None:
        out.write_text(json.dumps({"budget": budget, "effort": effort, "rows": rows}, indent=1))


if __name__ == "__main__":
    typer.run(main)
