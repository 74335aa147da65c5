"""Memory that an operator takes beside its results, for as long as it runs.

Known for the backward of torch's attention operators on NVIDIA GPUs, where it is a large part of a step's peak: the
gradient of the query is added up in float32, a sum of ``gradient * result`` per query is kept in float32, grouped heads
get gradients of their own before these are added, and operands in another order of dimensions are copied. The sizes are
those of ``flash_api.cpp`` and ``attention_backward.cu`` of torch 2.11; what cuDNN takes was measured. Against the
allocator on an H100 (``docs/results/gpu.md``) they are within its rounding. Other operators count as taking nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.problems.builder import Block

__all__ = ["inside_blocks", "inside_bytes"]

_FLOAT = 4


@dataclass(frozen=True)
class _Attention:
    """Sizes of an attention's operands, by hint, and the two that may be copied."""

    batches: int
    heads: int
    queries: int
    keys: int
    width: int
    value_heads: int
    value_width: int
    itemsize: int
    gradient: torch.Tensor
    result: torch.Tensor

    @property
    def expanded(self) -> int:
        """Gradients of keys and values for every head of the query, where several share one."""
        if self.value_heads == self.heads:
            return 0
        return self.batches * self.keys * self.heads * (self.width + self.value_width) * self.itemsize

    def copy_of(self, operand: torch.Tensor) -> int:
        """Of an operand that is to be in memory as (batch, sequence, head, width), and is not."""
        if _is_in_order(operand):
            return 0
        return self.batches * self.queries * self.heads * self.value_width * self.itemsize


def _flash(a: _Attention) -> int:
    rows = _up(a.queries, 128) * a.batches * a.heads
    width = _up(a.width, 32) if a.width <= 128 else _up(a.width, 64)
    return rows * (width + 1) * _FLOAT + a.expanded + a.copy_of(a.gradient) + a.copy_of(a.result)


def _cudnn(a: _Attention) -> int:
    return a.queries * a.batches * a.heads * (a.width + 1) * _FLOAT + a.expanded


def _efficient(a: _Attention) -> int:
    width = 64 if a.width <= 64 else _up(a.width, 128)
    summed = _up(a.queries, 128) * width + a.queries
    return a.batches * a.heads * summed * _FLOAT + a.copy_of(a.gradient)


#: Operator -> its price, and where the result of forward is among its arguments.
_BACKWARD: Mapping[str, tuple[Callable[[_Attention], int], int]] = {
    "aten::_scaled_dot_product_flash_attention_backward": (_flash, 4),
    "aten::_scaled_dot_product_cudnn_attention_backward": (_cudnn, 4),
    "aten::_scaled_dot_product_efficient_attention_backward": (_efficient, 5),
}


def inside_bytes(node: torch.fx.Node) -> int:
    """Bytes that a call takes while it runs, beside its results; 0 where that is not known."""
    known = _BACKWARD.get(_torch.op_name(node.target))
    if known is None or torch.version.hip is not None:
        return 0
    price, place = known
    if len(node.args) <= place:
        return 0
    values = [_value(node.args[i]) for i in (0, 1, 2, 3, place)]
    if any(v is None or v.device.type != "cuda" or v.dim() != 4 for v in values):
        return 0
    gradient, query, key, value, result = [v for v in values if v is not None]
    sizes = [_torch.size_hint(n) for n in (*query.shape, *key.shape[1:3], *value.shape[1::2])]
    if any(n is None for n in sizes):
        return 0
    batches, heads, queries, width, _, keys, value_heads, value_width = [n for n in sizes if n is not None]
    return price(
        _Attention(
            *(batches, heads, queries, keys, width, value_heads, value_width),
            itemsize=query.element_size(),
            gradient=gradient,
            result=result,
        )
    )


def inside_blocks(
    nodes: Iterable[torch.fx.Node], task_of: Mapping[torch.fx.Node, int], places: Mapping[torch.fx.Node, int]
) -> list[Block]:
    """The blocks of what the operators of a graph take while they run.

    Args:
        task_of: node -> number of its task.
        places: node of a task of several nodes -> its place among them.
    """
    found = []
    for node in nodes:
        if node.op == "call_function" and node in task_of and (size := inside_bytes(node)):
            task, place = task_of[node], places.get(node)
            span = None if place is None else (place, place)
            found.append(Block(f"{node.name}.inside", size, task, {task}, span=span))
    return found


def _value(argument: object) -> torch.Tensor | None:
    value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is_in_order(operand: torch.Tensor) -> bool:
    """Whether (batch, head, sequence, width) lies in memory as (batch, sequence, head, width), by hint."""
    shape = [_torch.size_hint(operand.shape[i]) for i in (0, 2, 1, 3)]
    strides = [_torch.size_hint(operand.stride(i)) for i in (0, 2, 1, 3)]
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size is None or (size != 1 and stride != step):
            return False
        step *= size
    return True


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
