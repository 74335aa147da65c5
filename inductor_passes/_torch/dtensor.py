"""DTensor's placements and meshes; values of all ranks under ``LocalTensorMode``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def concatenate_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh with ``outer``'s dimensions followed by ``inner``'s; both must be slices of one mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate([outer, inner])


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Sharding of ``dim`` by an outer mesh dimension AFTER inner ones have split it into ``split_factor`` parts."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def is_strided_shard(placement: Placement) -> bool:
    """Whether a placement is a :func:`strided_shard`."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def per_rank(callback: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``callback(rank, *local tensors)`` for this rank, or for every simulated rank under ``LocalTensorMode``."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensor, local_tensor_mode
    from torch.utils._python_dispatch import _disable_current_modes

    mode = local_tensor_mode()
    if mode is None or not tensors or not isinstance(tensors[0], LocalTensor):
        return callback(dist.get_rank(), *tensors)
    # A disabled mode still sees every operation; on plain tensors none of them concerns it.
    with mode.disable(), _disable_current_modes():
        results = {r: callback(r, *(t._local_tensors[r] for t in tensors)) for r in sorted(mode.ranks)}
    with mode.disable():
        return LocalTensor(results)


def per_rank_sizes(callback: Callable[[int], list[int]], like: torch.Tensor) -> list[Any]:
    """Sizes that depend on the rank: ``callback(rank)``; rank-valued integers when ``like`` is simulated for all."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalIntNode, LocalTensor, local_tensor_mode

    mode = local_tensor_mode()
    if mode is None or not isinstance(like, LocalTensor):
        return callback(dist.get_rank())
    ranks = sorted(mode.ranks)
    columns = zip(*(callback(r) for r in ranks))
    return [torch.SymInt(LocalIntNode(dict(zip(ranks, column)))) for column in columns]


def dtensor_of(local: torch.Tensor, like: Any, placements: list[Any], shard_order: Any) -> Any:
    """A ``DTensor`` of ``like``'s mesh, shape and stride around ``local``, with a shard order where torch has it.

    Raises:
        NotImplementedError: a shard order on a torch without one.
    """
    from torch.distributed.tensor import DTensor

    if not shard_order:
        return DTensor.from_local(
            local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    try:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
    except ImportError:
        raise NotImplementedError(f"torch {torch.__version__} has no shard order; plan to a _StridedShard") from None
    default = {e.tensor_dim: e for e in DTensorSpec.compute_default_shard_order(tuple(placements))}
    for dim, dims in shard_order:
        default[dim] = ShardOrderEntry(tensor_dim=dim, mesh_dims=tuple(dims))
    order = tuple(default[dim] for dim in sorted(default))
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=like._spec.tensor_meta, shard_order=order)
    return DTensor(local, spec, requires_grad=local.requires_grad)


def without_implicit_communication() -> contextlib.AbstractContextManager[Any]:
    """While it is entered, an operation on DTensors that would communicate raises; see :func:`is_refusal`.

    Without effect where this torch has no such mode.
    """
    try:
        from torch.distributed.tensor._utils import ExplicitRedistributionContext
    except ImportError:
        return contextlib.nullcontext()
    return ExplicitRedistributionContext()  # type: ignore[no-any-return]


def is_refusal(error: Exception) -> bool:
    """Whether an operation on DTensors failed because it would communicate or met a plain tensor."""
    text = str(error)
    return any(part in text for part in ("Implicit redistribution occurred", "mixed torch.Tensor and DTensor"))
