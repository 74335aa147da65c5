"""Which values of a graph are equal on all ranks of a group.

One graph shows one rank. Proven equal is what came out of an all_reduce, an all_gather or a broadcast over the group,
or over ranks that contain it, all pieces of that put together again, and what is computed of equal values alone by
operators whose numbers the ranks compare before anything is changed (``agreement``; pieces, selected rows and offsets
of whole numbers are left open there, so equality ends at them).

Symbolic numbers are no part of what ranks compare. Equal is a symbol that follows from the size of a collective's
tensor: ranks of its group have to bring as many elements. An operator whose numbers depend on another symbol proves
nothing, unless it only moves elements.

The weight of a norm, a bias, a position embedding and the first residual are inputs: nothing shows that ranks hold the
same. ``replicas="implied"`` says that they do. Then an operand is taken to be equal if it is combined element by
element with an equal value of the result's shape, and spans the last dimension as that does. What is made of numbers
that may be a rank's own, or of what a collective left different on the ranks, is no input: nothing is implied of it.
"""

from __future__ import annotations

import operator

import sympy
import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import ops
from inductor_passes.ir.ops import Role
from inductor_passes.operators import CollectiveKind
from inductor_passes.rewrites.movement import name_of, step_behind
from inductor_passes.rewrites.packing import Size, sizes
from inductor_passes.rewrites.work import Work

_SHARING = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST)
#: Operators that move whole tensors, alike on all ranks.
_WHOLE_NAMES = (
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "clone", "alias",
    "detach",
)  # fmt: skip
_WHOLE = frozenset(f"aten::{name}" for name in _WHOLE_NAMES)
#: Operators that add up, compare or multiply whole tensors, and numbers that are written down.
_COMPUTED = frozenset(
    f"aten::{name}"
    for name in ("sum", "mean", "amax", "amin", "var", "var_mean", "mm", "bmm", "addmm", "full", "scalar_tensor")
)
_SPLITS = frozenset(f"aten::{name}" for name in ("split", "split_with_sizes", "chunk", "unbind", "tensor_split"))
_ROWS = frozenset(("aten::select", "aten::select_scatter", "aten::slice_scatter"))


def equal_values(work: Work, ranks: tuple[int, ...], *, implied: bool) -> set[torch.fx.Node]:
    """The nodes whose values are equal on ``ranks``; O(nodes + edges).

    What is implied to be equal is so from where it is first combined with something equal; what was computed of it
    before is not looked at again.

    Args:
        implied: whether operands count that are implied to be equal.
    """
    return equal_and_own(work, ranks, implied=implied)[0]


def equal_and_own(
    work: Work, ranks: tuple[int, ...], *, implied: bool
) -> tuple[set[torch.fx.Node], set[torch.fx.Node]]:
    """:func:`equal_values`, and those others that are made of numbers which may be a rank's own: no input, of which
    something could be implied."""
    equal: set[torch.fx.Node] = set()
    own: set[torch.fx.Node] = set()
    compared = work.facts.compared
    implied = implied and compared
    known = _known_symbols(work, ranks)
    for node in work.graph.nodes:
        if node.op != "call_function":
            continue
        if any(n in own and n not in equal for n in node.all_input_nodes) or _has_own_number(node):
            own.add(node)
        if work.is_wait(node):
            shared = work.behind(node, *_SHARING)
            if shared is not None and set(shared.group.ranks).issuperset(ranks):
                equal.add(node)
            elif any(len(set(c.group.ranks).intersection(ranks)) != 1 for c in work.awaited(node)):
                own.add(node)
            continue
        if name_of(node) == "aten::cat":
            # All pieces of a tensor, in order: no number says which one is read.
            step = step_behind(node)
            if step is not None and step[0] in equal and not work.is_written(node):
                equal.add(node)
            continue
        operands = tensor_operands(node)
        if not _compares(node, operands, known) or work.is_written(node) or not (compared or _has_no_number(node)):
            continue
        if equal.issuperset(operands):
            equal.add(node)
        elif implied and _torch.is_pointwise(node.target) and any(o in equal and _spans(o, node) for o in operands):
            others = [o for o in operands if o not in equal]
            if all(o not in own and last_dimension(o, node) and not work.is_written(o) for o in others):
                equal.update((node, *others))
    return equal, own - equal


def _has_no_number(node: torch.fx.Node) -> bool:
    """Whether nothing that is written down in a call decides what it computes."""
    if name_of(node) in _WHOLE or not _torch.is_op(node.target):
        return True
    given = _torch.op_arguments(node).values()
    return all(value is None or isinstance(value, (torch.fx.Node, torch.dtype, torch.device)) for value in given)


def _has_own_number(node: torch.fx.Node) -> bool:
    """Whether a number in a call may be a rank's own: ranks do not compare those (``agreement``).

    Which piece or row is taken, and whole numbers that are added to or compared with whole numbers. Where something is
    implied ranks do compare those that are made: positions.
    """
    name = name_of(node)
    if name == "aten::slice":
        return not _torch.same_sizes(sizes(node) or [], sizes(node.all_input_nodes[0]) or [-1])
    if node.target is operator.getitem:
        return name_of(node.all_input_nodes[0]) in _SPLITS
    if name in _ROWS:
        return True
    values = [n.meta.get("val") for n in tensor_operands(node)]
    if not values or not _torch.is_pointwise(node.target):
        return False
    whole = all(not (v.is_floating_point() or v.is_complex()) for v in values if isinstance(v, torch.Tensor))
    return whole and any(type(value) is int for value in _torch.op_arguments(node).values())


def tensor_operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The operands that are tensors or lists of them."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), (torch.Tensor, list, tuple))]


def last_dimension(operand: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether an operand has as many columns as the result: a residual, a weight; not a factor per row."""
    mine, whole = sizes(operand), sizes(node)
    if not mine or not whole or _torch.same_size(mine[-1], 1):
        return False
    return _torch.same_size(mine[-1], whole[-1])


def _spans(operand: torch.fx.Node, node: torch.fx.Node) -> bool:
    mine, whole = sizes(operand), sizes(node)
    return mine is not None and whole is not None and _torch.same_sizes(mine, whole)


def _known_symbols(work: Work, ranks: tuple[int, ...]) -> frozenset[sympy.Symbol]:
    """The symbols that have one value on ``ranks``, see the module's docstring."""
    found: set[sympy.Symbol] = set()
    for start in work.collectives(*_SHARING, CollectiveKind.REDUCE_SCATTER):
        collective = work.collective(start, *_SHARING, CollectiveKind.REDUCE_SCATTER)
        if collective is None or not set(collective.group.ranks).issuperset(ranks):
            continue
        symbol = _torch.determined_symbol(collective.inputs[0].meta["val"].numel())
        if symbol is not None:
            found.add(symbol)
    return frozenset(found)


def _asked(node: torch.fx.Node, operands: list[torch.fx.Node]) -> frozenset[sympy.Symbol]:
    """The symbols on which the numbers depend that an operator computes: its scalars, and how many elements it adds."""
    name = name_of(node)
    if name in _WHOLE:
        return frozenset()
    values = [n.meta.get("val") for n in node.all_input_nodes]
    if name in _COMPUTED:
        values += [size for o in operands for size in _summed_sizes(node, o)]
    return frozenset().union(*map(_torch.size_symbols, values))


def _summed_sizes(node: torch.fx.Node, operand: torch.fx.Node) -> list[Size]:
    """The extents of an operand over which an operator adds up; all of them where it does not say which."""
    whole, arguments = sizes(operand) or [], _torch.op_arguments(node)
    dims = arguments.get("dim")
    if dims is None:
        return whole
    return [whole[int(d)] for d in (dims if isinstance(dims, (list, tuple)) else [dims])] if whole else []


def _compares(node: torch.fx.Node, operands: list[torch.fx.Node], known: frozenset[sympy.Symbol]) -> bool:
    """Whether equal operands give equal results: ranks have compared every number that is written in the call."""
    if node.target is operator.getitem:
        (source,) = node.all_input_nodes
        return name_of(source) in ("aten::var_mean",)
    if not _torch.is_op(node.target) or ops.role(node) not in (Role.FREE, Role.COMPUTE):
        return False
    if _torch.is_seeded_random(node.target) or ops.mutated_inputs(node) or not _asked(node, operands) <= known:
        return False
    value = node.meta.get("val")
    tensors = [o.meta["val"] for o in operands] or [value]
    if name_of(node) == "aten::slice":
        return _torch.same_sizes(sizes(node) or [], sizes(operands[0]) or [-1])
    floating = any(isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()) for t in tensors)
    name = name_of(node)
    return name in _WHOLE or (floating and (name in _COMPUTED or _torch.is_pointwise(node.target)))
