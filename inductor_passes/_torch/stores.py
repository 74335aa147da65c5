"""Key-value stores of process groups: which one there is, and a connection of one's own to it."""

from __future__ import annotations

from typing import Any


def default_store() -> tuple[Any, Any] | None:
    """(default process group, its key-value store); None without torch.distributed or before it is initialised."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    import torch.distributed.distributed_c10d as c10d

    group = c10d._get_default_group()
    entry = c10d._world.pg_map.get(group)
    return None if entry is None else (group, entry[1])


def moves_nothing() -> bool:
    """Whether the default process group is a fake one, whose collectives return without having moved anything."""
    found = default_store()
    if found is None:
        return False
    import torch.distributed as dist

    return "fake" in str(dist.get_backend(found[0]))


def reconnected(store: Any) -> Any:
    """Another connection to the same store, the store itself where this torch cannot make one."""
    clone = getattr(store, "clone", None)
    return store if clone is None else clone()


def read_many(store: Any, keys: list[str]) -> list[bytes]:
    """The values of keys that are all there: in one operation where the store can."""
    if len(keys) > 1 and store.has_extended_api():
        return [bytes(value) for value in store.multi_get(keys)]
    return [bytes(store.get(key)) for key in keys]


def sent_so_far(groups: tuple[str, ...]) -> str:
    """How many collectives were issued in process groups, by name, as text; "" of groups that do not count them.

    Equal on two ranks of a group that stand at the same place of a program.
    """
    found = []
    for name in groups:
        try:
            from torch.distributed.distributed_c10d import _resolve_process_group

            count = int(_resolve_process_group(name)._get_sequence_number_for_group())  # type: ignore[arg-type]
        except Exception:  # backends without one raise as they like
            continue
        found.append(count)
    return " ".join(map(str, found))
