"""Making nodes one after the other, each with its fake tensor and the origin of the node it stands for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import parameters
from inductor_passes.ir.layouts import as_copy
from inductor_passes.rewriting.numbers import Numbers
from inductor_passes.verify.messages import CUT_KEY

#: Dtypes whose sums are taken in float32.
NARROW = (torch.float16, torch.bfloat16)

#: Facts about a node's origin that its replacement inherits: where it was written, the user's annotations, what
#: activation checkpointing and the partitioner were told.
RECOMPUTE_META = ("recompute", "ac_graph_id", "partitioner_tag")
INHERITED_META = ("stack_trace", "custom", "nn_module_stack", "seq_nr", parameters.META_KEY, *RECOMPUTE_META)


class Emitter:
    """Appends nodes to a graph behind a cursor.

    Attributes:
        cursor: the node behind which the next one goes.
        made: every node made so far, in order.
    """

    def __init__(self, graph: torch.fx.Graph, cursor: torch.fx.Node) -> None:
        self._graph = graph
        self._origin: torch.fx.Node | None = None
        self._numbers: Numbers | None = None
        self._sizes: dict[tuple[Any, ...], torch.fx.Node] = {}
        self.cursor = cursor
        self.made: list[torch.fx.Node] = []

    @contextlib.contextmanager
    def standing_for(self, origin: torch.fx.Node) -> Any:
        """Nodes made inside inherit what is known about ``origin``."""
        before, self._origin = self._origin, origin
        try:
            yield
        finally:
            self._origin = before

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A call to an operator; its fake tensor is what the operator returns for the arguments' fake tensors.

        Symbolic sizes among the arguments become nodes that compute them.
        """
        return self._call(target, args, kwargs, target)

    def cut(self, tensor: torch.fx.Node, dim: int, first: Any, end: Any) -> torch.fx.Node:
        """A slice by numbers that are the same on every rank and no part of the program."""
        node = self.call(torch.ops.aten.slice.Tensor, tensor, dim, first, end)
        node.meta[CUT_KEY] = True
        return node

    def call_like(self, meaning: Callable[..., Any], target: Any, *args: Any) -> torch.fx.Node:
        """:meth:`call` of an operator of ours, of which ``meaning`` says what it returns: to ask it takes longer."""
        return self._call(target, args, {}, meaning)

    def _call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meaning: Callable[..., Any]
    ) -> torch.fx.Node:
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), self._number)
        with self._graph.inserting_after(self.cursor):
            node = self._graph.call_function(target, args, kwargs)
        fakes = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        tensor = _first_tensor([n.meta["val"] for n in node.all_input_nodes] or [self._origin_value()])

        def ask() -> Any:
            with _torch.without_guards(tensor):
                return meaning(*fakes[0], **fakes[1])

        node.meta["val"] = _torch.fake_result(tensor, fakes[0], fakes[1], target, ask)
        if self._origin is not None:
            for key in INHERITED_META:
                if key in self._origin.meta:
                    node.meta[key] = self._origin.meta[key]
            if node.meta.get("custom"):
                # What is made anew does not do step by step what a call of the program does.
                node.meta["custom"] = as_copy(node.meta["custom"])
        self.cursor = node
        self.made.append(node)
        return node

    def view(self, node: torch.fx.Node, shape: list[int]) -> torch.fx.Node:
        """The contiguous ``node`` with another shape; the node itself when it has that shape."""
        if _torch.same_sizes(node.meta["val"].shape, shape):
            return node
        return self.call(torch.ops.aten.view.default, node, shape)

    def _number(self, value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        if self._numbers is None:
            self._numbers = Numbers(self._graph.nodes)
        return self._numbers.make(value, self._size)

    def _size(self, target: Any, *args: Any) -> torch.fx.Node:
        """A node that computes a size, made once for all that come after it."""
        key = (target, *args)
        known = self._sizes.get(key)
        if known is not None and (known is self.cursor or known < self.cursor):
            return known
        with self._graph.inserting_after(self.cursor):
            node = self._graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        self.cursor = self._sizes[key] = node
        self.made.append(node)
        return node

    def size(self, value: torch.SymInt) -> torch.fx.Node:
        """A node that computes a symbolic size.

        Raises:
            ValueError: it does not follow from the sizes of the graph's inputs.
        """
        found = self._number(value)
        assert isinstance(found, torch.fx.Node), "a symbolic size is no constant"
        return found

    def place(self, node: torch.fx.Node) -> None:
        """Move an existing node behind the cursor."""
        if self.cursor.next is not node:
            self.cursor.append(node)
        self.cursor = node

    def _origin_value(self) -> Any:
        if self._origin is None:
            raise ValueError("an operator without tensor arguments needs an origin to take its fake mode from")
        return self._origin.meta["val"]


def _first_tensor(values: Sequence[Any]) -> torch.Tensor:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)):
            return _first_tensor(value)
    raise TypeError("expected a fake tensor among the arguments")
