"""What a forward graph saves for backward, and in which order AOTAutograd's runtime takes it."""

from __future__ import annotations

import enum
import functools
import types

import torch
import torch.fx


class Saved(enum.IntEnum):
    """What a saved value is, in the order in which the runtime takes them from the forward's outputs.

    The backward graph gets the symbols first and everything else in this order.
    """

    TENSOR = 0
    #: A tensor that an autograd function has on its context, whose version is not checked.
    UNCHECKED = 1
    #: A device mesh, for instance.
    OPAQUE = 2
    SYMBOL = 3


def saved_kind(value: object) -> Saved:
    """What a saved output of a forward graph, or an input of a backward graph, is."""
    if not isinstance(value, torch.fx.Node):
        return Saved.TENSOR
    example = value.meta.get("val")
    if isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return Saved.SYMBOL
    if _is_opaque(value):
        return Saved.OPAQUE
    return Saved.UNCHECKED if value.meta.get("saved_tensor_with_no_vc_check", False) else Saved.TENSOR


def _is_opaque(node: torch.fx.Node) -> bool:
    try:
        from torch._functorch._aot_autograd.graph_compile import is_opaque_node
    except ImportError:
        return False
    return bool(is_opaque_node(node))


@functools.cache
def takes_opaque_before_symbols() -> bool:
    """Whether the runtime takes opaque values from right before the symbols, as torch 2.12 and later do.

    False where there are none (torch 2.11).
    """
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta

    where = getattr(ViewAndMutationMeta, "opaque_objects_saved_for_backwards_slice", None)
    if not isinstance(where, property) or where.fget is None:
        return False
    counts = types.SimpleNamespace(num_opaque_objects_saved_for_bw=2, num_symints_saved_for_bw=3)
    try:
        return bool(where.fget(counts) == slice(-5, -3))
    except AttributeError:  # it counts something else, too
        return False
