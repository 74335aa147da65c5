"""From a reduction's result to a term of a sum: what may lie between, when the sum moves in front of the reduction.

Data movement (``movement``), a piece that is kept (``slice``, ``select``, ``narrow``, one of a split), and a cast to a
floating-point type that holds every value. All of it acts on each position alike, so it may act on the sum instead. A
piece stays behind the reduction: which one it is may differ between ranks, which reduce whole tensors together.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes.rewrites.movement import is_split, name_of, step_ahead, step_behind
from inductor_passes.rewriting.emit import Emitter

_PIECES = frozenset({"aten::slice", "aten::select", "aten::narrow"})
_CASTS = frozenset({"prims::convert_element_type", "aten::_to_copy"})
#: Nodes between a result and the terms that are made of it.
MAX_NODES = 256


@dataclass(frozen=True)
class Path:
    """Nodes from ``source`` (not among them) to ``result``, producers first."""

    source: torch.fx.Node
    nodes: tuple[torch.fx.Node, ...]
    result: torch.fx.Node

    def replayed(self, emit: Emitter, source: torch.fx.Node) -> torch.fx.Node:
        """The same path, without its casts, from another tensor of the source's shape."""
        new = {self.source: source}
        for node in self.nodes:
            if is_widening(node):
                new[node] = new[node.all_input_nodes[0]]
                continue
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: new.get(n, n))
            new[node] = emit.call(node.target, *args, **kwargs)
        return new[self.result]

    @property
    def signature(self) -> str:
        """Equal for paths that take the same elements of tensors of one shape to the same places; casts apart."""
        number: dict[torch.fx.Node, object] = {self.source: 0}
        steps = []
        for node in self.nodes:
            if is_widening(node):
                number[node] = number[node.all_input_nodes[0]]
                continue
            given = torch.fx.node.map_arg((node.args, node.kwargs), lambda o: number.get(o, o.name))
            steps.append((node.target, given))
            number[node] = len(steps)
        return repr(steps)


def path_behind(node: torch.fx.Node) -> Path:
    """The longest path that ends in ``node``."""
    parts: list[tuple[torch.fx.Node, ...]] = []
    source = node
    while (step := step_behind(source) or _piece(source) or _cast(source)) is not None:
        source = step[0]
        parts.append(step[1])
    return Path(source, tuple(n for part in reversed(parts) for n in part), node)


def is_widening(node: torch.fx.Node) -> bool:
    """Whether the node is a cast that keeps every value, between floating-point types, and does nothing else."""
    if name_of(node) not in _CASTS or len(node.all_input_nodes) != 1 or set(node.kwargs) - {"dtype"}:
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    if not (before.dtype.is_floating_point and after.dtype.is_floating_point):
        return False
    narrow, wide = torch.finfo(before.dtype), torch.finfo(after.dtype)
    more = wide.eps < narrow.eps and wide.max >= narrow.max and wide.smallest_normal <= narrow.smallest_normal
    return more and before.device == after.device


def ends(source: torch.fx.Node) -> list[tuple[torch.fx.Node, torch.fx.Node | None]]:
    """(end, reader) for every reader that is not on a path from ``source`` itself; no reader: too many to look at."""
    todo = [source]
    found: list[tuple[torch.fx.Node, torch.fx.Node | None]] = []
    for _ in range(MAX_NODES):
        if not todo:
            return found
        node = todo.pop()
        if (ahead := step_ahead(node)) is not None:
            todo.append(ahead)
            continue
        for user in node.users:
            on = step_behind(user) or _piece(user) or _cast(user)
            if is_split(user):
                todo += list(user.users)
            elif on is not None and on[0] is node:
                todo.append(user)
            else:
                found.append((node, user))
    return [*found, (source, None)]


def _piece(node: torch.fx.Node) -> tuple[torch.fx.Node, tuple[torch.fx.Node, ...]] | None:
    """(source, nodes) of a step that keeps a piece."""
    if name_of(node) in _PIECES and node.all_input_nodes:
        return node.all_input_nodes[0], (node,)
    if node.target is not operator.getitem or not isinstance(split := node.args[0], torch.fx.Node):
        return None
    return (split.all_input_nodes[0], (split, node)) if is_split(split) else None


def _cast(node: torch.fx.Node) -> tuple[torch.fx.Node, tuple[torch.fx.Node, ...]] | None:
    """(source, nodes) of a step that widens."""
    return (node.all_input_nodes[0], (node,)) if is_widening(node) else None
