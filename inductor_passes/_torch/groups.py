"""Process groups: resolving, creating, describing them; their stores and backends."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

#: Process group -> its ranks as torch lists them, and as a tuple.
_ranks_of: weakref.WeakKeyDictionary[Any, tuple[list[int], tuple[int, ...]]] = weakref.WeakKeyDictionary()


def resolve_group_ranks(group: object) -> tuple[str, tuple[int, ...]] | None:
    """(group name, global ranks in group order) of a group argument (name or object), None when it does not exist.

    A group that torch lists no ranks of does not exist either.
    """
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if not dist.is_available():
        return None
    try:
        process_group: Any = c10d._resolve_process_group(group) if isinstance(group, str) else _unwrapped(group)
        name = group if isinstance(group, str) else str(process_group.group_name)
        ranks = _once(process_group, dist.get_process_group_ranks(process_group))
        return (name, ranks) if ranks else None
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _once(process_group: Any, listed: list[int]) -> tuple[int, ...]:
    """The ranks as a tuple, the same one as long as they stay. Asked for every node: with thousands of ranks making it
    takes longer than everything else that is asked about a node.
    """
    try:
        known, ranks = _ranks_of.get(process_group, (None, ()))
        if known != listed:
            ranks = tuple(int(r) for r in listed)
            _ranks_of[process_group] = listed, ranks
        return ranks
    except TypeError:  # a group that is not ours to remember
        return tuple(int(r) for r in listed)


def reduce_op_name(value: object) -> str:
    """``sum``, ``avg`` ... of a reduction's argument: a name, a ``ReduceOp``, one of its values, or such a number.

    A pre-multiplied sum carries its factor, "?" for one that is a tensor or not to be had.
    """
    import torch.distributed as dist

    if isinstance(value, str):
        return value.lower()
    value = _unwrapped(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = dist.ReduceOp.RedOpType(value)
    # A ReduceOp holds its kind; a kind is its own.
    name = str(getattr(value, "op", value)).rsplit(".", 1)[-1].lower()
    if not name.startswith("premul"):
        return name
    state = value.__getstate__() if hasattr(value, "__getstate__") else None
    factor = state[1] if isinstance(state, tuple) and len(state) == 2 else None
    return f"{name}({factor if isinstance(factor, (int, float)) else '?'})"


def _unwrapped(value: object) -> Any:
    """What stands behind an object that torch wraps to trace through it."""
    for name in ("real_obj", "wrapped_obj"):
        inner = getattr(value, name, None)
        if inner is not None:
            return inner
    return value


def group_backend(name: str) -> str:
    """Backend of the named group (``gloo``, ``nccl``, ``fake`` ...), "" when the group does not exist."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    try:
        return str(dist.get_backend(c10d._resolve_process_group(name)))
    except (RuntimeError, ValueError, KeyError, TypeError):
        return ""


def device_backend(group: Any, device: torch.device) -> str:
    """Backend of a group as torch names it; of one made without naming any, that which moves the device's tensors."""
    import torch.distributed as dist

    named = str(dist.get_backend(group))
    if named == "undefined":
        with contextlib.suppress(AttributeError, RuntimeError):
            return str(group._get_backend(device).name()).lower()
    return named


def moves_with_gloo(name: str) -> bool:
    """Whether the named group moves CPU tensors with gloo, whatever it does with those of other devices."""
    import torch.distributed.distributed_c10d as c10d

    try:
        backend = c10d._resolve_process_group(name)._get_backend(torch.device("cpu"))
    except (AttributeError, RuntimeError, ValueError, KeyError, TypeError):
        return False
    gloo = getattr(c10d, "ProcessGroupGloo", None)
    # Debug levels wrap it.
    return gloo is not None and isinstance(getattr(backend, "wrapped_pg", backend), gloo)


def sends_at_once(name: str, device: torch.device) -> bool:
    """Whether the named group issues a message between two ranks without waiting for anything that was issued before.

    So does gloo: a send or a receive is an entry in a table, and threads of its own move the data. So does our emulated
    link, which moves data with gloo. Others (NCCL) run messages in the order of their issue.
    """
    return device.type == "cpu" and (group_backend(name) == "emulated" or moves_with_gloo(name))


def copies_messages(name: str, device: torch.device) -> bool:
    """Whether the named group moves tensors of the device through copies of its own, beside those in the graph.

    Gloo does (``ProcessGroupGloo.cpp``, torch 2.11 to 2.15): a reduce-scatter is an all-reduce on a copy of its input,
    which lives until the wait, and a gather receives into memory of its own, which lives while it travels. Our emulated
    link moves data with gloo.
    """
    return sends_at_once(name, device)


def group_store(name: str) -> tuple[Any, int, tuple[int, ...]] | None:
    """(key-value store, own global rank, global ranks) of the named group, None when this process is not in it."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    found = resolve_group_ranks(name)
    if found is None:
        return None
    entry = c10d._world.pg_map.get(c10d._resolve_process_group(name))
    rank = dist.get_rank()
    return None if entry is None or rank not in found[1] else (entry[1], rank, found[1])


def mesh_of(name: str, device_type: str) -> Any:
    """The ``DeviceMesh`` of one dimension over a named process group, which stays the group that communicates."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import _resolve_process_group

    return DeviceMesh.from_group(_resolve_process_group(name), device_type)


def gloo_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """A process group that moves CPU tensors with gloo, outside of ``torch.distributed``'s registry of groups.

    One thread does its work: with two, torch's gloo corrupts memory when gathers end at the same time, see
    ``_torch.gather_op``.

    Args:
        store: rendezvous store, with a prefix of the group's own.
        rank / size: within the group.
        timeout: ``datetime.timedelta`` for each collective.
    """
    from torch.distributed import ProcessGroup, ProcessGroupGloo

    group = ProcessGroup(store, rank, size)
    options = ProcessGroupGloo._Options()
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces] or [
        ProcessGroupGloo.create_default_device()
    ]
    options._timeout = timeout
    options._threads = 1
    backend = ProcessGroupGloo(store, rank, size, options)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


def register_work(tensor: torch.Tensor, work: Any) -> None:
    """Make ``_c10d_functional.wait_tensor(tensor)`` wait for ``work``."""
    from torch._C._distributed_c10d import _register_work

    _register_work(tensor, work)


def process_group(group: Any) -> Any:
    """The process group that a functional collective's group argument (a name or the group itself) means."""
    if not isinstance(group, str):
        return group
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group)


def group_method(group: Any, *names: str) -> Callable[..., Any]:
    """The first of ``names`` that ``group`` has: collectives were renamed in 2.13, newest name first."""
    for name in names:
        method = getattr(group, name, None)
        if method is not None:
            return method  # type: ignore[no-any-return]
    raise AttributeError(f"{type(group).__name__} has none of {', '.join(names)}")


def group_layout() -> dict[str, tuple[int, ...]]:
    """Every process group of this process: name -> global ranks in group order; empty without torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return {}
    import torch.distributed.distributed_c10d as c10d

    world = c10d._world
    names = dict(world.pg_names)
    ranks = dict(world.pg_group_ranks)
    return {
        str(names[group]): tuple(sorted(members, key=members.__getitem__))
        for group, members in ranks.items()
        if group in names
    }


def rank_and_world_size() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) without torch.distributed."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def group_name_of(ranks: tuple[int, ...]) -> str | None:
    """Name of the first created process group of exactly these ranks that this process belongs to; None without one."""
    import torch.distributed.distributed_c10d as c10d

    wanted = set(ranks)
    for group, members in c10d._world.pg_group_ranks.items():
        if set(members) == wanted:
            return str(group.group_name)
    return None


def create_groups(partition: tuple[tuple[int, ...], ...]) -> None:
    """Create one process group for each tuple of ranks; every process of the default group must call it alike."""
    import torch.distributed as dist

    for ranks in partition:
        dist.new_group(list(ranks))


def default_group() -> Any:
    """The default process group object.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    import torch.distributed.distributed_c10d as c10d

    return c10d._get_default_group()


def process_rank() -> int:
    """Rank of this process in the default group: an int, also under ``LocalTensorMode`` (symbolic from 2.15 on)."""
    return int(default_group().rank())


def group_descriptions() -> dict[str, str]:
    """Group name -> what it was described as when it was made (``mesh_tp`` for a mesh dimension), where it was."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return {}
    import torch.distributed.distributed_c10d as c10d

    names = dict(c10d._world.pg_names)
    return {str(name): str(getattr(group, "group_desc", "") or "") for group, name in names.items()}


def exchange(name: str, key: str, value: str) -> list[str]:
    """Every rank's ``value``, in group order, through the group's store: nothing is issued on the group itself.

    Collective: all ranks of the group call it alike, with a ``key`` that is used once. Waits for the slowest rank, at
    most as long as the store's timeout.

    Raises:
        ValueError: this process is not in the group.
    """
    found = group_store(name)
    if found is None:
        raise ValueError(f"this process is not in the process group {name!r}")
    store, own, ranks = found
    store.set(f"{key}/{own}", value)
    return [bytes(store.get(f"{key}/{rank}")).decode() for rank in ranks]


def sliced_from(mesh: object) -> tuple[Any, tuple[int, ...]] | None:
    """(the mesh that a device mesh is a slice of, its dimensions in the slice's order); None for others.

    Ranks see different slices and the same whole mesh.
    """
    root_of = getattr(mesh, "_get_root_mesh", None)
    root = root_of() if callable(root_of) else None
    names, all_names = (tuple(getattr(one, "mesh_dim_names", None) or ()) for one in (mesh, root))
    if root is None or root is mesh or not names or not set(names) <= set(all_names):
        return None
    return root, tuple(all_names.index(name) for name in names)


def mesh_layout(value: object) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]] | None:
    """(shape, names of the dimensions, names of this rank's groups along them) of a device mesh, None for others."""
    import torch.distributed as dist

    if not dist.is_available():
        return None
    from torch.distributed.device_mesh import DeviceMesh

    mesh = _unwrapped(value)
    if not isinstance(mesh, DeviceMesh):
        return None
    from torch.utils._python_dispatch import _disable_current_modes

    # A mesh holds a real tensor, which cannot be looked at while fake ones are traced.
    with _disable_current_modes():
        try:
            names = tuple(str(mesh.get_group(dim).group_name) for dim in range(mesh.ndim))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
            names = ()
        return tuple(int(size) for size in mesh.mesh.shape), tuple(mesh.mesh_dim_names or ()), names
