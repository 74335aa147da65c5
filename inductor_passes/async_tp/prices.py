"""What a fused operator takes: matmul and link side by side, plus what cannot overlap.

All styles share one form. The work is cut into pieces; the slower of matmul and link sets the pace and the faster one
adds one piece at the end that nothing hides::

    fused = max(matmul, link) + min(matmul, link) / pieces + overhead

Styles differ in pieces and overhead: ``op`` multiplies per peer and part and issues a message for each, ``symm_mem``
multiplies per peer and copies on a second stream, ``kernels`` runs one matmul in tiles, at a share of the library's
rate (an assumption; the measured ratio is what ``tools/bench gpu`` prints).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.cost.compute import FUSED, dtype_name, value_bytes
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir import groups

#: Share of the library's matmul rate that our kernels are taken to reach.
KERNEL_RATE = 0.85
#: Into how many pieces per rank tiles cut the work, at least.
_TILES = 8


def fused_ns(
    style: str,
    profile: CostProfile,
    kind: str,
    communicated: tuple[int, int],
    products: list[tuple[float, int]],
    dtype: str,
    ranks: tuple[int, ...],
    parts: int,
) -> int:
    """Time of one operator.

    Args:
        style: ``op``, ``symm_mem`` or ``kernels``.
        kind: of the collective.
        communicated: bytes that this rank puts in and gets out.
        products: (FLOPs, bytes moved) of every matmul.
        parts: sub-slabs per shard (``op``).
    """
    world = max(1, len(ranks))
    link = profile.communication_ns(kind, *communicated, ranks)
    pieces = {"op": world * parts, "symm_mem": world, "kernels": 1}[style]
    slabs = sum(
        pieces * profile.compute_ns(count / pieces, moved // pieces, dtype, 1) for count, moved in products
    )
    if style == "kernels":
        launch = profile.compute_ns(0, 0, dtype, 1)
        # One program for all ranks' rows, another one that pushes or adds up.
        return round(_overlapped(slabs / KERNEL_RATE, link, _TILES * world)) + 2 * launch
    issue = profile.issue_ns(kind, *communicated, ranks)
    messages = (world - 1) * parts if style == "op" else 1
    return round(_overlapped(slabs, link, pieces)) + messages * issue


def _overlapped(matmul_ns: float, link_ns: float, pieces: int) -> float:
    return max(matmul_ns, link_ns) + min(matmul_ns, link_ns) / max(1, pieces)


def product_size(left: Any, right: Any, rows: int) -> tuple[float, int]:
    """(FLOPs, bytes moved) of (rows, k) @ (k, n) for (fake) operands; the left one may be a shard."""
    k, n = (_torch.size_hint(s) or 0 for s in right.shape)
    width = left.element_size()
    return 2.0 * rows * k * n, width * (rows * k + k * n + rows * n)


def operator_ns(node: torch.fx.Node, profile: CostProfile) -> int:
    """Time of one of the operators below in a graph."""
    style, gathers, left_name, right_name = _STYLES[_torch.op_name(node.target)]
    arguments = torch.fx.node.map_arg(_torch.op_arguments(node), lambda n: n.meta.get("val"))
    left, rights = arguments[left_name], arguments[right_name]
    rights = list(rights) if isinstance(rights, (list, tuple)) else [rights]
    ranks = groups.resolve(arguments["group_name"]).ranks
    size = value_bytes(left)
    rows = _torch.size_hint(left.shape[0]) or 0
    products = [product_size(left, right, rows * len(ranks) if gathers else rows) for right in rights]
    if gathers:
        kind, moved = "all_gather", (size, size * len(ranks))
    else:
        whole = rows * (_torch.size_hint(rights[0].shape[1]) or 0) * left.element_size()
        kind, moved = "reduce_scatter", (whole, whole // max(1, len(ranks)))
    return fused_ns(style, profile, kind, moved, products, dtype_name(left), ranks, int(arguments.get("parts", 1)))


#: operator -> (style, whether it gathers, name of the left operand, name of the right one)
_STYLES: dict[str, tuple[str, bool, str, str]] = {
    "inductor_passes::gathered_mm": ("op", True, "shard", "right"),
    "inductor_passes::mm_scattered": ("op", False, "left", "right"),
    "inductor_passes::symm_gathered_mm": ("kernels", True, "shard", "rights"),
    "inductor_passes::symm_mm_scattered": ("kernels", False, "left", "right"),
    "symm_mem::fused_all_gather_matmul": ("symm_mem", True, "A", "Bs"),
    "symm_mem::fused_all_gather_scaled_matmul": ("symm_mem", True, "A", "Bs"),
    "symm_mem::fused_matmul_reduce_scatter": ("symm_mem", False, "A", "B"),
    "symm_mem::fused_scaled_matmul_reduce_scatter": ("symm_mem", False, "A", "B"),
}
FUSED.update(dict.fromkeys(_STYLES, operator_ns))
