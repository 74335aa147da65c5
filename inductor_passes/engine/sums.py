"""What decides the last bits of a graph: which sums over ranks travel together, and in what pieces products are taken.

A plan that comes into use while a program runs must leave all of it as it was. A library chooses by a message's size,
and by an element's place in it, in which order it adds what more than two ranks have; two numbers have one order only.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.rewriting.messages import members_of
from inductor_passes.settings.redistribution import Tier

#: Results do not depend on the order.
_ANY_ORDER = frozenset({"", "min", "max", "band", "bor", "bxor"})
_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution")
)


def _depends_on_message(one: Collective) -> bool:
    """Whether the last bits of its result depend on what it travels with."""
    inexact = any(dtype.is_floating_point or dtype.is_complex for dtype in one.dtypes)
    return one.reduce_op not in _ANY_ORDER and inexact and len(one.group.ranks) > 2


def arithmetic(view: GraphView, tier: Tier) -> Counter[str]:
    """What a graph adds up and multiplies, as text, with how often. Equal where last bits are.

    Args:
        tier: of the rewrites. Those that only move data leave sums of two ranks their bits.
    """
    found: Counter[str] = Counter()
    for one in view.collectives:
        members = members_of(one.start)
        about = f"{one.reduce_op} {sorted({*map(str, one.dtypes)})} {one.group.ranks}"
        if _depends_on_message(one):
            found[f"{about} {members}"] += 1
        elif one.reduce_op not in _ANY_ORDER and tier == "reassociate":
            found.update(f"{about} {member}" for member in members)
    for node in view.nodes:
        if node.op == "call_function" and _torch.op_name(node.target) in _PRODUCTS:
            operands = (n.meta.get("val") for n in node.all_input_nodes)
            shapes = [tuple(one.shape) for one in operands if isinstance(one, torch.Tensor)]
            found[f"{_torch.op_name(node.target)} {shapes}"] += 1
    return found
