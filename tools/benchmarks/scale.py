"""From 8 to 4,096 ranks by simulation: what the order of a step is worth on clusters that are not here.

One graph per model is captured in a fake world (64 ranks, hosts of 8) at two depths. Its collectives are priced again
for every number of ranks: a rank's compute stays (each rank has its own tokens), the bytes of a gathered parameter
stay, latency and the share of the bytes that cross the network change. Every contender schedules with those prices,
one simulator judges. A step at the model's real depth is the line through the two depths: the layers between head and
tail repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.profile import CostProfile
from inductor_passes.cost.specs import Constant, DeviceSpec, LinkSpec, lookup
from inductor_passes.schedule.problem import Kind
from tests.support.world import fake_world
from tools.benchmarks.plan import IN_TREE, INPUT, OURS_BUCKETED, contend
from tools.capture.graphs import as_problem, capture
from tools.capture.models import LLAMA_8B, LLAMA_70B, LLAMA_405B, Scenario, experts, fsdp, tensor_parallel
from tools.shared.record import RESULTS, chosen, markdown_table, write

#: Ranks of the captured world, and of a host.
CAPTURED, HOST = 64, 8
DEPTHS = (4, 8)
BUDGET = "unlimited"
#: The in-tree variants; the better one counts.
IN_TREE_SHOWN = (IN_TREE[0], IN_TREE[2])
MODELS: dict[str, Scenario] = {
    "llama-8b": Scenario(CAPTURED, 4, 32, fsdp(LLAMA_8B)),
    "llama-70b": Scenario(CAPTURED, 4, 80, fsdp(LLAMA_70B)),
    "llama-405b": Scenario(CAPTURED, 4, 126, lambda layers: tensor_parallel(layers, LLAMA_405B), groups=2),
    "moe": Scenario(CAPTURED, 4, 24, experts, groups=3),
}
LAYOUTS = {
    "llama-8b": "FSDP over all ranks",
    "llama-70b": "FSDP over all ranks",
    "llama-405b": "TP + SP in the host, FSDP over hosts",
    "moe": "64 experts over the host, everything else FSDP over all ranks",
}


@dataclass(frozen=True)
class Assumptions:
    """What the prices assume, relative to the datasheet defaults."""

    bandwidth: float = 1.0
    latency: float = 1.0
    compute: float = 1.0

    def title(self) -> str:
        """For tables; "as stated" when nothing differs."""
        changed = [f"{name} x {value:g}" for name, value in vars(self).items() if value != 1.0]
        return ", ".join(changed) or "as stated"


#: One assumption at a time: the network's bandwidth, all latencies, how fast compute is.
SENSITIVITY = (
    Assumptions(),
    Assumptions(bandwidth=0.5),
    Assumptions(bandwidth=2.0),
    Assumptions(latency=0.3),
    Assumptions(latency=3.0),
    Assumptions(compute=0.7),
    Assumptions(compute=1.4),
)


@dataclass(frozen=True)
class ClusterProfile(CostProfile):
    """Default costs for ``world`` ranks, asked about groups of the captured world."""

    world: int = CAPTURED
    assumptions: Assumptions = Assumptions()

    @staticmethod
    def of(world: int, assumptions: Assumptions, device: str = "cuda") -> ClusterProfile:
        """For a number of ranks that fills its hosts."""
        spec = lookup(device)
        name = f"{spec.name}, {world} ranks, {assumptions.title()}"
        return ClusterProfile(name, spec.name, False, HOST, world=world, assumptions=assumptions)

    @property
    def spec(self) -> DeviceSpec:
        return _spec(self.device, self.assumptions)

    def layout(self, ranks: tuple[int, ...]) -> GroupLayout:
        found = GroupLayout.of(ranks, HOST)
        if found.ranks == CAPTURED:
            return GroupLayout.of(tuple(range(self.world)), HOST)
        if found.hosts == CAPTURED // HOST:
            # One rank of every host.
            return GroupLayout(self.world // HOST, self.world // HOST, 1)
        return found

    def _sizes(self, kind: str, input_bytes: int, output_bytes: int, ranks: tuple[int, ...]) -> tuple[int, int]:
        """The captured sizes as they are in the cluster: whole parameters stay whole, shards become smaller."""
        size = self.layout(ranks).ranks
        if kind == "all_gather":
            return -(-output_bytes // size), output_bytes
        if kind == "reduce_scatter":
            return input_bytes, -(-input_bytes // size)
        return input_bytes, output_bytes

    def communication_estimate(
        self, kind: str, input_bytes: int, output_bytes: int, ranks: tuple[int, ...]
    ) -> tuple[int, str]:
        return super().communication_estimate(kind, *self._sizes(kind, input_bytes, output_bytes, ranks), ranks)

    def issue_ns(self, kind: str, input_bytes: int, output_bytes: int, ranks: tuple[int, ...]) -> int:
        return super().issue_ns(kind, *self._sizes(kind, input_bytes, output_bytes, ranks), ranks)


@cache
def _spec(device: str, assumptions: Assumptions) -> DeviceSpec:
    spec = lookup(device)

    def scaled(constant: Constant, factor: float) -> Constant:
        return replace(constant, value=constant.value * factor)

    def link(one: LinkSpec, bandwidth: float) -> LinkSpec:
        return LinkSpec(scaled(one.latency_ns, assumptions.latency), scaled(one.bytes_per_s, bandwidth))

    return replace(
        spec,
        matmul_efficiency=scaled(spec.matmul_efficiency, assumptions.compute),
        collective_ns=scaled(spec.collective_ns, assumptions.latency),
        intra=link(spec.intra, 1.0),
        inter=link(spec.inter, assumptions.bandwidth),
    )


@dataclass(frozen=True)
class Cell:
    """One model on one cluster by one contender; ns, forward and backward, at the model's real depth."""

    model: str
    world: int
    assumptions: Assumptions
    contender: str
    step_ns: float
    exposed_ns: float
    bound_ns: float
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "assumptions": vars(self.assumptions)}


def line(depths: Sequence[int], values: Sequence[float], depth: int) -> float:
    """The line through two points, at ``depth``."""
    (low, high), (at_low, at_high) = depths, values
    return at_low + (depth - low) * (at_high - at_low) / (high - low)


Graphs = dict[int, dict[str, Any]]


def captured(scenario: Scenario) -> Graphs:
    """Depth -> phase -> graph; inside the captured world."""
    return {depth: capture(scenario, depth) for depth in DEPTHS}


def predict(model: str, graphs: Graphs, world: int, assumptions: Assumptions) -> list[Cell]:
    """All contenders on one cluster."""
    profile = ClusterProfile.of(world, assumptions)
    totals: dict[str, dict[int, list[float]]] = {}
    errors: dict[str, str] = {}
    for depth, phases in graphs.items():
        for phase, gm in phases.items():
            before = as_problem(gm, profile, phase).problem
            compute = sum(t.duration_ns for t in before.tasks if t.kind is Kind.COMPUTE)
            for contender in (INPUT, *IN_TREE_SHOWN, OURS_BUCKETED):
                row = contend(f"{model}-{depth}.{phase}", gm, profile, contender, BUDGET, before)
                sums = totals.setdefault(contender, {}).setdefault(depth, [0.0, 0.0, 0.0])
                for k, value in enumerate((row.makespan_ns, row.makespan_ns - compute, row.bound_ns)):
                    sums[k] += value
                if row.error:
                    errors[contender] = row.error
    full = MODELS[model].full_layers

    def sums_at(at: dict[int, list[float]]) -> tuple[float, float, float]:
        step, exposed, bound = (line(DEPTHS, [at[depth][k] for depth in DEPTHS], full) for k in range(3))
        return step, exposed, bound

    return [
        Cell(
            model,
            world,
            assumptions,
            contender,
            *sums_at(at),
            errors.get(contender, ""),
        )
        for contender, at in totals.items()
    ]


def best_in_tree(cells: Sequence[Cell]) -> Cell | None:
    """The faster in-tree variant that got through, or None."""
    ran = [c for c in cells if c.contender in IN_TREE_SHOWN and not c.error]
    return min(ran, key=lambda c: c.step_ns, default=None)


HEADER = (
    "model",
    "ranks",
    "assumptions",
    "input order ms",
    "exposed",
    "in-tree ms",
    "exposed",
    "ours ms",
    "exposed",
    "input / ours",
    "in-tree / ours",
    "ours / bound",
)


def shown(cells: Sequence[Cell]) -> list[str]:
    """The cells of one cluster as a line of text, by ``HEADER``."""
    at = {c.contender: c for c in cells}
    plain, ours, in_tree = at[INPUT], at[OURS_BUCKETED], best_in_tree(cells)

    def ms(cell: Cell | None) -> list[str]:
        if cell is None or cell.error:
            return ["failed", "-"]
        return [f"{cell.step_ns / 1e6:.1f}", f"{cell.exposed_ns / 1e6:.1f}"]

    ratios = ["-"] * 3
    if not ours.error:
        over_in_tree = f"{in_tree.step_ns / ours.step_ns:.3f}" if in_tree else "-"
        ratios = [f"{plain.step_ns / ours.step_ns:.3f}", over_in_tree, f"{ours.step_ns / ours.bound_ns:.3f}"]
    first = [plain.model, f"{plain.world}", plain.assumptions.title()]
    return [*first, *ms(plain), *ms(in_tree), *ms(ours), *ratios]


def assumed(device: str = "cuda") -> list[str]:
    """Lines of Markdown: every number that the prices rest on, with its source."""
    rows = [[name, f"{c.value:g}", c.tag, c.source] for name, c in lookup(device).constants().items()]
    return markdown_table(["constant", "value", "kind", "source"], rows)


def page(scaling: Sequence[Sequence[Cell]], sensitivity: Sequence[Sequence[Cell]]) -> list[str]:
    """The page's lines."""
    layouts = "; ".join(f"{name}: {text}, {MODELS[name].full_layers} layers" for name, text in LAYOUTS.items())
    text = [
        "A simulation, not a measurement: no cluster was used. Forward and backward of one step, no optimizer; one "
        f"sequence of 8,192 tokens per rank, bf16, hosts of {HOST}; memory budget {BUDGET} for everybody. {layouts}.",
        "",
        f"Graphs are captured at {' and '.join(map(str, DEPTHS))} layers and the step at full depth is the line "
        "through both. `input order` is what a compiler that leaves collectives where they are needed would run; "
        "`in-tree` is the better of `schedule_overlap_bucketing` without and with pre-bucketing, given the same prices "
        f"(its bucket sizes are those that it picks for the {CAPTURED} captured ranks); `ours` is planning and "
        "bucketing. `exposed` is the step less compute alone (copies into buckets count as exposed). The bound ignores "
        "memory and is that of the graph as captured, so buckets can come below it. Memory of a real device is not "
        "checked: small worlds are there for the trend.",
        "",
        "## Number of ranks",
        "",
        *markdown_table(HEADER, [shown(cells) for cells in scaling]),
    ]
    if sensitivity:
        text += [
            "",
            "## Sensitivity to each assumption",
            "",
            "One assumption at a time; everybody schedules again with the changed prices. bandwidth: of the network "
            "between hosts; latency: of every hop and the fixed cost of a collective; compute: the share of the peak "
            "that matmuls reach.",
            "",
            *markdown_table(HEADER, [shown(cells) for cells in sensitivity]),
        ]
    return [*text, "", "## What the prices are made of", "", *assumed()]


def _draw(scaling: Sequence[Sequence[Cell]], path: Path) -> None:
    from tools.shared.plot import curves

    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for cells in scaling:
        series = panels.setdefault(cells[0].model, {"input order": [], "in-tree": [], "ours": [], "bound": []})
        at = {c.contender: c for c in cells}
        in_tree = best_in_tree(cells)
        series["input order"].append((cells[0].world, at[INPUT].step_ns / 1e6))
        if in_tree:
            series["in-tree"].append((cells[0].world, in_tree.step_ns / 1e6))
        series["ours"].append((cells[0].world, at[OURS_BUCKETED].step_ns / 1e6))
        series["bound"].append((cells[0].world, at[INPUT].bound_ns / 1e6))
    curves(path, panels, "ranks", "predicted step, ms")


def scale(
    model: Annotated[list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(MODELS)}. Default: all.")] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(help="Repeatable; a multiple of 8. Default: 8 64 512 4096.")
    ] = None,
    at: Annotated[int, typer.Option(help="Ranks for the sensitivity table; 0: leave it out.")] = 512,
    out: Annotated[Path, typer.Option(help="Folder for the page, its figures and its chart.")] = RESULTS,
) -> None:
    """Simulated steps from 8 to 4,096 ranks, and what each assumption does to them."""
    models, worlds = chosen(model, MODELS, "model"), list(ranks or (8, 64, 512, 4096))
    for world in (*worlds, at):
        if world < 0 or world % HOST or (world == 0 and world is not at):
            raise typer.BadParameter(f"{world} ranks do not fill hosts of {HOST}; expected a multiple of {HOST}")
    console = Console(width=170)
    scaling: list[list[Cell]] = []
    sensitivity: list[list[Cell]] = []
    for name in models:
        with fake_world(CAPTURED):
            graphs = captured(MODELS[name])
            for world in worlds:
                scaling.append(predict(name, graphs, world, Assumptions()))
                console.print(" ".join(shown(scaling[-1])))
            for assumptions in SENSITIVITY if at else ():
                known = [c for c in scaling if (c[0].model, c[0].world, c[0].assumptions) == (name, at, assumptions)]
                sensitivity.append(known[0] if known else predict(name, graphs, at, assumptions))
                console.print(" ".join(shown(sensitivity[-1])))
    for title, rows in (("number of ranks", scaling), ("sensitivity", sensitivity)):
        view = Table(*HEADER, title=title)
        for cells in rows:
            view.add_row(*shown(cells))
        console.print(view)
    data = {"scaling": [[c.to_json() for c in cells] for cells in scaling]}
    data["sensitivity"] = [[c.to_json() for c in cells] for cells in sensitivity]
    body = page(scaling, sensitivity)
    written = write("scale", "Simulated scale", body, data, lambda path: _draw(scaling, path), folder=out)
    console.print(f"written: {written}")
