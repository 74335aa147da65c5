"""How a cut passes through fused attention, forward and backward.

Batches are independent, and heads are where queries, keys and values have equally many. Everything with one entry per
batch or head is cut; what the kernel keeps beside (a random generator's state, sizes) is the same for every part. With
dropout, the parts would draw other numbers than the whole: such a call is left whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp.slab import Cut, Partial, Slab, Uniform

_QKV = ("query", "key", "value")
_SAVED = ("out", "logsumexp")


class Attention:
    """A rule (``rules.Rule``) for one operator.

    Args:
        alike: operands with batches first and heads second.
        outputs: results that are cut as those operands are; the others are the same for every part.
        mask: the operand that is added to the scores, if the operator has one.
    """

    def __init__(self, alike: Iterable[str], outputs: Iterable[int], mask: str = "") -> None:
        self._alike, self._outputs, self._mask = tuple(alike), frozenset(outputs), mask

    def output(self, index: int, cut: Slab) -> Cut:
        """The cut of one of the results."""
        return cut if index in self._outputs else Uniform(cut)

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        """Forward: of the results that are cut."""
        found = self.needs(node, cut, units)
        return cut if found is not None and found.get(operand) == cut else None

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> dict[torch.fx.Node, Slab | None] | None:
        """Backward."""
        if not isinstance(cut, Slab) or cut.dim > 1:
            return None
        arguments = _torch.op_arguments(node)
        if arguments.get("dropout_p", 0.0):
            return None
        mask = arguments.get(self._mask)
        if mask is not None and any(list(arguments.get("grad_input_mask") or ())[3:]):
            return None
        wanted: dict[torch.fx.Node, Slab | None] = {
            n: None for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)
        }
        batches_and_heads = self._shape(arguments[self._alike[0]])
        for name in self._alike:
            operand = arguments[name]
            if not cut.fits(self._shape(operand), units):
                return None
            wanted[operand] = cut
        if mask is not None:
            shape = self._shape(mask)
            dim = cut.dim - (len(batches_and_heads) - len(shape))
            if dim >= 0 and shape[dim] != 1:
                if not cut.on(dim).fits(shape, units):
                    return None
                wanted[mask] = cut.on(dim)
        return wanted

    def call(self, node: torch.fx.Node, cut: Cut, units: int, width: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments for every part."""
        assert not isinstance(cut, Partial)
        return tuple(node.args), dict(node.kwargs)

    @staticmethod
    def _shape(node: torch.fx.Node) -> tuple[Any, ...]:
        return tuple(node.meta["val"].shape)


#: Results past the gradients or (output, logsumexp) are generator states, sizes and debugging aids.
RULES: dict[str, Attention] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": Attention(_QKV, (0, 1), "attn_mask"),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": Attention(
        ("grad_out", *_QKV, *_SAVED), (0, 1, 2), "attn_mask"
    ),
    "aten::_scaled_dot_product_flash_attention": Attention(_QKV, (0, 1)),
    "aten::_scaled_dot_product_flash_attention_backward": Attention(("grad_out", *_QKV, *_SAVED), (0, 1, 2)),
    "aten::_scaled_dot_product_efficient_attention": Attention(_QKV, (0, 1), "attn_bias"),
    "aten::_scaled_dot_product_efficient_attention_backward": Attention(
        ("grad_out_", *_QKV, *_SAVED), (0, 1, 2), "attn_bias"
    ),
    "aten::_scaled_dot_product_cudnn_attention": Attention(_QKV, (0, 1), "attn_bias"),
    "aten::_scaled_dot_product_cudnn_attention_backward": Attention(
        ("grad_out", *_QKV, *_SAVED), (0, 1, 2), "attn_bias"
    ),
}
