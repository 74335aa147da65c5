"""A real training run: what narrower messages do to the loss, with and without error feedback."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import inductor_passes
from inductor_passes.report import Verdict
from inductor_passes.simple_fsdp import Mode, simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.ranks import Ranks
from tools.shared.launch import ROOT
from tools.shared.plot import curves
from tools.shared.record import RESULTS, chosen, markdown_table, write

#: Pages of ours that the model reads, byte by byte, in this order; every tenth piece of 1024 bytes is held out.
TEXT = (
    "adopt", "agreement", "async_tp", "bucketing", "comparison", "concepts", "configuration", "costs", "frameworks",
    "fuzzing", "limits", "models", "numerics", "own_pass", "redistribute", "trace", "troubleshooting", "tuning",
    "verifier", "walkthrough",
)  # fmt: skip
PIECE = 1024
#: The uncompressed run, which the others are compared with.
BASE = "no compression"
#: Name -> settings; None: torch.compile alone, which the uncompressed run has to equal bit for bit.
RUNS: dict[str, dict[str, str] | None] = {
    "torch.compile alone": None,
    BASE: {},
    "bf16": {"compress": "*=bf16"},
    "int8": {"compress": "*=int8"},
    "int8, feedback": {"compress": "*=int8", "compress_feedback": "on"},
    "e4m3": {"compress": "*=e4m3"},
    "e4m3, feedback": {"compress": "*=e4m3", "compress_feedback": "on"},
    "e5m2": {"compress": "*=e5m2"},
    "e5m2, feedback": {"compress": "*=e5m2", "compress_feedback": "on"},
}


@dataclass(frozen=True)
class Sizes:
    """Of the model and of one rank's batch.

    Attributes:
        codegen: who compiles what the passes made.
        gradients: every rank has all weights and SGD with momentum takes gradients as they come: nothing but their
            roundings is seen. Otherwise FSDP and AdamW.
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    hidden: int = 192
    batch: int = 4
    length: int = 64
    codegen: str = "aot_eager"
    gradients: bool = False


#: Largest learning rates of AdamW and of SGD.
RATES = (3e-3, 0.1)
#: Steps whose mean is the final loss.
LAST = 100


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes to train on, and those held out."""
    pages = b"".join((ROOT / "docs" / f"{name}.md").read_bytes() for name in TEXT)
    pieces = torch.tensor(list(pages), dtype=torch.int64).split(PIECE)
    parts = [piece for k, piece in enumerate(pieces) if k % 10 != 9], pieces[9::10]
    return torch.cat(parts[0]), torch.cat(parts[1])


def batches(
    data: torch.Tensor, sizes: Sizes, steps: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets, each (batch, seq), from random places."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        places = torch.randint(len(data) - sizes.length, (sizes.batch, 1), generator=generator)
        rows = data[places + torch.arange(sizes.length + 1)]
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Bytes(nn.Module):
    """A transformer that predicts the next byte: (tokens, targets), each (batch, length), to the mean cross-entropy.

    Norms have no weights, positions are added as sines, and the layers' matrices are rows of one parameter: a step has
    few messages, which all are long enough to be narrowed.
    """

    positions: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.layers = sizes.heads, sizes.layers
        #: Rows of a layer: queries, keys and values; what attention gives; up; down, transposed.
        self.rows = (3 * width, width, sizes.hidden, sizes.hidden)
        self.embed = nn.Parameter(0.5 * torch.randn(256, width))
        self.body = nn.Parameter(0.05 * torch.randn(sizes.layers * sum(self.rows), width))
        self.head = nn.Parameter(0.05 * torch.randn(256, width))
        angles = torch.outer(torch.arange(sizes.length), 10_000.0 ** -torch.arange(0, 1, 2 / width))
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self.embed) + self.positions
        for layer in self.body.chunk(self.layers):
            inward, outward, up, down = layer.split(self.rows)
            x = x + F.linear(self.attended(F.linear(_normed(x), inward)), outward)
            x = x + F.gelu(F.linear(_normed(x), up)) @ down
        return F.cross_entropy(F.linear(_normed(x), self.head).flatten(0, 1), targets.flatten())

    def attended(self, mixed: torch.Tensor) -> torch.Tensor:
        """Causal attention of queries, keys and values beside each other: (batch, length, 3 * width)."""
        batch, length, wide = mixed.shape
        split = mixed.view(batch, length, 3, self.heads, wide // 3 // self.heads).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        return found.transpose(1, 2).reshape(batch, length, wide // 3)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class _Local:
    """An optimizer of this rank's shards as plain tensors: its speed is not what is measured."""

    def __init__(self, model: nn.Module, gradients: bool, steps: int, rate: float) -> None:
        self.parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
        self.shards = [nn.Parameter(p.to_local().detach()) for p in self.parameters]
        self.optimizer: torch.optim.Optimizer
        if gradients:
            self.optimizer = torch.optim.SGD(self.shards, lr=rate, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(self.shards, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, rate, steps, pct_start=0.05, cycle_momentum=not gradients
        )

    def step(self) -> None:
        """One step with the parameters' gradients, which are dropped."""
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad, parameter.grad = parameter.grad.to_local(), None  # type: ignore[union-attr]
        self.optimizer.step()
        self.schedule.step()


def train(rank: int, world_size: int, name: str, sizes: Sizes, steps: int, rate: float) -> dict[str, Any]:
    """One rank's part of one run: the mean loss of all ranks at each step, the held-out loss, and what was narrowed."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    mode: Mode = "replicate" if sizes.gradients else "fully_shard"
    model = simple_fsdp(Bytes(sizes), mesh, mode=mode, reshard_after_forward=False)
    settings = RUNS[name]
    if settings and "compress_feedback" in settings:
        inductor_passes.add_feedback(model)
    step = compiled(model, settings, sizes.codegen)
    optimizer = _Local(model, sizes.gradients, steps, rate)
    learned, held_out = text()
    losses = torch.zeros(steps)
    with collect(what_if=False) as reports:
        for number, batch in enumerate(batches(learned, sizes, steps, 1 + rank)):
            loss = step(*batch)
            loss.backward()
            losses[number] = loss.detach()
            optimizer.step()
    with torch.no_grad():
        later = torch.stack([model(*batch) for batch in batches(held_out, sizes, 64, 1000 + rank)]).mean()
    means = torch.cat([losses, later.view(1)])
    dist.all_reduce(means)
    means /= world_size
    digest = hashlib.sha256()
    for one in (losses, *optimizer.shards):
        digest.update(one.detach().numpy().tobytes())
    return {
        "losses": means[:-1].tolist(),
        "held_out": float(means[-1]),
        "digest": digest.hexdigest(),
        "narrowed": _narrowed(reports),
    }


def compiled(model: nn.Module, settings: dict[str, str] | None, codegen: str) -> Any:
    """The step of a run."""
    torch._dynamo.reset()
    if settings is None:
        return torch.compile(model, fullgraph=True, backend=codegen)
    given: dict[str, Any] = {"memory_budget": "unlimited", "verify": "strict", "compress_error": "0.08", **settings}
    if codegen == "inductor":
        return torch.compile(model, fullgraph=True, options=inductor_passes.options(**given))
    keyed = {f"inductor_passes.{key}": value for key, value in {**given, "codegen": codegen}.items()}
    return torch.compile(model, fullgraph=True, backend="inductor_passes", options=keyed)


def _narrowed(reports: Any) -> dict[str, int]:
    """Messages of forward and backward, and how many of them were narrowed."""
    made = [d for report in reports for one in report.passes if one.name == "compress" for d in one.decisions]
    return {"messages": len(made), "narrowed": sum(d.verdict is Verdict.APPLIED for d in made)}


def figures(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By run: the final loss, the held-out loss, and how far they are from those of the uncompressed run."""
    final = {name: sum(one["losses"][-LAST:]) / LAST for name, one in found.items()}
    base = {"final": final[BASE], "held_out": found[BASE]["held_out"]}
    made = {name: {"final": final[name], "held_out": found[name]["held_out"]} for name in found}
    return {
        name: {**one, **{f"{key}_off": one[key] / base[key] - 1 for key in base}} for name, one in made.items()
    }


def rows(found: dict[str, Any]) -> list[list[str]]:
    """A row per run."""
    made = []
    for name, one in figures(found).items():
        sent = found[name]["narrowed"]
        messages = f"{sent['narrowed']} of {sent['messages']}" if sent["messages"] else "-"
        made.append([
            name, messages, f"{one['final']:.4f}", f"{one['final_off']:+.2%}",
            f"{one['held_out']:.4f}", f"{one['held_out_off']:+.2%}",
        ])  # fmt: skip
    return made


def smoothed(losses: list[float], window: int = 50) -> list[tuple[float, float]]:
    """(step, mean loss of the steps before it) for a plot."""
    ends = range(window, len(losses) + 1, window)
    return [(float(end), sum(losses[end - window : end]) / window) for end in ends]


def train_run(
    run: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(RUNS)}. Default: all.")] = None,
    steps: Annotated[int, typer.Option(help="Of each run; at least 200.", min=200)] = 2000,
    gradients: Annotated[bool, typer.Option(help="Gradients only, and SGD: a page of its own.")] = False,
    world: Annotated[int, typer.Option(help="Ranks.")] = 4,
    codegen: Annotated[str, typer.Option(help="aot_eager, or inductor (compiles for minutes).")] = "aot_eager",
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = RESULTS,
) -> None:
    """Train a small transformer on the bytes of our pages with narrower messages, and compare losses."""
    names = chosen(run, RUNS, "run")
    names = [name for name in RUNS if name in {*names, BASE}]
    sizes = Sizes(codegen=codegen, gradients=gradients)
    found: dict[str, Any] = {}
    with Ranks(world) as ranks:
        for name in names:
            by_rank = ranks.run(train, name, sizes, steps, RATES[gradients], timeout=3600)
            found[name] = {**by_rank[0], "digest": [one["digest"] for one in by_rank]}
            Console(width=160).print(name, f"{sum(found[name]['losses'][-LAST:]) / LAST:.4f}", markup=False)
    table = markdown_table(_COLUMNS, rows(found))
    Console(width=160).print("\n".join(table), markup=False)
    data = {"figures": figures(found), "runs": {n: {**f, "losses": f["losses"][::10]} for n, f in found.items()}}
    body = _body(found, table, sizes, steps, world)
    page, title = ("train_gradients", "gradients") if gradients else ("train", "messages")
    write(page, f"Training with narrower {title}", body, data, _draw(found), folder=out)


def _body(found: dict[str, Any], table: list[str], sizes: Sizes, steps: int, world: int) -> list[str]:
    ways = ("FSDP, AdamW, weights and gradients", "every rank has all weights, SGD with momentum, gradients")
    lines = [
        f"A byte-level transformer of {_parameters(sizes):,} parameters on {world} gloo ranks, {steps} steps on pages "
        f"of this documentation: {ways[sizes.gradients]} narrowed in blocks of 128. All runs have the same weights at "
        f"the beginning and the same batches. The final loss is the mean over the last {LAST} steps and all ranks; "
        "held-out text is read with exact weights.",
        "",
        *table,
        "",
    ]
    alone, base = (found.get(name) for name in ("torch.compile alone", BASE))
    if alone and base:
        equal = alone["digest"] == base["digest"]
        lines += [f"Losses and weights of torch.compile alone and of ours without compression {_EQUAL[equal]}.", ""]
    return lines


#: Whether two runs are equal -> what the page says.
_EQUAL = {
    True: "are equal bit for bit, at every step and on all ranks",
    False: "are not equal bit for bit; presumably since torch's aot_eager decomposes fewer operators than our backend",
}


def _parameters(sizes: Sizes) -> int:
    return sum(p.numel() for p in Bytes(sizes).parameters())


def _draw(found: dict[str, Any]) -> Any:
    final = found[BASE]["losses"]

    def panels() -> dict[str, dict[str, list[tuple[float, float]]]]:
        lines = {name: smoothed(one["losses"]) for name, one in found.items() if RUNS[name] is not None}
        tail = max(1, len(final) // 100)
        return {"whole run": lines, "second half": {name: line[tail:] for name, line in lines.items()}}

    return lambda path: curves(path, panels(), "step", "loss (mean of 50 steps)", log_x=False)


_COLUMNS = ["messages", "narrowed", "final loss", "against none", "held-out loss", "against none"]
