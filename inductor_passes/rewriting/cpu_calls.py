"""What Inductor's code for a CPU calls one C++ function for, where it would compile a loop for each size."""

from __future__ import annotations

import torch
import torch.fx

import inductor_passes.rewriting.unpack_op  # noqa: F401  registers the operator
from inductor_passes import _torch
from inductor_passes.rewriting import divide_op, pack_op


def register() -> None:
    """Make Inductor lower our operators to calls; twice is harmless."""
    _torch.lower_as_calls(torch.ops.inductor_passes.unpack, pack_op.OPERATOR, divide_op.OPERATOR)


def lower(graph: torch.fx.Graph) -> int:
    """Make copies into and out of messages, and averages, calls, where ``graph`` has any; O(nodes).

    Returns:
        The messages that are packed so and the averages.
    """
    register()
    return pack_op.lower(graph) + divide_op.lower(graph)
