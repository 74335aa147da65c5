"""Our kernels as operators of a graph: a gather or scatter inside a matmul, and all-reduce with residual and RMSNorm.

Registered as ``inductor_passes::symm_gathered_mm``, ``symm_mm_scattered`` and ``all_reduce_residual_rms_norm``, with
fake kernels; results are contiguous. They are for graphs behind autograd. All ranks of the group call them in the same
order, from one stream at a time; the memory that they share comes from ``workspace`` at the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_passes.async_tp.workspace import Workspace, workspace

__all__ = ["KERNEL_DTYPES", "all_reduce_residual_rms_norm", "symm_gathered_mm", "symm_mm_scattered"]

#: What the kernels compute in.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The stream on which shards are sent while the matmul runs, by device.
_streams: dict[torch.device, Any] = {}


def _pushed(shard: torch.Tensor, space: Workspace, epoch: torch.Tensor, tiles: Any) -> Any:
    """Send a shard, on CUDA on a stream of its own, which is returned."""
    from inductor_passes.kernels import gather_gemm

    arguments = (shard, space.data, space.flags, space.pages, space.rank, space.world, epoch, tiles)
    if shard.device.type != "cuda":
        gather_gemm.push(*arguments)
        return None
    if shard.device not in _streams:
        _streams[shard.device] = torch.cuda.Stream(shard.device, priority=-1)
    side = _streams[shard.device]
    side.wait_stream(torch.cuda.current_stream(shard.device))
    with torch.cuda.stream(side):
        gather_gemm.push(*arguments)
    shard.record_stream(side)
    return side


@torch.library.custom_op("inductor_passes::symm_gathered_mm", mutates_args=())
def symm_gathered_mm(
    shard: torch.Tensor,
    rights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    world: int,
    group_name: str,
    keep: bool,
) -> list[torch.Tensor]:
    """``all_gather(shard) @ right + bias`` for every right operand.

    Args:
        shard: (rows, k) of this rank.
        rights: (k, n) each, any strides; biases: (n,) or None each.
        world: ranks of the group.
        keep: also return the gathered matrix.

    Returns:
        (world * rows, n) each, contiguous, and with ``keep`` the gathered (world * rows, k).
    """
    from inductor_passes.kernels import gather_gemm, tiles

    shard = shard.contiguous()
    (rows, k), dtype, device = shard.shape, shard.dtype, shard.device
    cut = tiles.tiles_for(device, dtype)
    space = workspace(
        group_name,
        "gathered",
        gather_gemm.data_bytes(rows, k, world, dtype),
        gather_gemm.flag_count(rows, world, cut),
        device,
    )
    epoch = space.next_epoch()
    side = _pushed(shard, space, epoch, cut)
    common = (space.data, space.flags, space.pages, space.rank, world, epoch, cut)
    out = [gather_gemm.gemm((rows, k), right, bias, *common) for right, bias in zip(rights, biases)]
    if keep:
        out.append(space.page_copy((world * rows, k), dtype))
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)
    return out


@symm_gathered_mm.register_fake
def _(
    shard: torch.Tensor,
    rights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    world: int,
    group_name: str,
    keep: bool,
) -> list[torch.Tensor]:
    rows = world * shard.shape[0]
    return [shard.new_empty(rows, n) for n in (*(r.shape[1] for r in rights), *([shard.shape[1]] if keep else []))]


@torch.library.custom_op("inductor_passes::symm_mm_scattered", mutates_args=())
def symm_mm_scattered(
    left: torch.Tensor, right: torch.Tensor, reduce_op: str, world: int, group_name: str
) -> torch.Tensor:
    """``reduce_scatter(left @ right)`` along dimension 0.

    Args:
        left: (world * rows, k); right: (k, n); any strides.
        reduce_op: ``sum`` or ``avg``.
        world: ranks of the group.

    Returns:
        (rows, n), contiguous; the ranks' terms are added in rank order in float32.
    """
    from inductor_passes.kernels import gemm_scatter, tiles

    rows, n = left.shape[0] // world, right.shape[1]
    cut = tiles.tiles_for(left.device, left.dtype)
    space = workspace(
        group_name,
        "scattered",
        gemm_scatter.data_bytes(rows, n, world),
        gemm_scatter.flag_count(rows, n, world, cut),
        left.device,
    )
    common = (space.data, space.flags, space.pages, space.rank, world, space.next_epoch(), cut)
    gemm_scatter.gemm(left, right, *common)
    return gemm_scatter.reduce(left, (rows, n), *common, average=reduce_op == "avg")


@symm_mm_scattered.register_fake
def _(left: torch.Tensor, right: torch.Tensor, reduce_op: str, world: int, group_name: str) -> torch.Tensor:
    return left.new_empty(left.shape[0] // world, right.shape[1])


@torch.library.custom_op("inductor_passes::all_reduce_residual_rms_norm", mutates_args=())
def all_reduce_residual_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    y_dtype: torch.dtype,
    world: int,
    group_name: str,
    two_shot: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``h = residual + all_reduce(x)`` and ``y = h * rsqrt(mean(h * h, -1) + eps) * weight``.

    Args:
        x: (..., columns), this rank's terms; residual: of the same shape; weight: (columns,).
        y_dtype: of ``y``.
        world: ranks of the group.
        two_shot: see ``kernels.reduce_norm``.

    Returns:
        (h of the residual's dtype, y), contiguous.
    """
    from inductor_passes.kernels import reduce_norm

    columns = x.shape[-1]
    rows = x.numel() // columns
    space = workspace(
        group_name,
        "normed in two shots" if two_shot else "normed",
        reduce_norm.data_bytes(rows, columns, x.dtype, two_shot),
        reduce_norm.flag_count(rows, world),
        x.device,
    )
    h, y, _ = reduce_norm.all_reduce_residual_rms_norm(
        x.contiguous().view(rows, columns),
        residual.contiguous().view(rows, columns),
        weight.contiguous(),
        space.data,
        space.flags,
        space.pages,
        space.rank,
        world,
        space.next_epoch(),
        eps=eps,
        two_shot=two_shot,
        y_dtype=y_dtype,
    )
    return h.view(x.shape), y.view(x.shape)


@all_reduce_residual_rms_norm.register_fake
def _(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    y_dtype: torch.dtype,
    world: int,
    group_name: str,
    two_shot: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return residual.new_empty(x.shape), x.new_empty(x.shape, dtype=y_dtype)
