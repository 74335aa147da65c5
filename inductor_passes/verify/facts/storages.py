"""Blocks of memory and which values live in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.fx

from inductor_passes import _torch


@dataclass(slots=True, eq=False)
class Block:
    """A block of memory.

    Attributes:
        producer: the node that brings it to life.
        size_bytes: by hint; None when a size has none or is not known.
        members: nodes whose value lives in it, the producer first, in graph order.
        writers: nodes other than the producer that write to it, in graph order.
        reshaped: whether one of them changes the shape of what it writes to.
    """

    producer: torch.fx.Node
    size_bytes: int | None
    members: list[torch.fx.Node] = field(default_factory=list)
    writers: list[torch.fx.Node] = field(default_factory=list)
    reshaped: bool = False


#: Of a tensor the blocks that it may live in, of a list or dict the places of its elements.
Place: TypeAlias = tuple[Block, ...] | list["Place"] | dict[object, "Place"]


class Storages:
    """The place of every node's value; filled in graph order, with what is known of each node."""

    def __init__(self) -> None:
        self._places: dict[torch.fx.Node, Place] = {}
        self._blocks: dict[torch.fx.Node, tuple[Block, ...]] = {}
        self.all: list[Block] = []

    def of(self, node: torch.fx.Node) -> tuple[Block, ...]:
        """The blocks that a value lives in; empty for what is no tensor."""
        return self._blocks.get(node, ())

    def place(self, node: torch.fx.Node, path: tuple[object, ...] = ()) -> Place:
        """The place of a value, or of its element at a path of indices."""
        place: Place = self._places.get(node, ())
        for index in path:
            place = element(place, index)
        return place

    def put(self, node: torch.fx.Node, place: Place) -> None:
        """Enter a node's place."""
        self._places[node] = place
        self._blocks[node] = tuple(dict.fromkeys(flat(place)))
        for block in self._blocks[node]:
            block.members.append(node)

    def write(self, node: torch.fx.Node, written: torch.fx.Node, reshapes: bool) -> None:
        """Enter that ``node`` writes to the memory of ``written``."""
        for block in self.of(written):
            block.writers.append(node)
            block.reshaped = block.reshaped or reshapes

    def new(self, node: torch.fx.Node, value: object) -> Place:
        """A block for every tensor in a value."""
        if isinstance(value, torch.Tensor):
            return self.block(node, _torch.storage_bytes(value))
        if isinstance(value, (list, tuple)):
            return [self.new(node, v) for v in value]
        if isinstance(value, dict):
            return {k: self.new(node, v) for k, v in value.items()}
        return ()

    def block(self, node: torch.fx.Node, size_bytes: int | None) -> tuple[Block, ...]:
        """One new block."""
        self.all.append(Block(node, size_bytes))
        return (self.all[-1],)

    def join(self, nodes: list[torch.fx.Node]) -> None:
        """Whoever lives in a block of one of the nodes lives in all of their blocks: ``set_`` has made them one."""
        blocks = tuple(dict.fromkeys(b for node in nodes for b in self.of(node)))
        for member in dict.fromkeys(m for block in blocks for m in block.members):
            place = _joined(self._places[member], blocks)
            self._places[member] = place
            self._blocks[member] = tuple(dict.fromkeys(flat(place)))
            for block in blocks:
                if member not in block.members:
                    block.members.append(member)


def element(place: Place, index: object) -> Place:
    """The place of an element; of what is not known to have elements, the whole place."""
    if isinstance(place, list) and isinstance(index, int) and -len(place) <= index < len(place):
        return place[index]
    if isinstance(place, dict) and index in place:
        return place[index]
    return tuple(flat(place))


def flat(place: Place) -> Iterator[Block]:
    """All blocks of a place."""
    if isinstance(place, tuple):
        yield from place
    else:
        for inner in place.values() if isinstance(place, dict) else place:
            yield from flat(inner)


def _joined(place: Place, blocks: tuple[Block, ...]) -> Place:
    if isinstance(place, list):
        return [_joined(p, blocks) for p in place]
    if isinstance(place, dict):
        return {k: _joined(p, blocks) for k, p in place.items()}
    return tuple(dict.fromkeys((*place, *blocks))) if any(b in blocks for b in place) else place
