"""Collectives: which rank's element a received element is, and over which ranks a reduced one is summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from inductor_passes import _torch
from inductor_passes.ir.groups import resolve
from inductor_passes.verify.messages import KEY
from inductor_passes.verify.values.access import Access, Constant, dim_of
from inductor_passes.verify.values.affine import Affine, Space
from inductor_passes.verify.values.program import Record, operands, sizes, whole
from inductor_passes.verify.values.replicas import FAR, Replicas, apart, replicas
from inductor_passes.verify.values.sizes import NoHintError
from inductor_passes.verify.values.unequal import arrived


class NewCoordinateError(Exception):
    """A group that cannot be looked up was met: ``Groups.here`` has changed, and the proof has to begin again."""


def _here() -> int:
    try:
        return _torch.process_rank()
    except (ValueError, RuntimeError):
        return 0


class Groups:
    """The process groups of a proof, by the arguments that name them; ``here`` is this process's rank."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.here = Affine(_here())
        self._by_name: dict[str, Replicas] = {}

    def of(self, record: Record) -> Replicas:
        """The group that a collective communicates on."""
        given = record.arguments
        argument = given.get("group_name", given.get("group"))
        if isinstance(argument, Record):
            argument = argument.value if argument.value is not None else argument.name
        found = resolve(argument)
        if found.name not in self._by_name:
            known = bool(found.ranks) and self.here.const % FAR in found.ranks
            group = replicas(found.ranks) if known else None
            if group is not None:
                self._by_name[found.name] = group
                return group
            size = whole(given.get("group_size", given.get("world"))) or found.size or 2
            group = self._by_name[found.name] = apart(len(self._by_name), size, found.ranks)
            position = Affine(found.ranks.index(self.here.const % FAR)) if known else self.space.fresh(size)
            self.here = self.here.plus(position.times(group.digits[0][1]))
            raise NewCoordinateError
        return self._by_name[found.name]


class Reduction(NamedTuple):
    """An element that is reduced over ranks.

    Attributes:
        op: ``sum``, ``avg``, ``max`` ...
        dtype: of the terms and of the result.
        group: over whose ranks.
        term: what is reduced, on the rank whose position is 0.
        byte: which byte of the result, None: all of it.
    """

    op: str
    dtype: torch.dtype
    group: Replicas
    term: Access
    byte: Affine | None = None

    def on(self, digits: tuple[Affine, ...]) -> Access:
        """The term on the rank with these digits, for ``group.sorted_digits()``."""
        rank = self.term.rank
        for digit, (_, stride) in zip(digits, self.group.sorted_digits()):
            rank = rank.plus(digit.times(stride))
        return self.term._replace(rank=rank)


Result = Access | Constant | Reduction
Collective = Callable[[Groups, Access], "Result | None"]


def _operand(a: Access) -> Record:
    """The tensor that a collective sends for the result that is read."""
    data = next(iter(a.record.arguments.values()))
    found = data[a.path[0]] if isinstance(data, tuple) else data
    if not isinstance(found, Record):
        raise NoHintError(f"{a.record.name} sends something that is no node")
    return found


def _gathered(groups: Groups, a: Access) -> Access:
    source, group = _operand(a), groups.of(a.record)
    shape = source.shape()
    peer, row = groups.space.divide(a.indices[0], shape[0])
    rank = group.member(groups.space, a.rank, peer)
    return Access(source, (), rank, (row, *a.indices[1:]), a.byte, a.reader)


def reduce_op(record: Record) -> str:
    """``sum``, ``avg`` ... of a collective; a factor that cannot be read is like no other one."""
    argument = record.arguments["reduce_op"]
    argument = argument.value if isinstance(argument, Record) else argument
    return _torch.reduce_op_name(argument).replace("?", record.name)


def _reduced(groups: Groups, a: Access, source: Record, index: tuple[Affine, ...]) -> Reduction:
    group = groups.of(a.record)
    rank = group.base(groups.space, a.rank)
    term = Access(source, (), rank, index, None, a.reader)
    return Reduction(reduce_op(a.record), source.dtype(), group, term, a.byte)


def _all_reduced(groups: Groups, a: Access) -> Reduction:
    return _reduced(groups, a, _operand(a), a.indices)


def _scattered(groups: Groups, a: Access) -> Reduction:
    source, group = _operand(a), groups.of(a.record)
    rows = source.shape()[0] // group.size
    row = group.position(groups.space, a.rank).times(rows).plus(a.indices[0])
    return _reduced(groups, a, source, (row, *a.indices[1:]))


def _broadcast(groups: Groups, a: Access) -> Access:
    source, group = _operand(a), groups.of(a.record)
    root = whole(a.record.arguments["src"])
    if root is None:
        raise NoHintError(f"{a.record.name} has a source that is no number")
    return Access(source, (), group.member(groups.space, a.rank, Affine(root)), a.indices, a.byte, a.reader)


def _exchanged(groups: Groups, a: Access) -> Access | None:
    """all_to_all: what this rank gets from a peer is what the peer has for this rank's position.

    Where splits are unequal, what a peer sends is in that peer's graph only: None unless the exchange says it.
    """
    space, source, group = groups.space, _operand(a), groups.of(a.record)
    if KEY in a.record.meta and (told := arrived(space, group, a)) is not None:
        return told
    received, sent = exchange_splits(a.record, group.size)
    if len({*received, *sent}) != 1:
        return None
    peer, row = space.divide(a.indices[0], received[0])
    first = group.position(space, a.rank).times(sent[0])
    return Access(
        source, (), group.member(space, a.rank, peer), (first.plus(row), *a.indices[1:]), a.byte, a.reader
    )


def exchange_splits(record: Record, size: int) -> tuple[list[int], list[int]]:
    """Rows received from and sent to each of ``size`` ranks."""
    received, sent = (_splits(record, name, size) for name in ("output_split_sizes", "input_split_sizes"))
    return received, sent


def _splits(record: Record, name: str, size: int) -> list[int]:
    given = record.arguments[name]
    if not given:
        rows = (record.shape() if name.startswith("output") else record.first.shape())[0]
        return [rows // size] * size
    return list(sizes(given, record.name))


def _dim_exchanged(groups: Groups, a: Access) -> Access:
    """``shard_dim_alltoall``: gathered along one dimension, this rank's piece of another one."""
    space, source, group = groups.space, _operand(a), groups.of(a.record)
    shape = source.shape()
    gather = dim_of(a.record.arguments["gather_dim"], len(shape))
    shard = dim_of(a.record.arguments["shard_dim"], len(shape))
    index = list(a.indices)
    peer, index[gather] = space.divide(index[gather], shape[gather])
    here = group.position(space, a.rank)
    index[shard] = here.times(-(-shape[shard] // group.size)).plus(a.indices[shard])
    return Access(source, (), group.member(space, a.rank, peer), tuple(index), a.byte, a.reader)


def _waited(groups: Groups, a: Access) -> Access:
    found = list(operands(a.record.arguments))
    return a.at(found[a.path[0]], a.indices, a.path[1:])


COLLECTIVES: dict[str, Collective] = {
    "_c10d_functional::all_gather_into_tensor": _gathered,
    "_c10d_functional::all_gather_into_tensor_coalesced": _gathered,
    "inductor_passes::all_gather": _gathered,
    "_c10d_functional::reduce_scatter_tensor": _scattered,
    "_c10d_functional::reduce_scatter_tensor_coalesced": _scattered,
    "_c10d_functional::all_reduce": _all_reduced,
    "_c10d_functional::all_reduce_coalesced": _all_reduced,
    "_c10d_functional::all_to_all_single": _exchanged,
    "_c10d_functional::broadcast": _broadcast,
    "_c10d_functional::wait_tensors": _waited,
    "_dtensor::shard_dim_alltoall": _dim_exchanged,
}
