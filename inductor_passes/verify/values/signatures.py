"""How the elements of an operator's result depend on those of its operands.

Each dimension of result and operands gets a letter. A dimension of the result whose letter operands share is *mapped*:
element by element, in any number of pieces. A *whole* letter has to be there completely and in order (a row that is
normed, the keys of an attention), a *summed* one completely but in any order. A proof needs to know no more of an
operator that computes. An operator that is not in the tables has whole letters only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from inductor_passes import _torch
from inductor_passes.verify.values.access import Access
from inductor_passes.verify.values.affine import ZERO, Affine
from inductor_passes.verify.values.program import Record, operands, whole
from inductor_passes.verify.values.sizes import is_stretched

#: The letter of a dimension of size 1 that stands for all indices.
ONE = "1"


@dataclass(frozen=True)
class Use:
    """One operand and the letters of its dimensions."""

    record: Record
    letters: tuple[str, ...]

    def read(self, a: Access, binding: Mapping[str, Affine]) -> Access:
        """The element that belongs to these values of the letters, for the read ``a`` of the result."""
        index = tuple(ZERO if letter == ONE else binding[letter] for letter in self.letters)
        return Access(self.record, (), a.rank, index, None, a.reader and a.record)


@dataclass(frozen=True)
class Signature:
    """An operator's result in terms of its operands.

    Attributes:
        key: equal for nodes that compute the same function of their operands.
        out: letters of the result; whole ones among them are positions in what was computed from a whole.
        uses: operands in order.
        whole, summed: letters and their extents.
        sized: the library may choose another kernel, and other roundings, for other sizes.
    """

    key: Hashable
    out: tuple[str, ...]
    uses: tuple[Use, ...]
    whole: tuple[tuple[str, int], ...] = ()
    summed: tuple[tuple[str, int], ...] = ()
    sized: bool = False
    opaque: bool = False

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the operands."""
        return [use.record.shape() for use in self.uses]

    def binding(self, a: Access) -> dict[str, Affine]:
        """Values of the mapped letters for a read of the result."""
        inner = {letter for letter, _ in (*self.whole, *self.summed)}
        return {letter: i for letter, i in zip(self.out, a.indices) if letter != ONE and letter not in inner}

    def positions(self, a: Access) -> list[Affine]:
        """The indices of a read that are positions in a whole."""
        inner = {letter for letter, _ in self.whole}
        return [i for letter, i in zip(self.out, a.indices) if letter in inner]


#: Whose operators have no effects beyond their schemas.
_PURE = frozenset({"aten", "prims", "inductor_passes", "quantized_decomposed", "inductor", "_dtensor", "symm_mem"})


def is_pure(record: Record) -> bool:
    """Whether a node is a function of its operands."""
    target = record.target
    if record.op != "call_function" or not _torch.is_op(target):
        return False
    if record.called.partition("::")[0] not in _PURE or _torch.mutated_argument_names(target):
        return False
    if record.called.startswith(("aten::empty", "aten::new_empty")):
        return False
    # Attention that drops nothing out draws nothing.
    return not _torch.is_seeded_random(target) or record.arguments.get("dropout_p") == 0


# -- building blocks -------------------------------------------------------------------------------------------


def literals(record: Record, without: Iterable[str] = ()) -> Hashable:
    """Everything among the arguments that is no tensor, and where the tensors stand."""
    left_out = set(without)
    return tuple((k, _literal(v)) for k, v in record.arguments.items() if k not in left_out)


def _literal(value: Any) -> Hashable:
    if isinstance(value, Record):
        if isinstance(value.value, torch.Tensor) or hasattr(value.value, "dtype"):
            return ("%", str(value.dtype()))
        size = whole(value)
        return ("node", value.name) if size is None else size
    if isinstance(value, tuple):
        return tuple(map(_literal, value))
    if isinstance(value, bool):
        return ("bool", value)
    size = whole(value)
    return size if size is not None else (type(value).__name__, str(value))


def tensors(record: Record) -> list[Record]:
    """The tensor operands in order."""
    return [o for o in operands(record.arguments) if hasattr(o.value, "dtype")]


def key_of(record: Record, path: tuple[int, ...], without: Iterable[str] = ()) -> Hashable:
    """Operator, overload, literals, types."""
    return (str(record.target), literals(record, without), str(record.dtype(path)), path)


def pointwise(record: Record, path: tuple[int, ...]) -> Signature:
    """Every element alone."""
    shape = record.shape(path)
    out = tuple(f"d{i}" for i in range(len(shape)))
    return Signature(key_of(record, path), out, tuple(broadcast(o, shape, out) for o in tensors(record)))


def broadcast(operand: Record, shape: tuple[int, ...], letters: tuple[str, ...]) -> Use:
    """An operand that is broadcast to a shape with these letters."""
    own = operand.shape()
    kept = letters[len(letters) - len(own) :]
    wanted = shape[len(shape) - len(own) :]
    return Use(operand, tuple(ONE if is_stretched(s, to) else letter for s, to, letter in zip(own, wanted, kept)))


def opaque(record: Record, path: tuple[int, ...]) -> Signature:
    """An operator of which nothing is known but that it is a function."""
    out = tuple(f"o{i}" for i in range(len(record.shape(path))))
    wholes = [*zip(out, record.shape(path))]
    uses = []
    for number, operand in enumerate(tensors(record)):
        letters = tuple(f"w{number}.{i}" for i in range(len(operand.shape())))
        wholes += zip(letters, operand.shape())
        uses.append(Use(operand, letters))
    return Signature(key_of(record, path), out, tuple(uses), tuple(wholes), sized=True, opaque=True)


def einsum(
    record: Record, given: dict[str, str], out: str, summed: str = "", without: Iterable[str] = (), wholes: str = ""
) -> Signature | None:
    """From one letter per dimension; operands that are None or absent are left out."""
    extents: dict[str, int] = {}
    uses = []
    for name, letters in given.items():
        operand = record.arguments.get(name)
        if not isinstance(operand, Record):
            continue
        shape = operand.shape()
        if len(shape) != len(letters):
            return None
        extents.update((letter, size) for letter, size in zip(letters, shape) if letter != ONE)
        uses.append(Use(operand, tuple(letters)))
    return Signature(
        key_of(record, (), without),
        tuple(out),
        tuple(uses),
        tuple((letter, extents[letter]) for letter in wholes),
        tuple((letter, extents[letter]) for letter in summed),
        sized=True,
    )
