"""Applying data parallelism to a module in place."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from inductor_passes.simple_fsdp.access import (
    Managed,
    Unsharding,
    is_managed,
    managed_class,
    needs_class,
    register_stored,
)
from inductor_passes.simple_fsdp.forward import note_parametrizations
from inductor_passes.simple_fsdp.layout import distribute
from inductor_passes.simple_fsdp.settings import Mode, Settings, SimpleFSDPError

#: Every module that an application has covered. Those that own parameters also show it by their class.
_COVERED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

#: The outermost modules of them.
_APPLICATIONS: weakref.WeakSet[nn.Module] = weakref.WeakSet()

#: Attribute of a parameter that was replaced: who still holds it shared it with a module that now holds another.
_REPLACED = "_replaced_by_simple_fsdp"


def simple_fsdp(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    mode: Mode = "fully_shard",
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | Literal["auto"] = True,
    shard_dim: int = 0,
) -> nn.Module:
    """Make a module data-parallel in a way that ``torch.compile(fullgraph=True)`` sees.

    Parameters become DTensors on ``mesh``. Each access in forward casts and gathers, each backward reduces and
    averages the gradient over the data-parallel ranks, all with functional collectives that appear in the compiled
    forward and backward graphs: one all_gather and one reduce_scatter per access of a sharded parameter. Shared
    parameters stay shared, frozen ones are gathered but not reduced, buffers are left alone.

    Combine with ``parallelize_module`` by applying that first: DTensor parameters on other dimensions of the same
    device mesh become DTensors on (data-parallel, inner) dimensions. Parts that need another mesh (experts) are
    given to ``simple_fsdp`` first; a later call on a parent leaves them as they are.

    A meta-device module is distributed without memory; afterwards ``to_empty`` and ``reset_parameters`` work as
    usual (other initialisation code belongs inside :func:`sharded_parameters`). A real one takes the values of each
    group's first rank.

    Args:
        module: changed in place.
        mesh: one dimension, or two for hybrid_shard: (replicate, shard).
        mode: ``fully_shard`` shards parameters, gradients and optimizer state (ZeRO-3, or ZeRO-2 with
            ``reshard_after_forward=False``); ``hybrid_shard`` does so within groups of ranks that replicate each
            other; ``replicate`` keeps whole parameters and all-reduces gradients (DDP).
        mp_policy: ``param_dtype`` is what parameters are cast to before the gather, ``reduce_dtype`` what gradients
            are reduced in (default: as backward produces them); ``cast_forward_inputs`` and ``output_dtype`` concern
            ``module``'s own arguments and results. Stored parameters and gradients keep their dtype.
        reshard_after_forward: whether the compiled backward gathers again (True) or keeps the gathered parameters
            (False). ``"auto"`` has our compiler passes keep those that save most time per byte as long as the step
            stays within ``memory_budget`` (relative to gathering all of them again); compiled without our passes it
            means True. Without ``torch.compile`` they are always kept until backward.
        shard_dim: tensor dimension to shard; tensors with fewer dimensions use dimension 0, tensors without any are
            replicated. Sizes need not be divisible. Any other than 0 costs a transposing copy of each gradient.

    Returns:
        ``module``.

    Raises:
        SimpleFSDPError: a bad argument, a module that was covered before, or a parameter that cannot be laid out.
            The module is unchanged then.
    """
    settings, policy = Settings.of(mesh, mode, mp_policy, reshard_after_forward, shard_dim)
    _check(module)
    owners, replacement = _distribute_all(module, mesh, settings)
    for part, owned in owners:
        _manage(part, owned, replacement, settings)
    cast_at_the_border(module, policy)
    cover(module)
    return module


def cover(module: nn.Module) -> None:
    """Remember the parts of a module whose parameters are managed now."""
    parts = set(module.modules())
    _COVERED.update(parts)
    for inner in [one for one in _APPLICATIONS if one in parts]:
        _APPLICATIONS.discard(inner)
    _APPLICATIONS.add(module)
    note_parametrizations(module)
    _watch_registrations()


def applications() -> list[nn.Module]:
    """The models whose parameters are managed, each once however many of its parts were managed first."""
    return list(_APPLICATIONS)


#: A part of a module and its own parameters by name.
_Owner = tuple[nn.Module, list[tuple[str, nn.Parameter]]]


def _check(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise SimpleFSDPError(f"module={type(module).__name__}; expected a torch.nn.Module")
    if _is_covered(module):
        raise SimpleFSDPError(
            f"simple_fsdp was already applied to this {type(module).__name__}; apply it once, to parts first and to "
            "the whole last"
        )


def _manage(
    part: nn.Module,
    owned: Sequence[tuple[str, nn.Parameter]],
    replacement: Mapping[int, nn.Parameter],
    settings: Settings,
) -> None:
    """Put distributed parameters in place of a part's own, and give it the class that gathers them when read."""
    for name, parameter in owned:
        setattr(parameter, _REPLACED, True)
        part.register_parameter(name, replacement[id(parameter)])
    managed = tuple(
        Managed(name, Unsharding(_local_shape(replacement[id(parameter)]), settings)) for name, parameter in owned
    )
    if needs_class(type(part), managed):
        part.__class__ = managed_class(type(part), managed, settings)


def _distribute_all(
    module: nn.Module, mesh: DeviceMesh, settings: Settings
) -> tuple[list[_Owner], dict[int, nn.Parameter]]:
    """Parts that are not covered yet, and per ``id`` of a parameter what takes its place; changes nothing.

    Raises:
        SimpleFSDPError: a parameter is shared with a part that is covered, or cannot be laid out.
    """
    covered_before = {id(p) for part in module.modules() if _is_covered(part) for p in part.parameters()}
    replacement: dict[int, nn.Parameter] = {}
    owners: list[_Owner] = []
    for prefix, part in module.named_modules():
        if _is_covered(part):
            continue
        owned = list(part.named_parameters(recurse=False, remove_duplicate=False))
        owners.append((part, owned))
        for name, parameter in owned:
            full_name = f"{prefix}.{name}" if prefix else name
            if id(parameter) in covered_before or hasattr(parameter, _REPLACED):
                raise SimpleFSDPError(
                    f"parameter {full_name} is shared with a part that simple_fsdp was applied to before; apply it "
                    "to the smallest module that contains both"
                )
            if id(parameter) not in replacement:
                replacement[id(parameter)] = distribute(full_name, parameter, mesh, settings)
    return owners, replacement


@functools.cache
def _watch_registrations() -> None:
    register_module_parameter_registration_hook(register_stored)


def _local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    assert isinstance(parameter, DTensor)
    return tuple(parameter.to_local().shape)


def _is_covered(module: nn.Module) -> bool:
    return module in _COVERED or is_managed(module)


def cast_at_the_border(module: nn.Module, policy: MixedPrecisionPolicy, prepend: bool = False) -> None:
    """Have a module's floating-point arguments and results cast as a policy says.

    Args:
        module: gets hooks.
        policy: says what is cast.
        prepend: arguments are cast before the module's other hooks see them.
    """
    inputs, outputs = policy.param_dtype, policy.output_dtype
    if inputs is not None and policy.cast_forward_inputs:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (cast(args, inputs), cast(kwargs, inputs)), prepend=prepend, with_kwargs=True
        )
    if outputs is not None:
        module.register_forward_hook(lambda _, args, result: cast(result, outputs))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with the floating-point tensors in it cast to ``dtype``."""
    return on_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def on_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with the tensors in it changed.

    Goes through what ``fully_shard`` goes through: tuples, lists, sets, dicts, named tuples and dataclasses, and the
    outputs of Hugging Face models.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {one.name: on_tensors(getattr(value, one.name), change) for one in dataclasses.fields(value)}
        return type(value)(**changed)
    if isinstance(value, OrderedDict):
        found = value.__class__()
        for key, one in value.items():
            found[key] = on_tensors(one, change)
        return found
    if type(value) is dict:
        return {key: on_tensors(one, change) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[on_tensors(one, change) for one in value])
    if type(value) in (tuple, list, set):
        return type(value)([on_tensors(one, change) for one in value])
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with the tensors in it on a device."""
    return on_tensors(value, lambda tensor: tensor if tensor.device == device else tensor.to(device))
