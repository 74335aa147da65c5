"""The process groups that plans need: looked up by their ranks, created collectively ahead of time.

A plan communicates on sub-meshes; the flat group of a sub-mesh exists when the user flattened the mesh, when it is a
mesh dimension's own or the world, or when :func:`prepare_groups` made it. Creating a group is itself a collective, so
it never happens inside a plan or a compiler pass. ``DeviceMesh._flatten`` is not used: it would make DTensor merge
its own all_gathers over the new mesh, which is wrong for uneven sizes.

The same call establishes what the ranks of each group can do together (``async_tp.availability``).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from inductor_passes import _torch
from inductor_passes.groups.availability import establish
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.settings.errors import ConfigError


class GroupError(RuntimeError):
    """A process group that a plan needs does not exist; the message says how to create it."""


def mesh_of(mesh: Any) -> Mesh:
    """A :class:`Mesh` from ours or a torch ``DeviceMesh``.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if not isinstance(getattr(mesh, "mesh", None), torch.Tensor):
        raise ConfigError("mesh", mesh, "a torch DeviceMesh")
    return Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))


def group_name(mesh: Mesh, dims: Iterable[int]) -> str:
    """Name of this rank's process group over ``dims``.

    Raises:
        GroupError: there is none.
    """
    dims = tuple(dims)
    ranks = mesh.group(_torch.process_rank(), dims)
    name = _torch.group_name_of(ranks)
    if name is None:
        raise GroupError(
            f"no process group of ranks {ranks} (mesh dims {dims} of mesh {mesh.shape}) exists; "
            "call inductor_passes.prepare_groups(mesh) on all ranks before compiling"
        )
    return name


def prepare_groups(
    mesh: Any = None, dims: Iterable[Iterable[int]] | None = None, *, groups: Iterable[Any] = ()
) -> tuple[tuple[int, ...], ...]:
    """Create the flat process groups of sub-meshes that do not exist yet. Collective: call it on all ranks alike.

    Every process of the default group takes part, members of the mesh or not, in the same order; a second call creates
    nothing. Groups that the mesh or the user made are reused when the mesh covers the whole world: only then do all
    processes know alike that they exist.

    For every group that this rank is in, those of the mesh and those of ``groups``, the ranks also find out what they
    can do together (see :class:`~inductor_passes.groups.availability.Availability`); compilation looks that up.

    Args:
        mesh: a ``DeviceMesh``, or a slice of one by names, or a :class:`Mesh`; None for ``groups`` only.
        dims: sub-meshes as tuples of mesh dims, e.g. ``plan.groups``; None for all combinations of dims of size > 1.
        groups: process groups, or their names, that belong to no mesh; all members of each must name it.

    Returns:
        The sub-meshes for which groups were created, in order of creation.

    Raises:
        GroupError: one of ``groups`` does not exist or this process is not in it.
        ConfigError: an argument is of another type.
    """
    for name, value in (("dims", dims), ("groups", groups)):
        if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
            raise ConfigError(name, value, "a list")
    created: list[tuple[int, ...]] = []
    if mesh is not None:
        plain = mesh_of(mesh)
        wanted = _wanted(plain, dims)
        # Each rank has another slice of a mesh: what all ranks create alike is the whole mesh's.
        sliced = _torch.sliced_from(mesh)
        plain, whole = (plain, wanted) if sliced is None else (mesh_of(sliced[0]), _within(sliced[1], wanted))
        made = {*_create(plain, whole)}
        created = [asked for asked, one in zip(wanted, whole) if one in made]
        wanted = whole
        if _torch.process_rank() in plain.ranks:
            for combination in wanted:
                establish(group_name(plain, combination))
    for group in groups:
        found = _torch.resolve_group_ranks(group)
        if found is None or _torch.process_rank() not in found[1]:
            raise GroupError(f"groups: {group!r} is no process group that this process is in")
        establish(found[0])
    return tuple(created)


def _wanted(plain: Mesh, dims: Iterable[Iterable[int]] | None) -> list[tuple[int, ...]]:
    if dims is not None:
        return sorted({tuple(sorted(plain.check_dims(d))) for d in dims}, key=lambda d: (len(d), d))
    used = [m for m, size in enumerate(plain.shape) if size > 1]
    return [c for k in range(1, len(used) + 1) for c in itertools.combinations(used, k)]


def _within(dims: tuple[int, ...], wanted: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [tuple(sorted(dims[m] for m in combination)) for combination in wanted]


def _create(plain: Mesh, wanted: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    rank, world = _torch.process_rank(), _torch.default_group().size()
    known = _known_partitions()
    created = []
    for combination in wanted:
        partition = plain.groups(combination)
        if partition in known:
            continue
        known.add(partition)
        if plain.size == world and _torch.group_name_of(plain.group(rank, combination)) is not None:
            continue
        _torch.create_groups(partition)
        created.append(combination)
    return created


def prepared_partitions() -> list[tuple[tuple[int, ...], ...]]:
    """Every partition of ranks into groups that :func:`prepare_groups` was asked for: known alike on all ranks."""
    return sorted(_known_partitions())


_registry: weakref.WeakKeyDictionary[Any, set[tuple[tuple[int, ...], ...]]] = weakref.WeakKeyDictionary()


def _known_partitions() -> set[tuple[tuple[int, ...], ...]]:
    """Partitions whose groups exist, of the current default process group: forgotten when that is destroyed."""
    return _registry.setdefault(_torch.default_group(), set())
