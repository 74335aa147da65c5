"""``adopt``: check everything, then change classes; parameters stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from inductor_passes import _torch
from inductor_passes.adoption.accumulation import Entry, Ledger, Owner, Unit
from inductor_passes.adoption.methods import AdoptedDDP, AdoptedModule
from inductor_passes.adoption.settings import AdoptedCopy, AdoptedShard, AdoptError
from inductor_passes.simple_fsdp.access import Managed, Reader, is_managed, managed_class
from inductor_passes.simple_fsdp.apply import cast_at_the_border, cover, to_device
from inductor_passes.simple_fsdp.forward import reads_gather
from inductor_passes.simple_fsdp.settings import Settings, ranks_of
from inductor_passes.simple_fsdp.unshard import ShardLayout


def adopt(module: nn.Module, *, find_unused_parameters: bool | None = None) -> nn.Module:
    """Make the collectives of a module that FSDP2 or DDP wrapped visible to ``torch.compile``.

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        model = inductor_passes.adopt(model)
        step = torch.compile(model, options=inductor_passes.options())

    Hooks leave; reading a parameter gathers it and backward reduces its gradient, as part of the computation.
    Parameters stay the same objects: an optimizer that was made before keeps working, names and checkpoints stay what
    they are. What users call on a wrapped module (``set_requires_gradient_sync``, ``no_sync``, ``unshard`` ...) keeps
    its meaning; see ``docs/adopt.md``. All ranks have to call it, between two steps.

    Args:
        module: on which, or on parts of which, ``torch.distributed.fsdp.fully_shard`` (any layout) or the ``replicate``
            made of it was called; or a ``DistributedDataParallel``. Changed in place.
        find_unused_parameters: False says that all ranks use the same parameters although DDP was given
            ``find_unused_parameters=True``.

    Returns:
        ``module``.

    Raises:
        AdoptError: nothing to adopt, or a setting that only hooks can serve. The module is unchanged then.
    """
    wrapped = getattr(module, "_orig_mod", module)
    if not isinstance(wrapped, nn.Module):
        raise AdoptError(f"module={type(module).__name__}; expected a torch.nn.Module")
    adopted = [path for path, part in wrapped.named_modules() if isinstance(part, (AdoptedModule, AdoptedDDP))]
    if adopted:
        where = adopted[0] or f"this {type(wrapped).__name__}"
        raise AdoptError(f"{where} was adopted before: adopt the whole once, after all of it was wrapped")
    if isinstance(wrapped, DistributedDataParallel):
        _adopt_ddp(wrapped, find_unused_parameters)
        return module
    units = _torch.sharded_units(wrapped)
    if not units:
        _refuse_nothing(wrapped)
    _adopt_sharded(wrapped, units)
    return module


def _refuse_nothing(module: nn.Module) -> NoReturn:
    name = type(module).__name__
    wrapper = _torch.wrapper_of(module)
    if wrapper == "FSDP1":
        raise AdoptError(
            f"{name} is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters cannot be taken over: wrap "
            "it with torch.distributed.fsdp.fully_shard, or apply inductor_passes.simple_fsdp"
        )
    if wrapper == "replicate":
        raise AdoptError(
            f"{name} is replicated by DDP's hooks (torch.distributed._composable.replicate): wrap it with "
            "DistributedDataParallel, or with the replicate of torch.distributed._composable.replicate_with_fsdp"
        )
    if wrapper == "DDP":
        raise AdoptError(f"a part of {name} is a DistributedDataParallel: adopt that part")
    raise AdoptError(
        f"nothing to adopt in this {name}: call torch.distributed.fsdp.fully_shard on it, or wrap it with "
        "DistributedDataParallel, and adopt what results; or apply inductor_passes.simple_fsdp instead of both"
    )


def _check(module: nn.Module, problems: Iterable[str]) -> None:
    found = list(dict.fromkeys(problems))
    for path, part in module.named_modules():
        kind, label = type(part).__name__, path or "the module itself"
        if isinstance(part, torch.jit.ScriptModule):
            found.append(f"{label} is a torch.jit.ScriptModule: leave torch.jit.script out")
        elif is_managed(part):
            found.append(f"simple_fsdp was applied to {label} ({kind}): use one of the two")
        elif isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            found.append(f"{label} ({kind}) has sparse gradients: make it with sparse=False")
        elif any(isinstance(p, nn.parameter.UninitializedParameter) for p in part._parameters.values()):
            found.append(f"{label} ({kind}) has uninitialized parameters: run it once before wrapping")
    if found:
        raise AdoptError(f"cannot adopt this {type(module).__name__}: " + "; ".join(found))


# -- FSDP2 ----------------------------------------------------------------------------------------------


def _adopt_sharded(module: nn.Module, units: list[_torch.ShardedUnit]) -> None:
    problems = [problem for found in units for problem in found.problems]
    problems += [problem for found in units for one in found.parameters for problem in _layout_problems(one)]
    problems += _foreign(module, units)
    _check(module, problems)
    methods = {part: _torch.registered_forward_methods(part) for part in module.modules()}
    _torch.release_fsdp2(module, units)
    # Only now: after an evaluation FSDP2 leaves gathered parameters in the registry.
    owners = _owners(module)
    ledger = Ledger(tuple(sorted({rank for found in units for one in found.parameters for rank in ranks_of(one.mesh)})))
    readers: dict[nn.Module, list[Managed]] = {}
    of_module: dict[nn.Module, Unit] = {}
    for found in units:
        unit = Unit(ledger)
        ledger.units.append(unit)
        of_module.update(dict.fromkeys(found.modules, unit))
        for one in found.parameters:
            settings = _settings(one)
            places = owners.get(id(one.parameter), [])
            unit.entries.append(_entry(one, settings, places))
            for part, name in places:
                of_module.setdefault(part, unit)
                shape = tuple(one.parameter.to_local().shape)
                readers.setdefault(part, []).append(Managed(name, AdoptedShard(shape, settings)))
    wrapped = {part for found in units for part in found.modules}
    for part, its_unit in of_module.items():
        part._adoption = Owner(its_unit)  # type: ignore[assignment]
        _manage(part, readers.get(part, []), AdoptedModule if part in wrapped else None)
    for found, its_unit in zip(units, ledger.units):
        for part in found.modules:
            cast_at_the_border(part, found.policy, prepend=True)
        if not (found.reduces and found.all_reduces):
            its_unit.set_reduces(found.reduces, found.all_reduces)
    _finish(module, methods)
    _move_inputs(module, units)


def _layout_problems(one: _torch.ShardedParameter) -> list[str]:
    parameter = one.parameter
    if not isinstance(parameter, DTensor):
        return ["a parameter is not a DTensor: adopt the module before parameters are replaced"]
    # Equal meshes may be different objects with groups of their own: DTensor keeps one for each layout.
    mesh, wanted = parameter.device_mesh, _group_ranks(one.mesh)
    if _group_ranks(mesh)[: len(wanted)] != wanted:
        return [
            f"a parameter lies on {mesh}, whose first dimensions are not the data-parallel ones ({one.mesh}): name "
            "those first in init_device_mesh"
        ]
    sharded = [i for i in range(one.mesh.ndim) if not parameter.placements[i].is_replicate()]
    if len(sharded) > 1:
        return ["dp_mesh_dims shards over several mesh dimensions that are not flattened: flatten them first"]
    return []


def _group_ranks(mesh: DeviceMesh) -> list[list[int]]:
    return [torch.distributed.get_process_group_ranks(group) for group in mesh.get_all_groups()]


def _foreign(module: nn.Module, units: list[_torch.ShardedUnit]) -> list[str]:
    parts = set(module.modules())
    if any(part not in parts for found in units for part in found.modules):
        return ["fully_shard was called on a list of modules of which some lie outside of this one: adopt the whole"]
    return []


def _owners(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((part, name))
    return found


def _settings(one: _torch.ShardedParameter) -> Settings:
    mesh: DeviceMesh = one.parameter.device_mesh  # type: ignore[attr-defined]
    return Settings(
        mode=one.mode,  # type: ignore[arg-type]
        mesh_dims=one.mesh.ndim,
        compute_dtype=one.compute_dtype,
        reduce_dtype=one.reduce_dtype,
        # A number of ranks becomes True: what backward gathers again comes from all ranks.
        reshard="always" if one.reshard_after_forward else "never",
        shard_dim=one.shard_dim,
        groups=tuple(group.group_name for group in mesh.get_all_groups()[: one.mesh.ndim]),
        ranks=ranks_of(one.mesh),
        divisor=one.divisor,
    )


def _entry(one: _torch.ShardedParameter, settings: Settings, places: list[tuple[nn.Module, str]]) -> Entry:
    parameter = one.parameter
    assert isinstance(parameter, DTensor)
    layout = ShardLayout.of(parameter, settings.mesh_dims, settings.reduce_dtype, settings.divisor)
    made = one.compute_dtype or parameter.dtype
    reduced = one.reduce_dtype or made
    if reduced.itemsize < made.itemsize:
        return Entry(parameter, places, layout, None, made, rounded=reduced)
    return Entry(parameter, places, layout, None, reduced)


def _move_inputs(module: nn.Module, units: list[_torch.ShardedUnit]) -> None:
    """As FSDP2's outermost module: arguments go to the device that forward computes on."""
    device = units[0].device
    if device.type == "cpu" or device.type == "meta" or module not in units[0].modules:
        return

    def move(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return to_device(args, device), to_device(kwargs, device)

    module.register_forward_pre_hook(move, prepend=True, with_kwargs=True)


# -- DDP ------------------------------------------------------------------------------------------------


def _adopt_ddp(ddp: DistributedDataParallel, find_unused_parameters: bool | None) -> None:
    problems = _torch.ddp_problems(ddp)
    if type(ddp) is not DistributedDataParallel:
        problems.append(f"{type(ddp).__name__} is a subclass of DistributedDataParallel: wrap the model with that one")
    if ddp.find_unused_parameters and find_unused_parameters is not False and not ddp.static_graph:
        problems.append(
            "find_unused_parameters=True says that ranks use different parameters, which compiled graphs cannot serve: "
            "if all ranks use the same ones, call adopt(model, find_unused_parameters=False)"
        )
    if not ddp.require_backward_grad_sync:
        problems.append("it is inside of no_sync(): adopt it outside")
    elif not ddp.require_forward_param_sync and any(p.grad is not None for p in ddp.parameters()):
        # Set so by the last forward pass: it was inside of no_sync(), or without gradients.
        problems.append("gradients of no_sync() may wait for a reduction: finish the accumulation, or set them to None")
    inner = ddp.module
    if _torch.sharded_units(inner):
        problems.append("fully_shard was called on a part of it: use one of the two")
    _check(inner, [*problems, *_captured(inner)])
    group = str(ddp.process_group.group_name)
    ranks = tuple(torch.distributed.get_process_group_ranks(ddp.process_group))
    syncs = _torch.ddp_syncs_buffers(ddp) and any(True for _ in inner.buffers())
    ignored = set(ddp.parameters_to_ignore)
    unit = Unit(Ledger(tuple(sorted(ranks))))
    unit.ledger.units.append(unit)
    names = {id(p): name for name, p in inner.named_parameters() if p.requires_grad and name not in ignored}
    by_id = {id(p): p for p in inner.parameters()}
    places = {number: found for number, found in _owners(inner).items() if number in names}
    _torch.release_ddp(ddp)
    reader = AdoptedCopy(group, ranks)
    managed: dict[nn.Module, list[Managed]] = {}
    for number in names:
        unit.entries.append(Entry(by_id[number], places[number], None, (group, len(ranks)), by_id[number].dtype))
        for part, name in places[number]:
            managed.setdefault(part, []).append(Managed(name, reader))
    for part, found in managed.items():
        part._adoption = Owner(unit)  # type: ignore[assignment]
        _manage(part, found, None)
    ddp._adoption = Owner(unit)  # type: ignore[assignment]
    ddp._syncs_buffers, ddp._buffers_due, ddp._evaluated = syncs, True, False  # type: ignore[assignment]
    ddp.__class__ = AdoptedDDP
    _finish(inner, {})


def _captured(module: nn.Module) -> list[str]:
    """Parameters that a module keeps elsewhere too: reads of those would go around the reduction."""
    found = []
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            # Recurrent layers' list of their weights is made anew by their class.
            if name not in ("_parameters", "_modules", "_flat_weights") and _holds_parameter(value):
                where = f"{path}.{name}" if path else name
                found.append(
                    f"{where} ({type(part).__name__}) holds parameters by itself, and gradients of what forward reads "
                    "there would not be reduced: read them as attributes, or keep them in a torch.nn.ParameterList"
                )
    return found


def _holds_parameter(value: Any, depth: int = 3) -> bool:
    if isinstance(value, nn.Parameter):
        return value.requires_grad
    if depth and isinstance(value, dict):
        return any(_holds_parameter(one, depth - 1) for one in value.values())
    if depth and isinstance(value, (list, tuple, set)):
        return any(_holds_parameter(one, depth - 1) for one in value)
    return False


# -- both -----------------------------------------------------------------------------------------------


def _manage(part: nn.Module, parameters: list[Managed], mixin: type | None) -> None:
    saver = next((settings for one in parameters if (settings := _settings_of(one.reader))), None)
    if parameters or mixin is not None:
        part.__class__ = managed_class(type(part), tuple(parameters), saver, mixin)


def _settings_of(reader: Reader) -> Settings | None:
    return getattr(reader, "settings", None)


def _finish(module: nn.Module, methods: dict[nn.Module, dict[str, Callable[..., Any]]]) -> None:
    cover(module)
    for part, found in methods.items():
        for name, method in found.items():
            del part.__dict__[name]
            part.__dict__[name] = _as_forward(method)


def _as_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    """What ``register_fsdp_forward_method`` meant: reads inside gather."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with reads_gather():
            return method(*args, **kwargs)

    return call
