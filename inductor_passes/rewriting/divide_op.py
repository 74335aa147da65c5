"""``inductor_passes::divide``: what a sum over ranks gave, divided by a whole number: an average.

Only Inductor's code for a CPU has it, behind the last of our passes: there it is a call of one C++ function
(``_torch.lower_as_calls``). Inductor writes a loop for each size, and each bucket has its own.
"""

from __future__ import annotations

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role, role


@torch.library.custom_op("inductor_passes::divide", mutates_args=())
def divide(part: torch.Tensor, divisor: int) -> torch.Tensor:
    """``part / divisor``.

    Args:
        part: of a floating-point dtype.
        divisor: exact in float, or in the dtype where that is wider.
    """
    return part / divisor


@divide.register_fake
def unfilled(part: torch.Tensor, divisor: int) -> torch.Tensor:
    """What :func:`divide` returns, nothing computed."""
    return torch.empty_like(part)


OPERATOR = torch.ops.inductor_passes.divide

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Up to here every whole number is exact in float, which narrower dtypes are divided as.
_LARGEST = 1 << 24


def lower(graph: torch.fx.Graph) -> int:
    """Have parts of messages that the graph returns divided by calls in Inductor's code for a CPU; O(nodes).

    What computes with an average is one loop with the division, which is cheaper.

    Returns:
        The divisions that are made so.
    """
    found = [node for node in graph.nodes if _returns_average(node)]
    for node in found:
        part, divisor = node.args
        node.target, node.args = OPERATOR.default, (part, int(divisor))
    return len(found)


def _returns_average(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or _torch.op_name(node.target) != "aten::div" or node.kwargs or len(node.args) != 2:
        return False
    part, divisor = node.args
    value = part.meta.get("val") if isinstance(part, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(divisor, (int, float)) or isinstance(divisor, bool):
        return False
    whole = 0 < divisor <= _LARGEST and float(divisor).is_integer()
    known = all(type(size) is int for size in value.shape)
    return (
        whole
        and known
        and value.device.type == "cpu"
        and value.dtype in _DTYPES
        and all(user.op == "output" for user in node.users)
        and _arrived(part)
    )


def _arrived(node: torch.fx.Node) -> bool:
    """Whether a node is a part of what a collective brought."""
    while role(node) is Role.FREE and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return role(node) is Role.WAIT
