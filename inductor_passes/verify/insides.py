"""What attention's backward allocates beside its results on an NVIDIA GPU; the verifier's own account of it.

Listed as the tensors that the kernels' host code makes, by shape: ``mha_bwd`` in ``flash_api.cpp``,
``_flash_attention_backward`` and ``_efficient_attention_backward`` in ``attention_backward.cu``, and for cuDNN what the
allocator was seen to hand out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.fx

from inductor_passes import _torch

_NAME = "_scaled_dot_product_{}_attention_backward"
#: Kind -> where the rounding of a head's width changes, and to what it is rounded below and above.
_WIDTHS = {"flash": (128, 32, 64), "efficient": (64, 64, 128), "cudnn": (0, 1, 1)}


def inside_bytes(node: torch.fx.Node) -> int:
    """Bytes that live only while the node runs; 0 for what is not an attention's backward on a GPU."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    kind = next((kind for kind in _WIDTHS if name == _NAME.format(kind)), None)
    if kind is None or torch.version.hip is not None:
        return 0
    values = [n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in node.args[:6]]
    operands = [*values[:4], values[5 if kind == "efficient" else 4]] if len(values) == 6 else []
    tensors = [v for v in operands if isinstance(v, torch.Tensor) and v.is_cuda and v.dim() == 4]
    if len(tensors) != 5:
        return 0
    total = 0
    for shape, width in _made(kind, *tensors):
        sizes = [_torch.size_hint(n) for n in shape]
        if None in sizes:
            return 0
        total += math.prod(n for n in sizes if n is not None) * width
    return total


def _made(
    kind: str, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
) -> Iterator[tuple[tuple[int | torch.SymInt, ...], int]]:
    """(shape, bytes of an element) of each temporary."""
    b, h, s, d = q.shape
    rounded = s if kind == "cudnn" else (s + 127) // 128 * 128
    limit, small, large = _WIDTHS[kind]
    step = small if d <= limit else large
    # The query's gradient, and the sum over a head of gradient times result.
    yield (b, rounded, h, (d + step - 1) // step * step), 4
    yield (b, h, rounded if kind == "flash" else s), 4
    if kind != "efficient" and k.shape[1] != h:
        yield (b, k.shape[2], h, k.shape[3]), q.element_size()
        yield (b, v.shape[2], h, v.shape[3]), q.element_size()
    for one in {"flash": (grad, out), "efficient": (grad,), "cudnn": ()}[kind]:
        wanted = (s * h * one.shape[3], one.shape[3], h * one.shape[3], 1)
        if any(_differ(n, have) for n, have, size in zip(wanted, one.stride(), one.shape) if _differ(size, 1)):
            yield tuple(one.shape), one.element_size()


def _differ(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """By hint: asking symbolic sizes themselves would add a guard."""
    return _torch.size_hint(one) != _torch.size_hint(other)
