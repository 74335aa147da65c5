"""Which nodes share memory, how large it is, who writes it.

Aliasing is derived from operator schemas (``memory``) rather than from fake tensors' storages: passes replace fake
tensors freely. ``wait_tensor`` returns its input's memory although its schema does not say so, and so does what
receives from another rank; ``getitem`` selects one of several results, each of which may be memory of another input.
Of a backward's inputs its own graph does not show it: whoever saw forward has noted it (``ops.SAVED_BLOCK``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import memory, ops


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


#: Storages of a value: of a tensor those that it may live in, of a list or dict those of each element.
Place: TypeAlias = tuple[FxStorage, ...] | list["Place"] | dict[object, "Place"]


class Storages:
    """Storage of every node of a graph; O(nodes + edges) to build.

    A node can live in several storages: a multi-output op owns one per output, and what is not known to be one of
    several inputs counts as all of them.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._place: dict[torch.fx.Node, Place] = {}
        self._of: dict[torch.fx.Node, tuple[FxStorage, ...]] = {}
        self._attributes: dict[object, Place] = {}
        self._saved: dict[str, Place] = {}
        self.all: list[FxStorage] = []
        for node in graph.nodes:
            if node.op == "output":
                continue
            if node.op == "call_function" and self._is_plain(node):
                continue
            self._set(node, self._where(node))
            if node.op == "call_function" and _torch.op_name(node.target) in memory.REBINDING:
                self._join(self._of[node])
            for written in memory.mutated_inputs(node):
                for storage in self._of.get(written, ()):
                    storage.writers.append(node)

    def of(self, node: torch.fx.Node) -> tuple[FxStorage, ...]:
        """The storages that the node's value lives in; empty for values that are no tensors."""
        return self._of.get(node, ())

    def _is_plain(self, node: torch.fx.Node) -> bool:
        """Enter a node that makes one result, or views its first argument, and writes nothing; whether it is one."""
        if memory.makes_one_result(node.target):
            self._set(node, self._new(node, node.meta.get("val")))
            return True
        source = node.args[0] if node.args else None
        if not isinstance(source, torch.fx.Node) or not memory.views_its_first(node.target):
            return False
        sources = self._of.get(source, ())
        if not sources or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        self._set(node, sources)
        return True

    def _set(self, node: torch.fx.Node, place: Place) -> None:
        self._place[node] = place
        if type(place) is tuple and len(place) == 1:
            self._of[node] = place
            place[0].members.append(node)
            return
        self._of[node] = tuple(dict.fromkeys(_flat(place)))
        for storage in self._of[node]:
            storage.members.append(node)

    def _join(self, storages: tuple[FxStorage, ...]) -> None:
        """Whoever lives in one of the storages lives in all of them, to be safe from the beginning."""

        def joined(place: Place) -> Place:
            if isinstance(place, list):
                return [joined(p) for p in place]
            if isinstance(place, dict):
                return {k: joined(p) for k, p in place.items()}
            return tuple(dict.fromkeys((*place, *storages))) if set(place) & set(storages) else place

        for member in dict.fromkeys(m for storage in storages for m in storage.members):
            self._place[member] = joined(self._place[member])
            self._of[member] = tuple(dict.fromkeys(_flat(self._place[member])))
            for storage in storages:
                if member not in storage.members:
                    storage.members.append(member)

    def _where(self, node: torch.fx.Node) -> Place:
        value = node.meta.get("val")
        if node.op == "placeholder":
            return self._given(node, value)
        if node.op == "get_attr":
            key = _identity(node)
            if key not in self._attributes:
                self._attributes[key] = self._new(node, value)
            return self._attributes[key]
        if memory.is_getitem(node):
            return self._element(node)
        if memory.is_wait(node):
            source = next(iter(_torch.op_arguments(node).values()), None)
            return self._places(source)
        if memory.is_transfer(node):
            return self._transferred(node, value)
        sources = memory.result_sources(node)
        if sources.each is None:
            return self._shared(node, value, self._union(sources.all), sources.own)
        if len(sources.each) != 1:
            values = value if isinstance(value, (list, tuple)) else [None] * len(sources.each)
            return [self._shared(node, v, self._union(s), sources.own) for v, s in zip(values, sources.each)]
        if ops.collective_kind(node) and isinstance(value, (list, tuple)) and sources.each[0]:
            # A coalesced collective in place: every result is the operand at its position.
            return [self._places(source) for source in sources.each[0]]
        return self._shared(node, value, self._union(sources.each[0]), sources.own)

    def _union(self, nodes: Iterable[torch.fx.Node]) -> tuple[FxStorage, ...]:
        return tuple(dict.fromkeys(s for node in nodes for s in self.of(node)))

    def _places(self, value: object) -> Place:
        if isinstance(value, (list, tuple)):
            return [self._places(v) for v in value]
        return self._place.get(value, ()) if isinstance(value, torch.fx.Node) else ()

    def _new(self, node: torch.fx.Node, value: object) -> Place:
        """Memory of its own for every tensor in a value."""
        if isinstance(value, torch.Tensor):
            storage = FxStorage(node, _torch.storage_bytes(value))
            self.all.append(storage)
            return (storage,)
        if isinstance(value, (list, tuple)):
            return [self._new(node, v) for v in value]
        if isinstance(value, dict):
            return {k: self._new(node, v) for k, v in value.items()}
        return ()

    def _given(self, node: torch.fx.Node, value: object) -> Place:
        """The memory of an input; inputs that were saved as views of one block are that block."""
        first, size_bytes = node.meta.get(ops.SAVED_BLOCK, ("", 0))
        if first in self._saved:
            return self._saved[first]
        place = self._new(node, value)
        if first and isinstance(place, tuple):
            self._saved[first] = place
            for storage in place:
                storage.size_bytes = size_bytes
        return place

    def _shared(self, node: torch.fx.Node, value: object, sources: tuple[FxStorage, ...], own: bool) -> Place:
        """Every tensor in a value lives in all of ``sources``, and with ``own`` in memory of its own as well."""
        if not sources:
            return self._new(node, value)
        if isinstance(value, (list, tuple)):
            return [self._shared(node, v, sources, own) for v in value]
        if isinstance(value, dict):
            return {k: self._shared(node, v, sources, own) for k, v in value.items()}
        if value is not None and not isinstance(value, torch.Tensor):
            return ()
        return (*sources, *_flat(self._new(node, value))) if own else sources

    def _element(self, node: torch.fx.Node) -> Place:
        source, index = node.args
        assert isinstance(source, torch.fx.Node)
        place = self._place.get(source, ())
        if isinstance(place, list) and isinstance(index, int) and -len(place) <= index < len(place):
            return place[index]
        if isinstance(place, dict) and index in place:
            return place[index]
        if self.of(source):
            return self.of(source)
        return self._new(node, node.meta.get("val"))

    def _transferred(self, node: torch.fx.Node, value: object) -> Place:
        buffers = memory.received_into(node)
        values = value if isinstance(value, (list, tuple)) else [value]
        places = [
            self._places(buffer) if buffer is not None else self._new(node, one) for buffer, one in zip(buffers, values)
        ]
        return places if values is value else places[0]


def _identity(node: torch.fx.Node) -> object:
    """Equal for attributes that are the same memory: by name, and by what the module holds."""
    owner = node.graph.owning_module
    try:
        value = attrgetter(str(node.target))(owner)
    except AttributeError:
        return str(node.target)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return _torch.storage_identity(value)
    return str(node.target)


def _flat(place: Place) -> list[FxStorage]:
    if isinstance(place, tuple):
        return list(place)
    return [s for inner in (place.values() if isinstance(place, dict) else place) for s in _flat(inner)]
