"""A graph as records that outlive it: a pass edits nodes in place, and their former state is needed for the comparison.

Capturing keeps each node's target, arguments and fake value by reference, O(nodes): FX replaces these as a whole. Meta
is edited in place, so it is copied. Everything else is computed for the few nodes that a proof looks at. Symbolic sizes
count for their whole range, see ``sizes``.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.verify.facts.view import View
from inductor_passes.verify.values.memory import Memory
from inductor_passes.verify.values.sizes import NoHintError, size_of


@dataclass(frozen=True)
class Meta:
    """Shape and type of a step's value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Record:
    """One node, or one step of what an operator is defined to compute.

    Attributes:
        target: what the node calls; ``op`` is FX's kind of node.
        args, kwargs: as given; nodes in them are looked up in ``program``.
        value: fake tensor, list of them, size or None.
        position: among the nodes; a step has that of its operator.
        meta: FX's, of the node, as it was.
        rounds_freely: a step of an operator that may leave out the roundings of what it replaces.
    """

    __slots__ = (
        "__dict__", "args", "kwargs", "meta", "name", "op", "position", "program", "rounds_freely", "target", "value"
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        name: str,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        value: Any,
        position: int,
        rounds_freely: bool = False,
        meta: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.program, self.name, self.op, self.target = program, name, op, target
        self.args, self.kwargs, self.value, self.position = args, kwargs, value, position
        self.rounds_freely, self.meta = rounds_freely, meta

    @cached_property
    def called(self) -> str:
        """``namespace::operator``, ``getitem``, or "" for what calls no operator."""
        if self.op != "call_function":
            return ""
        return "getitem" if self.target is operator.getitem else _torch.op_name(self.target)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Arguments by the schema's names, defaults filled in, nodes as records."""
        given: dict[str, Any] = {}
        if _torch.is_op(self.target):
            for place, parameter in enumerate(_torch.op_schema(self.target).arguments):
                if place < len(self.args):
                    given[parameter.name] = self.args[place]
                elif parameter.name in self.kwargs:
                    given[parameter.name] = self.kwargs[parameter.name]
                elif parameter.has_default_value():
                    given[parameter.name] = parameter.default_value
        else:
            given = {**{str(place): value for place, value in enumerate(self.args)}, **self.kwargs}
        return {name: self.program.looked_up(value) for name, value in given.items()}

    @property
    def raw_operands(self) -> tuple[Record, ...]:
        """The nodes among the arguments."""
        return tuple(operands(self.program.looked_up((self.args, dict(self.kwargs)))))

    @property
    def first(self) -> Record:
        """The first argument, a node."""
        found = next(iter(self.arguments.values()))
        if not isinstance(found, Record):
            raise TypeError(f"{self.name}: the first argument of {self.called} is no node")
        return found

    def tensor(self, path: tuple[int, ...] = ()) -> Any:
        """The fake tensor, of a list the one at ``path``.

        Raises:
            NoHintError: there is none.
        """
        value = self.value
        for index in path:
            value = value[index]
        if not isinstance(value, (torch.Tensor, Meta)):
            raise NoHintError(f"{self.name} has no fake tensor")
        return value

    def shape(self, path: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Sizes, symbolic ones as :class:`~.sizes.Size`. Raises :class:`NoHintError`."""
        if path in (cache := self._shapes):
            return cache[path]
        return cache.setdefault(path, sizes(self.tensor(path).shape, self.name))

    @cached_property
    def _shapes(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}

    def dtype(self, path: tuple[int, ...] = ()) -> torch.dtype:
        """Element type."""
        return self.tensor(path).dtype

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What rules have worked out about this record."""
        return {}

    def __repr__(self) -> str:
        return self.name


def sizes(values: Any, where: str) -> tuple[int, ...]:
    """Integers of sizes, see :func:`whole`. Raises :class:`NoHintError`."""
    found = tuple(whole(v) for v in values)
    if any(v is None for v in found):
        raise NoHintError(f"{where} has a size that is no number")
    return found  # type: ignore[return-value]


def whole(value: Any) -> int | None:
    """An integer argument: a number, a symbolic size for its whole range, a node that is one; None otherwise."""
    return size_of(value.value if isinstance(value, Record) else value)


def _cut(split: Record) -> tuple[object, ...]:
    """The tensor of which an operator takes pieces, and their shapes."""
    return split.raw_operands[0].name, *(split.shape((i,)) for i in range(len(split.value)))


class Program:
    """All records of one graph, by name and by node, and what it writes to."""

    def __init__(self, view: View) -> None:
        self.memory = Memory(view)
        self.records: dict[str, Record] = {}
        self._of: dict[torch.fx.Node, Record] = {}
        for position, node in enumerate(view.nodes):
            record = Record(
                self, node.name, node.op, node.target, node.args, node.kwargs, node.meta.get("val"), position,
                meta=dict(node.meta),
            )  # fmt: skip
            self.records[node.name] = record
            self._of[node] = record

    def used_pieces(self, record: Record) -> list[int]:
        """Indices at which somebody reads the results of a node that returns a list; all where one takes the list."""
        return self._read_pieces.get(record.name, [])

    def pieces_in_use(self, split: Record) -> list[int]:
        """:meth:`used_pieces` of all operators that make a list of pieces of these shapes of the same tensor."""
        return self._in_use[_cut(split)]

    @cached_property
    def _in_use(self) -> dict[tuple[object, ...], list[int]]:
        found: dict[tuple[object, ...], set[int]] = {}
        for record in self.records.values():
            value = record.value
            if isinstance(value, (list, tuple)) and record.raw_operands and all(hasattr(v, "shape") for v in value):
                with contextlib.suppress(NoHintError):
                    found.setdefault(_cut(record), set()).update(self.used_pieces(record))
        return {cut: sorted(pieces) for cut, pieces in found.items()}

    @cached_property
    def _read_pieces(self) -> dict[str, list[int]]:
        lists = (r.name for r in self.records.values() if isinstance(r.value, (list, tuple)))
        found: dict[str, set[int]] = {name: set() for name in lists}
        read: set[str] = set()
        for record in self.records.values() if found else ():
            for operand in record.raw_operands:
                read.add(operand.name)
                if operand.name in found and record.called != "getitem":
                    found[operand.name].update(range(len(operand.value)))
        for pick in self.records.values() if found else ():
            if pick.called == "getitem" and pick.name in read and pick.arguments["0"].name in found:
                found[pick.arguments["0"].name].add(pick.arguments["1"])
        return {name: sorted(pieces) for name, pieces in found.items()}

    def record(self, node: torch.fx.Node) -> Record:
        """The record of a node."""
        return self._of[node]

    def looked_up(self, value: Any) -> Any:
        """An argument with records in the place of nodes."""
        if isinstance(value, torch.fx.Node):
            return self._of[value]
        if isinstance(value, (list, tuple)):
            return tuple(map(self.looked_up, value))
        if isinstance(value, dict):
            return {key: self.looked_up(item) for key, item in value.items()}
        if isinstance(value, slice):
            return ("slice", *map(self.looked_up, (value.start, value.stop, value.step)))
        return value


def operands(value: Any) -> Iterator[Record]:
    """The records in an argument, in order."""
    if isinstance(value, Record):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from operands(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from operands(item)
