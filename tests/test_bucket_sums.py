"""Merged messages leave the order of sums alone: Inductor's C++ code adds in another one where it cannot vectorise."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.rewriting.merge import merge
from inductor_passes.rewriting.sums import Read, changes_order, reads
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.graphs import GraphBuilder, aten, c10d
from tests.support.joint_kernels import kernels_together
from tests.support.ranks import Ranks
from tests.support.world import fake_world

CPU = torch.device("cpu")
WIDTHS = (7, 24, 50, 64, 96, 100, 130, 256)


class Block(nn.Module):
    """One of several layers whose weights end up inside of sums."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.RMSNorm(dim) if kind == "rms" else nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        self.gate = nn.Parameter(torch.linspace(-1, 1, dim).unsqueeze(1))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.kind == "gated":
            return h + torch.softmax(self.linear(h) * self.scale, -1) * h
        if self.kind == "rows":
            h = h * self.linear.weight.sum(0) + self.linear.bias.softmax(0)
        if self.kind == "bent":
            return h + torch.tanh(h * self.scale + self.linear.bias)
        weight = self.linear.weight
        if self.kind == "soft":
            weight = torch.tanh(weight * 3) * torch.sigmoid(self.gate)
            h = nn.functional.linear(h, weight) + h
        if self.kind == "unit":
            h = nn.functional.linear(h, self.gate * weight / weight.norm(dim=1, keepdim=True)) + h
        return h + torch.relu(self.linear(self.norm(h))) * self.scale


class Model(nn.Module):
    """Tokens through blocks; the table is tied to the output or not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        dim, words = rng.choice(WIDTHS), rng.choice([101, 128, 501])
        drawn = ["layer", "rms", "gated", "rows"] if seed < 3 else ["bent", "soft", "unit", "layer"]
        kinds = [rng.choice(drawn) for _ in range(rng.randint(2, 4))]
        self.table = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(Block(kind, dim) for kind in kinds)
        self.out = nn.Linear(dim, words, bias=False)
        if rng.random() < 0.5:
            self.out.weight = self.table.weight
        self.words = words

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.table(tokens)
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.out(h).flatten(0, 1), tokens.flatten())


@kernels_together()
def step(rank: int, world: int, seed: int, settings: dict[str, str] | None) -> tuple[list[torch.Tensor], int]:
    """Loss and gradients, and how many messages were merged."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = simple_fsdp(Model(seed), init_device_mesh("cpu", (world,)))
    torch.manual_seed(seed + 1 + rank)
    tokens = torch.randint(0, model.words, (5, 33))
    options = None if settings is None else inductor_passes.options(**settings)
    with collect(what_if=False) as reports:
        loss = torch.compile(model, options=options)(tokens)
        loss.backward()
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    merged = sum(p.metrics.get("collectives_after", 0) < p.metrics.get("collectives_before", 0)
                 for r in reports for p in r.passes if p.name == "bucket")  # fmt: skip
    return [loss.detach(), *gradients], merged


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_gradients_keep_their_bits(seed: int, two_ranks: Ranks) -> None:
    """Found: a tied table of 96 columns, read by its rows in a LayerNorm, changed bits of every gradient.
    Weights of rows of unit length, and those that a ``tanh`` is taken of, did too."""
    plain = two_ranks.run(step, seed, None)
    ours = two_ranks.run(step, seed, {"memory_budget": "unlimited"})
    for (before, _), (after, merged) in zip(plain, ours, strict=True):
        assert merged == 2
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _gathered(widths: dict[str, int]) -> tuple[GraphBuilder, dict[str, torch.fx.Node]]:
    """Gathered vectors on two ranks, by name."""
    b = GraphBuilder()
    group = torch.distributed.group.WORLD.group_name
    starts = {
        name: b.call(c10d.all_gather_into_tensor.default, b.placeholder(name, width), 2, group)
        for name, width in widths.items()
    }
    return b, {name: b.call(c10d.wait_tensor.default, start) for name, start in starts.items()}


def test_who_reads_in_a_sum() -> None:
    with fake_world(2):
        names = ("summed", "moved", "multiplied", "looked_up", "handed_on", "bent", "clamped")
        b, waits = _gathered({name: 64 if name == "looked_up" else 50 for name in names})
        x, places = b.placeholder("x", 3, 100), b.placeholder("places", 3, dtype=torch.int64)
        total = b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, x, waits["summed"]), [1])
        scaled = b.call(aten.mul.Tensor, x, waits["moved"])
        weight = b.call(aten.view.default, waits["multiplied"], [100, 1])
        product = b.call(aten.mm.default, scaled, weight)
        rows = b.call(aten.index.Tensor, waits["looked_up"], [places])
        bent = b.call(aten.tanh.default, b.call(aten.mul.Tensor, x, waits["bent"]))
        clamped = b.call(aten.clamp.default, waits["clamped"], 0.0)
        b.graph.output((total, product, b.call(aten.sum.default, rows), waits["handed_on"], bent, clamped))
        found = reads(GraphView(b.graph))
    assert {name: found[wait] for name, wait in waits.items()} == {
        "summed": Read.SUMMED,
        "moved": Read.NOT_SUMMED,
        "multiplied": Read.NOT_SUMMED,
        "looked_up": Read.SUMMED_BY_INDEX,
        "handed_on": Read.NOT_SUMMED,
        "bent": Read.SUMMED,
        "clamped": Read.NOT_SUMMED,
    }


@pytest.mark.parametrize(
    ("read", "row", "device", "expected"),
    [
        (Read.SUMMED, 50, CPU, True),
        (Read.SUMMED, 128, CPU, False),
        (Read.SUMMED_BY_INDEX, 128, CPU, True),
        (Read.NOT_SUMMED, 50, CPU, False),
        (Read.SUMMED, 50, torch.device("cuda"), False),
    ],
)
def test_where_the_order_changes(read: Read, row: int, device: torch.device, expected: bool) -> None:
    assert changes_order(read, row, device) is expected


def test_members_of_several_dimensions_are_never_consecutive_behind_several_rows() -> None:
    assert changes_order(Read.SUMMED, 128, CPU, folded=True)
    assert not changes_order(Read.NOT_SUMMED, 128, CPU, folded=True)
    assert not changes_order(Read.SUMMED, 128, torch.device("cuda"), folded=True)


@pytest.mark.parametrize(("shape", "copied"), [((64,), 0), ((64, 1), 0), ((8, 8), 2)])
def test_a_copy_apart_of_members_of_several_dimensions(shape: tuple[int, ...], copied: int) -> None:
    """Two messages of one row per rank: a vector in it is read in one piece, a matrix is not."""
    with fake_world(2):
        b = GraphBuilder()
        group = torch.distributed.group.WORLD.group_name
        inputs = [b.placeholder(name, *shape) for name in "ab"]
        waits = [b.call(c10d.wait_tensor.default, b.call(c10d.all_gather_into_tensor.default, one, 2, group))
                 for one in inputs]  # fmt: skip
        b.graph.output(tuple(b.call(aten.tanh.default, wait) for wait in waits))
        view = GraphView(b.graph)
        merge(b.graph, view, [list(view.collectives)], keep_sums=True)
        called = [getattr(n.target, "_opname", "") for n in b.graph.nodes]
    assert called.count("unpack") == copied and called.count("clone") == 2 - copied


@pytest.mark.parametrize("keep_sums", [False, True])
def test_a_copy_apart_only_where_a_sum_reads(keep_sums: bool) -> None:
    with fake_world(2):
        b, waits = _gathered({"summed": 50, "moved": 50})
        x = b.placeholder("x", 3, 100)
        total = b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, x, waits["summed"]), [1])
        b.graph.output((total, b.call(aten.mul.Tensor, x, waits["moved"])))
        view = GraphView(b.graph)
        merge(b.graph, view, [list(view.collectives)], keep_sums=keep_sums)
        b.graph.lint()
        called = [getattr(n.target, "_opname", "") for n in b.graph.nodes]
    assert called.count("unpack") == int(keep_sums) and called.count("clone") == 2 - int(keep_sums)
