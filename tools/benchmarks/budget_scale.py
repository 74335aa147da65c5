"""Step over peak memory by simulation, on clusters that are not here: ours with a budget each, and today's settings.

A decoder of a few layers is captured in a fake world of so many ranks, once per way to treat its parameters. Every
contender separates the joint graph into forward and backward and schedules both, as a compilation would; one simulator
judges what it leaves, time and memory. No kernels are generated: memory is that of the graphs.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import shrinking
from inductor_passes.engine.compilation import Known
from inductor_passes.engine.partitioner import Separation
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.rewriting.step_facts import facts_of
from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.simulate import simulate
from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.world import fake_world
from tools.benchmarks.budgets import AT_CAPS, AT_PEAKS, Measured, at_caps, at_each_peak, front, fronts, reached
from tools.benchmarks.plan import IN_TREE
from tools.benchmarks.scale import assumed
from tools.capture.graphs import as_problem, copied, trace
from tools.capture.models import BF16, LLAMA_8B, LLAMA_70B, Shape, decoder, text, world_mesh
from tools.link.models import Checkpointed
from tools.link.sweep import SAVED
from tools.link.worker import REFERENCE
from tools.shared import in_tree_schedule
from tools.shared.activations import saving
from tools.shared.record import RESULTS, chosen, markdown_table, write

DEVICE = "h100"
#: Of the published models, which have 128,256: in a model of a few layers the head would hold most of the memory.
VOCABULARY = 32_000
MODELS: dict[str, Shape] = {
    "llama-8b": replace(LLAMA_8B, vocab=VOCABULARY),
    "llama-70b": replace(LLAMA_70B, vocab=VOCABULARY),
    # Seconds, to see that everything works.
    "tiny": Shape(dim=64, heads=4, kv_heads=4, hiddens=(128,), vocab=512),
}
SHOWN = ("llama-8b", "llama-70b")
#: Values of ``memory_budget``, those below the peak first. ``{peak}``: bytes of the step's planned peak as it came.
BUDGETS = (
    *(f"-{less}%" for less in (65, 60, 50, 40, 30, 20, 10)),
    "={peak}B",
    "0",
    *(f"+{more}%" for more in (5, 10, 15, 25, 50)),
    "unlimited",
)
#: What in-tree scheduling may do: variant, memory limits.
IN_TREE_RUNS = tuple((IN_TREE[k].removeprefix("in-tree "), limits) for k in (0, 2) for limits in ("0", "unlimited"))
#: How parameters are treated after forward, and whether blocks are checkpointed.
Treated = tuple[bool | Literal["auto"], bool]

Split = tuple[torch.fx.GraphModule, torch.fx.GraphModule]
#: Separates the joint graph, by ours or (None) as torch does.
Splitter = Callable[[PassConfig | None], Split]
DEFAULT = "default Inductor, 100% saved"


@dataclass(frozen=True)
class Case:
    """A model on so many ranks; ``tokens`` of one rank's batch, a sequence."""

    model: str
    ranks: int
    tokens: int

    @property
    def title(self) -> str:
        """For headings."""
        return f"{self.model}, {self.ranks} ranks, {self.tokens} tokens per rank"


@dataclass(frozen=True)
class Cost:
    """What separating the joint graph costs, in seconds of processor time.

    Attributes:
        joint_nodes: of the graph.
        torch_s: as torch separates it.
        budgets_s: by value of ``memory_budget``, choice and separations together.
    """

    joint_nodes: int
    torch_s: float
    budgets_s: dict[str, float]

    @property
    def choice_s(self) -> float:
        """What a budget below the peak takes beyond torch's own separation, in the median of budgets."""
        return median(s for budget, s in self.budgets_s.items() if budget.startswith("-")) - self.torch_s


@dataclass
class Found:
    """What came of a case.

    Attributes:
        everyone: contenders that ran, by peak.
        failed: contender -> why there is no result.
        cost: of ours.
        compute_ns, sent_ns: compute and collectives of the step as it came, each alone.
    """

    case: Case
    everyone: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    cost: Cost | None = None
    compute_ns: int = 0
    sent_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **vars(self.case),
            "rows": [vars(m) for m in self.everyone],
            "failed": self.failed,
            "cost": vars(self.cost) if self.cost else None,
            "compute_ns": self.compute_ns,
            "sent_ns": self.sent_ns,
        }


def built(case: Case, layers: int, treated: Treated) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its inputs, on the meta device; inside the world."""
    shape, (reshard, blocks) = MODELS[case.model], treated
    model = decoder(shape, layers)
    if blocks:
        for i, layer in enumerate(model.layers):
            model.layers[i] = Checkpointed(layer)
    mesh = world_mesh(dist.get_world_size(), names=("dp",))
    sharded = simple_fsdp(model, mesh, mp_policy=BF16, reshard_after_forward=reshard)
    return sharded, text(shape, here=case.tokens)


def settings_of(budget: str, profile: Path) -> PassConfig:
    """Ours; memory is that of the graphs, for everybody: nobody's kernels are generated."""
    return PassConfig(memory_budget=budget, verify="strict", codegen="aot_eager", cost_profile=str(profile))


class Contest:
    """Runs the contenders of a case, and simulates what they leave; ``profile`` is a file."""

    def __init__(self, case: Case, profile: Path) -> None:
        self.file, self.profile = profile, CostProfile.load(profile)
        self.found = Found(case)

    def run(self, layers: int) -> Found:
        """All of them; inside the world."""
        for kept, blocks in itertools.product((True, False), (False, True)):
            self._traced(layers, (kept, blocks), functools.partial(self._sweep, treated=(kept, blocks)))
        self._traced(layers, ("auto", False), self._budgets)
        self.found.everyone.sort(key=lambda m: (m.peak_bytes, m.step_ns))
        return self.found

    def _traced(self, layers: int, treated: Treated, act: Callable[[Splitter], None]) -> None:
        """Have ``act`` separate the joint graph as often as it likes."""

        def partition(gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Split:
            def split(settings: PassConfig | None) -> Split:
                mine = shrinking.copied(gm)
                if settings is None:
                    forward, backward = _torch.default_partitioner()(mine, joint_inputs, **kwargs)
                    return forward, backward
                return Separation(lambda: settings, None).run(mine, joint_inputs, kwargs)

            self.joint_nodes = len(gm.graph.nodes)
            act(split)
            # torch 2.12 and 2.13 cannot run checkpointed blocks of DTensors as torch separates them: ours mends that.
            return split(settings_of("0", self.file))

        trace(*built(self.found.case, layers, treated), partition=partition)

    def _judge(self, title: str, make: Callable[[], Split], *, ours: bool = False, today: bool = False) -> None:
        """One contender; one that fails is a result."""
        name = REFERENCE if title == DEFAULT else title
        try:
            timelines = [simulate(as_problem(gm, self.profile, name).problem) for gm in make()]
        except Exception as error:
            self.found.failed[title] = f"{type(error).__name__}: {error}".splitlines()[0]
            return
        step_ns = sum(one.makespan_ns for one in timelines)
        peak_bytes = max(one.peak_bytes for one in timelines)
        self.found.everyone.append(Measured(name, title, ours, today, step_ns, peak_bytes, 0, 0, True))

    def _sweep(self, split: Splitter, treated: Treated) -> None:
        """Everything that a user of today can set, where parameters are treated so."""
        kept, blocks = treated
        default = settings_of(PassConfig().memory_budget, self.file)
        for percent in (100,) if blocks else (100, *SAVED):
            said = ("" if kept else ", kept") + (", blocks checkpointed" if blocks else f", {percent}% saved")
            with saving(percent / 100):
                came = split(settings_of("0", self.file))
                self._judge(f"default Inductor{said}", lambda: came, today=True)  # noqa: B023
                for variant, limits in IN_TREE_RUNS:
                    run = functools.partial(self._in_tree, came, variant, limits)
                    self._judge(f'in-tree {variant}, memory "{limits}"{said}', run, today=True)
                self._judge(f"our order{said}", lambda: self._ours(split(default), default))

    def _budgets(self, split: Splitter) -> None:
        """Ours, with one budget each."""
        began = time.process_time()
        both = split(None)
        torch_s = time.process_time() - began
        came = [as_problem(gm, self.profile, "came").problem for gm in both]
        self.found.compute_ns, self.found.sent_ns = (
            sum(t.duration_ns for p in came for t in p.tasks if t.kind is kind) for kind in (Kind.COMPUTE, Kind.START)
        )
        default = next((m.peak_bytes for m in self.found.everyone if m.name == REFERENCE), 0)
        peak = default or max(simulate(p).peak_bytes for p in came)
        seconds: dict[str, float] = {}
        for budget in (one.format(peak=peak) for one in BUDGETS):
            settings = settings_of(budget, self.file)
            began = time.process_time()
            try:
                both = split(settings)
            except Exception as error:
                self.found.failed[f'ours, "{budget}"'] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            seconds[budget] = time.process_time() - began
            self._judge(f'ours, "{budget}"', functools.partial(self._ours, both, settings), ours=True)
        self.found.cost = Cost(self.joint_nodes, torch_s, seconds)

    def _in_tree(self, came: Split, variant: str, limits: str) -> Split:
        forward, backward = copied(came[0]), copied(came[1])
        for gm in (forward, backward):
            in_tree_schedule.schedule(gm, self.profile, variant, limits)
        return forward, backward

    def _ours(self, both: Split, settings: PassConfig) -> Split:
        for gm, phase in zip(both, ("forward", "backward")):
            known = Known(phase, step=facts_of(gm.graph))
            run_passes(gm.graph, passes_of(settings), settings, self.profile, known=known)
        return both


def section(found: Found) -> list[str]:
    """Lines of Markdown about a case."""
    everyone = found.everyone
    if all(m.name != REFERENCE for m in everyone):
        return ["", f"## {found.case.title}", "", *(f"- {title} failed: {why}" for title, why in found.failed.items())]
    pairs, whole, today = at_each_peak(everyone)
    default = next(m for m in everyone if m.name == REFERENCE)
    alone = f"Compute alone {found.compute_ns / 1e6:.1f} ms, communication alone {found.sent_ns / 1e6:.1f} ms."
    lines = ["", f"## {found.case.title}", "", alone, "", *reached(everyone, whole, today)]
    if found.cost is not None:
        cost = found.cost
        lines.append(
            f"- The joint graph has {cost.joint_nodes} nodes. torch separates it in {cost.torch_s:.2f} s; a budget "
            f"below the peak takes {cost.choice_s:.2f} s more, {cost.choice_s / cost.joint_nodes * 5000:.2f} s per "
            "5,000 nodes (processor time)."
        )
    lines += [f"- {title} failed: {why}" for title, why in found.failed.items()]
    lines += ["", *markdown_table(AT_PEAKS, pairs), "", *markdown_table(AT_CAPS, at_caps(everyone))]
    kinds = [m for m in everyone if m.ours], [m for m in everyone if not m.ours], [m for m in everyone if m.today]
    shown = {id(m) for ones in kinds for m in front(ones)} | {id(default)}
    rows = [
        [m.title, f"{m.step_ns / 1e6:.1f}", f"{m.peak_bytes / 1e6:.0f}", f"{m.peak_bytes / default.peak_bytes:.2f}"]
        for m in everyone
        if id(m) in shown
    ]
    columns = ["contender that none of its kind beats", "step ms", "peak MB", "/ default"]
    return [*lines, "", *markdown_table(columns, rows)]


def page(everything: Sequence[Found], layers: int) -> list[str]:
    """The page's lines."""
    text = [
        f"A simulation, not a measurement: no cluster was used. Decoders of {layers} layers and {VOCABULARY:,} tokens "
        "(a larger head would hold most of the memory of so few layers), fully sharded, bf16 with float32 "
        "reductions, hosts of 8, costs of the table below; forward and backward of one step, no optimizer. One "
        "simulator judges everybody, time and the memory of the graphs (no kernels are generated).",
        "",
        'Ours has one setting, `memory_budget`, and `reshard_after_forward="auto"`. The sweep is every combination of '
        "who orders (the order as it comes, in-tree overlap scheduling with and without buckets and with and without "
        "a memory limit, our order at its defaults), parameters gathered again or kept, and torch's "
        "`activation_memory_budget` (percent saved) or checkpointed blocks. A ratio above 1 says that ours is faster "
        "within the same memory.",
    ]
    text += [line for found in everything for line in section(found)]
    return [*text, "", "## What the prices are made of", "", *assumed()]


def _draw(everything: Sequence[Found], path: Path) -> None:
    from tools.shared.plot import curves

    panels = {found.case.title: fronts(found.everyone) for found in everything}
    curves(path, panels, "peak / default Inductor's", "simulated step, ms", log_x=False)


def budget_scale(
    model: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(MODELS)}. Default: {', '.join(SHOWN)}.")
    ] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="Repeatable; fills hosts of 8. Default: 64 512.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Repeatable; per rank. Default: 2048.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Of the captured model.")] = 8,
    name: Annotated[str, typer.Option(help="Of the page and its files.")] = "budgets_scale",
    out: Annotated[Path, typer.Option(help="Folder for the page, its figures and its chart.")] = RESULTS,
) -> None:
    """Simulated steps over peak memory on 64 and 512 GPUs: ours with one budget each against today's settings."""
    worlds = list(ranks or (64, 512))
    for world in worlds:
        if world < 8 or world % 8:
            raise typer.BadParameter(f"{world} ranks do not fill hosts of 8; expected a multiple of 8")
    everything: list[Found] = []
    console = Console(width=180)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        CostProfile.default(DEVICE).save(profile)
        cases = itertools.product(chosen(model or SHOWN, MODELS, "model"), worlds, tokens or (2048,))
        for case in itertools.starmap(Case, cases):
            with fake_world(case.ranks):
                everything.append(Contest(case, profile).run(layers))
            console.print("\n".join(section(everything[-1])), markup=False)
            # After every case: a run that is cut short leaves what it has.
            written = write(
                name,
                "Memory budgets at scale, simulated",
                page(everything, layers),
                [found.to_json() for found in everything],
                lambda path: _draw(everything, path),
                folder=out,
            )
    console.print(f"written: {written}")
