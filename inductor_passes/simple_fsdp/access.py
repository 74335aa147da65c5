"""Parameter access as computation: a class whose parameters are properties that unshard.

Every module that owns managed parameters gets a subclass of its class in which the parameters' names are properties.
Optimizers, ``state_dict``, ``parameters()`` and ``to_empty`` read the module's registry and keep seeing the sharded
DTensors under their original names. The subclass depends on (class, names, shapes, settings) only, so that equal
layers share one class and dynamo compiles them without recompiling.

Reads gather in compiled code and inside a module's forward, where all ranks take part. Elsewhere they give a
:class:`~inductor_passes.simple_fsdp.handle.ParameterHandle`, which one rank alone can use.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from inductor_passes import _torch
from inductor_passes.simple_fsdp.arrival import meet
from inductor_passes.simple_fsdp.forward import gathers, reads_gather
from inductor_passes.simple_fsdp.handle import ParameterHandle
from inductor_passes.simple_fsdp.saving import saves_whole, with_whole_values
from inductor_passes.simple_fsdp.settings import Settings, SimpleFSDPError
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


@contextlib.contextmanager
def gathered_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, reads of managed parameters outside of forward gather as in forward, with gradients.

    For eager code that is part of the computation without being in any module's forward: a loss that reads
    ``model.head.weight``, a method that is not ``forward``. Compiled code needs no context. Concerns this thread.

    Args:
        module: whose parameters are going to be read; all ranks that share them have to enter, and every read inside
            is a collective.

    Raises:
        SimpleFSDPError: no parameter of ``module`` is managed.
        MissingRanksError: some ranks did not enter.
    """
    meshes = sorted({key[2].ranks for part in module.modules() if (key := _MANAGED.get(type(part)))})
    if not meshes:
        raise SimpleFSDPError(f"no parameter of this {type(module).__name__} is managed by simple_fsdp")
    for ranks in meshes:
        meet(ranks, f"gathered_parameters of a {type(module).__name__}")
    with reads_gather():
        yield


def managed_class(cls: type[nn.Module], shards: Shards, settings: Settings) -> type[nn.Module]:
    """The subclass of ``cls`` whose parameters unshard on access; the same object for equal arguments.

    Args:
        shards: names of the parameters and shapes of this rank's local tensors.
    """
    key = (cls, shards, settings)
    if key not in _CLASSES:
        _CLASSES[key] = _derive(cls, shards, settings)
        _MANAGED[_CLASSES[key]] = key
    return _CLASSES[key]


_Key = tuple[type[nn.Module], Shards, Settings]
_CLASSES: dict[_Key, type[nn.Module]] = {}
#: The other way round.
_MANAGED: dict[type[nn.Module], _Key] = {}


def is_managed(module: nn.Module) -> bool:
    """Whether a module's class is one of :func:`managed_class`; true of copies, too."""
    return type(module) in _MANAGED


def needs_class(cls: type[nn.Module], shards: Shards) -> bool:
    """Whether a module of a class has anything that :func:`managed_class` changes."""
    return bool(shards) or saves_whole(cls)


def _derive(cls: type[nn.Module], shards: Shards, settings: Settings) -> type[nn.Module]:
    members: dict[str, Any] = {name: _unsharding(cls, name, shape, settings) for name, shape in shards}
    members["__module__"] = cls.__module__
    members["__doc__"] = cls.__doc__
    members["__init__"] = _construct(cls)
    members["__reduce_ex__"] = _reduce(cls)
    for method in INITIALISERS:
        if hasattr(cls, method):
            members[method] = _on_stored(getattr(cls, method))
    if not saves_whole(cls):
        return type(f"SimpleFSDP{cls.__name__}", (cls,), members)
    members["save_pretrained"] = with_whole_values(cls.save_pretrained, settings)
    # What is saved names the model's class.
    return type(cls.__name__, (cls,), members)


def _construct(cls: Any) -> Callable[..., None]:
    """``__init__``: calling a managed class (``type(module)(...)``, slicing a container) makes an unmanaged module."""

    @functools.wraps(cls.__init__)
    def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        module.__class__ = cls
        cls.__init__(module, *args, **kwargs)

    return construct


def _reduce(cls: Any) -> Callable[..., Any]:
    """``__reduce_ex__``, for pickle and copy: a managed class is not found by name, so it is made again."""

    def reduce(module: nn.Module, protocol: Any) -> Any:
        reduced = cls.__reduce_ex__(module, protocol)
        key = _MANAGED.get(type(module))
        if key is None or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        return (_restore, (*key, *reduced[1][1:]), *reduced[2:])

    return reduce


def _restore(cls: Any, shards: Shards, settings: Settings, *args: Any) -> nn.Module:
    module: nn.Module = cls.__new__(managed_class(cls, shards, settings), *args)
    return module


def _unsharding(cls: type[nn.Module], name: str, shape: tuple[int, ...], settings: Settings) -> property:
    mesh_dims = settings.mesh_dims
    compute_dtype, reduce_dtype = settings.compute_dtype, settings.reduce_dtype
    reshard, groups = settings.reshard, ",".join(settings.groups)
    label = f"{cls.__name__}.{name}"

    def read(module: nn.Module) -> Any:
        stored = _torch.stored_parameter(module, name)
        if _ACCESS.stored or stored is None:
            return stored
        if torch.compiler.is_compiling() or gathers(module):
            return unshard(stored, mesh_dims, shape, compute_dtype, reduce_dtype, reshard, groups)
        return ParameterHandle.of(stored, label) if isinstance(stored, DTensor) else stored

    return property(read, doc=f"{name}, gathered over the data-parallel ranks")


def _on_stored(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with sharded_parameters():
            return method(*args, **kwargs)

    return wrapper


def register_stored(_module: nn.Module, _name: str, parameter: Any) -> Any:
    """For ``register_module_parameter_registration_hook``: what is registered under another name is what is stored."""
    return parameter._stored if isinstance(parameter, ParameterHandle) else None
