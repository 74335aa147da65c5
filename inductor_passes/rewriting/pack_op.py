"""``inductor_passes::pack``: tensors side by side in a message, as ``cat`` along the columns.

Only Inductor's code for a CPU has it, behind the last of our passes: there most tensors that are in memory already are
copied by a call of one C++ function (``_torch.lower_as_calls``). For ``cat`` Inductor writes loops, which have the
size of the message in their code: equal layers in two messages became two functions to compile.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role, role


@torch.library.custom_op("inductor_passes::pack", mutates_args=())
def pack(parts: list[torch.Tensor]) -> torch.Tensor:
    """``cat(parts, 1)``.

    Args:
        parts: [rows, columns of its own] each, of one dtype.
    """
    return torch.cat(parts, 1)


@pack.register_fake
def unfilled(parts: list[torch.Tensor]) -> torch.Tensor:
    """What :func:`pack` returns, nothing copied."""
    return parts[0].new_empty(parts[0].shape[0], sum(part.shape[1] for part in parts))


OPERATOR = torch.ops.inductor_passes.pack


def lower(graph: torch.fx.Graph) -> int:
    """Have messages put together by calls in Inductor's code for a CPU, where ``graph`` has any; O(nodes).

    Returns:
        The messages that are packed so.
    """
    found = list(_packs(graph))
    for cat, parts in found:
        cat.target, cat.args, cat.kwargs = OPERATOR.default, (parts,), {}
    return len(found)


def _has_loops(dtype: torch.dtype) -> bool:
    """Whether Inductor computes with elements on a CPU: of others it calls operators as they stand in the graph."""
    return not dtype.is_complex and (dtype.itemsize > 1 or dtype is torch.bool)


def _packs(graph: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, list[torch.fx.Node]]]:
    """Messages on a CPU that are put together along the columns, and what of."""
    for cat in graph.nodes:
        if cat.op != "call_function" or _torch.op_name(cat.target) != "aten::cat":
            continue
        given = _torch.op_arguments(cat)
        parts, values = given["tensors"], [part.meta.get("val") for part in given["tensors"]]
        alike = all(
            isinstance(value, torch.Tensor)
            and value.dim() == 2
            and value.device.type == "cpu"
            and value.dtype == values[0].dtype
            and _has_loops(value.dtype)
            and all(type(size) is int for size in value.shape)
            for value in values
        )
        sent = bool(cat.users) and all(role(user) is Role.START for user in cat.users)
        if alike and sent and given.get("dim", 0) in (1, -1):
            yield cat, list(parts)
