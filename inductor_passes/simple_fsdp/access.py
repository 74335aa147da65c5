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
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from inductor_passes import _torch
from inductor_passes.simple_fsdp.arrival import meet
from inductor_passes.simple_fsdp.forward import gathers, reads_gather
from inductor_passes.simple_fsdp.handle import ParameterHandle
from inductor_passes.simple_fsdp.layout import losses_of
from inductor_passes.simple_fsdp.residuals import Losses, buffers
from inductor_passes.simple_fsdp.saving import saves_whole, with_whole_values
from inductor_passes.simple_fsdp.settings import Settings, SimpleFSDPError
from inductor_passes.simple_fsdp.unshard import unshard

#: Methods that initialise parameters in place; they must see what is stored, not a gathered copy.
INITIALISERS = ("reset_parameters", "init_weights", "apply")


class Reader(Protocol):
    """How one parameter becomes what forward computes with; hashable, equal for equal layers."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that take part in a read."""

    def reading(self, name: str) -> Callable[[nn.Module, Any], Any]:
        """The function of (module, stored parameter) that a read inside of forward calls."""

    def outside(self, module: nn.Module, name: str) -> Any:
        """What a read outside of forward gives instead of a handle of the stored parameter, or None."""

    @property
    def residuals(self) -> tuple[str, ...]:
        """Names of the module's buffers in which backward keeps what messages lose of the gradient."""

    def losses(self, stored: torch.Tensor) -> Losses:
        """What a parameter needs such buffers for."""

    def keeping(self, residuals: tuple[str, ...]) -> Reader:
        """The same reader with these buffers."""


@dataclasses.dataclass(frozen=True)
class Managed:
    """A parameter of a module whose reads are computations."""

    name: str
    reader: Reader


@dataclasses.dataclass(frozen=True)
class Unsharding:
    """Reads gather.

    Attributes:
        shape: of this rank's local tensor.
        settings: of the application.
        residuals: see :class:`Reader`.
    """

    shape: tuple[int, ...]
    settings: Settings
    residuals: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """See :class:`Reader`."""
        return self.settings.ranks

    def reading(self, name: str) -> Callable[[nn.Module, Any], Any]:
        """See :class:`Reader`."""
        del name
        # Plain values: dynamo guards on each object that a read goes through.
        shape, arguments, residuals = self.shape, self.settings.arguments, self.residuals
        if not residuals:
            return lambda _, stored: unshard(stored, shape, *arguments)
        return lambda module, stored: unshard(  # type: ignore[misc]
            stored, shape, *arguments, residuals=buffers(module, residuals)
        )

    def outside(self, module: nn.Module, name: str) -> None:
        """See :class:`Reader`."""

    def losses(self, stored: torch.Tensor) -> Losses:
        """See :class:`Reader`."""
        return losses_of(stored, self.settings)

    def keeping(self, residuals: tuple[str, ...]) -> Unsharding:
        """See :class:`Reader`."""
        return dataclasses.replace(self, residuals=residuals)


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
    meshes = sorted({one.reader.ranks for part in module.modules() for one in managed_parameters(part)})
    if not meshes:
        raise SimpleFSDPError(f"no parameter of this {type(module).__name__} is managed by simple_fsdp")
    for ranks in meshes:
        meet(ranks, f"gathered_parameters of a {type(module).__name__}")
    with reads_gather():
        yield


def managed_class(
    cls: type[nn.Module], parameters: tuple[Managed, ...], saver: Settings | None = None, mixin: type | None = None
) -> type[nn.Module]:
    """The subclass of ``cls`` whose parameters unshard on access; the same object for equal arguments.

    Args:
        cls: the module's own class.
        parameters: those that unshard.
        saver: of the application, for a class that has ``save_pretrained``.
        mixin: a class whose methods come before those of ``cls``.
    """
    key = (cls, parameters, saver if saves_whole(cls) else None, mixin)
    if key not in _CLASSES:
        _CLASSES[key] = _derive(*key)
        _MANAGED[_CLASSES[key]] = key
    return _CLASSES[key]


_Key = tuple[type[nn.Module], tuple[Managed, ...], Settings | None, type | None]
_CLASSES: dict[_Key, type[nn.Module]] = {}
#: The other way round.
_MANAGED: dict[type[nn.Module], _Key] = {}


def is_managed(module: nn.Module) -> bool:
    """Whether a module's class is one of :func:`managed_class`; true of copies, too."""
    return type(module) in _MANAGED


def managed_parameters(module: nn.Module) -> tuple[Managed, ...]:
    """The parameters that a module's class unshards; none of a class that :func:`managed_class` did not make."""
    key = _MANAGED.get(type(module))
    return key[1] if key else ()


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module's user gave it."""
    key = _MANAGED.get(type(module))
    return key[0] if key else type(module)


def manage_again(module: nn.Module, change: Callable[[Reader], Reader]) -> None:
    """Give a managed module the class that reads its parameters in another way."""
    manage_each(module, lambda one: change(one.reader))


def manage_each(module: nn.Module, change: Callable[[Managed], Reader]) -> None:
    """As :func:`manage_again`, where a parameter's name matters too."""
    cls, parameters, saver, mixin = _MANAGED[type(module)]
    changed = tuple(dataclasses.replace(one, reader=change(one)) for one in parameters)
    module.__class__ = managed_class(cls, changed, saver, mixin)


def needs_class(cls: type[nn.Module], parameters: tuple[Managed, ...]) -> bool:
    """Whether a module of a class has anything that :func:`managed_class` changes."""
    return bool(parameters) or saves_whole(cls)


def _derive(
    cls: type[nn.Module], parameters: tuple[Managed, ...], saver: Settings | None, mixin: type | None
) -> type[nn.Module]:
    members: dict[str, Any] = {one.name: _unsharding(cls, one) for one in parameters}
    if issubclass(cls, nn.RNNBase) and parameters:
        members |= {"_flat_weights": _flat_weights(), "flatten_parameters": _keep_apart}
    if parameters:
        members |= _containers(cls)
    members["__module__"] = cls.__module__
    members["__doc__"] = cls.__doc__
    members["__init__"] = _construct(cls)
    members["__reduce_ex__"] = _reduce(cls)
    for method in INITIALISERS:
        if hasattr(cls, method):
            members[method] = _on_stored(getattr(cls, method))
    bases = (cls,) if mixin is None else (mixin, cls)
    if saver is None:
        return type(f"SimpleFSDP{cls.__name__}", bases, members)
    members["save_pretrained"] = with_whole_values(cls.save_pretrained, saver)
    # What is saved names the model's class.
    return type(cls.__name__, bases, members)


def _flat_weights() -> property:
    """What recurrent layers compute with: a list of their own, made from the registry before it was managed."""

    def read(module: Any) -> list[Any]:
        return [getattr(module, name, None) for name in module._flat_weights_names]

    def keep(_module: Any, _value: Any) -> None:
        """The list is made anew at each read."""

    return property(read, keep)


def _containers(cls: Any) -> dict[str, Any]:
    """In forward, slices and copies of containers are lists and dictionaries of what is gathered.

    torch wraps what they hold in parameters of a new container, which cut it off: no gradient would reach the shards.
    Elsewhere they are containers of what is stored.
    """

    def getitem(module: Any, index: Any) -> Any:
        if not isinstance(index, slice):
            return cls.__getitem__(module, index)
        if torch.compiler.is_compiling() or gathers(module):
            return [module[i] for i in range(*index.indices(len(module)))]
        with sharded_parameters():
            return cls.__getitem__(module, index)

    def copied(module: Any) -> Any:
        if torch.compiler.is_compiling() or gathers(module):
            return dict(module.items())
        with sharded_parameters():
            return cls.copy(module)

    if issubclass(cls, nn.ParameterList):
        return {"__getitem__": getitem}
    return {"copy": copied} if issubclass(cls, nn.ParameterDict) else {}


def _keep_apart(_module: Any) -> None:
    """For ``flatten_parameters``, which would move all weights into one buffer: gathered ones are new at each read."""


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


def _restore(
    cls: Any, parameters: tuple[Managed, ...], saver: Settings | None, mixin: type | None, *args: Any
) -> nn.Module:
    module: nn.Module = cls.__new__(managed_class(cls, parameters, saver, mixin), *args)
    return module


def _unsharding(cls: type[nn.Module], managed: Managed) -> property:
    name, reader = managed.name, managed.reader
    compute = reader.reading(name)
    label = f"{cls.__name__}.{name}"
    # A container that forward makes of these would put copies in their place, and gradients would stay there.
    alone = issubclass(cls, (nn.ParameterList, nn.ParameterDict))

    def read(module: nn.Module) -> Any:
        try:
            stored = _torch.stored_parameter(module, name)
        except KeyError:
            # It was removed. ``hasattr`` knows this error only.
            raise AttributeError(f"{label} is no parameter any more") from None
        if _ACCESS.stored or stored is None:
            return stored
        if not isinstance(stored, (nn.Parameter, DTensor)):
            # What ``torch.func.functional_call`` puts in a parameter's place is what forward computes with.
            return stored
        if torch.compiler.is_compiling():
            return compute(module, stored)
        if gathers(module):
            value = compute(module, stored)
            return _torch.counts_as_parameter(value) if alone else value
        if not isinstance(stored, DTensor):
            return stored
        found = reader.outside(module, name)
        return ParameterHandle.of(stored, label) if found is None else found

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
