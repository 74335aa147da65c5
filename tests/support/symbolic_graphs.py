"""Hand-made graphs whose rows are only known at run time, and a way to run them at any size."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.bucket_graphs import Program, aten, c10d, run_all_ranks


class SymbolicProgram(Program):
    """A program whose inputs have a symbolic first dimension; ``sizes`` are their rows in the example.

    Args:
        symbolic: False: the same program with the sizes of the example.
    """

    def __init__(self, symbolic: bool = True) -> None:
        super().__init__()
        self.symbolic = symbolic
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, static_shapes=not symbolic)

    def rows(self, rows: int, *rest: int, dtype: torch.dtype = torch.float32, multiple: int = 1) -> torch.fx.Node:
        """An input whose rows are a symbol of their own, known to be a multiple of a number."""
        node = self.input(1, *rest, dtype=dtype)
        with _disable_current_modes():
            example = torch.empty(rows, *rest, dtype=dtype)
            kinds = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * len(rest)]
            context = StatelessSymbolicContext(dynamic_sizes=kinds) if self.symbolic else None
            fake = self.mode.from_tensor(example, source=ConstantSource(node.name), symbolic_context=context)
            node.meta["val"] = fake
            # The guard that a program has which asserts it.
            assert fake.shape[0] % multiple == 0
        return node

    def exchange(self, x: torch.fx.Node, group: str, ranks: int) -> torch.fx.Node:
        """all_to_all in equal parts, which the graph computes."""
        size: Any = x.meta["val"].shape[0] // ranks
        if self.symbolic:
            rows = self.number(aten.sym_size.int, x, 0)
            size = self.number(operator.floordiv, rows, ranks)
        return self.wait(self.call(c10d.all_to_all_single.default, x, [size] * ranks, [size] * ranks, group))

    def number(self, target: Any, *args: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node


def at_sizes(gm: torch.fx.GraphModule, rows: Sequence[int], ranks: int) -> list[list[torch.Tensor]]:
    """Outputs by output and rank, with as many rows as given per input."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for count, node in zip(rows, gm.graph.find_nodes(op="placeholder"), strict=True):
        fake = node.meta["val"]
        shape = (count, *map(int, fake.shape[1:]))
        values = [torch.randn(shape, generator=generator) * 8 for _ in range(ranks)]
        inputs.append([value.to(fake.dtype) for value in values])
    return run_all_ranks(gm, inputs)
