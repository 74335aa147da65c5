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

#: Results do not depend on the order.
_ANY_ORDER = frozenset({"", "min", "max", "band", "bor", "bxor"})
_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution")
)


def adds_in_some_order(one: Collective) -> bool:
    """Whether the last bits of its result depend on what it travels with."""
    inexact = any(dtype.is_floating_point or dtype.is_complex for dtype in one.dtypes)
    return one.reduce_op not in _ANY_ORDER and inexact and len(one.group.ranks) > 2


def arithmetic(view: GraphView, *, exact: bool) -> Counter[str]:
    """What a graph adds up and multiplies, as text, with how often. Equal where last bits are.

    Args:
        exact: passes only move data: sums of two ranks then have equal bits however they are carried out.
    """
    found: Counter[str] = Counter()
    for one in view.collectives:
        members = members_of(one.start)
        if adds_in_some_order(one):
            found[f"{one.reduce_op} {one.dtypes[0]} {one.group.ranks} {members}"] += 1
        elif one.reduce_op not in _ANY_ORDER and not exact:
            found.update(f"{one.reduce_op} {one.dtypes[0]} {one.group.ranks} {member}" for member in members)
    for node in view.nodes:
        if node.op == "call_function" and _torch.op_name(node.target) in _PRODUCTS:
            shapes = [tuple(value.shape) for value in map(_value, node.all_input_nodes) if value is not None]
            found[f"{_torch.op_name(node.target)} {shapes}"] += 1
    return found


def _value(node: torch.fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None
