"""Several saved views of one block are one block in backward, which backward's graph alone does not show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes import verify
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import partitioner
from inductor_passes.ir.ops import SAVED_BLOCK
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build
from inductor_passes.problems.graph_memory import mark_saved_blocks, mark_views_of_inputs
from inductor_passes.report import GraphReport
from inductor_passes.schedule.memory import profile
from inductor_passes.schedule.problem import INPUT, Problem
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.compiled import compiled_reports, without_kernels
from tests.support.graphs import GraphBuilder
from tests.support.models import LlamaConfig, llama, llama_batch
from tests.support.world import fake_world

GPU = CostProfile.default("cuda")
ATTENTION = LlamaConfig(layers=2, dim=64, hidden=96, vocab=64, batch=8, seq=64)


def two_graphs() -> tuple[GraphBuilder, GraphBuilder]:
    """A forward that saves two views of one product and another product, and a backward that reads them in turn."""
    forward, backward = GraphBuilder(), GraphBuilder()
    x, weight = forward.placeholder("primals_1", 4, 4), forward.placeholder("primals_2", 4, 4)
    product = forward.call(torch.ops.aten.mm.default, x, weight)
    turned = forward.call(torch.ops.aten.permute.default, product, [1, 0])
    part = forward.call(torch.ops.aten.slice.Tensor, product, 0, 0, 2)
    other = forward.call(torch.ops.aten.mm.default, x, product)
    view = forward.call(torch.ops.aten.permute.default, weight, [1, 0])
    forward.graph.output((other, turned, part, other, view))
    mine = [backward.placeholder(n.name, *n.meta["val"].shape) for n in (turned, part, other, view)]
    tangent = backward.placeholder("tangents_1", 4, 4)
    first = backward.call(torch.ops.aten.mm.default, mine[0], tangent)
    second = backward.call(torch.ops.aten.mm.default, mine[2], first)
    third = backward.call(torch.ops.aten.mm.default, mine[1], second)
    backward.graph.output((third,))
    return forward, backward


def test_views_of_one_block_live_as_long_as_the_last_of_them() -> None:
    forward, backward = two_graphs()
    mark_views_of_inputs(forward.graph, backward.graph)
    apart = profile(build(GraphView(backward.graph), GPU).problem)
    mark_saved_blocks(forward.graph, backward.graph)
    view = GraphView(backward.graph)
    turned, part, other, weight, _ = backward.graph.find_nodes(op="placeholder")
    assert view.storages.of(turned) == view.storages.of(part) != view.storages.of(other)
    assert view.storages.of(turned)[0].size_bytes == 64
    assert view.storages.of(weight) not in (view.storages.of(turned), view.storages.of(other))
    problem = build(view, GPU).problem
    blocks = {s.name: (s.size_bytes, s.readers) for s in problem.storages if s.producer == INPUT and not s.pinned}
    assert blocks == {turned.name: (64, (0, 2)), other.name: (64, (1,))}
    # Callers' tangent and weight, three blocks of 64 bytes, and results: before, the slice counted for itself.
    assert profile(problem) == [320, 384, 288]
    assert apart == [352, 352, 256]
    # The verifier's own replay.
    freed = [turned.name, part.name, other.name]
    assert verify.peak_bytes(backward.graph, donated=freed) == 384


def own_bytes(nodes: list[torch.fx.Node]) -> int:
    """Bytes of values by the storages of their fake tensors."""
    storages = [n.meta["val"].untyped_storage() for n in nodes]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def test_attention_saves_its_result_once() -> None:
    """Found: attention's result is saved as attention's backward and as the product behind it read it."""
    found = []
    original = partitioner.Separation._split

    def split(self: partitioner.Separation, *args: Any) -> partitioner.Split:
        both = original(self, *args)
        saved = {n.name: n for n in both[0].graph.output_node().all_input_nodes}
        mine = [n for n in both[1].graph.find_nodes(op="placeholder") if not str(n.target).startswith(("prim", "tang"))]
        problem = build(GraphView(both[1].graph), GPU).problem
        counted = sum(s.size_bytes for s in problem.storages if s.producer == INPUT and not s.pinned)
        alone = sum(n.meta["val"].untyped_storage().nbytes() for n in mine)
        found.append((counted, own_bytes([saved[str(n.target)] for n in mine]), alone))
        return both

    with fake_world(2), mock.patch.object(partitioner.Separation, "_split", split):
        model = simple_fsdp(llama(ATTENTION), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        compiled_reports(model, llama_batch(ATTENTION)[0], memory_budget="0", bucket="off")
    ((counted, real, alone),) = found
    assert counted == real == alone - ATTENTION.layers * 8 * 64 * 64 * 4


class Unrolled(nn.Module):
    """A recurrent cell: its weight's gradient needs each step's part of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            h = torch.tanh(self.cell(x[:, step]) + h)
        return h.sum()


def test_views_of_an_input_are_the_input() -> None:
    """Found: each saved view of an input counted as all of it; the peak grew with the square of the number of steps."""
    steps = 24
    x = torch.randn(64, steps, 64)
    with fake_world(2), without_kernels():
        model = simple_fsdp(Unrolled(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        _, backward = compiled_reports(model, x, memory_budget="unlimited", bucket="off")
    # The input, what each step made, and less than three more of these for what is at hand.
    (peak,) = {s.peak_before_bytes for s in backward.schedules if s.level == "fx"}
    assert 2 * x.nbytes <= peak < 2 * x.nbytes * (1 + 3 / steps) + 3 * 4 * 64 * 64


class Products(nn.Module):
    """Three products of one size are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 128, bias=False)
        self.narrow = nn.Linear(128, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.narrow(self.wide(x).sin())
        return x


def kernels_of_backward(folder: Path, together: int) -> tuple[Problem, list[GraphReport]]:
    """The problem of backward's kernels when so many of the saved products are said to be one block."""
    torch._dynamo.reset()
    original = partitioner.Separation._split

    def split(self: partitioner.Separation, *args: Any) -> partitioner.Split:
        both = original(self, *args)
        products = [n for n in both[1].graph.find_nodes(op="placeholder") if n.name.startswith("mm")]
        for node in products[:together]:
            node.meta[SAVED_BLOCK] = (products[0].name, 2**20)
        return both

    with mock.patch.object(partitioner.Separation, "_split", split), fake_world(2), without_kernels():
        model = simple_fsdp(Products(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        options = inductor_passes.options(memory_budget="0", dump_problem=str(folder), bucket="off")
        # What is noted is no part of the key of a cache.
        with torch._inductor.config.patch(force_disable_caches=True), collect(what_if=False) as reports:
            compiled = torch.compile(lambda x: model(x).square().mean(), fullgraph=True, options=options)
            compiled(torch.randn(1024, 32)).backward()
    (path,) = folder.glob("*backward*.json")
    return Problem.from_json(json.loads(path.read_text())), list(reports)


def test_kernels_hold_a_block_until_its_last_reader(tmp_path: Path) -> None:
    apart, _ = kernels_of_backward(tmp_path / "apart", 0)
    joined, reports = kernels_of_backward(tmp_path / "joined", 2)
    blocks = [
        {s.name: s for s in p.storages if s.name.startswith("mm") and s.producer == INPUT} for p in (apart, joined)
    ]
    assert [len(b) for b in blocks] == [3, 2] and set(blocks[1]) < set(blocks[0])
    (gone,) = set(blocks[0]) - set(blocks[1])
    (one,) = (s for s in blocks[1].values() if s.size_bytes == 2**20)
    assert one.readers == tuple(sorted({*blocks[0][one.name].readers, *blocks[0][gone].readers}))
    # The verifier's replay knows it, too.
    assert not any(p.findings or p.rolled_back for r in reports for p in r.passes)
