"""How far the planner is from the best orders known: a long search per captured graph.

The search starts from the plan and has the same costs, the same cap and the graph that our passes left. Where the plan
is at the lower bound nothing is searched: nothing can be better. One file per graph and budget is written at once to
``--rows``, with the best order; another run goes on from there. ``--render`` makes the page from what is there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from inductor_passes.cost.profile import CostProfile
from inductor_passes.schedule.memory_bound import best_known
from inductor_passes.schedule.problem import Problem, ProblemError
from inductor_passes.schedule.simulate import simulate
from tests.support.world import fake_world
from tools.benchmarks.best_search import STORED, search
from tools.benchmarks.plan import BUDGETS, ours
from tools.capture.graphs import as_problem, capture, copied
from tools.capture.models import SCENARIOS
from tools.shared.record import RESULTS, Provenance, chosen, geometric_mean, markdown_table, provenance, write

PHASES = ("forward", "backward")
HEADER = ("graph", "budget", "nodes", "plan / bound", "best / bound", "plan / best", "rounds", "minutes", "found by")


def best(
    scenario: Annotated[list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(SCENARIOS)}.")] = None,
    phase: Annotated[list[str] | None, typer.Option(help="Repeatable; forward, backward. Default: both.")] = None,
    budget: Annotated[list[str] | None, typer.Option(help='Repeatable; of "unlimited", "0". Default: both.')] = None,
    minutes: Annotated[float, typer.Option(help="Per graph and budget.")] = 10.0,
    layers: Annotated[int, typer.Option(help="Depth; 0: the scenario's own.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the disturbances.")] = 0,
    device: Annotated[str, typer.Option(help="Whose default costs.")] = "cuda",
    rows: Annotated[Path, typer.Option(help="Folder for results per graph.")] = Path("out/bench_best"),
    render: Annotated[bool, typer.Option(help="Only make the page from what is in --rows.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the page and its figures.")] = RESULTS,
) -> None:
    """Captured graphs: our plan against the best order that a search of ten minutes finds."""
    scenarios, phases = chosen(scenario, SCENARIOS, "scenario"), chosen(phase, PHASES, "phase")
    budgets = chosen(budget, BUDGETS, "budget")
    if minutes <= 0:
        raise typer.BadParameter(f"--minutes {minutes}: expected a number above 0")
    rows.mkdir(parents=True, exist_ok=True)
    profile = CostProfile.default(device)
    for name in [] if render else scenarios:
        with fake_world(SCENARIOS[name].world):
            for which, gm in capture(SCENARIOS[name], layers or None).items():
                if which not in phases:
                    continue
                graph = f"{name}-{layers or SCENARIOS[name].layers}.{which}"
                cap = simulate(as_problem(gm, profile, graph).problem).peak_bytes
                for one in budgets:
                    mine = copied(gm)
                    ours(mine, profile, one, bucket=False)
                    file = rows / f"{graph}.{one}.json"
                    stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
                    row = _searched(graph, as_problem(mine, profile, graph).problem, one, cap, minutes, seed, stored)
                    row |= {"nodes": len(gm.graph.nodes), "provenance": asdict(provenance())}
                    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
                    typer.echo("  ".join(_cells(row)))
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(rows.glob("*.json"))]
    for row in found:
        # Long, and of use only with the captured graph.
        row.pop("order")
    source = min((Provenance(**row.pop("provenance")) for row in found), key=lambda s: s.date, default=None)
    write("best_orders", "Plans against the best orders known", _body(found), found, folder=out, source=source)


def _searched(
    graph: str, problem: Problem, budget: str, cap: int, minutes: float, seed: int, stored: dict[str, Any] | None
) -> dict[str, Any]:
    planned = simulate(problem)
    known = _known_order(problem, stored)
    before: dict[str, Any] = {"rounds": 0, "minutes": 0.0, "improvements": []}
    if stored is not None and known:
        before = stored
    found = search(problem, None if budget == "unlimited" else cap, 60 * minutes, seed, known)
    bound = best_known(problem, None if budget == "unlimited" else max(cap, planned.peak_bytes)).ns
    searched = planned.makespan_ns > bound
    improvements = [*before["improvements"], *(one for one in found.found if one[2] != STORED)]
    return {
        "graph": graph,
        "budget": budget,
        "bound_ns": bound,
        "plan_ns": planned.makespan_ns,
        "best_ns": found.makespan_ns,
        "plan_peak_bytes": planned.peak_bytes,
        "best_peak_bytes": found.peak_bytes,
        "cap_bytes": None if budget == "unlimited" else cap,
        "rounds": before["rounds"] + found.rounds,
        "minutes": before["minutes"] + (minutes if searched else 0.0),
        "improvements": improvements if found.found else [],
        "order": [problem.tasks[i].name for i in found.order],
    }


def _known_order(problem: Problem, stored: dict[str, Any] | None) -> list[int] | None:
    """The stored order in the numbers of ``problem``; None when it is another problem's."""
    number = {task.name: i for i, task in enumerate(problem.tasks)}
    names = stored["order"] if stored is not None else None
    if not isinstance(names, list) or set(names) != set(number):
        return None
    order = [number[name] for name in names]
    try:
        problem.check_order(tuple(order))
    except ProblemError:
        return None
    return order


def _cells(row: dict[str, Any]) -> list[str]:
    by = row["improvements"][-1][2] if row["improvements"] else ""
    return [
        row["graph"],
        row["budget"],
        str(row["nodes"]),
        f"{row['plan_ns'] / row['bound_ns']:.4f}",
        f"{row['best_ns'] / row['bound_ns']:.4f}",
        f"{row['plan_ns'] / row['best_ns']:.4f}",
        str(row["rounds"]),
        f"{row['minutes']:g}",
        by or ("the plan is at the bound" if not row["minutes"] else "nothing better found"),
    ]


def _body(found: Sequence[dict[str, Any]]) -> list[str]:
    if not found:
        return ["Nothing was searched."]
    worst = max(found, key=lambda r: r["plan_ns"] / r["best_ns"])
    mean = geometric_mean(r["plan_ns"] / r["best_ns"] for r in found)
    return [
        "The bound is that of the graph that our passes left, within the budget. Search: disturbed durations, local",
        "search and windows solved by CP-SAT (`tools/benchmarks/best_search.py`), starting from the plan.",
        "",
        *markdown_table(HEADER, [_cells(row) for row in found]),
        "",
        f"Geometric mean of plan / best {mean:.4f}; largest {worst['plan_ns'] / worst['best_ns']:.4f} "
        f"({worst['graph']}, budget {worst['budget']}).",
    ]
