"""Which tensor a collective moves: an identity that is equal on ranks that run matching programs.

Derived from the expression that computes the tensor: operators, literals, inputs by their order. What may differ
between ranks is left out: names, sizes (a shard may be smaller on one rank), padding, and the numbers of pieces. Pieces
next to a collective are kept separately (:attr:`Tensor.pieces`) and compared with those of other ranks: a piece must be
the same on all ranks, or each rank's own.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import groups, ops
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import behind
from inductor_passes.verify.facts import communication

#: Operators that lengthen a shard: a rank with a larger one does without.
_PADDING = frozenset({"aten::constant_pad_nd"})
#: Operators whose whole numbers say which piece of a tensor.
_PIECES = frozenset({"aten::slice", "aten::slice_scatter", "aten::select", "aten::select_scatter"})
_JOINS = frozenset({"aten::cat", "aten::clone", "aten::_to_copy", "prims::convert_element_type"})
#: Arguments that are sizes, or may be a rank's own offset.
_SIZES = frozenset(
    {
        "size",
        "sizes",
        "shape",
        "split_size",
        "split_sizes",
        "input_split_sizes",
        "output_split_sizes",
        "repeats",
        "pad",
        "length",
        "stride",
        "other",
        "start",
        "end",
        "fill_value",
    }
)
#: Pieces looked at per collective.
_MAX_PIECES = 256


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a collective reads.

    Attributes:
        name: for people and for comparison: what makes it, and 12 hex digits of how.
        pieces: numbers of the pieces that are cut out next to the collective, in order.
    """

    name: str = ""
    pieces: tuple[int, ...] = ()


class Tensors:
    """The identities of a graph's values; O(nodes + edges)."""

    def __init__(self, nodes: Sequence[torch.fx.Node], roles: Mapping[torch.fx.Node, Role]) -> None:
        self._roles = roles
        self._digest: dict[torch.fx.Node, str] = {}
        self._inputs: dict[torch.fx.Node, int] = {}
        for node in nodes:
            self._digest[node] = self._of(node)

    def read_by(self, operands: Sequence[torch.fx.Node]) -> Tensor:
        """What a collective with these operands moves."""
        names = [f"{self._label(node)} #{self._digest[node]}" for node in operands]
        return Tensor(" and ".join(names), tuple(self._pieces(operands)))

    def _of(self, node: torch.fx.Node) -> str:
        if node.op == "placeholder":
            if isinstance(node.meta.get("val"), torch.Tensor):
                self._inputs[node] = len(self._inputs)
            return _hashed(f"input {self._inputs.get(node, '')}")
        if node.op == "get_attr":
            return _hashed(f"attribute {node.target}")
        name = _torch.op_name(node.target) if node.op == "call_function" else node.op
        sources = node.all_input_nodes
        if name in _PADDING and sources:
            return self._digest[sources[0]]
        numbers = name not in _PIECES and node.target is not operator.getitem
        arguments = _torch.op_arguments(node) if _torch.is_op(node.target) else dict(enumerate(node.args))
        parts = [f"{key}={self._text(key, value, numbers)}" for key, value in arguments.items()]
        return _hashed(f"{name or node.target}({', '.join(parts)})")

    def _text(self, key: object, value: object, numbers: bool) -> str:
        if isinstance(value, torch.fx.Node):
            return self._digest[value]
        if key in ("group_name", "group"):
            return _shape(groups.resolve(behind(value)))
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._text(key, item, numbers) for item in value)}]"
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return str(value) if numbers and isinstance(value, int) and key not in _SIZES else "?"
        if value is None or isinstance(value, (bool, float, complex, str)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        return type(value).__name__

    def _label(self, node: torch.fx.Node) -> str:
        """What made a value, views and copies of it left out: an input by its number, anything else by its operator."""
        for _ in range(_MAX_PIECES):
            if node.op == "placeholder":
                return f"input {self._inputs.get(node, '?')} ({node.target})"
            moves = self._roles[node] is Role.FREE or _torch.op_name(node.target) in _JOINS | _PADDING
            if not moves or len(node.all_input_nodes) != 1:
                break
            node = node.all_input_nodes[0]
        return _torch.op_name(node.target).partition("::")[2] or str(node.target)

    def _pieces(self, operands: Sequence[torch.fx.Node]) -> list[int]:
        found: list[int] = []
        todo = list(reversed(operands))
        for _ in range(_MAX_PIECES):
            if not todo:
                break
            node = todo.pop()
            if node.op != "call_function":
                continue
            number = _piece(node)
            if number is not None:
                found.append(number)
            if self._roles[node] is Role.FREE or _torch.op_name(node.target) in _JOINS | _PADDING:
                todo.extend(reversed(node.all_input_nodes))
        return found


def _piece(node: torch.fx.Node) -> int | None:
    """Which of the equal pieces of a tensor a node takes; None where it takes no such piece."""
    source = next(iter(node.all_input_nodes), None)
    value = None if source is None else source.meta.get("val")
    if node.target is operator.getitem:
        index = node.args[1]
        return index if isinstance(value, (list, tuple)) and isinstance(index, int) and _cut(source) else None
    name = _torch.op_name(node.target)
    if name not in ("aten::slice", "aten::select") or not isinstance(value, torch.Tensor):
        return None
    arguments = _torch.op_arguments(node)
    if name == "aten::select":
        index = arguments.get("index")
        return index if isinstance(index, int) else None
    own = node.meta.get("val")
    dim, start = arguments.get("dim", 0), arguments.get("start", 0) or 0
    if not isinstance(own, torch.Tensor) or not isinstance(dim, int) or not isinstance(start, int):
        return None
    if not -own.dim() <= dim < own.dim() == value.dim():  # a damaged graph
        return None
    length, size = _torch.size_hint(own.shape[dim]), _torch.size_hint(value.shape[dim])
    if not length or not size or size % length or start % length:
        return None
    return start % size // length


def _cut(node: torch.fx.Node | None) -> bool:
    return node is not None and ops.is_view(node) and communication.form_of(_torch.op_name(node.target)) is None


def _shape(group: groups.Group) -> str:
    progression = group.start_stride
    return f"{group.size} ranks stride {progression[1] if progression else '?'}"


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
