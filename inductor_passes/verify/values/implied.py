"""Values that a program treats as equal on the ranks of a group, if the user says that such values are equal.

An element-by-element operator combines a value that is equal on all ranks of a group with another operand: the result
makes sense on all of them alike only if that operand is equal too. This is no proof: a program may scale a common value
by a number of its own on every rank. So it holds only where the setting ``replicas`` says so, and only for operands
with as many columns as a result that the common value spans: a residual, the weight of a norm, a bias. What is scaled
per row, or has columns of its own on every rank, implies nothing. Nor does what follows from a number that may be the
rank's own (a mask of the columns that a rank owns), or from what a collective of the group left different on its ranks.

A symbolic number is equal on a group's ranks if it follows from how many elements a collective of the group takes from
each of them.
"""

from __future__ import annotations

import contextlib
import math

import torch

from inductor_passes import _torch
from inductor_passes.ir.groups import resolve
from inductor_passes.verify.values.communication import Groups
from inductor_passes.verify.values.moves import MOVES
from inductor_passes.verify.values.operators import TABLE
from inductor_passes.verify.values.program import Program, Record, whole
from inductor_passes.verify.values.replicas import Replicas
from inductor_passes.verify.values.signatures import is_pure, tensors
from inductor_passes.verify.values.sizes import NoHintError, Size, Symbol

#: Collectives whose result is the same on every rank that takes part.
_GATHER = "_c10d_functional::all_gather_into_tensor"
_COMMON = frozenset({"_c10d_functional::all_reduce", "_c10d_functional::broadcast", _GATHER})
#: Those to which every rank brings as many elements.
_ALIKE_IN_SIZE = _COMMON | {"_c10d_functional::reduce_scatter_tensor"}
#: Numbers that are known at run time only.
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
#: Which element these read can be another number on every rank.
_PICKING = (
    "slice", "narrow", "select", "split", "split_with_sizes", "chunk", "unbind", "tensor_split", "slice_scatter",
    "select_scatter", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes", "as_strided", "roll",
    "constant_pad_nd",
)  # fmt: skip
_PICKS = frozenset(f"aten::{name}" for name in _PICKING)


def implied(program: Program, groups: Groups) -> dict[str, set[Replicas]]:
    """Names of the operands that are implied to be equal -> the groups on whose ranks; O(nodes + edges) per group."""
    found: dict[str, set[Replicas]] = {}
    for group, names in _common(program, groups).items():
        _spread(program, groups, names, group, found)
    return found


def computed(program: Program, groups: Groups, with_implied: bool = False) -> dict[str, set[Replicas]]:
    """Names of the values that are made of equal ones alone -> the groups on whose ranks; O(nodes + edges) per group.

    Nothing is taken for granted: a place to look at, where the same is to be proven.

    Args:
        with_implied: whether values count as equal that are implied to be.
    """
    found: dict[str, set[Replicas]] = {}
    for group, names in _common(program, groups).items():
        _spread(program, groups, names, group, {} if with_implied else None)
        for name in names:
            found.setdefault(name, set()).add(group)
    return found


def _common(program: Program, groups: Groups) -> dict[Replicas, set[str]]:
    """What collectives leave the same on every rank of their group."""
    common: dict[Replicas, set[str]] = {}
    for record in program.records.values():
        if record.called in _COMMON:
            common.setdefault(groups.of(record), set()).add(record.name)
    return common


def _spread(
    program: Program, groups: Groups, equal: set[str], group: Replicas, found: dict[str, set[Replicas]] | None
) -> None:
    """Follow what is equal along one group through the program; with ``found`` also what is implied to be."""
    apart: set[str] = set()
    symbols = _symbols(program, groups, group)
    for record in program.records.values():
        if record.op != "call_function":
            continue
        operands = [o for o in record.raw_operands if not _follows(o, symbols)]
        if _sets_apart(record, group) or any(o.name in apart and o.name not in equal for o in operands):
            apart.add(record.name)
        if program.memory.is_written(record.name):
            continue
        if record.called == "_c10d_functional::wait_tensor":
            if operands[0].name in equal:
                equal.add(record.name)
            continue
        if record.called == "aten::cat" and (source := _joined(record)) is not None:
            if source.name in equal:
                equal.add(record.name)
            continue
        if not alike(record) or any(isinstance(o.value, _NUMBERS) for o in operands):
            continue
        if all(o.name in equal for o in operands):
            equal.add(record.name)
        elif found is not None and _torch.is_pointwise(record.target) and _implies(record, equal, apart):
            for operand in tensors(record):
                if operand.name not in equal:
                    equal.add(operand.name)
                    for leaf in _leaves(operand, group):
                        found.setdefault(leaf.name, set()).add(group)
            equal.add(record.name)


def _symbols(program: Program, groups: Groups, group: Replicas) -> set[Symbol]:
    """The symbols that have one value on the ranks of a group: a collective's elements are as many only for that."""
    found: set[Symbol] = set()
    for record in program.records.values():
        if record.called in _ALIKE_IN_SIZE and groups.of(record) == group:
            with contextlib.suppress(NoHintError):
                elements: object = math.prod(record.first.shape())
                symbols = _symbols_of(elements)
                terms = elements.terms.items() if isinstance(elements, Size) else ()
                # A sum of positive multiples of powers grows with its only symbol.
                if len(symbols) == 1 and all(c > 0 for powers, c in terms if powers):
                    found |= symbols
    return found


def _symbols_of(size: object) -> set[Symbol]:
    return {symbol for powers in size.terms for symbol, _ in powers} if isinstance(size, Size) else set()


def _follows(record: Record, symbols: set[Symbol]) -> bool:
    """Whether a record is a number that is made of these symbols alone."""
    number: object = whole(record) if isinstance(record.value, torch.SymInt) else None
    return isinstance(number, Size) and _symbols_of(number) <= symbols


def _is_all(slice_: Record) -> bool:
    """Whether a slice is all of its operand."""
    with contextlib.suppress(NoHintError):
        return slice_.called == "aten::slice" and slice_.shape() == slice_.first.shape()
    return False


def _joined(cat: Record) -> Record | None:
    """What is split into pieces that a cat joins, all of them in order: no number says which one is read."""
    pieces = list(cat.raw_operands)
    splits = {piece.raw_operands[0].name: piece.raw_operands[0] for piece in pieces if piece.called == "getitem"}
    if len(splits) != 1 or any(piece.called != "getitem" for piece in pieces):
        return None
    (split,) = splits.values()
    if split.called not in _PICKS or not isinstance(split.value, (list, tuple)):
        return None
    whole = [piece.args[1] for piece in pieces] == list(range(len(split.value)))
    return split.raw_operands[0] if whole else None


#: The only numbers in these say which dimensions they are about.
_BY_DIMENSION = frozenset(
    {"prims::rev", *(f"aten::{name}" for name in ("amax", "amin", "flip", "cumsum", "cumprod", "logcumsumexp"))}
)


def alike(record: Record) -> bool:
    """Whether the operator gives equal results for equal operands on every rank: the numbers in it are no rank's own.

    Whole numbers that are added to or compared with whole numbers may be, as may be what says which piece is read.
    """
    if record.called == "getitem":
        return record.raw_operands[0].called not in _PICKS
    if not is_pure(record) or record.called in _PICKS:
        return _is_all(record)
    operands = tensors(record)
    if operands and (record.called in MOVES or record.called in _BY_DIMENSION):
        return True
    if record.called == "prims::iota":
        # What is at a position is the position, however many there are.
        return (record.arguments.get("start", 0), record.arguments.get("step", 1)) == (0, 1)
    if _torch.is_pointwise(record.target) and all(isinstance(v, Record) for v in record.arguments.values()):
        return True
    known = record.called in MOVES or record.called in TABLE or _torch.is_pointwise(record.target)
    return known and any(o.dtype().is_floating_point or o.dtype().is_complex for o in operands or [record])


def _sets_apart(record: Record, group: Replicas) -> bool:
    """Whether equal operands may give results that differ in a group: by a number, or by who communicates."""
    if record.called in ("getitem", *_PICKS):
        return not alike(record)
    if record.called.startswith("_c10d_functional::") and record.called != "_c10d_functional::wait_tensor":
        given = record.arguments
        argument = given.get("group_name", given.get("group"))
        ranks = resolve(argument.value if isinstance(argument, Record) else argument).ranks
        # What is equal at the end of a collective is known as such.
        return len({*ranks}.intersection(group.ranks)) != 1
    counts = [o.dtype() for o in tensors(record)]
    if not counts or not isinstance(record.value, torch.Tensor) or not _torch.is_pointwise(record.target):
        return False
    numbers = any(type(value) is int for value in record.arguments.values())
    return numbers and not any(dtype.is_floating_point or dtype.is_complex for dtype in counts)


def _implies(record: Record, equal: set[str], apart: set[str]) -> bool:
    """Whether an equal value spans the result, and the other operands have as many columns and no own numbers."""
    try:
        shape = record.shape()
        shapes = [(o.name in equal, o.shape()) for o in tensors(record)]
    except NoHintError:
        return False
    if any(o.name in apart and o.name not in equal for o in tensors(record)):
        return False
    if not shape or shape[-1] == 1 or not any(known and own == shape for known, own in shapes):
        return False
    return all(known or own[-1:] == shape[-1:] for known, own in shapes)


def _leaves(record: Record, group: Replicas) -> list[Record]:
    """Where the elements of an operand come from, through what only moves or casts them, and through gathers.

    Those are between ranks of which one is of the group: what they gathered the others of the group gather too, from
    ranks that hold the same if the whole is the same.
    """
    found, todo, seen = [], [record], set[str]()
    while todo:
        one = todo.pop()
        if one.name in seen:
            continue
        seen.add(one.name)
        gather = one.raw_operands[0] if one.called == "_c10d_functional::wait_tensor" else None
        if gather is not None and gather.called == _GATHER and not _sets_apart(gather, group):
            todo += gather.raw_operands
        elif one.called in MOVES and one.called not in _PICKS and one.raw_operands:
            todo += one.raw_operands
        else:
            found.append(one)
    return found
