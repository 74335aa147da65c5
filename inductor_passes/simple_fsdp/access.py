"""Parameter access as computation: a class whose parameters are properties that unshard.

Every module that owns managed parameters gets a subclass of its class in which the parameters' names are properties.
Optimizers, ``state_dict``, ``parameters()`` and ``to_empty`` read the module's registry and keep seeing the sharded
DTensors under their original names. The subclass depends on (class, names, shapes, settings) only, so that equal
layers share one class and dynamo compiles them without recompiling.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from inductor_passes import _torch
from inductor_passes.simple_fsdp.settings import Settings
from inductor_passes.simple_fsdp.unshard import unshard

#: Methods that initialise parameters in place; they must see what is stored, not a gathered copy.
INITIALISERS = ("reset_parameters", "init_weights", "apply")


#: Per parameter its name and the shape of this rank's local tensor.
Shards = tuple[tuple[str, tuple[int, ...]], ...]


class _Access:
    """Process-wide state; an object so that dynamo guards on one attribute."""

    stored = False


_ACCESS = _Access()


@contextlib.contextmanager
def sharded_parameters() -> Iterator[None]:
    """Inside, attribute access to managed parameters gives the stored DTensors instead of gathered copies.

    Initialisation code needs it: a write to a gathered copy is lost. ``module.apply(fn)`` and the methods
    ``reset_parameters`` and ``init_weights`` of a module with managed parameters use it by themselves. Concerns the
    whole process; do not enter it while a forward pass runs in another thread.
    """
    before = _ACCESS.stored
    _ACCESS.stored = True
    try:
        yield
    finally:
        _ACCESS.stored = before


def managed_class(cls: type[nn.Module], shards: Shards, settings: Settings) -> type[nn.Module]:
    """The subclass of ``cls`` whose parameters unshard on access; the same object for equal arguments.

    Args:
        shards: names of the parameters and shapes of this rank's local tensors.
    """
    key = (cls, shards, settings)
    if key not in _CLASSES:
        _CLASSES[key] = _derive(cls, shards, settings)
        _MANAGED.add(_CLASSES[key])
    return _CLASSES[key]


_CLASSES: dict[tuple[type[nn.Module], Shards, Settings], type[nn.Module]] = {}
_MANAGED: set[type[nn.Module]] = set()


def is_managed(module: nn.Module) -> bool:
    """Whether a module's class is one of :func:`managed_class`; true of copies, too."""
    return type(module) in _MANAGED


def _derive(cls: type[nn.Module], shards: Shards, settings: Settings) -> type[nn.Module]:
    members: dict[str, Any] = {name: _unsharding(name, shape, settings) for name, shape in shards}
    members["__module__"] = cls.__module__
    members["__doc__"] = cls.__doc__
    for method in INITIALISERS:
        if hasattr(cls, method):
            members[method] = _on_stored(getattr(cls, method))
    return type(f"SimpleFSDP{cls.__name__}", (cls,), members)


def _unsharding(name: str, shape: tuple[int, ...], settings: Settings) -> property:
    mesh_dims = settings.mesh_dims
    compute_dtype, reduce_dtype = settings.compute_dtype, settings.reduce_dtype
    reshard, groups = settings.reshard, ",".join(settings.groups)

    def read(module: nn.Module) -> Any:
        stored = _torch.stored_parameter(module, name)
        if _ACCESS.stored or stored is None:
            return stored
        return unshard(stored, mesh_dims, shape, compute_dtype, reduce_dtype, reshard, groups)

    return property(read, doc=f"{name}, gathered over the data-parallel ranks")


def _on_stored(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with sharded_parameters():
            return method(*args, **kwargs)

    return wrapper
