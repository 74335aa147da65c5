"""From the stored shard of a parameter to the tensor that the forward pass computes with, and back for gradients.

``torch.ops.inductor_passes.unshard`` is composite: dynamo sees one call per parameter access, and AOTAutograd sees
what is inside, so that the joint graph holds plain functional collectives:

    forward    shard -> cast to the compute dtype -> all_gather -> tensor
    backward   gradient -> cast to the reduce dtype -> reduce_scatter over the sharding dimension -> all_reduce over
               the replicating one -> mean over the data-parallel ranks, in the parameter's dtype

The cast comes before the gather so that fewer bytes travel; the reduction over the sharding dimension comes before
the other one for the same reason. This is the idea of SimpleFSDP (Zhang et al., 2024, arXiv:2411.00284): data
parallelism as parameter access, left to the compiler to schedule.

An uneven dimension is split as ``torch.chunk`` does: all ranks but the last non-empty one hold full chunks, so that
the parameter is a prefix of what a gather of padded chunks returns.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from inductor_passes import _torch
from inductor_passes.ir.canonical import WHOLE_PIECE
from inductor_passes.simple_fsdp import written
from inductor_passes.simple_fsdp.residuals import compensated, local_residuals, summed, summed_shapes

_LIBRARY = torch.library.Library("inductor_passes", "DEF")
_LIBRARY.define(
    "unshard(Tensor parameter, int[] shard_shape, int mesh_dims, ScalarType? compute_dtype, "
    "ScalarType? reduce_dtype, str reshard, str groups, float? divisor, Tensor? held, Tensor[] residuals) -> Tensor"
)


@dataclass(frozen=True)
class ShardLayout:
    """How the local tensors of one parameter make up the whole on the data-parallel dimensions.

    Attributes:
        mesh: the parameter's mesh; its first ``mesh_dims`` dimensions are data-parallel.
        mesh_dims: see ``mesh``.
        shard_mesh_dim: the mesh dimension that shards, or -1.
        dim: the tensor dimension that is sharded; 0 when none is.
        size: of the unsharded tensor along ``dim`` on this rank (inner mesh dimensions may still shard it).
        reduce_dtype: what gradients are reduced in, or None.
        divisor: what the sum of the ranks' gradients is divided by, or None for the number of data-parallel ranks.
    """

    mesh: DeviceMesh
    mesh_dims: int
    shard_mesh_dim: int
    dim: int
    size: int
    reduce_dtype: torch.dtype | None
    divisor: float | None = None

    @staticmethod
    def of(
        parameter: DTensor, mesh_dims: int, reduce_dtype: torch.dtype | None, divisor: float | None = None
    ) -> ShardLayout:
        """The layout of a parameter whose first ``mesh_dims`` mesh dimensions are data-parallel."""
        mesh, placements = parameter.device_mesh, parameter.placements
        sharded = [i for i in range(mesh_dims) if not placements[i].is_replicate()]
        dim = placements[sharded[0]].dim if sharded else 0
        size = local_size(parameter.shape[dim], dim, mesh, placements, mesh_dims) if sharded else 0
        return ShardLayout(mesh, mesh_dims, sharded[0] if sharded else -1, dim, size, reduce_dtype, divisor)

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks."""
        result = 1
        for i in range(self.mesh_dims):
            result *= self.mesh.size(i)
        return result

    @property
    def chunk(self) -> int:
        """The size of a full chunk along ``dim``."""
        return -(-self.size // self.mesh.size(self.shard_mesh_dim))

    @property
    def uneven(self) -> bool:
        """Whether ranks have chunks of unequal size."""
        return self.shard_mesh_dim >= 0 and self.size % self.mesh.size(self.shard_mesh_dim) != 0

    @property
    def steps(self) -> tuple[tuple[str, str, int], ...]:
        """The collectives that reduce a gradient, in order: (``reduce_scatter`` or ``all_reduce``, group, ranks)."""
        return tuple(
            ("reduce_scatter" if i == self.shard_mesh_dim else "all_reduce", self.mesh.get_group(i).group_name, ranks)
            for i in reversed(range(self.mesh_dims))
            if (ranks := self.mesh.size(i)) > 1
        )

    def whole_shape(self, local: Sequence[int]) -> list[int]:
        """The shape of the unsharded tensor on this rank, from that of its chunk."""
        return [self.size if i == self.dim and self.shard_mesh_dim >= 0 else size for i, size in enumerate(local)]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The unsharded tensor from this rank's chunk."""
        if self.shard_mesh_dim < 0 or self.mesh.size(self.shard_mesh_dim) == 1:
            return local.view_as(local)
        rows = pad(swap(local, self.dim), self.chunk)
        return swap(cut(_torch.all_gather(rows, self.mesh, self.shard_mesh_dim), self.size), self.dim)

    def reduce(
        self, gradient: torch.Tensor, like: torch.Size, dtype: torch.dtype, residuals: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """This rank's chunk, of shape ``like``, of the ranks' gradients' sum over :attr:`divisor`, in ``dtype``.

        Args:
            gradient: whole on this rank.
            residuals: what earlier messages lost, see :meth:`residual_shapes`; read and written.
        """
        left = list(residuals)
        gradient = gradient.to(self.reduce_dtype or gradient.dtype)
        early, late = self.factors(gradient.dtype)
        if early != 1:
            gradient = gradient / early
        padded: torch.Size | None = None
        for i in reversed(range(self.mesh_dims)):
            if self.mesh.size(i) == 1:
                continue
            if i == self.shard_mesh_dim:
                rows = pad(swap(gradient, self.dim), self.chunk * self.mesh.size(i))
                send = functools.partial(_torch.reduce_scatter_sum, mesh=self.mesh, dim=i)
                gradient = compensated(rows, left.pop(0), send) if left else send(rows)
                if not left and any(self.mesh.size(k) > 1 for k in range(i)):
                    # Pieces of unequal size would be unequal messages. The shape says on every rank that none is.
                    padded, gradient = gradient.shape, gradient.view(WHOLE_PIECE)
                else:
                    gradient = self._own(gradient, like)
            elif left and gradient.numel() > 0:
                group, ranks = self.mesh.get_group(i).group_name, self.mesh.size(i)
                gradient = summed(gradient, group, ranks, left.pop(0), left.pop(0))
            elif gradient.numel() > 0:
                gradient = _torch.all_reduce_sum(gradient, self.mesh, i)
        if padded is not None:
            gradient = self._own(gradient.view(padded), like)
        gradient = gradient.to(dtype)
        return gradient if late == 1 else gradient / late

    def _own(self, piece: torch.Tensor, like: torch.Size) -> torch.Tensor:
        """This rank's chunk, of shape ``like``, from what a reduce_scatter gave."""
        return swap(cut(piece, like[self.dim]), self.dim)

    def residual_shapes(self, local: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of what :meth:`reduce` keeps of the roundings of its messages, for a chunk of shape ``local``.

        A reduce_scatter keeps its input's. An all_reduce is two messages then, see :func:`summed`.
        """
        found: list[tuple[int, ...]] = []
        shape = self.whole_shape(local)
        for kind, _, ranks in self.steps:
            if kind == "reduce_scatter":
                shape[0], shape[self.dim] = shape[self.dim], shape[0]
                found.append((self.chunk * ranks, *shape[1:]))
                shape = list(local)
            elif elements := math.prod(shape):
                found += summed_shapes(elements, ranks)
        return found

    def factors(self, dtype: torch.dtype) -> tuple[float, float]:
        """What gradients of a dtype are divided by before and after they are summed.

        A sum in half precision overflows where the mean would not, and a mean underflows where the gradients do not:
        about the root of the divisor comes before, as in ``torch.distributed.fsdp``.
        """
        divisor = self.ranks if self.divisor is None else self.divisor
        early = 1
        while dtype is torch.float16 and divisor % early == 0 and divisor / early > early:
            early *= 2
        return early, divisor if early == 1 else divisor / early


def local_size(size: int, dim: int, mesh: DeviceMesh, placements: tuple[Placement, ...], first: int) -> int:
    """``size`` along ``dim`` after the mesh dimensions from ``first`` on have sharded it, on this rank."""
    for i in range(first, mesh.ndim):
        placement = placements[i]
        if isinstance(placement, Shard) and placement.dim == dim:
            chunk = -(-size // mesh.size(i))
            if size % mesh.size(i):
                chunk = max(0, min(chunk, size - chunk * mesh.get_local_rank(i)))
            size = chunk
    return size


# The helpers below give back the same tensor where there is nothing to do, to keep no-ops out of the graph.


def swap(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A view with dimensions 0 and ``dim`` exchanged; its own inverse."""
    return tensor if dim == 0 else tensor.transpose(0, dim)


def cut(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """A view of the first ``rows`` along dimension 0."""
    return tensor if tensor.shape[0] == rows else tensor.narrow(0, 0, rows)


def pad(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """``tensor`` with zeros appended along dimension 0 up to ``rows``."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, missing])


@functools.lru_cache(maxsize=64)
def inner_mesh(mesh: DeviceMesh, mesh_dims: int) -> DeviceMesh:
    """The dimensions of ``mesh`` after the data-parallel ones."""
    names = mesh.mesh_dim_names
    assert names is not None, "a mesh made of slices has named dimensions"
    return mesh[names[mesh_dims:]]


class _Unshard(torch.autograd.Function):
    """The whole tensor, or the values that forward has written to it since; the gradient goes to the shards."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        layout: ShardLayout,
        compute_dtype: torch.dtype | None,
        residuals: Sequence[torch.Tensor],
        written_to: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.layout, ctx.shape, ctx.dtype, ctx.residuals = layout, local.shape, local.dtype, residuals
        if written_to is not None:
            return written_to.clone()
        if compute_dtype is not None and local.is_floating_point():
            local = local.to(compute_dtype)
        return layout.gather(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.layout.reduce(gradient, ctx.shape, ctx.dtype, ctx.residuals), None, None, None, None


class _UnshardHeld(torch.autograd.Function):
    """The whole tensor; its gradient goes to ``held``, not reduced."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        held: torch.Tensor,
        layout: ShardLayout,
        compute_dtype: torch.dtype | None,
        written_to: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.dtype = held.dtype
        if written_to is not None:
            return written_to.clone()
        if compute_dtype is not None and local.is_floating_point():
            local = local.to(compute_dtype)
        return layout.gather(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None, None]:
        return None, gradient.to(ctx.dtype), None, None, None


def _unshard(
    parameter: torch.Tensor,
    shard_shape: Sequence[int],
    mesh_dims: int,
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reshard: str,
    groups: str,
    divisor: float | None,
    held: torch.Tensor | None,
    residuals: Sequence[torch.Tensor],
) -> torch.Tensor:
    del groups
    if not isinstance(parameter, DTensor) and _torch.is_fake(parameter):
        # Torch hands plain tensors to the bodies of its control flow, whatever was read in them.
        raise TypeError(
            "a parameter whose shards simple_fsdp or adopt gathers is read in the body of torch.cond, while_loop, scan "
            "or another control flow operator; read it before: weight = layer.weight, and use weight in the body."
        )
    if not isinstance(parameter, DTensor):
        raise TypeError(
            f"a parameter managed by simple_fsdp is a {type(parameter).__name__}; expected a DTensor. It was "
            "replaced after simple_fsdp was applied: copy values into the parameter instead."
        )
    earlier = written.written_to(parameter, (compute_dtype,), f"a parameter of shape {tuple(parameter.shape)}")
    layout = ShardLayout.of(parameter, mesh_dims, reduce_dtype, divisor)

    def again() -> contextlib.AbstractContextManager[None]:
        if reshard == "never":
            return contextlib.nullcontext()
        return _torch.recomputed_in_backward(left_to_partitioner=reshard == "auto")

    # Recomputed too, so that the parameter itself is saved for backward, and not a view of it on those ranks where the
    # shard is empty and both cost nothing: ranks with different graphs cannot agree on a plan.
    with again() if reshard == "always" else contextlib.nullcontext():
        local = parameter.to_local()
    if list(local.shape) != list(shard_shape):
        raise RuntimeError(
            f"this rank's shard of a parameter managed by simple_fsdp has shape {list(local.shape)}; expected "
            f"{list(shard_shape)}. It was laid out anew after simple_fsdp was applied."
        )
    with again():
        if held is None:
            whole = _Unshard.apply(local, layout, compute_dtype, local_residuals(residuals), earlier)
        else:
            whole = _UnshardHeld.apply(local.detach(), held, layout, compute_dtype, earlier)
    written.note(parameter, (compute_dtype,), whole)
    if parameter.device_mesh.ndim == mesh_dims:
        return whole
    return DTensor.from_local(
        whole,
        inner_mesh(parameter.device_mesh, mesh_dims),
        parameter.placements[mesh_dims:],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


_LIBRARY.impl("unshard", _unshard, "CompositeImplicitAutograd")


def _unshard_without_autograd(_mode: Any, _op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
    # Under inference_mode a DTensor sees the composite op itself and would look for a sharding rule.
    return _unshard(*args, **(kwargs or {}))


torch.library.register_torch_dispatch(
    "inductor_passes::unshard", DTensor, _unshard_without_autograd, lib=_LIBRARY
)


def unshard(
    parameter: torch.Tensor,
    shard_shape: Sequence[int],
    mesh_dims: int,
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reshard: str,
    groups: str,
    divisor: float | None = None,
    held: torch.Tensor | None = None,
    residuals: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The tensor to compute with: a plain one, or a DTensor on the inner mesh dimensions when there are any.

    Args:
        parameter: a DTensor whose first ``mesh_dims`` mesh dimensions are data-parallel.
        shard_shape: shape of this rank's local tensor. Ranks with uneven shards compile different graphs; as an
            argument it keeps their entries apart in a compile cache that they share.
        mesh_dims: see ``parameter``.
        compute_dtype: dtype of the result (floating-point parameters only), or None.
        reduce_dtype: dtype in which gradients are reduced, or None.
        reshard: whether compiled backward gathers again instead of keeping the result: ``always``, ``never``, or
            ``auto``, which leaves that to our partitioner and else is ``always``.
        groups: names of this rank's data-parallel process groups. As an argument they keep ranks of different groups
            apart in a compile cache that they share: what is cached names the groups.
        divisor: what the sum of the ranks' gradients is divided by; None is the number of data-parallel ranks.
        held: of the result's shape; where given it gets the gradient, not reduced, and ``parameter`` gets none.
        residuals: what earlier messages lost of the gradient, see ``residuals``; none: that is forgotten.
    """
    return torch.ops.inductor_passes.unshard.default(
        parameter, shard_shape, mesh_dims, compute_dtype, reduce_dtype, reshard, groups, divisor, held, residuals
    )
