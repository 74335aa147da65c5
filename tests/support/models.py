"""The graphs that torch.compile makes of the package's models, caught for tests.

``capture_graphs`` gives the forward and backward graphs as a compiler backend receives them, also under a fake world,
which needs no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from inductor_passes.models import (
    Llama,
    LlamaConfig,
    MLPConfig,
    MoE,
    MoEConfig,
    RMSNorm,
    cross_entropy,
    llama,
    llama_batch,
    mlp,
    mlp_batch,
    moe,
    moe_batch,
    tensor_parallel,
)
from tests.support.world import fake_world

__all__ = [
    "Graphs",
    "Llama",
    "LlamaConfig",
    "MLPConfig",
    "MoE",
    "MoEConfig",
    "RMSNorm",
    "WorldGather",
    "capture_fake",
    "capture_graphs",
    "collectives",
    "cross_entropy",
    "llama",
    "llama_batch",
    "mlp",
    "mlp_batch",
    "moe",
    "moe_batch",
    "recording_backend",
    "tensor_parallel",
]


class WorldGather(torch.autograd.Function):
    """All-gather of all ranks along the first dimension, reduce-scatter as its backward."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(weight, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return funcol.reduce_scatter_tensor(gradient, "sum", 0, dist.group.WORLD)


@dataclass
class Graphs:
    """What a backend received: per compiled frame the joint graph before partitioning, forward and backward.

    ``inference`` holds graphs that were compiled without gradients.
    """

    joint: list[torch.fx.GraphModule] = field(default_factory=list)
    forward: list[torch.fx.GraphModule] = field(default_factory=list)
    backward: list[torch.fx.GraphModule] = field(default_factory=list)
    inference: list[torch.fx.GraphModule] = field(default_factory=list)


def recording_backend(graphs: Graphs, *, decompose: bool = True) -> Callable[..., Any]:
    """A torch.compile backend that runs eagerly after AOTAutograd and writes the graphs it saw into ``graphs``.

    ``decompose`` applies Inductor's decompositions, so that graphs look as Inductor's passes see them.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def record(into: list[torch.fx.GraphModule]) -> Callable[..., Any]:
        def compiler(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            into.append(gm)
            return make_boxed_func(gm.forward)

        return compiler

    def partition(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        # The partitioner rewrites its input; a shallow copy of the graph keeps the nodes' meta as they are now.
        joint = torch.fx.Graph()
        output = joint.graph_copy(gm.graph, {})
        joint.output(output)
        graphs.joint.append(torch.fx.GraphModule(gm, joint))
        return min_cut_rematerialization_partition(gm, *args, **kwargs)

    return aot_autograd(
        fw_compiler=record(graphs.forward),
        bw_compiler=record(graphs.backward),
        inference_compiler=record(graphs.inference),
        partition_fn=partition,
        decompositions=select_decomp_table() if decompose else None,
    )


def capture_graphs(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    decompose: bool = True,
    dynamic: bool | None = False,
) -> Graphs:
    """The graphs of one step of ``model`` (fullgraph), forward and backward from ``loss(output)``.

    ``loss`` defaults to the sum of the output. The step really runs, under whatever process group there is. Sizes are
    numbers unless ``dynamic`` says otherwise: also where this process compiled the same code with other sizes before.
    """
    graphs = Graphs()
    compiled = torch.compile(
        model, backend=recording_backend(graphs, decompose=decompose), fullgraph=True, dynamic=dynamic
    )
    output = compiled(*inputs)
    value = output.sum() if loss is None else loss(output)
    if value.requires_grad:
        value.backward()
    return graphs


def capture_fake(
    build: Callable[[], tuple[Callable[..., Any], Sequence[Any]]],
    world_size: int,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **options: Any,
) -> Graphs:
    """:func:`capture_graphs` in a fake world: ``build()`` runs inside and returns (model, inputs)."""
    with fake_world(world_size):
        model, inputs = build()
        return capture_graphs(model, inputs, loss, **options)


def collectives(gm: torch.fx.GraphModule) -> list[str]:
    """Short names of a graph's collectives in graph order, waits left out."""
    return [
        node.target._opname
        for node in gm.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "_c10d_functional"
        and not node.target._opname.startswith("wait_tensor")
    ]
