"""Random training-like graphs: gathered parameters of many sizes, matmuls, reduced gradients, duplicates, nesting.

Unlike the programs of the fuzzer these can overlap, and their memory matters: budgets and passes make a difference.
"""

from __future__ import annotations

import random

import torch
import torch.fx
from torch.distributed.device_mesh import DeviceMesh

from tests.support.graphs import GraphBuilder, aten, c10d

ROWS = 16


class _Layers(GraphBuilder):
    def __init__(self, rng: random.Random, mesh: DeviceMesh) -> None:
        super().__init__()
        self.rng = rng
        self.groups = [(mesh.get_group(d).group_name, mesh.size(d)) for d in range(mesh.ndim)]
        self.count = 0

    def wait(self, start: torch.fx.Node) -> torch.fx.Node:
        return self.call(c10d.wait_tensor.default, start)

    def gather(self, shard: torch.fx.Node, dims: list[int]) -> torch.fx.Node:
        for d in dims:
            name, size = self.groups[d]
            shard = self.wait(self.call(c10d.all_gather_into_tensor.default, shard, size, name))
        return shard

    def parameter(self, columns: int, dims: list[int]) -> torch.fx.Node:
        ranks = 1
        for d in dims:
            ranks *= self.groups[d][1]
        self.count += 1
        return self.placeholder(f"shard{self.count}", max(1, columns // ranks), ROWS)

    def scatter(self, gradient: torch.fx.Node, dim: int) -> torch.fx.Node:
        name, size = self.groups[dim]
        return self.wait(self.call(c10d.reduce_scatter_tensor.default, gradient, "sum", size, name))


def random_layers(seed: int, mesh: DeviceMesh) -> torch.fx.GraphModule:
    """A graph of 3 to 12 layers on a two-dimensional mesh; equal seeds give equal graphs."""
    rng = random.Random(seed)
    b = _Layers(rng, mesh)
    x = b.placeholder("x", ROWS, ROWS)
    results: list[torch.fx.Node] = []
    again: list[tuple[torch.fx.Node, list[int]]] = []
    pending: list[torch.fx.Node] = []
    for _ in range(rng.randint(3, 12)):
        dims = rng.choice([[0], [1], [1], [0, 1], [1, 0]])
        if again and rng.random() < 0.3:
            shard, dims = rng.choice(again)
        else:
            shard = b.parameter(8 * rng.choice([1, 2, 4, 16, 64]), dims)
            again.append((shard, dims))
        if rng.random() < 0.3:
            wide = b.gather(shard, dims)
            weight = b.call(torch.ops.prims.convert_element_type.default, wide, torch.bfloat16)
            weight = b.call(torch.ops.prims.convert_element_type.default, weight, torch.float32)
        else:
            weight = b.gather(shard, dims)
        hidden = b.call(aten.mm.default, x, b.call(aten.permute.default, weight, [1, 0]))
        x = b.call(aten.mm.default, b.call(aten.relu.default, hidden), weight)
        if rng.random() < 0.5:
            gradient = b.call(aten.mm.default, b.call(aten.permute.default, hidden, [1, 0]), x)
            pending.append(gradient)
        if pending and rng.random() < 0.6:
            gradient = pending.pop(rng.randrange(len(pending)))
            dim = rng.choice([0, 1])
            if gradient.meta["val"].shape[0] % b.groups[dim][1] == 0:
                results.append(b.scatter(gradient, dim))
        if rng.random() < 0.2:
            name, _ = b.groups[rng.choice([0, 1])]
            x = b.call(aten.add.Tensor, x, b.wait(b.call(c10d.all_reduce.default, x, "sum", name)))
    b.graph.output((x, *results))
    return torch.fx.GraphModule(torch.nn.Module(), b.graph)
