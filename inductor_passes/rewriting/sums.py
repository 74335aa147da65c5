"""Which values Inductor's C++ code would read in the middle of a sum, and so decide in which order it adds.

A copy out of a message is no kernel of its own: Inductor computes its address inside of the loop that reads it. A loop
that adds is vectorised only where its loads are consecutive, and with and without vectors it adds in another order. So
a merged message changes the last bits of a sum that reads a member of it in place. Triton adds in an order that its
block sizes decide, whatever the addresses.

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


class Read(enum.IntEnum):
    """How sums read a value: not at all, element by element, or at places that another tensor names."""

    NOT_SUMMED = 0
    SUMMED = 1
    SUMMED_BY_INDEX = 2


def reads(view: GraphView) -> dict[torch.fx.Node, Read]:
    """How fused sums read every node's value; O(nodes + edges).

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
    if _torch.is_pointwise(user.target) or _torch.op_name(user.target) in _MOVES:
        return found[user]
    if any(_is_index(operand) for operand in user.all_input_nodes if operand is not value):
        return Read.SUMMED_BY_INDEX if found[user] else Read.NOT_SUMMED
    return Read.SUMMED


def _is_index(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


def changes_order(read: Read, row_elements: int, device: torch.device) -> bool:
    """Whether a sum may add in another order when it reads a member of a message in place.

    Args:
        read: how sums read the member.
        row_elements: elements of the member in each row of the message. Where no vector crosses the end of a row, loads
            stay consecutive; unless an index decides, whose value is not known.
    """
    if device.type != "cpu":
        return False
    return read is Read.SUMMED_BY_INDEX or (read is Read.SUMMED and row_elements % LANES != 0)
