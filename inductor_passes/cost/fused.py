"""What an operator takes that communicates while the compute lane stands still.

Which price an operator has stands in ``operators.py``; here is one function per price. Matmul and link overlap inside
the operator, plus what cannot.

All styles share one form. The work is cut into pieces; the slower of matmul and link sets the pace and the faster one
adds one piece at the end that nothing hides::

    fused = max(matmul, link) + min(matmul, link) / pieces + overhead

Styles differ in pieces and overhead: ``op`` multiplies per peer and part and issues a message for each, ``symm_mem``
multiplies per peer and copies on a second stream, ``kernels`` runs one matmul in tiles, at a share of the library's
rate (an assumption; the measured ratio is what ``tools/bench gpu`` prints).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.cost.profile import CostProfile
from inductor_passes.cost.values import dtype_name, value_bytes
from inductor_passes.ir import groups
from inductor_passes.operators import OPERATORS, CollectiveKind, OperatorFacts, Price

#: Share of the library's matmul rate that our kernels are taken to reach.
KERNEL_RATE = 0.85
#: Into how many pieces per rank tiles cut the work, at least.
_TILES = 8


def fused_ns(
    style: str,
    profile: CostProfile,
    kind: CollectiveKind,
    communicated: tuple[int, int],
    products: list[tuple[float, int]],
    dtype: str,
    ranks: tuple[int, ...],
    parts: int,
) -> int:
    """Time of one operator.

    Args:
        style: ``op``, ``symm_mem`` or ``kernels``.
        kind: of the collective inside.
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


def norm_ns(profile: CostProfile, size_bytes: int, itemsize: int, ranks: tuple[int, ...], two_shot: bool) -> int:
    """Time of an all-reduce with residual and RMSNorm on messages of ``size_bytes``.

    Its exchanges, and one kernel that reads and writes rows.
    """
    world = max(1, len(ranks))
    kernel = profile.compute_ns(0, 4 * size_bytes, "float32", 1)
    if not two_shot:
        return kernel + profile.communication_ns(CollectiveKind.ALL_GATHER, size_bytes, size_bytes * world, ranks)
    there = profile.communication_ns(CollectiveKind.REDUCE_SCATTER, size_bytes, size_bytes // world, ranks)
    sums = size_bytes * 4 // itemsize
    return kernel + there + profile.communication_ns(CollectiveKind.ALL_GATHER, sums // world, sums, ranks)


def operator_ns(node: torch.fx.Node, profile: CostProfile) -> int | None:
    """Time of a node that communicates while the compute lane stands still; None for every other node."""
    facts = OPERATORS.get(_torch.op_name(node.target)) if node.op == "call_function" else None
    price = _PRICES.get(facts.price) if facts is not None else None
    if facts is None or price is None:
        return None
    arguments = torch.fx.node.map_arg(_torch.op_arguments(node), lambda n: n.meta.get("val"))
    # Of a group that is not known no more is known than that the operator is there.
    ranks = groups.resolve(arguments["group_name"]).ranks or (0,)
    return price(_Call(node, arguments, ranks), facts, profile)


@dataclass(frozen=True)
class _Call:
    """One call of an operator: its node, its arguments' values by name, the ranks that take part."""

    node: torch.fx.Node
    arguments: Mapping[str, Any]
    ranks: tuple[int, ...]


def _matmul_ns(call: _Call, facts: OperatorFacts, profile: CostProfile) -> int:
    assert facts.matmul is not None and facts.kind is not None
    left, rights = call.arguments[facts.matmul.left], call.arguments[facts.matmul.right]
    rights = list(rights) if isinstance(rights, (list, tuple)) else [rights]
    gathers = facts.kind.facts.input_share
    size, rows = value_bytes(left), _torch.size_hint(left.shape[0]) or 0
    products = [product_size(left, right, rows * len(call.ranks) if gathers else rows) for right in rights]
    if gathers:
        moved = (size, size * len(call.ranks))
    else:
        whole = rows * (_torch.size_hint(rights[0].shape[1]) or 0) * left.element_size()
        moved = (whole, whole // len(call.ranks))
    parts = int(call.arguments.get("parts", 1))
    return fused_ns(facts.matmul.style, profile, facts.kind, moved, products, dtype_name(left), call.ranks, parts)


def _norm_ns(call: _Call, facts: OperatorFacts, profile: CostProfile) -> int:
    x = call.arguments["x"]
    return norm_ns(profile, value_bytes(x), x.element_size(), call.ranks, bool(call.arguments["two_shot"]))


def _blocking_link_ns(call: _Call, facts: OperatorFacts, profile: CostProfile) -> int:
    assert facts.kind is not None
    sent = sum(value_bytes(n.meta.get("val")) for n in call.node.all_input_nodes)
    received = value_bytes(call.node.meta.get("val"))
    copies = profile.compute_ns(0, sent + received, dtype_name(call.node.meta.get("val")), 1)
    return copies + profile.communication_ns(facts.kind, sent, received, call.ranks)


_Price = Callable[[_Call, OperatorFacts, CostProfile], int]
_PRICES: Mapping[Price, _Price] = MappingProxyType(
    {Price.MATMUL: _matmul_ns, Price.NORM: _norm_ns, Price.BLOCKING_LINK: _blocking_link_ns}
)
