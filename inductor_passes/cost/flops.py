"""Floating-point operations of a node, by the formulas of ``torch.utils.flop_counter`` and a few for what it lacks.

A higher-order operator does what it calls: the operator that it wraps (attention under activation checkpointing), or
the graphs that it runs. It is one node, so it costs nothing apart from that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.utils.flop_counter import flop_registry

from inductor_passes import _torch
from inductor_passes.cost.values import dtype_name
from inductor_passes.ir import higher_order

#: Operators without a formula of their own in torch, and those that take the same arguments.
_SAME_FORMULA = {
    "aten::_int_mm": "mm",
    "aten::_addmm_activation": "addmm",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_fused_attention_overrideable": "_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": "_scaled_dot_product_flash_attention_backward",
}
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_int_mm"})
#: Higher-order operators that run one of their graphs.
_ONE_OF = frozenset({"higher_order::cond", "higher_order::switch"})


def flops(node: torch.fx.Node) -> int | None:
    """Floating-point operations of a node that is, calls or runs something matmul-like.

    None for a node without a formula or without size hints. Of a branch the most counts, and a loop as one round: how
    many there will be is not known.
    """
    if node.op != "call_function":
        return None
    if not higher_order.is_higher_order(node):
        return _counted(node.target, node.args, node.kwargs, node.meta.get("val"))
    called = higher_order.wrapped(node)
    if called is not None:
        given = node.args[higher_order.WRAPPERS[_torch.op_name(node.target)] + 1 :]
        return _counted(called, given, node.kwargs, None)
    if node.target in flop_registry:
        return _counted(node.target, node.args, node.kwargs, node.meta.get("val"))
    inside = []
    for body in bodies_of(node):
        counts = [count for n in body.graph.nodes if (count := flops(n)) is not None]
        inside += [sum(counts)] if counts else []
    if not inside:
        return None
    return max(inside) if runs_one(node) else sum(inside)


def bodies_of(node: torch.fx.Node) -> Sequence[torch.fx.GraphModule]:
    """The graphs that a higher-order operator runs as they stand; flex attention's say what to do per element."""
    if not higher_order.is_higher_order(node) or node.target in flop_registry:
        return ()
    return higher_order.subgraphs(node) or ()


def runs_one(node: torch.fx.Node) -> bool:
    """Whether a higher-order operator runs one of its graphs, and not all of them."""
    return _torch.op_name(node.target) in _ONE_OF


def _counted(target: object, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> int | None:
    """What the formula of an operator says of its arguments."""
    formula = _formula_of(target)
    if formula is None:
        return None
    value = torch.fx.node.map_arg(tuple(args), lambda n: n.meta.get("val"))
    keywords = torch.fx.node.map_arg(dict(kwargs), lambda n: n.meta.get("val"))
    try:
        counted = formula(*value, **keywords, out_val=result)
    except (TypeError, ValueError, AssertionError, AttributeError, IndexError, RuntimeError):
        # A formula that does not know this overload's arguments: the node counts as memory traffic.
        return None
    return _torch.size_hint(counted)


def _formula_of(target: Any) -> Callable[..., Any] | None:
    name = _torch.op_name(target)
    if not _torch.is_op(target):
        found = flop_registry.get(target)
    elif name in _SAME_FORMULA:
        found = flop_registry.get(getattr(torch.ops.aten, _SAME_FORMULA[name]))
    else:
        found = flop_registry.get(target.overloadpacket) or _OURS.get(name)
    return found


def _of_groups(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Products of groups of rows, of columns or of the dimension that is summed over; the groups' sizes add up.

    Three dimensions on both sides are a batch, [groups, rows, inner] and [groups, inner, columns].
    """
    batch = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * batch * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _of_rows(left: torch.Tensor, *_: Any, out_val: torch.Tensor, **__: Any) -> Any:
    """A product whose right side is packed: the result tells its columns."""
    return 2 * out_val.numel() * left.shape[-1]


#: Formulas for what torch has none for.
_OURS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"), _of_groups),
    "aten::_scaled_mm_v2": _of_groups,
    **dict.fromkeys(("aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm"), _of_rows),
    **dict.fromkeys(("aten::_weight_int4pack_mm_for_cpu", "aten::_dyn_quant_matmul_4bit"), _of_rows),
}


def operand_dtype(node: torch.fx.Node) -> str:
    """The dtype that a matmul-like node calculates in: that of its first floating-point operand, if it has one.

    A wrapper's first argument may be the state of a random generator.
    """
    values = [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if not higher_order.is_higher_order(node):
        return dtype_name(values[0] if values else node.meta.get("val"))
    floating = next((v for v in tensors if v.dtype.is_floating_point), None)
    return dtype_name(node.meta.get("val") if floating is None else floating)


def library_shape(node: torch.fx.Node) -> tuple[str, int] | None:
    """(kind, shorter side of the result) of a matmul or of fused attention, for ``CostProfile.compute_ns``."""
    if node.op != "call_function":
        return None
    called = higher_order.wrapped(node)
    name = _torch.op_name(node.target if called is None else called).partition("::")[2]
    if ("dot_product" in name or name.startswith("flex")) and "attention" in name:
        return ("attention_backward" if "backward" in name else "attention"), 0
    value = node.meta.get("val")
    if name in _MATMULS and isinstance(value, torch.Tensor) and value.dim() >= 2:
        sides = [_torch.size_hint(size) for size in value.shape[-2:]]
        if all(side is not None for side in sides):
            return "matmul", min(int(side) for side in sides if side is not None)
    return None
