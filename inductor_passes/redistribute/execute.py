"""Running a plan eagerly, with functional collectives, on the rank of this process or on all simulated ranks.

Every step is pack, one collective on flat buffers, unpack. Packs and unpacks are computed from the two layouts of the
step, so uneven sizes, strided shards and shard orders need no case of their own. Local tensors are plain dense memory.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from inductor_passes import _torch
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.boxes import common, numel, place, select, shape_of
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.plan import RedistributionPlan
from inductor_passes.redistribute.prepare import group_name
from inductor_passes.redistribute.spec import Block, Partial, Placement, Shard, Spec, SpecError
from inductor_passes.redistribute.steps import Step
from inductor_passes.redistribute.traffic import suppliers, traffic


def redistribute(tensor: Any, plan: RedistributionPlan) -> Any:
    """Bring ``tensor`` from ``plan.source`` to ``plan.target``.

    Args:
        tensor: a ``DTensor`` with the plan's source spec, or this rank's local tensor.
        plan: from ``plan_redistribution``.

    Returns:
        A ``DTensor`` for a ``DTensor``, else the local tensor. The result of a plan without steps is the input itself.

    Raises:
        SpecError: the tensor is not what the plan was made for.
        GroupError: a process group that the plan needs does not exist; call ``prepare_groups`` first.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return run_local(tensor, plan)
    if Spec.of(tensor) != plan.source:
        raise SpecError(f"the tensor is {Spec.of(tensor)}, but the plan begins at {plan.source}")
    local = run_local(tensor.to_local(), plan)
    placements = [torch_placement(p) for p in plan.target.placements]
    return _torch.dtensor_of(local, tensor, placements, plan.target.shard_order)


def torch_placement(value: Placement) -> Any:
    """torch's placement object for ours."""
    from torch.distributed import tensor as dtensor

    if isinstance(value, Shard):
        if value.split_factor > 1:
            return _torch.strided_shard(value.dim, value.split_factor)
        return dtensor.Shard(value.dim)
    return dtensor.Partial(value.reduce_op) if isinstance(value, Partial) else dtensor.Replicate()


def run_local(tensor: torch.Tensor, plan: RedistributionPlan) -> torch.Tensor:
    """The plan on this rank's local tensor (dense; any strides)."""
    mesh = plan.source.mesh
    groups = [group_name(mesh, s.mesh_dims) if s.communicates else "" for s in plan.steps]
    for step, group in zip(plan.steps, groups):
        tensor = _RUN[step.kind](tensor, step, mesh, group)
    return tensor


def _run_select(tensor: torch.Tensor, step: Step, mesh: Mesh, group: str) -> torch.Tensor:
    def cut(rank: int, local: torch.Tensor) -> torch.Tensor:
        c = mesh.coordinates(rank)
        have, want = step.before.block(c), step.after.block(c)
        if not numel(want):
            return local.new_empty(shape_of(want))
        # A view would keep the whole input alive: a slice is its own memory, as DTensor's is.
        return local if have == want else select(local, have, want).clone(memory_format=torch.contiguous_format)

    return _torch.per_rank(cut, tensor)


def _run_gather(tensor: torch.Tensor, step: Step, mesh: Mesh, group: str) -> torch.Tensor:
    room = step.before.max_numel

    def pack(rank: int, local: torch.Tensor) -> torch.Tensor:
        return _wire(_padded(local.reshape(-1), room))

    def unpack(rank: int, buffer: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        c = mesh.coordinates(rank)
        want = step.after.block(c)
        buffer = _unwire(buffer, local.dtype)
        out = local.new_empty(shape_of(want))
        seen: set[Block] = set()
        for slot, member in enumerate(mesh.group(rank, step.mesh_dims)):
            have = step.before.block(mesh.coordinates(member))
            part = common(have, want)
            if have in seen or not numel(part):
                continue
            seen.add(have)
            piece = buffer[slot * room : slot * room + numel(have)].view(shape_of(have))
            if part == want:
                return select(piece, have, part).clone(memory_format=torch.contiguous_format)
            if part == have and len(seen) == 1 and _in_order(step, mesh, rank):
                return buffer.view(shape_of(want))
            place(out, want, select(piece, have, part), part)
        return out

    size = mesh.group_size(step.mesh_dims)
    buffer = _torch.call_collective(CollectiveKind.ALL_GATHER, _torch.per_rank(pack, tensor), size, group)
    return _torch.per_rank(unpack, buffer, tensor)


def _in_order(step: Step, mesh: Mesh, rank: int) -> bool:
    """Whether the gathered buffer, as it is, is the wanted block: members follow each other along one dimension that
    has nothing but extents of 1 before it, and none is padded."""
    want = step.after.block(mesh.coordinates(rank))
    blocks = [step.before.block(mesh.coordinates(m)) for m in mesh.group(rank, step.mesh_dims)]
    if any(numel(b) != step.before.max_numel for b in blocks) or len(blocks) * numel(blocks[0]) != numel(want):
        return False
    changed = [d for d, part in enumerate(want) if blocks[0][d] != part]
    if len(changed) != 1 or any(n != 1 for n in shape_of(want)[: changed[0]]):
        return False
    along = [interval for b in blocks for interval in b[changed[0]]]
    return all(x[1] <= y[0] for x, y in itertools.pairwise(along))


class _Exchange:
    """Who sends which elements to whom in an all_to_all of exactly what is missing."""

    def __init__(self, step: Step, mesh: Mesh) -> None:
        self._step = step
        self._mesh = mesh
        self._active = traffic(step.before, step.after).active
        self._served = suppliers(step.before, step.after)

    def _position(self, rank: int) -> int:
        c = self._mesh.coordinates(rank)
        index = 0
        for m in self._active:
            index = index * self._step.before.mesh_shape[m] + c[m]
        return index

    def _pieces(self, sender: int, receiver: int) -> list[tuple[int, int]]:
        """Elements of the common block that ``sender`` sends to ``receiver``."""
        p = self._position(sender)
        return [(lo, hi) for q, lo, hi in self._served[self._position(receiver)] if q == p]

    def sent(self, rank: int) -> list[int]:
        """Elements that ``rank`` sends to each member of its group."""
        members = self._mesh.group(rank, self._step.mesh_dims)
        return [sum(hi - lo for lo, hi in self._pieces(rank, member)) for member in members]

    def received(self, rank: int) -> list[int]:
        """Elements that ``rank`` gets from each member of its group."""
        members = self._mesh.group(rank, self._step.mesh_dims)
        return [sum(hi - lo for lo, hi in self._pieces(member, rank)) for member in members]

    def pack(self, rank: int, local: torch.Tensor) -> torch.Tensor:
        """The message of a rank."""
        step, mesh = self._step, self._mesh
        have = step.before.block(mesh.coordinates(rank))
        parts = [_wire(local.new_empty(0))]
        for member in mesh.group(rank, step.mesh_dims):
            for lo, hi in self._pieces(rank, member):
                want = step.after.block(mesh.coordinates(member))
                parts.append(_wire(select(local, have, common(have, want)).reshape(-1)[lo:hi]))
        return torch.cat(parts) if len(parts) != 2 else parts[1]

    def unpack(self, rank: int, buffer: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """A rank's new tensor from what arrived and what it had."""
        step, mesh = self._step, self._mesh
        c = mesh.coordinates(rank)
        have, want = step.before.block(c), step.after.block(c)
        buffer = _unwire(buffer, local.dtype)
        # Members of one class hold the same block, so their pieces of it are put together by block.
        arrived: dict[Block, list[tuple[int, torch.Tensor]]] = {}
        at = 0
        for member in mesh.group(rank, step.mesh_dims):
            for lo, hi in self._pieces(member, rank):
                block = common(step.before.block(mesh.coordinates(member)), want)
                arrived.setdefault(block, []).append((lo, buffer[at : at + hi - lo]))
                at += hi - lo
        if len(arrived) == 1 and want in arrived and len(arrived[want]) == 1:
            return buffer.view(shape_of(want))
        out = local.new_empty(shape_of(want))
        own = common(have, want)
        if numel(own):
            place(out, want, select(local, have, own), own)
        for block, parts in arrived.items():
            ordered = [part for _, part in sorted(parts, key=lambda p: p[0])]
            flat = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
            place(out, want, flat.view(shape_of(block)), block)
        return out


def _run_exchange(tensor: torch.Tensor, step: Step, mesh: Mesh, group: str) -> torch.Tensor:
    exchange = _Exchange(step, mesh)
    # One complex element travels as two real ones.
    factor = 2 if tensor.dtype.is_complex else 1
    packed = _torch.per_rank(exchange.pack, tensor)
    received = _torch.per_rank_sizes(lambda rank: [factor * n for n in exchange.received(rank)], packed)
    sent = _torch.per_rank_sizes(lambda rank: [factor * n for n in exchange.sent(rank)], packed)
    buffer = _torch.call_collective(CollectiveKind.ALL_TO_ALL, packed, received, sent, group)
    return _torch.per_rank(exchange.unpack, buffer, tensor)


def _run_scatter(tensor: torch.Tensor, step: Step, mesh: Mesh, group: str) -> torch.Tensor:
    room = step.after.max_numel

    def pack(rank: int, local: torch.Tensor) -> torch.Tensor:
        have = step.before.block(mesh.coordinates(rank))
        pieces = []
        for member in mesh.group(rank, step.mesh_dims):
            want = step.after.block(mesh.coordinates(member))
            pieces.append(_reducible(_padded(select(local, have, want).reshape(-1), room)))
        return torch.cat(pieces)

    def unpack(rank: int, buffer: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        want = step.after.block(mesh.coordinates(rank))
        return _unreducible(buffer, local.dtype)[: numel(want)].view(shape_of(want))

    packed = _torch.per_rank(pack, tensor)
    size = mesh.group_size(step.mesh_dims)
    buffer = _torch.call_collective(CollectiveKind.REDUCE_SCATTER, packed, step.reduce_op, size, group)
    return _torch.per_rank(unpack, buffer, tensor)


def _run_reduce(tensor: torch.Tensor, step: Step, mesh: Mesh, group: str) -> torch.Tensor:
    packed = _torch.per_rank(lambda rank, local: _reducible(local), tensor)
    buffer = _torch.call_collective(CollectiveKind.ALL_REDUCE, packed, step.reduce_op, group)
    return _torch.per_rank(lambda rank, b, local: _unreducible(b, local.dtype).view(local.shape), buffer, tensor)


def _run_partition(tensor: torch.Tensor, step: Step, mesh: Mesh, group: str) -> torch.Tensor:
    (m,) = step.mesh_dims

    def share(rank: int, local: torch.Tensor) -> torch.Tensor:
        if step.reduce_op == "sum" and (local.is_floating_point() or local.is_complex()):
            return local / mesh.shape[m]
        if step.reduce_op in ("sum", "product") and mesh.coordinates(rank)[m]:
            return torch.full_like(local, 0 if step.reduce_op == "sum" else 1)
        return local

    return _torch.per_rank(share, tensor)


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, dense, of a dtype that backends move: complex as pairs, 8-bit floats as bytes."""
    flat = tensor.contiguous().reshape(-1)
    if flat.dtype.is_complex:
        return torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8) if flat.dtype.is_floating_point and flat.itemsize == 1 else flat


def _unwire(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.view_as_complex(buffer.view(-1, 2)) if dtype.is_complex else buffer.view(dtype)


def _reducible(tensor: torch.Tensor) -> torch.Tensor:
    """As :func:`_wire` for values that are summed: 8-bit floats keep their dtype."""
    flat = tensor.contiguous().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.dtype.is_complex else flat


def _unreducible(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.view_as_complex(buffer.view(-1, 2)) if dtype.is_complex else buffer


def _padded(flat: torch.Tensor, room: int) -> torch.Tensor:
    """Padded with zeros to ``room`` elements."""
    return flat if flat.numel() == room else torch.cat([flat, flat.new_zeros(room - flat.numel())])


_RUN = {
    "local": _run_select,
    "all_gather": _run_gather,
    "all_to_all": _run_exchange,
    "reduce_scatter": _run_scatter,
    "all_reduce": _run_reduce,
    "partition": _run_partition,
}
