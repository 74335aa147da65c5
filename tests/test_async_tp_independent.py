"""What is computed in parts along the batch: no part waits for a transfer of another one, in a training step."""

from __future__ import annotations

import pytest
import torch
import torch.fx
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import _torch
from inductor_passes.async_tp import selection
from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.models import LlamaConfig, cross_entropy, llama, llama_batch, tensor_parallel
from inductor_passes.problems.fx import build
from inductor_passes.report import Verdict
from inductor_passes.schedule.plan import plan
from tests.support.compiled import without_kernels
from tests.support.world import fake_world
from tests.test_async_tp_pass import link

CONFIG = LlamaConfig(vocab=64, dim=64, layers=2, heads=4, kv_heads=4, hidden=96, batch=8, seq=16)

PARTS = 4


class InParts(_torch.graph_pass_base()):  # type: ignore[misc]
    """Async TP, cut as a whole at these costs; keeps the starts of parts, each with those in front of it."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self.needed: list[dict[str, set[str]]] = []
        self.regions: list[float] = []
        self.steps_ns: list[int] = []

    def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
        if not GraphView(graph).collectives:
            return
        settings = PassConfig(verify="strict", memory_budget="unlimited")
        one = AsyncTpPass(mode="auto", parts=(PARTS,))
        report = run_passes(graph, [one], settings, self.profile).report.passes[0]
        assert any(d.verdict is Verdict.APPLIED for d in report.decisions), report
        self.regions.append(report.metrics["regions"])
        self.steps_ns.append(plan(build(GraphView(graph), self.profile).problem, None).makespan_ns)
        self.needed.append(needed(GraphView(graph)))

    def uuid(self) -> None:
        return None


def needed(view: GraphView) -> dict[str, set[str]]:
    """Starts that passes made, with those of them that must have been waited for, by data or by order."""
    before: dict[torch.fx.Node, set[torch.fx.Node]] = {node: {*node.all_input_nodes} for node in view.nodes}
    for earlier, later in view.ordering_edges():
        before[later].add(earlier)
    starts = {c.start for c in view.collectives if "_default" in c.start.name}
    reached: dict[torch.fx.Node, set[str]] = {}
    for node in view.nodes:
        reached[node] = {s.name for s in before[node] & starts}.union(*(reached[source] for source in before[node]))
    return {start.name: reached[start] for start in starts}


def test_a_part_waits_for_itself_alone() -> None:
    """Found by the emulated link: what is saved of a norm joins all parts, and each part's norm came behind it."""
    with fake_world(2), without_kernels():
        parts = InParts(link(100.0, 50_000.0))
        model = tensor_parallel(llama(CONFIG), init_device_mesh("cpu", (2,)), sequence_parallel=True)
        tokens, targets = llama_batch(CONFIG)
        compiled = torch.compile(model, options={"post_grad_custom_post_pass": parts})
        cross_entropy(compiled(tokens), targets).backward()
    assert len(parts.needed) == 2, "forward and backward"
    for found in parts.needed:
        chain = len(found) // PARTS
        assert chain >= 8, found
        # As many chains as parts, in which each start is behind those in front of it.
        assert sorted(map(len, found.values())) == sorted([*range(chain)] * PARTS), found


def test_fewer_longer_regions_where_the_graph_is_faster_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its price each region alone is better here; at every border all parts of one wait for each other."""
    steps = []
    for share in (selection.RIVAL, 2.0):
        monkeypatch.setattr(selection, "RIVAL", share)
        torch._dynamo.reset()
        with fake_world(2), without_kernels():
            parts = InParts(link(60.0, 1_000.0))
            model = tensor_parallel(llama(CONFIG), init_device_mesh("cpu", (2,)), sequence_parallel=True)
            tokens, _ = llama_batch(CONFIG)
            torch.compile(model, options={"post_grad_custom_post_pass": parts})(tokens)
        assert len(parts.regions) == 1, "forward"
        steps.append((parts.regions[0], parts.steps_ns[0]))
    (regions, step_ns), (alone, alone_ns) = steps
    assert regions < alone and step_ns < 0.95 * alone_ns
