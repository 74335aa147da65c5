"""Operators that treat the rows of a tensor alike, on a rank's share of the rows.

A tensor of shape ``[*leading, *rest]`` whose leading extents multiply to the number of rows lies in memory row by row.
Its share is ``[rows / ranks, *rest]``: consecutive rows, in the order of memory. A tensor is known by how many of its
dimensions are leading ones (its *lead*).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.rewrites.movement import name_of
from inductor_passes.rewrites.packing import Size, sizes
from inductor_passes.rewrites.replicas import tensor_operands
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import dense
from inductor_passes.verify.messages import OWN_KEY

_VIEWS = frozenset(f"aten::{name}" for name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"))
_SAME = frozenset(("aten::alias", "aten::detach"))
_SUMMED = frozenset(("aten::sum", "aten::mean", "aten::amax", "aten::amin"))
_SPREAD = frozenset(("aten::var", "aten::var_mean"))
REDUCTIONS = _SUMMED | _SPREAD

#: Node -> its lead.
Leads = dict[torch.fx.Node, int]


@dataclass(frozen=True, eq=False)
class Shares:
    """``rows`` rows, possibly symbolic, over ``ranks`` ranks. Equal are those that are for every size."""

    rows: Size
    ranks: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shares):
            return NotImplemented
        return self.ranks == other.ranks and _torch.same_size(self.rows, other.rows)

    def __hash__(self) -> int:
        return hash(self.ranks)

    @property
    def share(self) -> Size:
        """Rows of one rank."""
        return self.rows // self.ranks

    @property
    def divides(self) -> bool:
        """Whether ranks are known to have equal shares, for every size.

        A guard on a product of symbols is not enough: sizes computed from it would not be seen to be equal again.
        """
        return _torch.same_size(self.share * self.ranks, self.rows)

    def shape(self, node: torch.fx.Node, lead: int) -> list[Size]:
        """The shape of a rank's share."""
        return [self.share, *node.meta["val"].shape[lead:]]

    def lead_of(self, shape: Sequence[Size]) -> int:
        """The least number of leading dimensions that hold all rows; 0 without any."""
        count: Size = 1
        for lead, size in enumerate(shape, 1):
            count = count * size
            if _torch.same_size(count, self.rows):
                return lead
        return 0


def lead_behind(shares: Shares, node: torch.fx.Node, leads: Leads) -> int:
    """The lead of what an operator makes of operands with these leads; 0 where it does not treat rows alike.

    Operands without a lead are not looked at but for their shapes: whether they may be used is for the caller to say.
    """
    name = name_of(node)
    if node.target is operator.getitem:
        (source,) = node.all_input_nodes
        # The results of a reduction begin as it does.
        return leads[source] if name_of(source) in _SPREAD else 0
    shape = sizes(node)
    if not _torch.is_op(node.target) or (shape is None and name not in _SPREAD):
        return 0
    if name in _VIEWS:
        return shares.lead_of(shape or [])
    if name in REDUCTIONS:
        (source,) = tensor_operands(node)
        return leads[source] if all(d >= leads[source] for d in reduced_dims(node)) and reduced_dims(node) else 0
    if name == "aten::expand":
        (source,) = tensor_operands(node)
        return _aligned(source, leads[source], node)
    if name == "aten::clone" or name in _SAME or _torch.is_pointwise(node.target):
        found = {_aligned(o, leads[o], node) for o in tensor_operands(node) if o in leads}
        return found.pop() if len(found) == 1 else 0
    return 0


def reduced_dims(node: torch.fx.Node) -> list[int]:
    """The dimensions of its operand that a reduction removes, counted from the front; none when it removes all."""
    given = _torch.op_arguments(node).get("dim")
    dims = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    rank = tensor_operands(node)[0].meta["val"].ndim
    return [int(d) % rank for d in dims]


def is_free(node: torch.fx.Node) -> bool:
    """Whether an operator only reshapes, repeats or casts: whoever reads its result does that on the way."""
    name = name_of(node)
    return name in _VIEWS or name in _SAME or name in ("aten::expand", "prims::convert_element_type")


def adds_rows(node: torch.fx.Node, lead: int) -> bool:
    """Whether a node adds up all rows, and nothing else, of an operand with this lead: the gradient of a weight."""
    return (
        name_of(node) == "aten::sum"
        and sorted(reduced_dims(node)) == list(range(lead))
        and _torch.op_arguments(node).get("dtype") in (None, node.meta["val"].dtype)
    )


def _aligned(operand: torch.fx.Node, lead: int, node: torch.fx.Node) -> int:
    """The lead of a result that an operand with this lead is broadcast to; 0 where its rows would be repeated."""
    shape, whole = sizes(operand), sizes(node)
    if shape is None or whole is None:
        return 0
    more = len(whole) - len(shape)
    return lead + more if _torch.same_sizes(whole[: lead + more], [1] * more + shape[:lead]) else 0


class OnShares:
    """Emits operators on shares.

    Args:
        position: of the rank in its group.
        ranks: of the group, in order; what a split says whose first use is the rank's own piece.

    Attributes:
        new: node -> what stands for it on shares.
    """

    def __init__(self, shares: Shares, leads: Leads, position: int, ranks: tuple[int, ...]) -> None:
        self.shares, self.leads, self.position, self.ranks = shares, leads, position, ranks
        self.new: dict[torch.fx.Node, torch.fx.Node] = {}
        self._cut: dict[tuple[torch.fx.Node, tuple[Hashable, ...]], torch.fx.Node] = {}

    def emit(self, emit: Emitter, node: torch.fx.Node) -> torch.fx.Node:
        """The node on shares of its operands."""
        name, lead = name_of(node), self.leads[node]
        if node.target is operator.getitem:
            return emit.call(operator.getitem, self.new[node.all_input_nodes[0]], node.args[1])
        if name in _SAME:
            return self.new[node.all_input_nodes[0]]
        if name in _VIEWS:
            source = self.new[node.all_input_nodes[0]]
            shape = self.shares.shape(node, lead)
            if _torch.same_sizes(source.meta["val"].shape, shape):
                return source
            return emit.view(dense(emit, source), shape)
        if name in REDUCTIONS:
            (source,) = tensor_operands(node)
            dims = [d - self.leads[source] + 1 for d in reduced_dims(node)]
            return _reduced(emit, node, self.new[source], dims)
        if name == "aten::expand":
            return emit.call(node.target, self.new[tensor_operands(node)[0]], self.shares.shape(node, lead))
        return self._pointwise(emit, node, lead)

    def summed(self, emit: Emitter, node: torch.fx.Node) -> torch.fx.Node:
        """This rank's part of a sum over all rows, in the shape of the whole sum."""
        (source,) = tensor_operands(node)
        part = _reduced(emit, node, self.new[source], [0])
        return emit.view(dense(emit, part), list(node.meta["val"].shape))

    def _pointwise(self, emit: Emitter, node: torch.fx.Node, lead: int) -> torch.fx.Node:
        operands = tensor_operands(node)
        brought = {o: self.new[o] if o in self.leads else self._brought(emit, o, node, lead) for o in operands}
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: brought.get(n, n))
        return emit.call(node.target, *args, **kwargs)

    def _brought(self, emit: Emitter, operand: torch.fx.Node, node: torch.fx.Node, lead: int) -> torch.fx.Node:
        """What a share needs of a whole operand: all of it, where it is the same for all rows, or its own rows."""
        shape, whole = sizes(operand), sizes(node)
        assert shape is not None and whole is not None
        leading, rest = _parts(shape, whole, lead)
        if _torch.same_sizes(leading, [1] * len(leading)):
            return emit.view(dense(emit, operand), rest) if leading else operand
        key = operand, tuple(map(_torch.size_key, whole[:lead]))
        if key not in self._cut:
            full = operand
            if not _torch.same_sizes(leading, whole[:lead]):
                full = emit.call(torch.ops.aten.expand.default, operand, [*whole[:lead], *rest])
            flat = emit.view(dense(emit, full), [self.shares.rows, *rest])
            # How many pieces there are is written down, also where their size is symbolic.
            pieces = emit.call(torch.ops.aten.split_with_sizes.default, flat, [self.shares.share] * self.shares.ranks)
            pieces.meta[OWN_KEY] = self.ranks
            self._cut[key] = emit.call(operator.getitem, pieces, self.position)
        return self._cut[key]


def _reduced(emit: Emitter, node: torch.fx.Node, source: torch.fx.Node, dims: list[int]) -> torch.fx.Node:
    """A reduction of another operand along other dimensions."""
    args, kwargs = list(node.args), dict(node.kwargs)
    args[0] = source
    if len(args) > 1:
        args[1] = dims
    else:
        kwargs["dim"] = dims
    return emit.call(node.target, *args, **kwargs)


def _parts(shape: list[Size], whole: list[Size], lead: int) -> tuple[list[Size], list[Size]]:
    """The extents of an operand along the leading dimensions of a result, and along the rest."""
    own = max(0, len(shape) - (len(whole) - lead))
    return shape[:own], shape[own:]


def copied_bytes(shares: Shares, operand: torch.fx.Node, node: torch.fx.Node, lead: int) -> int:
    """What bringing a whole operand to a share copies; symbolic sizes by their hints."""
    shape, whole = sizes(operand) or [], sizes(node) or []
    leading, rest = _parts(shape, whole, lead)
    value = operand.meta["val"]
    rows_alike = _torch.same_sizes(leading, [1] * len(leading))
    if rows_alike or (_torch.same_sizes(leading, whole[:lead]) and _torch.is_contiguous(value)):
        return 0
    return math.prod(_torch.size_hint(size) or 0 for size in [*whole[:lead], *rest]) * int(value.dtype.itemsize)
