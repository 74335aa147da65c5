"""Data movement between collectives: the nodes that only rearrange one tensor, all of it, alike on all ranks.

Views, permutations, dense copies, padding with zeros, and a split whose pieces are all joined again. Pieces that are
left out (a slice) end a movement: which piece it is may depend on the rank. What is here acts on positions and never on
values, so it commutes with anything that treats elements alike: a cast, an all_reduce, a scaling.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.rewriting.emit import Emitter

_RESHAPES = frozenset(
    {
        "aten::view",
        "aten::_unsafe_view",
        "aten::reshape",
        "aten::permute",
        "aten::transpose",
        "aten::t",
        "aten::unsqueeze",
        "aten::squeeze",
        "aten::clone",
        "aten::alias",
    }
)
_SPLITS = frozenset({"aten::split", "aten::split_with_sizes", "aten::chunk"})


@dataclass(frozen=True)
class Movement:
    """Nodes from ``source`` (not among them) to ``result``, producers first; ``result`` is ``source`` without nodes."""

    source: torch.fx.Node
    nodes: tuple[torch.fx.Node, ...]
    result: torch.fx.Node

    def replayed(self, emit: Emitter, source: torch.fx.Node) -> torch.fx.Node:
        """The same movement of another tensor of the source's shape."""
        return repeat_movement(emit, self.nodes, {self.source: source}).get(self.result, source)


    @property
    def signature(self) -> str:
        """Equal for movements that do the same to tensors of one shape."""
        number = {node: k for k, node in enumerate((self.source, *self.nodes))}
        return repr(
            [
                (n.target, torch.fx.node.map_arg((n.args, n.kwargs), lambda o: number.get(o, -1)))
                for n in self.nodes
            ]
        )


def repeat_movement(
    emit: Emitter, nodes: tuple[torch.fx.Node, ...], known: Mapping[torch.fx.Node, torch.fx.Node]
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Emit ``nodes`` again with operands replaced by ``known``; returns old -> new, ``known`` included."""
    new = dict(known)
    for node in nodes:
        args = torch.fx.node.map_arg(node.args, lambda n: new.get(n, n))
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: new.get(n, n))
        new[node] = emit.call(node.target, *args, **kwargs)
    return new


def name_of(node: torch.fx.Node) -> str:
    """The operator's name, "" for anything that is no operator call."""
    return _torch.op_name(node.target) if node.op == "call_function" else ""


def is_split(node: torch.fx.Node) -> bool:
    """Whether the node cuts a tensor into consecutive pieces."""
    return name_of(node) in _SPLITS


def pieces_read(split: torch.fx.Node) -> frozenset[int]:
    """Which pieces of a split anybody reads, here or of another split of the same tensor into pieces of these shapes.

    DTensor splits once per piece that it packs, and not every graph had its common subexpressions taken out.
    """
    found: set[int] = set()
    outline = _outline(split)
    for other in split.all_input_nodes[0].users:
        if not is_split(other) or _outline(other) != outline:
            continue
        for piece in other.users:
            if piece.target is not operator.getitem:
                return frozenset(range(len(split.meta["val"])))
            if piece.users:
                found.add(piece.args[1])  # type: ignore[arg-type]
    return frozenset(found)


def _outline(split: torch.fx.Node) -> tuple[object, ...]:
    """Equal for splits of one tensor into pieces of the same shapes; those of ``split`` follow from few of them."""
    pieces = split.meta["val"]
    if not pieces or name_of(split) == "aten::split":
        return len(pieces), *(str(piece.shape) for piece in (*pieces[:1], *pieces[-1:]))
    shapes = [str(piece.shape) for piece in pieces]
    regular = len({*shapes[:-1]}) <= 1
    return (len(shapes), shapes[0], shapes[-1]) if regular else tuple(shapes)


def is_zero_padding(node: torch.fx.Node) -> bool:
    """Whether the node pads with zeros and cuts nothing off."""
    if name_of(node) != "aten::constant_pad_nd":
        return False
    arguments = _torch.op_arguments(node)
    value = arguments.get("value", 0)
    pad = arguments["pad"]
    return isinstance(value, (int, float)) and value == 0 and all(isinstance(p, int) and p >= 0 for p in pad)


def step_behind(node: torch.fx.Node) -> tuple[torch.fx.Node, tuple[torch.fx.Node, ...]] | None:
    """(source, nodes) of the last step of a movement that ends in ``node``; None when there is none."""
    name = name_of(node)
    if name in _RESHAPES and len(node.all_input_nodes) == 1:
        return node.all_input_nodes[0], (node,)
    if is_zero_padding(node):
        return node.all_input_nodes[0], (node,)
    if name == "aten::cat":
        return _joined(node)
    return None


def _joined(cat: torch.fx.Node) -> tuple[torch.fx.Node, tuple[torch.fx.Node, ...]] | None:
    """A cat of all pieces of one split, in order, each possibly copied or padded on its own."""
    pieces = cat.args[0]
    if not isinstance(pieces, (list, tuple)) or not pieces:
        return None
    nodes: list[torch.fx.Node] = []
    split: torch.fx.Node | None = None
    for index, piece in enumerate(pieces):
        if not isinstance(piece, torch.fx.Node):
            return None
        own: list[torch.fx.Node] = []
        while piece.target is not operator.getitem:
            if name_of(piece) != "aten::clone" and not is_zero_padding(piece):
                return None
            own.append(piece)
            piece = piece.all_input_nodes[0]
        source = piece.args[0]
        if not isinstance(source, torch.fx.Node) or not is_split(source) or piece.args[1] != index:
            return None
        if split is not None and source is not split:
            return None
        split = source
        nodes += [piece, *reversed(own)]
    if split is None or len(split.meta["val"]) != len(pieces):
        return None
    # A piece that is read twice, or by others, is still all of the tensor here; the caller checks the readers.
    ordered = dict.fromkeys([split, *nodes, cat])
    return split.all_input_nodes[0], tuple(ordered)


def movement_behind(node: torch.fx.Node) -> Movement:
    """The longest movement that ends in ``node``."""
    nodes: list[tuple[torch.fx.Node, ...]] = []
    source = node
    while (step := step_behind(source)) is not None:
        source = step[0]
        nodes.append(step[1])
    return Movement(source, tuple(n for part in reversed(nodes) for n in part), node)


def step_ahead(node: torch.fx.Node) -> torch.fx.Node | None:
    """The end of the movement's next step when nothing but that step reads ``node``; else None."""
    users = list(node.users)
    if len(users) != 1:
        return None
    (user,) = users
    if is_split(user):
        last = next(reversed(user.users), None)
        while last is not None and name_of(last) != "aten::cat":
            last = next(iter(last.users), None) if len(last.users) == 1 else None
        user = last if last is not None else user
    step = step_behind(user)
    return user if step is not None and step[0] is node else None
