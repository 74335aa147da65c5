"""A plan as nodes of one rank's graph: packs and unpacks of even layouts, without writes.

The eager form of the same steps is in ``execute``; here blocks are put together by concatenation, since a graph under
compilation has no in-place writes to a new tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import dataclass, replace

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.redistribute.boxes import common, numel, offsets, shape_of
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.spec import Block, Layout
from inductor_passes.redistribute.steps import Step
from inductor_passes.redistribute.traffic import suppliers, traffic
from inductor_passes.report import Reason
from inductor_passes.rewrites.work import refuse
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import dense, exchanged, gathered, reduced, scattered
from inductor_passes.verify.messages import OWN_KEY, Messages, Part


@dataclass(frozen=True)
class Piece:
    """A tensor and the place of its first element in a larger one."""

    tensor: torch.fx.Node
    at: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(self.tensor.meta["val"].shape)


@dataclass(frozen=True)
class Unroller:
    """Emits steps for the rank at ``rank`` of ``mesh``; ``groups`` names the process groups."""

    mesh: Mesh
    rank: int
    groups: dict[tuple[int, ...], str]

    def run(self, emit: Emitter, tensor: torch.fx.Node, steps: list[Step]) -> torch.fx.Node:
        """All steps; the result is dense."""
        for step in steps:
            tensor = {
                "local": self._select,
                "all_gather": self._gather,
                "all_to_all": self._exchange,
                "all_reduce": self._reduce,
                "reduce_scatter": self._scatter,
            }[step.kind](emit, tensor, step)
        return tensor

    def _block(self, step: Step, rank: int, after: bool = False) -> Block:
        return (step.after if after else step.before).block(self.mesh.coordinates(rank))

    def _members(self, step: Step) -> tuple[int, ...]:
        return self.mesh.group(self.rank, step.mesh_dims)

    def _select(self, emit: Emitter, tensor: torch.fx.Node, step: Step) -> torch.fx.Node:
        part = self._own_pieces(emit, tensor, step)
        if part is None:
            part = _cut(emit, tensor, self._block(step, self.rank), self._block(step, self.rank, after=True))
        # A view would keep all of the input alive.
        return part if part is tensor else emit.call(
            torch.ops.aten.clone.default, part, memory_format=torch.contiguous_format
        )

    def _own_pieces(self, emit: Emitter, tensor: torch.fx.Node, step: Step) -> torch.fx.Node | None:
        """The rank's own pieces as splits that say so, which other ranks' pieces can be told from; None where a cut is
        not the innermost one, or not even."""
        at = self.mesh.coordinates(self.rank)
        new = []
        for d, (old, now) in enumerate(zip(step.before.cuts, step.after.cuts)):
            if now[: len(old)] != old or any(factor != 1 for _, factor in now):
                return None
            new += [(d, m) for m, _ in now[len(old) :]]
        for d, m in new:
            size, count = tensor.meta["val"].shape[d], self.mesh.shape[m]
            if size % count or not size:
                return None
            split = emit.call(torch.ops.aten.split.Tensor, tensor, size // count, d)
            split.meta[OWN_KEY] = self.mesh.group(self.rank, (m,))
            tensor = emit.call(operator.getitem, split, at[m])
        return tensor

    def _gather(self, emit: Emitter, tensor: torch.fx.Node, step: Step) -> torch.fx.Node:
        want = self._block(step, self.rank, after=True)
        members = self._members(step)
        local = dense(emit, tensor)
        whole = gathered(emit, local, len(members), self.groups[step.mesh_dims])
        sides = moved_cuts(step)
        if sides is not None and not any(sides[1]) and sum(map(len, sides[0])) == len(step.mesh_dims):
            return joined_grid(emit, whole, self._sizes(step), sides[0], tuple(local.meta["val"].shape))
        rows = local.meta["val"].shape[0]
        pieces, seen = [], set()
        for slot, member in enumerate(members):
            have = self._block(step, member)
            part = common(have, want)
            if part in seen or not numel(part):
                continue
            seen.add(part)
            pieces.append((slot, have, part))
        ordered = [_place(part, want) for _, _, part in pieces]
        along_rows = all(p == (k * rows, *(0,) * (len(p) - 1)) for k, p in enumerate(ordered))
        if along_rows and len(pieces) == len(members) and shape_of(want)[1:] == tuple(local.meta["val"].shape)[1:]:
            return whole
        cut = [
            Piece(_cut(emit, _rows(emit, whole, slot * rows, rows), have, part), _place(part, want))
            for slot, have, part in pieces
        ]
        return assembled(emit, cut, shape_of(want))

    def _reduce(self, emit: Emitter, tensor: torch.fx.Node, step: Step) -> torch.fx.Node:
        return reduced(emit, dense(emit, tensor), step.reduce_op, self.groups[step.mesh_dims])

    def _scatter(self, emit: Emitter, tensor: torch.fx.Node, step: Step) -> torch.fx.Node:
        have, members = self._block(step, self.rank), self._members(step)
        wanted = [self._block(step, member, after=True) for member in members]
        rows = shape_of(wanted[0])[0]
        in_order = all(_place(part, have) == (k * rows, *(0,) * (len(have) - 1)) for k, part in enumerate(wanted))
        if in_order:
            packed = dense(emit, tensor)
        else:
            packed = emit.call(torch.ops.aten.cat.default, [_cut(emit, tensor, have, part) for part in wanted])
        return scattered(emit, packed, step.reduce_op, len(members), self.groups[step.mesh_dims])

    def _exchange(self, emit: Emitter, tensor: torch.fx.Node, step: Step) -> torch.fx.Node:
        members, traffic_of = self._members(step), _Traffic(self.mesh, step)
        ranges = traffic_of.ranges
        have, want = self._block(step, self.rank), self._block(step, self.rank, after=True)
        regular = _is_regular(traffic_of, members)
        sides = moved_cuts(step)
        everywhere = list(range(len(step.mesh_dims)))
        if regular and sides is not None and all(sorted(itertools.chain(*side)) == everywhere for side in sides):
            return self._exchange_grid(emit, tensor, step, sides, replace(traffic_of, regular=True))
        sent, received, parts = [], [], []
        for member in members:
            if regular and member == self.rank:
                own = common(have, want)
                parts.append(_flat(emit, _cut(emit, tensor, have, own)))
                sent.append(numel(own))
                received.append(numel(own))
                continue
            outgoing = ranges(self.rank, member)
            part = common(have, self._block(step, member, after=True))
            for lo, hi in outgoing:
                flat = _flat(emit, _cut(emit, tensor, have, part))
                parts.append(flat if hi - lo == numel(part) else _rows(emit, flat, lo, hi - lo))
            sent.append(sum(hi - lo for lo, hi in outgoing))
            received.append(sum(hi - lo for lo, hi in ranges(member, self.rank)))
        if not parts:
            parts = [_rows(emit, _flat(emit, tensor), 0, 0)]
        packed = parts[0] if len(parts) == 1 else emit.call(torch.ops.aten.cat.default, parts)
        says = Messages(tensor.name, replace(traffic_of, regular=regular))
        buffer = exchanged(emit, dense(emit, packed), received, sent, self.groups[step.mesh_dims], says)
        arrived: dict[Block, list[tuple[int, torch.fx.Node]]] = {}
        at = 0
        for member in members:
            incoming = [(0, received[members.index(member)])] if regular else ranges(member, self.rank)
            for lo, hi in incoming:
                block = common(self._block(step, member), want)
                arrived.setdefault(block, []).append((lo, _rows(emit, buffer, at, hi - lo)))
                at += hi - lo
        pieces = []
        own = common(have, want)
        if numel(own) and not regular:
            pieces.append(Piece(_cut(emit, tensor, have, own), _place(own, want)))
        if pieces and not arrived:
            # Memory of its own, as on the ranks to which something arrives: what reads it may write to it.
            return emit.call(torch.ops.aten.clone.default, pieces[0].tensor, memory_format=torch.contiguous_format)
        for block, found in arrived.items():
            flats = [flat for _, flat in sorted(found, key=lambda f: f[0])]
            flat = flats[0] if len(flats) == 1 else emit.call(torch.ops.aten.cat.default, flats)
            pieces.append(Piece(emit.view(flat, list(shape_of(block))), _place(block, want)))
        return dense(emit, assembled(emit, pieces, shape_of(want)))

    def _exchange_grid(
        self, emit: Emitter, tensor: torch.fx.Node, step: Step, sides: tuple[Moved, Moved], traffic_of: _Traffic
    ) -> torch.fx.Node:
        """Equal parts for everybody: pack and unpack are a permutation each."""
        sizes, (gone, put) = self._sizes(step), sides
        packed = split_grid(emit, dense(emit, tensor), sizes, put)
        part = list(packed.meta["val"].shape)[len(sizes) :]
        count = packed.meta["val"].numel()
        says = Messages(tensor.name, traffic_of)
        equal = [count // math.prod(sizes)] * math.prod(sizes)
        name = self.groups[step.mesh_dims]
        buffer = exchanged(emit, emit.view(packed, [count]), equal, equal, name, says)
        return joined_grid(emit, emit.view(buffer, [math.prod(sizes) * part[0], *part[1:]]), sizes, gone, tuple(part))

    def _sizes(self, step: Step) -> tuple[int, ...]:
        return tuple(self.mesh.shape[m] for m in step.mesh_dims)


def exchanges_equally(mesh: Mesh, step: Step) -> bool:
    """Whether in an exchange every rank has equally much for every rank, itself included: the same answer on all ranks.

    Looked at are all ranks of a mesh of up to 64, and of a larger one the groups of its first and of its last rank.
    """
    ranks = mesh.ranks if len(mesh.ranks) <= 64 else (mesh.ranks[0], mesh.ranks[-1])
    traffic_of = _Traffic(mesh, step)
    return all(_is_regular(traffic_of, members) for members in {mesh.group(r, step.mesh_dims) for r in ranks})


def _is_regular(traffic_of: _Traffic, members: tuple[int, ...]) -> bool:
    """Whether every rank has equally much for every rank, itself included; O(messages).

    Then its own part goes along: nothing more is sent, and equal splits leave bucketing and scheduling free to
    treat the exchange as any other collective.
    """
    mesh, step = traffic_of.mesh, traffic_of.step
    places = {traffic_of.position(m): mesh.coordinates(m) for m in members}
    own = {numel(common(step.before.block(at), step.after.block(at))) for at in places.values()}
    if len(own) != 1 or 0 in own or len(places) != len(members):
        return False
    (size,) = own
    for receiver in places:
        sent = [(p, lens) for p, lens in traffic_of.sent_to(receiver).items() if p != receiver]
        if len(sent) != len(places) - 1 or any(p not in places for p, _ in sent):
            return False
        if any(len(runs) != 1 or runs[0][1] - runs[0][0] != size for _, runs in sent):
            return False
    return True


@functools.lru_cache(maxsize=64)
def _sent(before: Layout, after: Layout) -> tuple[dict[int, list[tuple[int, int]]], ...]:
    """By receiver, by sender: the elements of the common block that travel. Places among the active dimensions."""
    found: list[dict[int, list[tuple[int, int]]]] = []
    for served in suppliers(before, after):
        found.append({})
        for p, lo, hi in served:
            found[-1].setdefault(p, []).append((lo, hi))
    return tuple(found)


@dataclass(frozen=True)
class _Traffic:
    """Who sends what in a step; a function of sender and receiver alone, the same on all ranks.

    Attributes:
        regular: whether every rank sends itself its own part as well.
    """

    mesh: Mesh
    step: Step
    regular: bool = False

    def __call__(self, sender: int, receiver: int) -> tuple[Part, ...]:
        """For the verifier: see ``verify.messages``."""
        have = self.step.before.block(self.mesh.coordinates(sender))
        part = common(have, self.step.after.block(self.mesh.coordinates(receiver)))
        if self.regular and sender == receiver:
            ranges = [(0, numel(part))]
        else:
            ranges = self.ranges(sender, receiver)
        return tuple(Part(_place(part, have), shape_of(part), lo, hi) for lo, hi in ranges)

    def ranges(self, sender: int, receiver: int) -> list[tuple[int, int]]:
        """Elements of the common block that ``sender`` sends to ``receiver``."""
        return self.sent_to(self.position(receiver)).get(self.position(sender), [])

    def sent_to(self, place: int) -> dict[int, list[tuple[int, int]]]:
        """By sender's place what the rank at a place gets."""
        return _sent(self.step.before, self.step.after)[place]

    @functools.cached_property
    def _active(self) -> tuple[int, ...]:
        return tuple(traffic(self.step.before, self.step.after).active)

    def position(self, rank: int) -> int:
        """A rank's place among the dimensions along which something travels."""
        index, c = 0, self.mesh.coordinates(rank)
        for m in self._active:
            index = index * self.mesh.shape[m] + c[m]
        return index


#: Per tensor dimension, places among a step's mesh dimensions, outermost cut first.
Moved = tuple[tuple[int, ...], ...]


def moved_cuts(step: Step) -> tuple[Moved, Moved] | None:
    """The cuts that an even step takes off each tensor dimension, and those that it puts on; None when some rank holds
    less than others, or when cuts are not the innermost ones."""
    place = {m: k for k, m in enumerate(step.mesh_dims)}
    gone, put = [], []
    for size, old, new in zip(step.before.shape, step.before.cuts, step.after.cuts):
        shared = 0
        while shared < min(len(old), len(new)) and old[shared] == new[shared]:
            shared += 1
        for cuts in (old, new):
            if any(factor != 1 for _, factor in cuts) or size % math.prod(step.before.mesh_shape[m] for m, _ in cuts):
                return None
        if any(m not in place for m, _ in (*old[shared:], *new[shared:])):
            return None
        gone.append(tuple(place[m] for m, _ in old[shared:]))
        put.append(tuple(place[m] for m, _ in new[shared:]))
    return tuple(gone), tuple(put)


def joined_grid(
    emit: Emitter, whole: torch.fx.Node, sizes: tuple[int, ...], gone: Moved, part: tuple[int, ...]
) -> torch.fx.Node:
    """Dense: parts of shape ``part`` that follow each other, as many as ``sizes`` say, side by side along the
    dimensions whose cuts ``gone`` are taken off."""
    grid = emit.view(whole, [*sizes, *part])
    order = [k for d, cuts in enumerate(gone) for k in (*cuts, len(sizes) + d)]
    shape = [size * math.prod(sizes[k] for k in cuts) for size, cuts in zip(part, gone)]
    if order != sorted(order):
        grid = dense(emit, emit.call(torch.ops.aten.permute.default, grid, order))
    return emit.view(grid, shape)


def split_grid(emit: Emitter, tensor: torch.fx.Node, sizes: tuple[int, ...], put: Moved) -> torch.fx.Node:
    """Dense, of shape ``[*sizes, *part]``: the parts that the cuts ``put`` make of a dense tensor."""
    shape: list[int] = []
    places: dict[int, int] = {}
    at: list[int] = []
    for size, cuts in zip(tensor.meta["val"].shape, put):
        for k in cuts:
            places[k] = len(shape)
            shape.append(sizes[k])
        at.append(len(shape))
        shape.append(size // math.prod(sizes[k] for k in cuts))
    order = [*(places[k] for k in range(len(sizes))), *at]
    grid = emit.view(tensor, shape)
    return grid if order == sorted(order) else dense(emit, emit.call(torch.ops.aten.permute.default, grid, order))


def _rows(emit: Emitter, tensor: torch.fx.Node, first: int, count: int) -> torch.fx.Node:
    if first == 0 and count == tensor.meta["val"].shape[0]:
        return tensor
    return emit.call(torch.ops.aten.slice.Tensor, tensor, 0, first, first + count)


def _flat(emit: Emitter, tensor: torch.fx.Node) -> torch.fx.Node:
    return emit.view(dense(emit, tensor), [tensor.meta["val"].numel()])


def _cut(emit: Emitter, tensor: torch.fx.Node, have: Block, want: Block) -> torch.fx.Node:
    """The block ``want`` of a tensor that holds ``have``: slices, one run per dimension."""
    for d, (a, b) in enumerate(zip(have, want)):
        if a == b:
            continue
        runs = offsets(a, b)
        if len(runs) != 1:
            refuse(Reason.UNSUPPORTED, "a block of several pieces")
        at, n = runs[0]
        if (at, n) != (0, tensor.meta["val"].shape[d]):
            tensor = emit.call(torch.ops.aten.slice.Tensor, tensor, d, at, at + n)
    return tensor


def _place(part: Block, whole: Block) -> tuple[int, ...]:
    """Where the block ``part`` begins in ``whole``; one run per dimension."""
    first = []
    for a, b in zip(whole, part):
        runs = offsets(a, b)
        if len(runs) != 1:
            refuse(Reason.UNSUPPORTED, "a block of several pieces")
        first.append(runs[0][0])
    return tuple(first)


def assembled(emit: Emitter, pieces: list[Piece], shape: tuple[int, ...]) -> torch.fx.Node:
    """One tensor from pieces that fill it: cut where no piece is cut through, dimension by dimension.

    Refuses pieces that no straight cut separates.
    """
    if len(pieces) == 1 and pieces[0].shape == shape:
        return pieces[0].tensor
    for d, extent in enumerate(shape):
        edges = {p.at[d] for p in pieces} | {p.at[d] + p.shape[d] for p in pieces} | {0, extent}
        cuts = sorted(e for e in edges if not any(p.at[d] < e < p.at[d] + p.shape[d] for p in pieces))
        if len(cuts) <= 2:
            continue
        parts = []
        for lo, hi in itertools.pairwise(cuts):
            inside = [
                Piece(p.tensor, (*p.at[:d], p.at[d] - lo, *p.at[d + 1 :])) for p in pieces if lo <= p.at[d] < hi
            ]
            parts.append(assembled(emit, inside, (*shape[:d], hi - lo, *shape[d + 1 :])))
        return emit.call(torch.ops.aten.cat.default, parts, d)
    refuse(Reason.UNSUPPORTED, "pieces that no straight cut separates")


def group_names(mesh: Mesh, rank: int, steps: list[Step]) -> dict[tuple[int, ...], str]:
    """Names of the process groups of a plan. Refuses when one does not exist."""
    names = {}
    for step in steps:
        if step.communicates:
            ranks = mesh.group(rank, step.mesh_dims)
            name = _torch.group_name_of(ranks)
            if name is None:
                refuse(
                    Reason.DIFFERENT_GROUP,
                    f"no process group of ranks {ranks}",
                    "inductor_passes.prepare_groups(mesh) before compiling",
                )
            names[step.mesh_dims] = name
    return names
