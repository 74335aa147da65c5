"""Process groups without processes.

:func:`fake_world` is the one that all others are made of: collectives of its groups return at once and move nothing.
Graphs are built, traced and planned under it. :func:`simulated` also computes: operators on ``LocalTensor`` run for
every rank in this process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from inductor_passes.redistribute.prepare import prepare_groups


@contextlib.contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[str]:
    """A default process group of ``ranks``, seen from ``rank``; yields its name."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        everybody = dist.group.WORLD
        assert everybody is not None
        yield everybody.group_name
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def grouped_world(ranks: int = 8, rank: int = 0) -> Iterator[dict[str, str]]:
    """A fake world with three sub-groups; yields {"world", "row", "column", "other"} -> group name.

    ``row`` and ``other`` are two groups of the same ranks.
    """
    half, even = list(range(ranks // 2)), list(range(0, ranks, 2))
    with fake_world(ranks, rank) as everybody:
        groups = {"row": dist.new_group(half), "column": dist.new_group(even), "other": dist.new_group(half)}
        yield {"world": everybody, **{name: group.group_name for name, group in groups.items()}}


@contextlib.contextmanager
def mesh_world(shape: tuple[int, ...], rank: int = 0) -> Iterator[DeviceMesh]:
    """A fake world with a mesh, all groups of it prepared."""
    with fake_world(math.prod(shape), rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abcd"[: len(shape)]))
        prepare_groups(mesh)
        yield mesh


@contextlib.contextmanager
def simulated(ranks: int) -> Iterator[str]:
    """A fake world whose ranks all compute in this process; yields the name of the group of all ranks."""
    with fake_world(ranks) as everybody, LocalTensorMode(ranks):
        yield everybody
