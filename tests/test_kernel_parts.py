"""Inductor's fusion makes no kernel of two parts of async TP: it would wait for the transfers of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes import _torch
from inductor_passes.engine import hooks
from inductor_passes.ir.parts import mark_part, part_of
from inductor_passes.models import LlamaConfig, cross_entropy, llama, llama_batch, tensor_parallel
from inductor_passes.problems import kernel_parts, kernel_waits
from inductor_passes.trace.collector import collect
from tests.support.compiled import without_kernels
from tests.support.world import fake_world
from tests.test_async_tp_pass import link

CONFIG = LlamaConfig(vocab=64, dim=64, layers=2, heads=4, kv_heads=4, hidden=96, batch=8, seq=16)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The kernels of all graphs, fused."""
    found: list[Any] = []
    ordered = hooks._ordered

    def seen(nodes: list[Any], compilation: Any) -> list[Any]:
        found.extend(nodes)
        return ordered(nodes, compilation)

    monkeypatch.setattr(hooks, "_ordered", seen)
    yield found


def compiled(tmp_path: Path) -> None:
    """Forward and backward of a sequence-parallel model on a link on which async TP cuts all of it."""
    profile = tmp_path / "profile.json"
    link(100.0, 50_000.0).save(profile)
    options = inductor_passes.options(
        async_tp="auto", async_tp_parts="4", cost_profile=str(profile), memory_budget="unlimited", verify="strict",
        inductor={"fx_graph_cache": False},
    )  # fmt: skip
    with fake_world(2), without_kernels(), collect(what_if=False) as reports:
        model = tensor_parallel(llama(CONFIG), init_device_mesh("cpu", (2,)), sequence_parallel=True)
        tokens, targets = llama_batch(CONFIG)
        cross_entropy(torch.compile(model, options=options)(tokens), targets).backward()
    assert len(reports) == 2
    assert all(report.schedules[-1].level == "scheduler" for report in reports), "kernels were ordered"


def mixed(kernels: list[Any]) -> list[str]:
    """Fused kernels that compute something of several parts."""
    found = []
    for kernel in kernels:
        parts = {part for origin in _torch.snode_origins(kernel) if (part := part_of(origin)) is not None}
        if _torch.snode_kind(kernel) == "fused" and len(parts) > 1 and not _only_joins(kernel):
            found.append(_torch.snode_name(kernel))
    return found


def _only_joins(kernel: Any) -> bool:
    """Whether it only writes what is read when all parts are there."""
    readers = {user for origin in _torch.snode_origins(kernel) for user in origin.users}
    return not any(part_of(reader) for reader in readers)


def test_no_kernel_computes_two_parts(
    kernels: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(tmp_path)
    assert len(kernels) > 200 and mixed(kernels) == []
    kernels.clear()
    torch._dynamo.reset()
    monkeypatch.setattr(kernel_waits, "apart", lambda nodes, behind: [])
    compiled(tmp_path)
    assert len(mixed(kernels)) >= 10, "Inductor fuses parts by itself"


class Node:
    """A node of a scheduler: one FX node, what it reads, and what comes in front of it."""

    def __init__(self, kind: str, origin: torch.fx.Node, *reads: Node) -> None:
        self.kind, self.origin, self.reads = kind, origin, reads
        self.needs: set[Node] = {*reads}.union(*(one.needs for one in reads))


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of Inductor's nodes is answered by :class:`Node`."""
    for name, answer in {
        "snode_kind": lambda node: node.kind,
        "snode_origins": lambda node: [node.origin],
        "snode_needs": lambda node, other: other in node.needs,
        "snode_output_names": lambda node: [node.origin.name],
        "snode_dependencies": lambda node: [(one.origin.name, False) for one in node.reads],
    }.items():
        monkeypatch.setattr(_torch, name, answer)


def test_what_else_is_kept_in_order_comes_first(scheduler: None) -> None:
    """Two parts of one message: the second kernel is behind the first start, unless something needs it in front."""
    graph = torch.fx.Graph()
    nodes: list[Node] = []
    # Both kernels stand in front of both starts, so nothing but the order of the starts tells.
    for kind, part in (("fused", 0), ("fused", 1), ("start", 0), ("start", 1)):
        origin = graph.placeholder(f"{kind}{part}")
        mark_part(origin, "message", part)
        nodes.append(Node(kind, origin, *([nodes[part]] if kind == "start" else [])))
    kernel, start = nodes[1], nodes[2]
    assert kernel_parts.apart(nodes, []) == [(start, kernel)]
    assert kernel_parts.apart(nodes, [(nodes[0], kernel)]) == [(start, kernel)]
    assert kernel_parts.apart(nodes, [(kernel, nodes[0])]) == []
    assert kernel_parts.apart([Node("fused", graph.placeholder("other"))], []) == []


def test_a_part_may_wait_for_something_while_the_others_go_on(scheduler: None) -> None:
    """Found: behind a long region the second part stood still until the first one had sent its result.

    Two parts, each: a kernel, a matmul of what it computes, a kernel, and the message.
    """
    graph = torch.fx.Graph()
    nodes: list[Node] = []
    for stage, kind in enumerate(("fused", "extern", "fused", "start")):
        for part in range(2):
            origin = graph.placeholder(f"stage{stage}_{part}")
            mark_part(origin, "region", part)
            nodes.append(Node(kind, origin, *(nodes[-2:-1] if stage else [])))
    _, second, matmul, _, _, last, start, _ = nodes
    assert kernel_parts.apart(nodes, []) == [(matmul, second), (start, last)]
