"""Which values Inductor's C++ code would read in a loop whose last bits depend on whether it is vectorised.

A copy out of a message is no kernel of its own: Inductor computes its address inside of the loop that reads it. A loop
is vectorised only where its loads are consecutive. With and without vectors it adds in another order, and ``tanh`` and
its like come from another library. So a merged message changes the last bits of what reads a member of it in place.
Triton adds in an order that its block sizes decide, whatever the addresses.

Source: ``TilingSelect`` and ``CppVecKernel.reduction`` in torch/_inductor/codegen/cpp.py.
"""

from __future__ import annotations

import enum

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role, label
from inductor_passes.ir.view import GraphView

#: No vector of the C++ code holds more elements: 64 bytes of one-byte elements.
LANES = 64
#: Operators that move elements and are fused like pointwise ones.
_MOVES = frozenset({"aten::cat", "aten::clone", "aten::constant_pad_nd", "aten::slice_scatter", "aten::copy"})
#: Pointwise operators that round once, or not at all: of the same bits with and without vectors.
_ROUND_ONCE = frozenset(
    {
        *(f"aten::{name}" for name in ("add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "reciprocal")),
        *(f"aten::{name}" for name in ("relu", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "where")),
        *(f"aten::{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not")),
        *(f"aten::{name}" for name in ("bitwise_and", "bitwise_or", "bitwise_not", "sign", "ceil", "floor", "trunc")),
        *(f"aten::{name}" for name in ("masked_fill", "threshold_backward", "fill", "lift_fresh_copy", "_to_copy")),
        "prims::convert_element_type",
    }
)


class Read(enum.IntEnum):
    """How such loops read a value: not at all, element by element, or at places that another tensor names."""

    NOT_SUMMED = 0
    SUMMED = 1
    SUMMED_BY_INDEX = 2


def reads(view: GraphView) -> dict[torch.fx.Node, Read]:
    """How fused loops read every node's value whose bits depend on vectors; O(nodes + edges).

    Matmuls, attention and collectives read memory, so nothing is looked for behind them.
    """
    found: dict[torch.fx.Node, Read] = {}
    for node in reversed(view.nodes):
        found[node] = max((_by(view, user, node, found) for user in node.users), default=Read.NOT_SUMMED)
    return found


def _by(view: GraphView, user: torch.fx.Node, value: torch.fx.Node, found: dict[torch.fx.Node, Read]) -> Read:
    role = view.role(user)
    if role is Role.FREE or role is Role.WAIT:
        return found[user]
    if role is not Role.COMPUTE or label(user):
        return Read.NOT_SUMMED
    name = _torch.op_name(user.target)
    if name in _ROUND_ONCE or name in _MOVES:
        return found[user]
    if _torch.is_pointwise(user.target):
        return max(found[user], Read.SUMMED)
    if any(_is_index(operand) for operand in user.all_input_nodes if operand is not value):
        return Read.SUMMED_BY_INDEX if found[user] else Read.NOT_SUMMED
    return Read.SUMMED


def _is_index(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


def changes_order(read: Read, row_elements: int, device: torch.device, *, folded: bool = False) -> bool:
    """Whether a loop that reads a member of a message in place may give other bits than one that reads a copy.

    Args:
        read: how such loops read the member.
        row_elements: elements of the member in each row of the message, perhaps symbolic. Where no vector crosses the
            end of a row, loads stay consecutive; unless an index decides, whose value is not known.
        folded: the message has several rows, and the member several dimensions. Inductor does not see then that loads
            are consecutive: the remainder of a sum of loop variables is more than it simplifies.
    """
    if device.type != "cpu":
        return False
    if read is Read.SUMMED:
        return folded or not _torch.is_multiple(row_elements, LANES)
    return read is Read.SUMMED_BY_INDEX


def taken_in(view: GraphView) -> frozenset[torch.fx.Node]:
    """Nodes that some loop reads, so that Inductor may compute a copy of them inside of it; O(nodes + edges).

    Matmuls, attention, collectives and the caller read memory.
    """
    found: set[torch.fx.Node] = set()
    for node in reversed(view.nodes):
        if any(_takes_in(view, user, found) for user in node.users):
            found.add(node)
    return frozenset(found)


def _takes_in(view: GraphView, user: torch.fx.Node, found: set[torch.fx.Node]) -> bool:
    role = view.role(user)
    return user in found if role is Role.FREE or role is Role.WAIT else role is Role.COMPUTE and not label(user)
