"""What a data-parallel module was asked to do: validated once, immutable, hashable."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement, Replicate, Shard

Mode = Literal["fully_shard", "hybrid_shard", "replicate"]
Reshard = Literal["always", "never", "auto"]

#: Dimensions that the mesh must have: hybrid_shard replicates over the first and shards over the second.
MESH_DIMS: dict[str, int] = {"fully_shard": 1, "hybrid_shard": 2, "replicate": 1}


class SimpleFSDPError(ValueError):
    """An argument that cannot be used; the message names it, its value and what is allowed."""


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of a mesh, in ascending order."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of :func:`simple_fsdp` that concern every parameter.

    Attributes:
        mode: see :func:`simple_fsdp`.
        mesh_dims: number of data-parallel mesh dimensions.
        compute_dtype: what parameters are cast to before they travel; None keeps their own.
        reduce_dtype: what gradients are reduced in; None reduces them as backward produces them.
        reshard: whether backward gathers again instead of keeping gathered parameters: ``always``, ``never``, ``auto``.
        shard_dim: the tensor dimension to shard.
        groups: names of this rank's process groups along the data-parallel mesh dimensions.
        ranks: the global ranks of the mesh.
        divisor: what the sum of the ranks' gradients is divided by; None is the number of data-parallel ranks.
    """

    mode: Mode
    mesh_dims: int
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reshard: Reshard
    shard_dim: int
    groups: tuple[str, ...]
    ranks: tuple[int, ...]
    divisor: float | None = None

    @staticmethod
    def of(
        mesh: Any, mode: Any, mp_policy: Any, reshard_after_forward: Any, shard_dim: Any
    ) -> tuple[Settings, MixedPrecisionPolicy]:
        """Validated settings and the policy with its default filled in.

        Raises:
            SimpleFSDPError: an argument of the wrong type or value.
        """
        if mode not in get_args(Mode):
            raise SimpleFSDPError(f"mode={mode!r}; expected one of {', '.join(map(repr, get_args(Mode)))}")
        if not isinstance(mesh, DeviceMesh):
            raise SimpleFSDPError(f"mesh={mesh!r}; expected a torch.distributed.device_mesh.DeviceMesh")
        if mesh.ndim != MESH_DIMS[mode]:
            hint = (
                " (replicate, shard), e.g. mesh['dp_replicate', 'dp_shard']"
                if mode == "hybrid_shard"
                else ", e.g. mesh['dp']"
            )
            raise SimpleFSDPError(
                f"mode={mode!r} needs a mesh with {MESH_DIMS[mode]} dimension(s){hint}; this one has "
                f"{mesh.ndim}: {mesh}"
            )
        policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
        if not isinstance(policy, MixedPrecisionPolicy):
            raise SimpleFSDPError(
                f"mp_policy={mp_policy!r}; expected a torch.distributed.fsdp.MixedPrecisionPolicy or None"
            )
        for key in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(policy, key)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise SimpleFSDPError(f"mp_policy.{key}={dtype!r}; expected a floating-point dtype or None")
        if not isinstance(reshard_after_forward, bool) and reshard_after_forward != "auto":
            raise SimpleFSDPError(f'reshard_after_forward={reshard_after_forward!r}; expected True, False or "auto"')
        if isinstance(shard_dim, bool) or not isinstance(shard_dim, int) or shard_dim < 0:
            raise SimpleFSDPError(f"shard_dim={shard_dim!r}; expected a tensor dimension, 0 or greater")
        settings = Settings(
            mode=mode,
            mesh_dims=mesh.ndim,
            compute_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            reshard="auto" if reshard_after_forward == "auto" else "always" if reshard_after_forward else "never",
            shard_dim=shard_dim,
            groups=tuple(group.group_name for group in mesh.get_all_groups()),
            ranks=ranks_of(mesh),
        )
        return settings, policy

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What reads pass to :func:`~inductor_passes.simple_fsdp.unshard.unshard` besides parameter and shape."""
        groups = ",".join(self.groups)
        return (self.mesh_dims, self.compute_dtype, self.reduce_dtype, self.reshard, groups, self.divisor)

    def placements(self, parameter: torch.Tensor) -> tuple[Placement, ...]:
        """Where a parameter lies on the data-parallel mesh.

        A tensor with too few dimensions for ``shard_dim`` is sharded along its dimension 0; one without a
        dimension or without an element is replicated.
        """
        if self.mode == "replicate" or parameter.ndim == 0 or parameter.numel() == 0:
            return (Replicate(),) * self.mesh_dims
        shard = Shard(self.shard_dim if self.shard_dim < parameter.ndim else 0)
        return (Replicate(),) * (self.mesh_dims - 1) + (shard,)
