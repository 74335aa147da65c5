"""What the ranks of a process group can do together, found out once, before anything is compiled.

If one rank chose a lowering and another did not, they would hang. So what it needs - point-to-point messages, memory
that all ranks map, a compiler for kernels - is established by all ranks of a group together: each one publishes its own
facts through the group's store, and all derive the same answer from the same list. Compiling only looks the answer up.

Answers are forgotten with the default process group; they are part of the compile cache's key (see ``identity``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from inductor_passes import _torch

UNKNOWN = "not established for this process group: call inductor_passes.prepare_groups before compiling"
#: Backends that can send to a single rank; ``undefined`` is torch's name for its choice of gloo and nccl by device.
_POINT_TO_POINT = frozenset({"gloo", "nccl", "mpi", "ucc", "xccl", "undefined"})


@dataclass(frozen=True)
class Availability:
    """What all ranks of a group can use; each field is "" when it is available, else the reason why not.

    Attributes:
        point_to_point: messages to single ranks.
        symmetric_memory: torch's symmetric memory between the ranks' devices.
        kernels: our Triton kernels over memory that all ranks map.
        device: type of the device whose tensors that is about, e.g. ``cuda`` or ``cpu``; "" when nothing is known.
    """

    point_to_point: str = UNKNOWN
    symmetric_memory: str = UNKNOWN
    kernels: str = UNKNOWN
    device: str = ""


@dataclass(frozen=True)
class Facts:
    """One rank's contribution.

    Attributes:
        host: equal for ranks that can map the same memory: kernel boot and shared-memory file system.
        device: ``cuda`` or ``xpu`` when this rank has such a device, else ``cpu``.
        device_id: of the current CUDA device; empty without.
        visible / reachable: ids of the devices that this process sees, and of those whose memory its own can access.
        overlapping: several ranks may share a device.
        point_to_point / symmetric_memory / compiled / interpreted: "" or why this rank cannot: send to single ranks,
            allocate symmetric memory, run Triton kernels on the device, run them in the interpreter.
    """

    host: str
    device: str
    device_id: str = ""
    visible: tuple[str, ...] = ()
    reachable: tuple[str, ...] = ()
    overlapping: bool = False
    point_to_point: str = ""
    symmetric_memory: str = ""
    compiled: str = ""
    interpreted: str = ""


def own_facts(name: str) -> Facts:
    """This rank's facts about the group ``name``; no communication."""
    backend = _torch.group_backend(name)
    kind = backend.rpartition(":")[2]
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    triton = _triton(interpreted)
    visible, reachable, device_id = _devices()
    return Facts(
        host=_host(),
        device="cuda" if device_id else _accelerator(),
        device_id=device_id,
        visible=visible,
        reachable=reachable,
        overlapping=os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
        point_to_point="" if kind in _POINT_TO_POINT else f"backend {backend!r} is not known to send to single ranks",
        symmetric_memory="" if device_id else "torch's symmetric memory needs CUDA devices",
        compiled=triton or _uncompiled(interpreted, device_id),
        interpreted=triton or ("" if interpreted else "on CPUs kernels run under TRITON_INTERPRET=1 only"),
    )


def _accelerator() -> str:
    return "xpu" if torch.xpu.is_available() else "cpu"


def _uncompiled(interpreted: bool, device_id: str) -> str:
    if interpreted:
        return "TRITON_INTERPRET=1 is set"
    return "" if device_id else "there is no CUDA device"


def _host() -> str:
    boot, shared = Path("/proc/sys/kernel/random/boot_id"), Path("/dev/shm")
    which = boot.read_text().strip() if boot.is_file() else ""
    # Containers on one machine have file systems of their own for shared memory.
    return f"{socket.gethostname()} {which} {shared.stat().st_dev if shared.is_dir() else 'no shared memory'}"


def _devices() -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """(visible devices, those that the current one can access, the current one) by id; empty without CUDA."""
    if not torch.cuda.is_available():
        return (), (), ""
    ids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    own = torch.cuda.current_device()
    near = [ids[i] for i in range(len(ids)) if i == own or torch.cuda.can_device_access_peer(own, i)]
    return tuple(ids), tuple(near), ids[own]


def _triton(interpreted: bool) -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from triton.runtime.interpreter import InterpretedFunction

        from inductor_passes.kernels import signals
    except Exception as error:  # a broken installation raises anything while it is imported
        return f"Triton cannot be imported: {type(error).__name__}: {error}"
    if isinstance(signals.release, InterpretedFunction) != interpreted:
        return "TRITON_INTERPRET was changed after Triton had been imported"
    return ""


def agree(facts: Sequence[Facts]) -> Availability:
    """The answer for a group from its ranks' facts, in group order: the same on all ranks."""
    devices = {f.device for f in facts}
    device = facts[0].device if len(devices) == 1 else "cpu"
    hosts = len({f.host for f in facts})
    apart = f"the ranks are on {hosts} hosts" if hosts > 1 else ""
    if device == "cuda":
        mapped = _first(facts, "symmetric_memory") or apart or _devices_apart(facts)
        return Availability(_first(facts, "point_to_point"), mapped, mapped or _first(facts, "compiled"), device)
    symmetric = _first(facts, "symmetric_memory")
    if devices - {"cpu", "cuda"}:
        why = f"the kernels need CUDA devices on all ranks; these have {', '.join(sorted(devices))}"
        return Availability(_first(facts, "point_to_point"), symmetric, why, device)
    return Availability(_first(facts, "point_to_point"), symmetric, _first(facts, "interpreted") or apart, device)


def _first(facts: Sequence[Facts], field: str) -> str:
    return next((f"rank {rank} of the group: {why}" for rank, f in enumerate(facts) if (why := getattr(f, field))), "")


def _devices_apart(facts: Sequence[Facts]) -> str:
    """Why the devices of all ranks cannot access each other's memory; a device that is not visible is not judged."""
    for rank, one in enumerate(facts):
        for peer, other in enumerate(facts):
            if rank != peer and one.device_id == other.device_id and not (one.overlapping and other.overlapping):
                return (
                    f"ranks {rank} and {peer} of the group share a device; "
                    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 allows it"
                )
            if other.device_id in one.visible and other.device_id not in one.reachable:
                return f"the device of rank {rank} of the group cannot access that of rank {peer}"
    return ""


def establish(name: str) -> Availability:
    """Find out what the ranks of a group can do. Collective among them; a second call only looks up.

    Where the facts allow symmetric memory, a small buffer is exchanged to see that it works, and the ranks compare
    once more.
    """
    known = _known()
    if name in known:
        return known[name]
    if "fake" in _torch.group_backend(name):
        why = "a fake process group moves nothing"
        return record(name, Availability(why, why, why))
    key = "inductor_passes/availability"
    facts = [_read(text) for text in _torch.exchange(name, key, json.dumps(asdict(own_facts(name))))]
    found = agree(facts)
    if found.device == "cuda" and not found.symmetric_memory:
        problems = _torch.exchange(name, f"{key}/tried", _try(name))
        rank, why = next(((r, p) for r, p in enumerate(problems) if p != _FINE), (0, ""))
        if why:
            why = f"rank {rank} of the group: {why}"
            found = Availability(found.point_to_point, why, why, found.device)
        # Graphs out of a cache name the operators without having looked for them.
        _torch.symmetric_op("fused_all_gather_matmul")
    return record(name, found)


def _read(text: str) -> Facts:
    values: dict[str, Any] = json.loads(text)
    values.update(visible=tuple(values["visible"]), reachable=tuple(values["reachable"]))
    return Facts(**values)


#: A store does not tell an empty value from a missing one on every backend.
_FINE = "fine"


def _try(name: str) -> str:
    try:
        _torch.symmetric_buffer(1024, name, torch.device("cuda", torch.cuda.current_device()))
    except Exception as error:  # whatever the driver says
        return f"symmetric memory failed: {type(error).__name__}: {error}"
    return _FINE


def record(name: str, found: Availability) -> Availability:
    """Set the answer for a group, e.g. one that was established by other means; it must be equal on all ranks."""
    _known()[name] = found
    return found


def availability(name: str) -> Availability:
    """What was established for a group, or for another group of the same ranks; a pure look-up."""
    known = _known()
    if name in known:
        return known[name]
    own = _torch.resolve_group_ranks(name)
    for other, found in sorted(known.items()):
        ranks = _torch.resolve_group_ranks(other)
        if own is not None and ranks is not None and ranks[1] == own[1]:
            return found
    return Availability()


def established() -> dict[str, dict[str, str]]:
    """Everything that is known, as plain data for the cache key; empty without torch.distributed."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return {}
    return {name: asdict(found) for name, found in sorted(_known().items())}


_registry: weakref.WeakKeyDictionary[Any, dict[str, Availability]] = weakref.WeakKeyDictionary()


def _known() -> dict[str, Availability]:
    return _registry.setdefault(_torch.default_group(), {})
