"""Random draws among generated kernels: their order is one, whatever the plan and the memory budget."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._inductor.fx_passes.replace_random import replace_random_passes
from torch._inductor.virtualized import V
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.hooks import FusionHook
from inductor_passes.problems.kernels import build
from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.inductor_orders import lower, random_order
from tests.support.models import capture_graphs
from tests.support.world import fake_world


class Noisy(nn.Module):
    """Layers that draw by operators with one result and with several; only the generator keeps them in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for layer in self.layers:
            heads = layer(x).view(2, 8, 2, 8).transpose(1, 2)
            attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)[0]
            found += [torch.rand(4, 4), nn.functional.dropout(x, 0.5), attended, nn.functional.dropout(layer(x), 0.2)]
        return torch.stack([one.sum() for one in found])


@pytest.mark.parametrize("held", [False, True], ids=["as inductor has them", "held"])
@pytest.mark.parametrize("fallback", [False, True], ids=["seeds", "fallback_random"])
def test_draws_of_any_legal_order_are_the_same(fallback: bool, held: bool) -> None:
    """What draws is known from the FX graph; neither the plan of kernels nor its verifier is asked.

    Inductor makes one draw of seeds of all that it lowers itself, and moves draws to save memory; torch 2.13 keeps
    those of ``fallback_random`` in the program's order. Our hook before fusion keeps all of them.
    """
    torch._dynamo.reset()
    rng = random.Random(2)
    seen: list[list[str]] = []
    settings = {"fallback_random": fallback} | ({"_pre_fusion_custom_pass": FusionHook(PassConfig())} if held else {})
    with fake_world(2), torch._inductor.config.patch(settings):
        model = simple_fsdp(Noisy(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        captured = capture_graphs(model, [torch.randn(16, 16)], None)
        (graph,) = captured.forward
        with V.set_fake_mode(detect_fake_mode([n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")])):
            replace_random_passes(graph)
        for node in graph.graph.nodes:
            if "attention" in str(node.target):
                # On a CPU it cannot be run with dropout, so it gets that when it is not run any more.
                node.args = (*node.args, 0.1)
        names = [n.name for n in graph.graph.nodes if _torch.is_seeded_random(n.target)]
        assert len(names) == (12 if fallback else 4)

        def drawn(node: Any) -> list[str]:
            # Inductor works on a copy of the graph, and wraps some of these nodes.
            calls = _torch.snode_kind(node) == "extern" and _torch.snode_op(node) is not None
            return [o.name for o in _torch.snode_origins(node) if calls and o.name in names]

        def inspect(nodes: list[Any]) -> list[Any]:
            problem = build(nodes, CostProfile.default("cpu"), backward=False).problem
            for order in (range(len(nodes)), *(random_order(problem, rng) for _ in range(20))):
                seen.append([name for i in order for name in drawn(nodes[i])])
            return nodes

        lower(graph, inspect)
    assert len(seen) == 21 and sorted(seen[0]) == sorted(names)
    assert all(one == seen[0] for one in seen), seen
    assert seen[0] == names or not held
