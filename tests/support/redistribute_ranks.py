"""All ranks of a mesh in one process: sources with known values, our plans and DTensor's redistribution on them."""

from __future__ import annotations

import functools
import itertools
import logging

import torch
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from inductor_passes.redistribute.boxes import select
from inductor_passes.redistribute.execute import torch_placement
from inductor_passes.redistribute.spec import Layout, Spec

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def device_mesh(shape):
    size = 1
    for s in shape:
        size *= s
    return DeviceMesh(
        "cpu", torch.arange(size).view(shape), mesh_dim_names=tuple(f"d{i}" for i in range(len(shape)))
    )


def _plainly(function):
    """Run outside of the simulation, which would repeat every operation on plain tensors for each rank."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return wrapper


@_plainly
def contributions(spec: Spec, dtype: torch.dtype, seed: int = 0) -> dict[tuple[int, ...], torch.Tensor]:
    """One global tensor of small integers per combination of coordinates on the partial mesh dims."""
    generator = torch.Generator().manual_seed(seed)
    dims = spec.layout.partial_dims
    result = {}
    for key in itertools.product(*(range(spec.mesh.shape[m]) for m in dims)):
        values = torch.randint(-4, 5, spec.shape, generator=generator)
        # No zeros and few magnitudes: products over 8 ranks stay exact in float32.
        result[key] = torch.where(values == 0, 1, values.clamp(-2, 2)).to(dtype)
    return result


@_plainly
def local_tensors(spec: Spec, values: dict[tuple[int, ...], torch.Tensor]) -> dict[int, torch.Tensor]:
    """What every rank holds of these contributions."""
    layout: Layout = spec.layout
    whole = tuple(((0, s),) if s else () for s in spec.shape)
    result = {}
    for rank in spec.mesh.ranks:
        c = spec.mesh.coordinates(rank)
        value = values[tuple(c[m] for m in layout.partial_dims)]
        result[rank] = select(value, whole, layout.block(c)).clone(memory_format=torch.contiguous_format)
    return result


def simulate(locals_: dict[int, torch.Tensor]) -> LocalTensor:
    with _disable_current_modes():
        copies = {r: t.clone() for r, t in locals_.items()}
    return LocalTensor(copies)


@_plainly
def same(left: dict[int, torch.Tensor], right: dict[int, torch.Tensor]) -> bool:
    """Whether all ranks hold the same shapes and bits."""
    return left.keys() == right.keys() and all(
        left[r].shape == right[r].shape and left[r].dtype == right[r].dtype and torch.equal(left[r], right[r])
        for r in left
    )


def dtensor(spec: Spec, mesh: DeviceMesh, locals_: dict[int, torch.Tensor]) -> DTensor:
    stride = torch.empty(spec.shape, device="meta").stride()
    placements = [torch_placement(p) for p in spec.placements]
    return DTensor.from_local(
        simulate(locals_), mesh, placements, run_check=False, shape=torch.Size(spec.shape), stride=stride
    )


def ranks_of(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    if hasattr(tensor, "wait") and not isinstance(tensor, LocalTensor):
        tensor = tensor.wait()
    assert isinstance(tensor, LocalTensor), type(tensor)
    return dict(tensor._local_tensors)


@_plainly
def reduced(values: dict[tuple[int, ...], torch.Tensor], ops: list[str]) -> torch.Tensor:
    """The global value: contributions reduced dimension by dimension, last first."""
    for k in reversed(range(len(ops))):
        grouped: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for key, value in values.items():
            grouped.setdefault(key[:k], []).append(value)
        values = {key: _reduce(ops[k], torch.stack(parts)) for key, parts in grouped.items()}
    return values[()]


def _reduce(op: str, stacked: torch.Tensor) -> torch.Tensor:
    if op in ("sum", "avg"):
        total = stacked.sum(0, dtype=stacked.dtype)
        return total / len(stacked) if op == "avg" else total
    return {"min": torch.amin, "max": torch.amax, "product": torch.prod}[op](stacked, 0)
