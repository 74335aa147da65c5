"""Data parallel wrappers whose collectives run in hooks, found on the modules that are being called.

A compiler compiles a function when it is called first: the modules whose ``forward`` is running are on the stack. So
what a graph belongs to is known without a look at all objects, and without the wrappers' own registers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from inductor_passes._torch.autograd import module_call_code

#: Class attribute of modules that count as wrapped for their users, and whose collectives are in the graph.
ADOPTED = "_adopted_by_inductor_passes"

_REDUCED_IN_HOOKS = (
    ("DDP", "torch.nn.parallel", "DistributedDataParallel"),
    ("replicate", "torch.distributed._composable.replicate", "DDP"),
)
#: (wrapper, module of torch, class of which a wrapped module is an instance); the first that fits counts.
_WRAPPERS = (
    ("replicate", "torch.distributed._composable.replicate_with_fsdp", "ReplicateModule"),
    ("FSDP2", "torch.distributed.fsdp", "FSDPModule"),
    ("FSDP1", "torch.distributed.fsdp", "FullyShardedDataParallel"),
    *_REDUCED_IN_HOOKS,
)


def wrapper_being_called() -> str:
    """``FSDP2``, ``FSDP1``, ``DDP`` or ``replicate``: how a module that is being called, or a part of it, is wrapped.

    "" where there is none, or where its collectives come into graphs all the same (DDP under compiled autograd).
    """
    wrappers = [one for one in _WRAPPERS if not (one in _REDUCED_IN_HOOKS and _reduces_in_graphs())]
    return _first_wrapper(_modules_being_called(), wrappers)


def wrapper_of(module: torch.nn.Module) -> str:
    """``FSDP2``, ``FSDP1``, ``DDP`` or ``replicate``: how a module or a part of it is wrapped; "" where it is not."""
    return _first_wrapper((module,), _WRAPPERS)


def _first_wrapper(modules: Iterable[torch.nn.Module], wrappers: Iterable[tuple[str, str, str]]) -> str:
    known = [(name, found) for name, *place in wrappers if (found := _class(*place)) is not None]
    seen: set[int] = set()
    for module in modules:
        for part in module.modules():
            if id(part) in seen or getattr(type(part), ADOPTED, False):
                continue
            seen.add(id(part))
            for name, wrapped in known:
                if isinstance(part, wrapped):
                    return name
    return ""


def _class(where: str, name: str) -> type | None:
    """None while this process has not imported it: without its class there is no wrapped module."""
    found = getattr(sys.modules.get(where), name, None)
    return found if isinstance(found, type) else None


def _modules_being_called() -> Iterator[torch.nn.Module]:
    """Modules whose call is on the stack, innermost first.

    Only torch's own frames are looked into: before Python 3.13 a look at a frame's variables keeps their values alive
    until the frame ends, and a user's frame may last for the whole training.
    """
    calls = module_call_code()
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in calls:
            found: Any = frame.f_locals.get("self")
            if isinstance(found, torch.nn.Module) and not isinstance(found, torch.fx.GraphModule):
                yield found
        frame = frame.f_back


def _reduces_in_graphs() -> bool:
    """Whether DDP reduces gradients in operators that compiled autograd traces."""
    dynamo = sys.modules.get("torch._dynamo")
    return str(getattr(getattr(dynamo, "config", None), "optimize_ddp", "")).startswith("python_reducer")


def graph_breaks() -> int:
    """How often dynamo has cut a function into several graphs since it was reset."""
    utilities = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utilities, "counters", None)
    return sum(counters["graph_break"].values()) if counters is not None else 0
