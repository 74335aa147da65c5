"""Who schedules captured graphs best: same costs, same simulator, everybody's memory counted.

Every contender rewrites and reorders a copy of the captured FX graph. The graph that it leaves is turned into a
scheduling problem again (so copies in and out of buckets cost what they cost) and its order is simulated. Makespans are
given over the lower bound of the graph *as captured*, which ignores memory; buckets change the graph, so a bucketed
one may come below 1. Times are processor times of this process: the graph as it comes in to the graph as it goes out;
ours include verification.

One JSON file per graph is written at once to ``--rows``; ``--render`` makes the report from what is there. Where the
folder does not exist yet it is filled from the stored page, so that a run of a few contenders or graphs renews those
rows and keeps the others. Every row says by which commit and when it was made; the page lists the runs it is made of.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from inductor_passes.bucket.candidates import candidates
from inductor_passes.bucket.choose import bound_ns
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import garbage
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.memory_bound import best_known
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import simulate
from tests.support.world import fake_world
from tools.capture.graphs import as_problem, capture, copied
from tools.capture.models import SCENARIOS
from tools.shared import in_tree_schedule
from tools.shared.record import RESULTS, Provenance, chosen, geometric_mean, markdown_table, provenance, write

BUDGETS = ("unlimited", "0")
INPUT, OURS, OURS_BUCKETED = "input", "ours", "ours + bucketing"
IN_TREE = tuple(f"in-tree {variant}" for variant in in_tree_schedule.VARIANTS)
CONTENDERS = (INPUT, *IN_TREE, OURS, OURS_BUCKETED)
#: Makespan over bound that ours should stay below, by budget.
GOAL = {"unlimited": 1.03, "0": 1.06}
#: By what share of its nodes and of its bound a graph may differ between runs: tracing is not deterministic to the
#: node, the heterogeneous backward graph has 4,513 or 4,514.
SAME_GRAPH = 0.001
#: Shares of time below which two makespans count as equal.
EQUAL = 0.0005


@dataclass(frozen=True)
class Row:
    """One contender on one graph under one budget.

    Attributes:
        graph: ``scenario-layers.phase``; ``nodes`` of its FX graph.
        bound_ns: of the graph as captured. ``own_bound_ns``: of the graph that the contender left, within the budget.
        makespan_ns / peak_bytes / input_peak_bytes: by the simulator.
        collectives: in the graph that the contender left.
        seconds: processor time; 0 for the input order.
        error: why there is no result, else "".
        commit / date: of the run that made it.
        any_buckets_ns: bound of the graph as captured over all partitions of its collectives; 0: not asked.
    """

    graph: str
    contender: str
    budget: str
    nodes: int
    bound_ns: int
    own_bound_ns: int
    makespan_ns: int
    peak_bytes: int
    input_peak_bytes: int
    collectives: int
    seconds: float
    error: str = ""
    commit: str = ""
    date: str = ""
    any_buckets_ns: int = 0

    @property
    def over_bound(self) -> float:
        return self.makespan_ns / max(1, self.bound_ns)

    @property
    def over_any_buckets(self) -> float:
        return self.makespan_ns / max(1, self.any_buckets_ns)

    @property
    def peak(self) -> float:
        """Share of the input's peak."""
        return self.peak_bytes / max(1, self.input_peak_bytes)


def ours(gm: torch.fx.GraphModule, profile: CostProfile, budget: str, bucket: bool) -> None:
    """Our pipeline on ``gm`` in place, as a compilation runs it; what goes wrong raises."""
    settings = PassConfig(memory_budget=budget, bucket="on" if bucket else "off", verify="strict")
    run_passes(gm.graph, passes_of(settings), settings, profile)


def action(contender: str, profile: CostProfile, budget: str) -> Callable[[torch.fx.GraphModule], None]:
    """What a contender does to a graph."""
    if contender == INPUT:
        return lambda gm: None
    if contender in IN_TREE:
        variant = contender.removeprefix("in-tree ")
        return lambda gm: in_tree_schedule.schedule(gm, profile, variant, budget)
    return lambda gm: ours(gm, profile, budget, contender == OURS_BUCKETED)


def any_buckets_ns(gm: torch.fx.GraphModule, profile: CostProfile, before: Problem) -> int:
    """What no order of ``gm`` can beat however its collectives are merged."""
    view = GraphView(gm.graph)
    return bound_ns(before, candidates(view)[0], BucketCosts(view, profile))


@contextlib.contextmanager
def _collector(contender: str) -> Iterator[None]:
    """Python's garbage collector leaves alone what was there before: else seconds in which it walks other contenders'
    objects would be charged to whoever happens to run. While ours plans it rests, as in a compilation."""
    gc.freeze()
    try:
        with garbage.paused() if contender in (OURS, OURS_BUCKETED) else contextlib.nullcontext():
            yield
    finally:
        gc.unfreeze()


def contend(
    graph: str, gm: torch.fx.GraphModule, profile: CostProfile, contender: str, budget: str, before: Problem
) -> Row:
    """Run one contender on a copy of ``gm``, whose problem is ``before``, and judge what it leaves."""
    mine = copied(gm)
    act = action(contender, profile, budget)
    base = (graph, contender, budget, len(gm.graph.nodes), lower_bound(before))
    peak = simulate(before).peak_bytes
    text = ""
    with _collector(contender):
        began = time.process_time()
        try:
            act(mine)
        except Exception as error:  # a contender that fails is a result
            text = f"{type(error).__name__}: {error}".splitlines()[0]
        seconds = time.process_time() - began if contender != INPUT else 0.0
    if text:
        return Row(*base, 0, 0, 0, peak, 0, seconds, text)
    after = as_problem(mine, profile, graph).problem
    timeline = simulate(after)
    collectives = sum(task.kind == 1 for task in after.tasks)
    within = best_known(after, None if budget == "unlimited" else peak)
    return Row(
        *base, within.ns, timeline.makespan_ns, timeline.peak_bytes, peak, collectives, round(seconds, 3)
    )


def run_graph(
    graph: str, gm: torch.fx.GraphModule, profile: CostProfile, contenders: Sequence[str], budgets: Sequence[str]
) -> list[Row]:
    """All contenders on one graph; inside its process group."""
    before = as_problem(gm, profile, graph).problem
    merged_ns = any_buckets_ns(gm, profile, before)
    rows = []
    gc.collect()
    for budget in budgets:
        for contender in contenders:
            row = replace(contend(graph, gm, profile, contender, budget, before), any_buckets_ns=merged_ns)
            rows.append(row)
            print(
                f"{graph:26}{budget:10}{contender:24}{row.over_bound:8.4f}{row.peak:8.3f}{row.seconds:8.2f} s"
                f"{row.collectives:6d}  {row.error}",
                flush=True,
            )
    return rows


# -- the report -----------------------------------------------------------------------------------------


def mean(rows: list[Row]) -> str:
    """Of makespans over the bound."""
    return f"{geometric_mean(r.over_bound for r in rows):.4f}"


def mean_any_buckets(rows: list[Row]) -> str:
    """Of makespans over the bound over all partitions."""
    return f"{geometric_mean(r.over_any_buckets for r in rows):.4f}"


def table(rows: Sequence[Row], budget: str, value: Callable[[Row], str], last: Callable[[list[Row]], str]) -> list[str]:
    """A markdown table: graphs down, contenders across, ``last`` of each contender's rows at the bottom."""
    mine = [r for r in rows if r.budget == budget]
    at = {(r.graph, r.contender): r for r in mine}
    graphs = list(dict.fromkeys(r.graph for r in mine))
    names = [c for c in CONTENDERS if any(r.contender == c for r in mine)]
    lines = ["| graph | nodes | " + " | ".join(names) + " |", "|---|---:|" + "---:|" * len(names)]
    for graph in graphs:
        found = [at.get((graph, c)) for c in names]
        nodes = next(r.nodes for r in found if r)
        cells = ["" if r is None else "failed" if r.error else value(r) for r in found]
        lines.append(f"| {graph} | {nodes} | " + " | ".join(cells) + " |")
    finished = {c: [r for g in graphs if (r := at.get((g, c))) and not r.error] for c in names}
    # The first summary is for comparing contenders: only graphs that everybody finished enter it.
    whole = [g for g in graphs if all(any(r.graph == g for r in found) for found in finished.values())]
    ends = [last([r for r in finished[c] if r.graph in whole]) for c in names]
    lines.append(f"| **the {len(whole)} that all finished** | | " + " | ".join(f"**{e}**" for e in ends) + " |")
    each = [f"{last(finished[c])} ({len(finished[c])})" for c in names]
    lines.append("| each on what it finished (graphs) | | " + " | ".join(each) + " |")
    return lines


def cause(row: Row, best_other: Row | None) -> str:
    """One line about a row of ours that misses its goal or loses, "" for one that does neither."""
    notes = []
    if row.error:
        return f"failed: {row.error}"
    if row.over_bound > GOAL[row.budget]:
        own = row.makespan_ns / max(1, row.own_bound_ns)
        notes.append(f"{row.over_bound:.3f} of the bound ({own:.3f} of the bound of the graph it left)")
    if row.budget == "0" and row.peak_bytes > row.input_peak_bytes:
        notes.append(f"peak {row.peak:.4f} of the input's")
    if best_other is not None and row.makespan_ns > best_other.makespan_ns * (1 + EQUAL):
        over = " (which breaks the budget)" if best_other.peak_bytes > row.input_peak_bytes else ""
        notes.append(
            f"{row.makespan_ns / best_other.makespan_ns - 1:.1%} slower than {best_other.contender}{over}"
        )
    return "; ".join(notes)


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """Every row of ours that is slower than a contender of its kind, above its goal or above the budget."""
    lines = []
    for row in rows:
        if row.contender not in (OURS, OURS_BUCKETED):
            continue
        plain = (INPUT, IN_TREE[0])
        rivals = [
            r
            for r in rows
            if (r.graph, r.budget) == (row.graph, row.budget)
            and not r.error
            and r.contender in (plain if row.contender == OURS else (*IN_TREE, INPUT, OURS))
        ]
        text = cause(row, min(rivals, key=lambda r: r.makespan_ns, default=None))
        if text:
            lines.append(f"- {row.graph}, budget {row.budget}, {row.contender}: {text}")
    return lines or ["None."]


def violations(rows: list[Row]) -> str:
    """How many rows are above the input's peak, and the worst of them."""
    over = [r.peak for r in rows if r.peak_bytes > r.input_peak_bytes]
    return f"{len(over)} over, at most {max(over):.3f}" if over else "0 over"


def run_lines(rows: Sequence[Row], runs: Sequence[Provenance]) -> list[str]:
    """A markdown table: the runs that the rows are of, the newest first, and what of each is on the page."""
    made: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        made.setdefault((row.commit, row.date), []).append(row)
    lines = []
    for (commit, date), mine in sorted(made.items(), key=lambda one: one[0][1], reverse=True):
        commands = dict.fromkeys(f"`{r.command}`" for r in runs if (r.commit, r.date) == (commit, date))
        graphs = len({r.graph for r in mine})
        budgets = " ".join(b for b in BUDGETS if any(r.budget == b for r in mine))
        who = ", ".join(c for c in CONTENDERS if any(r.contender == c for r in mine))
        cells = [commit or "unknown", date or "unknown", ", ".join(commands) or "unknown", str(len(mine)), str(graphs)]
        lines.append([*cells, budgets, who])
    return markdown_table(("commit", "date", "command", "rows", "graphs", "budgets", "contenders"), lines)


def markdown(
    rows: Sequence[Row], depths: Sequence[str], device: str, runs: Sequence[Provenance] = ()
) -> list[str]:
    """The page's lines."""
    lines = [
        f"Default costs for {device}, fake process group, rank 0. Planning times are processor times, without "
        "Python's garbage collector walking what was there before; while ours plans it rests, as in a compilation.",
        "",
        "In-tree is `schedule_overlap_bucketing`, called by its own arguments with our costs as its "
        "`custom_runtime_estimation`, and judged by the same simulator as ours. Buckets are packed (copies charged) "
        "everywhere: the fake backend has no coalesced collectives. Means are geometric.",
        "",
        "The number after a graph's name is how many layers were traced; the models have: " + "; ".join(depths) + ".",
    ]
    for budget in BUDGETS:
        lines += ["", f"## Makespan over the lower bound, memory budget {budget}", ""]
        lines += table(rows, budget, lambda r: f"{r.over_bound:.4f}", mean)
    asked = [r for r in rows if r.any_buckets_ns]
    for budget in BUDGETS if asked else ():
        lines += ["", f"## Makespan over the bound over all buckets, memory budget {budget}", ""]
        lines += ["No order of any partition into buckets beats it, whatever memory it uses; copies are left out.", ""]
        lines += table(asked, budget, lambda r: f"{r.over_any_buckets:.4f}", mean_any_buckets)
    lines += ["", '## Peak over the input\'s peak, memory budget "0"', ""]
    lines += table(rows, "0", lambda r: f"{r.peak:.4f}" + (" !" if r.peak > 1 else ""), violations)
    lines += ["", "## Peak over the input's peak, memory unlimited", ""]
    lines += table(rows, "unlimited", lambda r: f"{r.peak:.4f}", violations)
    lines += ["", "## Collectives left, memory unlimited", ""]
    total: Callable[[list[Row]], str] = lambda found: str(sum(r.collectives for r in found))  # noqa: E731
    lines += table(rows, "unlimited", lambda r: str(r.collectives), total)
    for budget in BUDGETS:
        lines += ["", f"## Planning, seconds of processor time, memory budget {budget}", ""]
        lines += table(
            rows, budget, lambda r: f"{r.seconds:.2f}", lambda found: f"{sum(r.seconds for r in found):.1f}"
        )
    lines += ["", "## Where ours is slower than a contender, above its goal or above the budget", ""]
    goals = ", ".join(f"{goal} with budget {budget}" for budget, goal in GOAL.items())
    held = "`ours` is held against the input and in-tree scheduling, `ours + bucketing` against all."
    lines += [f"Goals: {goals}. {held}", "", *shortfalls(rows)]
    lines += ["", "## Runs", "", "What the rows above were made by.", "", *run_lines(rows, runs)]
    return lines


def show(rows: Sequence[Row]) -> None:
    """The makespans as tables on the terminal."""
    console = Console(width=150)
    for budget in BUDGETS:
        lines = table(rows, budget, lambda r: f"{r.over_bound:.4f}", mean)
        header, _, *body = [[c.strip().strip("*") for c in line.strip("|").split("|")] for line in lines]
        view = Table(*header, title=f"makespan over the bound, memory budget {budget}")
        for cells in body:
            view.add_row(*cells)
        console.print(view)


def load(folder: Path) -> list[Row]:
    """All stored rows, by scenario in its usual order."""
    files = [
        file
        for name in SCENARIOS
        for phase in ("forward", "backward")
        for file in sorted(folder.glob(f"{name}-*.{phase}.json"))
    ]
    return [Row(**row) for file in files for row in json.loads(file.read_text())["rows"]]


def plan(
    scenario: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(SCENARIOS)}. Default: all.")
    ] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(CONTENDERS)}. Default: all.")
    ] = None,
    budget: Annotated[list[str] | None, typer.Option(help='Repeatable; of "unlimited", "0". Default: both.')] = None,
    layers: Annotated[int, typer.Option(help="Depth; 0: the scenario's own.")] = 0,
    device: Annotated[str, typer.Option(help="Whose default costs.")] = "cuda",
    rows: Annotated[Path, typer.Option(help="Folder for results per graph.")] = Path("out/bench_plan"),
    render: Annotated[bool, typer.Option(help="Only make the page from what is in --rows.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the page, its figures and its chart.")] = RESULTS,
) -> None:
    """Captured graphs of cluster-sized models: our planner against the in-tree scheduler, by one simulator."""
    scenarios, contenders = chosen(scenario, SCENARIOS, "scenario"), chosen(contender, CONTENDERS, "contender")
    budgets = chosen(budget, BUDGETS, "budget")
    if not rows.exists():
        unpack(out / "plan.json", rows)
    profile = CostProfile.default(device)
    for name in [] if render else scenarios:
        with fake_world(SCENARIOS[name].world):
            for phase, gm in capture(SCENARIOS[name], layers or None).items():
                graph = f"{name}-{layers or SCENARIOS[name].layers}.{phase}"
                fresh = run_graph(graph, gm, profile, contenders, budgets)
                _store(rows / f"{graph}.json", fresh, f"{name} {SCENARIOS[name].full_layers}", profile.name)
    found = load(rows)
    show(found)
    files = [json.loads((rows / f"{graph}.json").read_text()) for graph in dict.fromkeys(r.graph for r in found)]
    depths = list(dict.fromkeys(file["depth"] for file in files))
    runs = runs_of(files)
    body = markdown(found, depths, profile.spec.name, runs)
    title = "Planning captured graphs"
    write("plan", title, body, files, lambda path: _draw(found, path), folder=out, source=_source(runs, found))


def runs_of(files: Sequence[dict[str, Any]]) -> list[Provenance]:
    """The runs that files of rows name, each once."""
    found = [Provenance(**run) for file in files for run in file["runs"]]
    return [run for k, run in enumerate(found) if run not in found[:k]]


def _source(runs: Sequence[Provenance], rows: Sequence[Row]) -> Provenance | None:
    """The newest run; with the command that makes all, and all commits, when there are several."""
    if not runs:
        return None
    newest = max(runs, key=lambda run: run.date)
    commits = sorted({row.commit for row in rows if row.commit})
    if len(commits) <= 1 and len(runs) == 1:
        return newest
    return replace(newest, command="tools/bench plan", commit=f"{', '.join(commits)} (see Runs)")


def unpack(page: Path, folder: Path) -> None:
    """Fill ``folder`` with the rows of a stored page, one file per graph; empty when there is no page."""
    folder.mkdir(parents=True, exist_ok=True)
    if not page.exists():
        return
    for contents in json.loads(page.read_text(encoding="utf-8"))["data"]:
        graph = contents["rows"][0]["graph"]
        (folder / f"{graph}.json").write_text(json.dumps(contents, indent=1), encoding="utf-8")


def _store(file: Path, fresh: Sequence[Row], depth: str, device: str) -> None:
    """Write a graph's rows, with the run that made them; those of contenders that did not run this time stay, when they
    are about the same graph.
    """
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": [], "runs": []}
    ran = {(r.contender, r.budget) for r in fresh}
    kept = [
        r for r in before["rows"] if (r["contender"], r["budget"]) not in ran and _same_graph(Row(**r), fresh[0])
    ]
    this = provenance()
    mine = [asdict(replace(r, commit=this.commit, date=this.date)) for r in fresh]
    used = {(r["commit"], r["date"]) for r in kept}
    runs = [run for run in before["runs"] if (run["commit"], run["date"]) in used and run != asdict(this)]
    contents = {"depth": depth, "device": device, "runs": [*runs, asdict(this)], "rows": kept + mine}
    file.write_text(json.dumps(contents, indent=1), encoding="utf-8")


def _same_graph(one: Row, other: Row) -> bool:
    """Whether two rows are about the same graph, up to what differs between runs."""
    pairs = (one.nodes, other.nodes), (one.bound_ns, other.bound_ns)
    return all(abs(a - b) <= SAME_GRAPH * max(a, b) for a, b in pairs)


def _draw(rows: Sequence[Row], path: Path) -> None:
    from tools.shared.plot import bars

    budget = BUDGETS[0]
    mine = [r for r in rows if r.budget == budget]
    graphs = list(dict.fromkeys(r.graph for r in mine))
    at = {(r.graph, r.contender): r.over_bound for r in mine if not r.error}
    shown = (INPUT, IN_TREE[0], IN_TREE[2], OURS_BUCKETED)
    series = {c: [at.get((g, c), float("nan")) for g in graphs] for c in shown}
    bars(path, graphs, series, f"makespan / lower bound, memory {budget}", line=1.0)
