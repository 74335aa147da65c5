"""Graphs made by hand: the one builder that writes nodes with their fake tensors.

What a family of tests says often (whole-group collectives, books on memory, random steps) it adds in a class of its
own; how a node gets its value is decided here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the collectives
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class GraphBuilder:
    """An FX graph under construction; every method returns the node it made, with its fake tensor in ``meta["val"]``.

    Args:
        source: each call is a line of this file in its node's stack trace; none without.
    """

    def __init__(self, source: str = "") -> None:
        self.graph = torch.fx.Graph()
        # A loop's values need an environment of shapes, which Inductor's graphs always have.
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        self.source = source
        self.line = 0

    def placeholder(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.fx.Node:
        """An input of the graph; it stands before all calls, whenever it is made."""
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), self.graph._root)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        # A simulation of ranks that is under way would make a tensor for each.
        with _disable_current_modes(), self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fakes, named = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with _disable_current_modes(), self.mode:
            node.meta["val"] = target(*fakes, **named)
        if self.source:
            self.line += 1
            node.meta["stack_trace"] = f'  File "{self.source}", line {self.line}, in forward\n    ...'
        return node
