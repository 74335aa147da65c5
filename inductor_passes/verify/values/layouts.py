"""Along which mesh dimension a redistribution slices, by the layouts that the program's call says.

One rank's graph shows a slice as a constant piece of a split. On a mesh whose dimensions have equal sizes it does not
show of which of them the piece is the rank's own. The call's note (``ir.layouts.Noted``) does: its collectives and
slices, in order, lead from the layout before the call to the one behind it, and mostly one choice of dimensions does.
Where several do, nothing is said. The layout also says along which dimensions the ranks hold the same: what the call
redistributes is replicated there.

A gradient's first layout is in no note, so every layout is tried that its collectives could begin at.

Along a tensor dimension, cuts nest: the last cut is the innermost. A gather takes innermost cuts off, a slice and a
reduce_scatter put one on, a reduction ends a pending sum.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from inductor_passes.ir.groups import resolve
from inductor_passes.ir.layouts import COPY_KEY, Noted, noted
from inductor_passes.verify.values.access import dim_of
from inductor_passes.verify.values.communication import COLLECTIVES, reduce_op
from inductor_passes.verify.values.program import Program, Record

_PLACEMENT = re.compile(r"S\((\d+)\)|P\((\w+)\)|_S\((\d+), (\d+)\)|R")
_SPLITS = ("aten::split", "aten::split_with_sizes")
_REDUCES = ("_c10d_functional::all_reduce", "_c10d_functional::reduce_scatter_tensor")
_WAIT = "_c10d_functional::wait_tensors"
_EXCHANGE = "_dtensor::shard_dim_alltoall"
#: Nobody writes redistributions with more ways than that to read them.
_MOST_WAYS = 4096


@dataclass(frozen=True)
class _Placed:
    """A layout: per tensor dimension the mesh dimensions that cut it, outermost first; mesh dimension -> reduce op."""

    cuts: tuple[tuple[int, ...], ...]
    pending: tuple[tuple[int, str], ...]

    def free(self, m: int) -> bool:
        """Whether the ranks along a mesh dimension hold the same."""
        return not any(m in cuts for cuts in self.cuts) and m not in dict(self.pending)

    def without(self, m: int) -> _Placed | None:
        """A mesh dimension's cut taken off, or its sum done; None where another cut is inside of it."""
        if m in dict(self.pending):
            return _Placed(self.cuts, tuple(p for p in self.pending if p[0] != m))
        for d, cuts in enumerate(self.cuts):
            if cuts and cuts[-1] == m:
                return self.cut_as(d, cuts[:-1])
        return None

    def cut_as(self, dim: int, cuts: tuple[int, ...]) -> _Placed:
        """With the cuts of one tensor dimension replaced."""
        return _Placed((*self.cuts[:dim], cuts, *self.cuts[dim + 1 :]), self.pending)


@dataclass(frozen=True)
class _Way:
    """A layout that nodes may lead to, and the mesh dimensions of the slices on the way."""

    begin: _Placed
    placed: _Placed
    slices: tuple[tuple[str, int], ...] = ()

    def to(self, placed: _Placed, *sliced: tuple[str, int]) -> _Way:
        """One step further."""
        return _Way(self.begin, placed, (*self.slices, *sliced))


@dataclass(frozen=True)
class _Call:
    """What the nodes of a call say: split -> the mesh dimension that it slices along; those that ranks are alike on."""

    slices: Mapping[str, int] = field(default_factory=dict)
    replicated: tuple[int, ...] = ()


class Layouts:
    """The slices of the redistributions of a program as it came; each call is read once, O(nodes of it)."""

    def __init__(self, program: Program, here: int) -> None:
        self._here = here
        self._noted: dict[tuple[Noted, bool], list[Record]] = {}
        for record in program.records.values():
            note = noted(record.meta)
            if note is not None:
                self._noted.setdefault((note, _is_forward(record)), []).append(record)
        self.program = program
        self._found: dict[tuple[Noted, bool], _Call] = {}

    def group(self, split: Record) -> tuple[int, ...] | None:
        """Global ranks, each of which takes the piece of ``split`` at its own position; None where that is not said.

        ``split`` may be of a program that was made of this one. What a pass makes says which call it was made for: a
        slice of the same piece along the same dimension is taken for a copy of that call's.
        """
        copied = noted(split.meta, COPY_KEY)
        note = copied or noted(split.meta)
        if note is None or self._here not in note.ranks:
            return None
        if copied is None:
            m = self._read(note, _is_forward(split)).slices.get(split.name)
        else:
            calls = ((self._read(note, way).slices, self._noted.get((note, way), ())) for way in (True, False))
            found = {slices.get(one.name) for slices, nodes in calls for one in nodes if _alike(one, split)}
            m = found.pop() if len(found) == 1 else None
        return None if m is None else tuple(_rank(note, at) for at in _along(note, _coordinates(note, self._here), [m]))

    def replicated(self) -> Iterator[tuple[Record, tuple[int, ...]]]:
        """(what a call redistributes, global ranks that hold the same of it), for every mesh dimension along which."""
        for (note, forward), nodes in self._noted.items():
            if self._here not in note.ranks:
                continue
            inside = {record.name for record in nodes}
            sources = {o.name: o for record in nodes for o in record.raw_operands if o.name not in inside}
            at = _coordinates(note, self._here)
            for m in self._read(note, forward).replicated if len(sources) == 1 else ():
                ranks = tuple(_rank(note, there) for there in _along(note, at, [m]))
                yield next(iter(sources.values())), ranks

    def _read(self, note: Noted, forward: bool) -> _Call:
        key = note, forward
        if key not in self._found:
            self._found[key] = self._call(note, self._noted.get(key, []), forward)
        return self._found[key]

    def _call(self, note: Noted, nodes: list[Record], forward: bool) -> _Call:
        at = _coordinates(note, self._here)
        first = _placed(note.before, note, note.orders[0])
        last = _placed(note.after, note, note.orders[1])
        if first is None or last is None:
            return _Call()
        steps = [(record, dims) for record in nodes if (dims := _dims(record, note, at)) is not None]
        if any(record.called in COLLECTIVES and not dims for record, dims in steps):
            return _Call()
        used = {m for _, dims in steps for m in dims}
        if forward:
            begins = [first]
        else:
            # A gradient of what is pending is replicated where somebody communicates, and else whatever it is.
            last = _Placed(first.cuts, tuple(p for p in first.pending if p[0] not in used))
            begins = list(_beginnings(steps, note))
        ways = {_Way(begin, begin) for begin in begins}
        for record, dims in steps:
            ways = {way for one in ways for way in _after(record, dims, one, note, at, self.program)}
            if len(ways) > _MOST_WAYS:
                return _Call()
        found: dict[str, set[int]] = {}
        reaching = [way for way in ways if way.placed == last]
        for way in reaching:
            for name, m in way.slices:
                found.setdefault(name, set()).add(m)
        free = [{m for m in range(len(note.mesh)) if way.begin.free(m)} for way in reaching]
        return _Call(
            {name: next(iter(dims)) for name, dims in found.items() if len(dims) == 1},
            tuple(sorted(set.intersection(*free))) if free else (),
        )


def _alike(one: Record, other: Record) -> bool:
    """Whether two splits cut the same dimension into as many pieces, and the same one is read."""
    if {one.called, other.called} - {*_SPLITS} or len(one.value) != len(other.value):
        return False
    dims = [dim_of(s.arguments.get("dim", 0), len(s.first.shape())) for s in (one, other)]
    return dims[0] == dims[1] and one.program.used_pieces(one) == other.program.used_pieces(other)


def _is_forward(record: Record) -> bool:
    return "source_fn_stack" in record.meta


def _coordinates(note: Noted, rank: int) -> tuple[int, ...]:
    place, found = note.ranks.index(rank), []
    for size in reversed(note.mesh):
        place, digit = divmod(place, size)
        found.append(digit)
    return tuple(reversed(found))


def _rank(note: Noted, at: Sequence[int]) -> int:
    place = 0
    for size, c in zip(note.mesh, at):
        place = place * size + c
    return note.ranks[place]


def _along(note: Noted, at: Sequence[int], dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Coordinates of all ranks that differ along these mesh dimensions only."""
    yield from itertools.product(*(range(n) if m in dims else (at[m],) for m, n in enumerate(note.mesh)))


def _placed(
    placements: tuple[str, ...], note: Noted, orders: tuple[tuple[int, tuple[int, ...]], ...]
) -> _Placed | None:
    """Which mesh dimensions cut which tensor dimension; None where it cannot be told.

    Cuts nest from left to right, but for what ``orders`` says, and for strided shards: their cut is inside of those
    that come later and make ``split factor`` parts.
    """
    cuts: list[tuple[int, ...]] = [() for _ in note.shape]
    pending = []
    for m, text in reversed([*enumerate(placements)]):
        found = _PLACEMENT.fullmatch(text)
        if found is None:
            return None
        if found[1] is not None:
            cuts[int(found[1])] = (m, *cuts[int(found[1])])
        elif found[2] is not None:
            pending.append((m, found[2]))
        elif found[3] is not None:
            later, parts = cuts[int(found[3])], [1]
            parts += itertools.accumulate((note.mesh[other] for other in later), operator.mul)
            if int(found[4]) not in parts:
                return None
            place = parts.index(int(found[4]))
            cuts[int(found[3])] = (*later[:place], m, *later[place:])
    for dim, order in orders:
        if sorted(order) != sorted(cuts[dim]):
            return None
        cuts[dim] = order
    return _Placed(tuple(cuts), tuple(pending[::-1]))


def _beginnings(steps: list[tuple[Record, tuple[int, ...]]], note: Noted) -> Iterator[_Placed]:
    ops = {reduce_op(record) for record, _ in steps if record.called in _REDUCES}
    kinds = ["R", *(f"S({d})" for d in range(len(note.shape))), *(f"P({op})" for op in sorted(ops))]
    for placements in itertools.product(kinds, repeat=len(note.mesh)):
        placed = _placed(placements, note, ())
        assert placed is not None
        yield placed


def _dims(record: Record, note: Noted, at: tuple[int, ...]) -> tuple[int, ...] | None:
    """The mesh dimensions along which a node communicates, () for a split or a group that is none of the mesh; None
    for a node that neither communicates nor cuts."""
    if record.called in _SPLITS:
        return ()
    if record.called not in COLLECTIVES or record.called == _WAIT:
        return None
    argument = record.arguments.get("group_name")
    ranks = resolve(argument.value if isinstance(argument, Record) else argument).ranks
    if not set(ranks) <= set(note.ranks):
        return ()
    members = [_coordinates(note, rank) for rank in ranks]
    dims = tuple(m for m in range(len(note.mesh)) if any(member[m] != at[m] for member in members))
    return dims if sorted(members) == sorted(_along(note, at, dims)) else ()


def _after(
    record: Record, dims: tuple[int, ...], way: _Way, note: Noted, at: tuple[int, ...], program: Program
) -> Iterator[_Way]:
    if record.called in _SPLITS:
        yield from _sliced(record, way, note, at, program)
        return
    left: _Placed | None = way.placed
    for m in reversed(dims):
        # A gather takes cuts off, a reduction does sums.
        if left is None or (m in dict(left.pending)) != (record.called in _REDUCES):
            return
        left = left.without(m)
    if left is None:
        return
    if record.called in _REDUCES and {op for m, op in way.placed.pending if m in dims} != {reduce_op(record)}:
        return
    onto: Sequence[int] = ()
    if record.called == _REDUCES[1]:
        onto = range(len(note.shape))
    elif record.called == _EXCHANGE:
        onto = (dim_of(record.arguments["shard_dim"], len(note.shape)),)
    else:
        yield way.to(left)
    for dim in onto:
        yield way.to(left.cut_as(dim, (*left.cuts[dim], *dims)))


def _sliced(split: Record, way: _Way, note: Noted, at: tuple[int, ...], program: Program) -> Iterator[_Way]:
    used = program.pieces_in_use(split)
    if len(used) != 1 or len(split.value) == 1:
        yield way
        return
    dim = dim_of(split.arguments.get("dim", 0), len(note.shape))
    for m, c in enumerate(at):
        if c == used[0] and note.mesh[m] == len(split.value) and way.placed.free(m):
            yield way.to(way.placed.cut_as(dim, (*way.placed.cuts[dim], m)), (split.name, m))
