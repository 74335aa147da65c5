"""Places of a graph that look alike: what was found around one collective holds around another, node for node.

The layers of a model repeat, and so do the regions around their collectives. While a region grows it notes what it
looks at (:class:`Seen`). A second collective gets the same regions if all of that is there as well: the same operators
with the same arguments, sizes, memory orders, groups and durations, joined in the same way and in the same order.
:meth:`Places.match` walks both places at once and compares; it is linear in what was looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView

Nodes = dict[torch.fx.Node, torch.fx.Node]
"""Nodes of one place -> those of another."""
_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass
class Seen:
    """What growing looked at.

    Attributes:
        read: nodes whose operator and operands it looked at.
        admitted: those that were members at some time: it looked at all their users, too.
        left: nodes that it left alone for one of their users.
    """

    read: dict[torch.fx.Node, None] = field(default_factory=dict)
    admitted: dict[torch.fx.Node, None] = field(default_factory=dict)
    left: dict[torch.fx.Node, None] = field(default_factory=dict)

    def close(self) -> None:
        """Keep as left what somebody outside reads: of the others it matters which members read them, and how."""
        for node in list(self.left):
            if node in self.admitted or all(user in self.admitted for user in node.users):
                del self.left[node]
                self.read[node] = self.admitted[node] = None


class Places:
    """Compares places of one graph.

    Args:
        duration_ns: of a node.
        about: what else is to be the same of a node.
    """

    def __init__(
        self,
        view: GraphView,
        duration_ns: Callable[[torch.fx.Node], int],
        about: Callable[[torch.fx.Node], Hashable],
    ) -> None:
        self._view, self._duration_ns, self._about = view, duration_ns, about
        self._kinds: dict[torch.fx.Node, Hashable] = {}
        self._calls: dict[torch.fx.Node, Hashable] = {}
        self._durations: dict[torch.fx.Node, int] = {}
        self._users: dict[torch.fx.Node, list[torch.fx.Node]] = {}

    def key(self, start: torch.fx.Node) -> Hashable:
        """Equal for collectives whose surroundings are worth comparing."""
        around = (*start.all_input_nodes, *self.users(start))
        return self._call(start), tuple(self._kind(node) for node in around)

    def users(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Users in graph order."""
        if node not in self._users:
            self._users[node] = sorted(node.users, key=self._view.position.__getitem__)
        return self._users[node]

    def match(self, seen: Seen, start: torch.fx.Node, other: torch.fx.Node) -> Nodes | None:
        """Every node that was seen around ``start`` with the one that is in its place around ``other``.

        None where a difference might matter.
        """
        found: Nodes = {start: other}
        taken = {other}
        stack = [start]

        def pair(ours: Iterable[torch.fx.Node], theirs: Iterable[torch.fx.Node]) -> bool:
            for one, another in zip(ours, theirs):
                if one not in found:
                    if another in taken or self._kind(one) != self._kind(another):
                        return False
                    found[one] = another
                    taken.add(another)
                    stack.append(one)
                elif found[one] is not another:
                    return False
            return True

        while stack:
            node = stack.pop()
            twin = found[node]
            if (node in seen.read or node in seen.left) and self._call(node) != self._call(twin):
                return None
            if node in seen.read and not pair(node.all_input_nodes, twin.all_input_nodes):
                return None
            if node in seen.admitted:
                ours, theirs = self.users(node), self.users(twin)
                if self._duration(node) != self._duration(twin) or len(ours) != len(theirs) or not pair(ours, theirs):
                    return None
        return found if self._same_rest(seen, found) else None

    def _same_rest(self, seen: Seen, found: Nodes) -> bool:
        """Whether all was met, what was left alone would be again, and the order is the same."""
        looked_at = {**seen.read, **seen.left}
        if any(node not in found for node in looked_at):
            return False
        members = {found[node] for node in seen.admitted}
        for node in seen.left:
            if all(user in members for user in found[node].users):
                return False
        position = self._view.position
        ordered = [position[found[node]] for node in sorted(seen.read, key=position.__getitem__)]
        return all(a < b for a, b in itertools.pairwise(ordered))

    def _duration(self, node: torch.fx.Node) -> int:
        if node not in self._durations:
            self._durations[node] = self._duration_ns(node)
        return self._durations[node]

    def _kind(self, node: torch.fx.Node) -> Hashable:
        """What whoever reads a node sees of it."""
        if node not in self._kinds:
            role = self._view.role(node)
            value = () if role is Role.OUTPUT else _value(node.meta.get("val"))
            self._kinds[node] = role, value, self._about(node)
        return self._kinds[node]

    def _call(self, node: torch.fx.Node) -> Hashable:
        """What a node does with its operands."""
        if node not in self._calls:
            places = {operand: place for place, operand in enumerate(node.all_input_nodes)}
            collective = self._view.by_start.get(node)
            moved: Hashable = None
            if collective is not None:
                group = collective.group
                moved = collective.kind, group.name, group.ranks, collective.reduce_op, len(collective.waits)
            target = node.target if node.op == "call_function" else node.op
            self._calls[node] = target, _literal((node.args, node.kwargs), places, node), moved
        return self._calls[node]


def _value(value: Any) -> Hashable:
    """Everything about a value that a price or a cut may depend on."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value.layout, value.dtype, value.device, _sizes(value.shape)
        return value.dtype, value.device, _sizes(value.shape), _sizes(value.stride())
    if isinstance(value, (list, tuple)):
        return tuple(_value(one) for one in value)
    return type(value), str(value)


def _sizes(sizes: Iterable[Any]) -> tuple[Hashable, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in sizes)


def _literal(argument: Any, places: dict[torch.fx.Node, int], owner: torch.fx.Node) -> Hashable:
    """An argument without the nodes in it; what cannot be compared is like nothing else."""
    if isinstance(argument, torch.fx.Node):
        return "operand", places[argument]
    if isinstance(argument, (list, tuple)):
        return tuple(_literal(one, places, owner) for one in argument)
    if isinstance(argument, dict):
        return tuple((key, _literal(one, places, owner)) for key, one in argument.items())
    if argument is None or type(argument) in _PLAIN:
        return type(argument), argument
    if isinstance(argument, (torch.SymInt, slice)):
        return type(argument), str(argument)
    return owner
