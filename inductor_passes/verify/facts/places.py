"""The record of what one node does, and where the results of a node are when nothing else is known about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.fx

from inductor_passes.ir.ops import Role
from inductor_passes.verify.facts import roles
from inductor_passes.verify.facts.higher_order import Inside
from inductor_passes.verify.facts.known import Known
from inductor_passes.verify.facts.storages import Block, Place, Storages

Nodes = tuple[torch.fx.Node, ...]
LookInside = Callable[[list[torch.fx.GraphModule] | None], Inside]


@dataclass(slots=True, eq=False)
class NodeFacts:
    """What one node does.

    Attributes:
        role: its part in a schedule.
        channel: ``random``, ``assert``, ``fence`` or "": nodes of a channel keep their order among each other.
        place: of its results.
        writes: operands whose memory it writes to.
        may_write: operands that it writes to when Inductor leaves out a copy.
        reinplaced: operands that Inductor may let it write to when nobody reads them later.
        copies: whether it is a view that may turn out to be a copy.
        reshapes: whether it changes the shape of what it writes to.
        certain: whether it is in the channel ``random`` and draws nothing with these arguments.
    """

    role: Role
    channel: str = ""
    place: Place = ()
    writes: Nodes = ()
    may_write: Nodes = ()
    reinplaced: Nodes = ()
    copies: bool = False
    reshapes: bool = False
    certain: bool = False


class Places:
    """Results of nodes and the memory that they are in; what a node of which nothing else is known does.

    Attributes:
        storages: filled along the way.
        facts: of the nodes that have been read.
        look_inside: tells what happens in the graphs that a node runs.
        known, values: facts about single nodes, see :class:`Known`.
    """

    def __init__(self, look_inside: LookInside, known: Known | None = None) -> None:
        self.storages = Storages()
        self.known = known or Known()
        self.values = self.known.values()
        self.facts: dict[torch.fx.Node, NodeFacts] = {}
        self.look_inside = look_inside

    def made(
        self,
        node: torch.fx.Node,
        role: Role,
        channel: str = "",
        *,
        shared: Iterable[torch.fx.Node] = (),
        writes: Nodes = (),
    ) -> NodeFacts:
        """A node whose results have memory of their own, or may be that of ``shared`` nodes as well."""
        value = node.meta.get("val")
        blocks = self.union(shared)

        def mixed(place: Place) -> Place:
            if isinstance(place, list):
                return [mixed(p) for p in place]
            if isinstance(place, dict):
                return {k: mixed(p) for k, p in place.items()}
            return (*blocks, *place) if place else ()

        own = self.storages.new(node, value)
        return NodeFacts(role, channel, blocks if value is None else mixed(own) if blocks else own, writes)

    def unknown(self, node: torch.fx.Node) -> NodeFacts:
        """A node that may write to everything that it is given, and return it."""
        given = self.given(node)
        return self.made(node, Role.FENCE, "fence", shared=given, writes=given)

    def given(self, node: torch.fx.Node) -> Nodes:
        """Operands that are or hold tensors, for all that we know."""
        return tuple(n for n in node.all_input_nodes if self.holds_tensors(n))

    def holds_tensors(self, node: torch.fx.Node) -> bool:
        """Whether a value is or holds a tensor, for all that we know."""
        value = node.meta.get("val")
        if value is not None:
            return any(True for _ in roles.tensors(value))
        facts = self.facts.get(node)
        return facts is None or facts.role is not Role.FREE or bool(facts.place)

    def union(self, nodes: Iterable[torch.fx.Node]) -> tuple[Block, ...]:
        return tuple(dict.fromkeys(block for node in nodes for block in self.storages.of(node)))
