"""Turning a parameter into a DTensor on the data-parallel mesh, or on (data-parallel, inner) when it is one already.

Two-dimensional layouts read right to left: the inner mesh (tensor or expert parallel) has split the tensor first,
data parallelism splits what this rank has of it. Where both split the same dimension, the outer placement is strided:
rank (d, t) of a (D, T) mesh holds piece t * D + d of the whole.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from inductor_passes import _torch
from inductor_passes.simple_fsdp.residuals import DTYPE, Losses
from inductor_passes.simple_fsdp.settings import Settings, SimpleFSDPError
from inductor_passes.simple_fsdp.unshard import ShardLayout, inner_mesh


def distribute(name: str, parameter: nn.Parameter, mesh: DeviceMesh, settings: Settings) -> nn.Parameter:
    """The parameter as a DTensor; the values of each mesh group's first rank go to all of it.

    Args:
        name: for messages.
        parameter: a plain tensor (any device, meta included) or a DTensor on other dimensions of ``mesh``'s root.
        mesh: the data-parallel dimensions.
        settings: mode and dimension to shard.

    Raises:
        SimpleFSDPError: a parameter that cannot be laid out.
    """
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise SimpleFSDPError(f"parameter {name} is uninitialized; run the lazy module once before simple_fsdp")
    outer = settings.placements(parameter)
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            data = _distribute_inner(name, parameter, mesh, outer)
        else:
            data = distribute_tensor(parameter.detach(), mesh, outer)
    result = nn.Parameter(data, requires_grad=parameter.requires_grad)
    # Marks that users put on parameters, e.g. for optimizer groups.
    result.__dict__.update({k: v for k, v in parameter.__dict__.items() if not k.startswith("_")})
    return result


def _distribute_inner(
    name: str, parameter: DTensor, mesh: DeviceMesh, outer: tuple[Placement, ...]
) -> DTensor:
    inner = parameter.device_mesh
    names, inner_names = mesh.mesh_dim_names or (), inner.mesh_dim_names or ()
    if not names or not inner_names or set(names) & set(inner_names):
        raise SimpleFSDPError(
            f"parameter {name} is already distributed over {inner}, which cannot be combined with {mesh}: both must "
            "be slices, by different dimension names, of one mesh made by init_device_mesh(mesh_dim_names=...)"
        )
    for placement in parameter.placements:
        if _torch.is_strided_shard(placement) or not isinstance(placement, (Shard, Replicate)):
            raise SimpleFSDPError(f"parameter {name} has placement {placement}; expected Shard or Replicate")
    whole = _torch.concatenate_meshes(mesh, inner)
    inner_mesh(whole, mesh.ndim)
    shard = distribute_tensor(parameter.to_local(), mesh, outer).to_local()
    placements = tuple(_outer_placement(name, p, parameter, mesh.size(i)) for i, p in enumerate(outer))
    return DTensor.from_local(
        shard,
        whole,
        placements + tuple(parameter.placements),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _outer_placement(name: str, placement: Placement, parameter: DTensor, ranks: int) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    inner = parameter.device_mesh
    factor = 1
    for i, p in enumerate(parameter.placements):
        if isinstance(p, Shard) and p.dim == placement.dim:
            factor *= inner.size(i)
    if factor == 1:
        return placement
    if parameter.shape[placement.dim] % (factor * ranks):
        # The strided placement cannot say which rows a rank holds when chunks differ in size, so that a checkpoint
        # would mix rows up.
        raise SimpleFSDPError(
            f"parameter {name} of shape {tuple(parameter.shape)} is sharded {factor} times along dimension "
            f"{placement.dim} already and cannot be sharded {ranks} times more: {factor * ranks} does not divide "
            f"{parameter.shape[placement.dim]}. Choose another shard_dim."
        )
    return _torch.strided_shard(placement.dim, factor)


def losses_of(stored: torch.Tensor, settings: Settings) -> Losses:
    """What a sharded or replicated parameter needs residuals for."""
    assert isinstance(stored, DTensor)
    mesh, dims = stored.device_mesh, settings.mesh_dims
    layout = ShardLayout.of(stored, dims, settings.reduce_dtype, settings.divisor)
    shapes = () if layout.uneven else tuple(layout.residual_shapes(stored.to_local().shape))
    reduced = settings.reduce_dtype or settings.compute_dtype or stored.dtype
    problem = problem_of(stored, reduced) if shapes else ""
    for dim, size in enumerate(stored.shape):
        parts = [mesh.size(i) for i in range(dims, mesh.ndim) if stored.placements[i] == Shard(dim)]
        if size % math.prod(parts):
            problem = problem or f"is split unevenly along dimension {dim} by another mesh dimension"
    return Losses(mesh, shapes, problem)


def problem_of(stored: torch.Tensor, reduced: torch.dtype) -> str:
    """Why there is no residual of a parameter whose gradient is reduced in a type, or nothing."""
    if stored.is_meta:
        return "is on the meta device: call add_feedback after to_empty"
    if reduced is not DTYPE:
        return f"is reduced in {reduced}; expected {DTYPE}, e.g. MixedPrecisionPolicy(reduce_dtype={DTYPE})"
    return ""
