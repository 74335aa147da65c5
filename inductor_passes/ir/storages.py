"""Which nodes share memory, how large it is, who writes it.

Aliasing is derived from operator schemas rather than from fake tensors' storages: passes replace fake tensors freely,
schemas do not lie. ``wait_tensor`` returns its input's memory although its schema does not say so, and so does what
receives from another rank; ``getitem`` on the result of a multi-output op selects one of its outputs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import ops


@dataclass(slots=True, eq=False)
class FxStorage:
    """A block of memory in an FX graph.

    Attributes:
        producer: the node that brings it to life.
        size_bytes: size by hint; None when a symbolic size has no hint.
        members: nodes whose value lives in it, the producer first, in graph order.
        writers: nodes other than the producer that write to it.
    """

    producer: torch.fx.Node
    size_bytes: int | None
    members: list[torch.fx.Node] = field(default_factory=list)
    writers: list[torch.fx.Node] = field(default_factory=list)


class Storages:
    """Storage of every node of a graph; O(nodes + edges) to build.

    A node can live in several storages: a multi-output op owns one per output, and a list-returning view shares all
    of its inputs' memory.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._of: dict[torch.fx.Node, tuple[FxStorage, ...]] = {}
        self._outputs: dict[torch.fx.Node, list[tuple[FxStorage, ...]]] = {}
        self._attributes: dict[str, tuple[FxStorage, ...]] = {}
        self.all: list[FxStorage] = []
        for node in graph.nodes:
            self._add(node)
            for written in ops.mutated_inputs(node):
                for storage in self._of.get(written, ()):
                    storage.writers.append(node)

    def of(self, node: torch.fx.Node) -> tuple[FxStorage, ...]:
        """The storages that the node's value lives in; empty for values that are no tensors."""
        return self._of.get(node, ())

    def _new(self, node: torch.fx.Node, tensor: torch.Tensor) -> FxStorage:
        storage = FxStorage(node, _torch.storage_bytes(tensor))
        self.all.append(storage)
        return storage

    def _add(self, node: torch.fx.Node) -> None:
        if node.op == "output":
            return
        shared = self._shared_inputs(node)
        if shared is not None:
            storages: list[FxStorage] = []
            for source in shared:
                storages.extend(s for s in self._of.get(source, ()) if s not in storages)
            if len(shared) == 1 and shared[0] in self._outputs:
                self._outputs[node] = self._outputs[shared[0]]
            elif ops.collective_kind(node) and isinstance(node.meta.get("val"), (list, tuple)):
                # A coalesced collective in place: every result is the operand at its position.
                self._outputs[node] = [self._of.get(source, ()) for source in shared]
            self._set(node, tuple(storages))
            return
        if node.target is operator.getitem:
            source, index = node.args[0], node.args[1]
            assert isinstance(source, torch.fx.Node)
            outputs = self._outputs.get(source)
            if outputs is not None and isinstance(index, int) and -len(outputs) <= index < len(outputs):
                self._set(node, outputs[index])
            elif source in self._of:
                self._set(node, self._of[source])
            elif isinstance(node.meta.get("val"), torch.Tensor):
                # an element of a dict, e.g. of a functional Triton kernel's results
                self._set(node, (self._new(node, node.meta["val"]),))
            return
        if node.op == "get_attr" and str(node.target) in self._attributes:
            self._set(node, self._attributes[str(node.target)])
            return
        value = node.meta.get("val")
        if ops.is_transfer(node):
            self._add_transfer(node)
        elif isinstance(value, torch.Tensor):
            self._set(node, (self._new(node, value),))
            if node.op == "get_attr":
                self._attributes[str(node.target)] = self._of[node]
        elif isinstance(value, (list, tuple)):
            outputs = [
                (self._new(node, v),) if isinstance(v, torch.Tensor) else () for v in value
            ]
            self._outputs[node] = outputs
            self._set(node, tuple(s for out in outputs for s in out))

    def _add_transfer(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        outputs: list[tuple[FxStorage, ...]] = []
        for buffer, one in zip(ops.received_into(node), values):
            if buffer is not None:
                outputs.append(self._of.get(buffer, ()))
            else:
                outputs.append((self._new(node, one),) if isinstance(one, torch.Tensor) else ())
        if values is value:
            self._outputs[node] = outputs
        self._set(node, tuple(s for out in outputs for s in out))

    def _set(self, node: torch.fx.Node, storages: tuple[FxStorage, ...]) -> None:
        self._of[node] = storages
        for storage in storages:
            storage.members.append(node)

    def _shared_inputs(self, node: torch.fx.Node) -> list[torch.fx.Node] | None:
        """Inputs whose memory the node returns, None when it returns its own."""
        if node.op != "call_function" or not _torch.is_op(node.target):
            return None
        arguments = _torch.op_arguments(node)
        if ops.is_wait(node):
            return _inputs(next(iter(arguments.values()), None))
        names = _torch.aliased_argument_names(node.target)
        if not names:
            return None
        return [n for name in names for n in _inputs(arguments.get(name))] or None


def _inputs(value: object) -> list[torch.fx.Node]:
    if isinstance(value, torch.fx.Node):
        return [value]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in _inputs(v)]
    return []
