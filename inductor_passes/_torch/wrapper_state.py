"""What FSDP2 (``fully_shard``, the FSDP form of ``replicate``) and DDP keep about a module, and how it is undone."""

from __future__ import annotations

import importlib
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class ShardedParameter:
    """What FSDP2 knows about one parameter.

    Attributes:
        parameter: what is registered, a DTensor.
        mesh: the data-parallel dimensions.
        mode: ``fully_shard``, ``hybrid_shard`` or ``replicate``.
        compute_dtype: what it is cast to before it is gathered, or None.
        reduce_dtype: what its gradients are reduced in; None is the dtype in which backward produces them.
        reshard_after_forward: whether it is sharded again after forward; an int is a number of ranks.
        shard_dim: the tensor dimension that is sharded.
        divisor: what the gradients' sum is divided by, None for the number of data-parallel ranks.
    """

    parameter: nn.Parameter
    mesh: DeviceMesh
    mode: str
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reshard_after_forward: bool | int
    shard_dim: int
    divisor: float | None


@dataclass
class ShardedUnit:
    """One call of ``fully_shard``.

    Attributes:
        modules: those that it was called on.
        policy: mixed precision.
        device: where forward computes.
        parameters: see :class:`ShardedParameter`.
        problems: settings that only FSDP2's hooks can serve, each with the way out.
        reduces: False after ``set_requires_gradient_sync(False)``.
        all_reduces: False after ``set_requires_all_reduce(False)``.
        state: FSDP2's own object.
    """

    modules: tuple[nn.Module, ...]
    policy: MixedPrecisionPolicy
    device: torch.device
    parameters: list[ShardedParameter]
    problems: list[str]
    reduces: bool
    all_reduces: bool
    state: Any = field(repr=False)


def sharded_units(module: nn.Module) -> list[ShardedUnit]:
    """The calls of ``fully_shard`` that concern a module and its parts, outermost first.

    FSDP2 is told the dtypes that its first forward pass would tell it; nothing else changes.
    """
    from torch.distributed import _composable_state
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    states: dict[int, Any] = {}
    inside: set[int] = set()
    for part in module.modules():
        state = _composable_state._get_module_state(part)
        if not isinstance(state, FSDPState) or id(state) in states:
            continue
        states[id(state)] = state
        for owner in state._modules:
            inside |= {id(_composable_state._get_module_state(m)) for m in owner.modules() if m is not owner}
    return [_unit(state, id(state) not in inside) for state in states.values()]


def _unit(state: Any, outermost: bool) -> ShardedUnit:
    problems: list[str] = []
    parameters: list[ShardedParameter] = []
    groups = _parameter_groups(state)
    if state._is_root is False and outermost:
        problems.append("it is a part of a larger module that ran forward already: adopt that one")
    if state._training_state.name != "IDLE":
        problems.append("it is inside of forward or backward: adopt it between two steps")
    for group in groups:
        problems += _group_problems(group)
        never = group.post_forward_mesh_info is None
        never |= state._is_root is None and outermost and bool(getattr(state, "_auto_reshard_after_forward", False))
        reshard: bool | int = not never
        if not never and group._use_post_forward_mesh:
            reshard = group.post_forward_mesh_info.shard_mesh_size
        for one in group.fsdp_params:
            info = getattr(one, "mesh_info", None) or group.mesh_info
            one.init_dtype_attrs(group.mp_policy)
            parameters.append(
                ShardedParameter(
                    parameter=_registered(one),
                    mesh=info.mesh,
                    mode=_mode(info),
                    compute_dtype=one.param_dtype,
                    reduce_dtype=one.reduce_dtype,
                    reshard_after_forward=reshard,
                    shard_dim=one.fsdp_placement.dim,
                    divisor=group.gradient_divide_factor,
                )
            )
            problems += _parameter_problems(one)
    return ShardedUnit(
        modules=tuple(state._modules),
        policy=state._mp_policy,
        device=state._device,
        parameters=parameters,
        problems=sorted(set(problems)),
        reduces=all(group.reduce_grads for group in groups),
        all_reduces=all(group.all_reduce_grads for group in groups),
        state=state,
    )


def _registered(one: Any) -> nn.Parameter:
    """What its module has while it is sharded.

    ``load_state_dict(assign=True)`` and loaders replace it; FSDP2 looks for that only in the first forward pass.
    """
    kept: nn.Parameter = one.sharded_param
    if one.sharded_state.name != "SHARDED":
        return kept
    where = one._module_info
    found: nn.Parameter | None = where.module._parameters.get(where.param_name)
    return kept if found is None else found


def _parameter_groups(state: Any) -> list[Any]:
    """Since torch 2.12 a state may have several groups; before it had one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _mode(info: Any) -> str:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    if isinstance(info, HSDPMeshInfo):
        return "hybrid_shard"
    return "fully_shard" if isinstance(info, FSDPMeshInfo) else "replicate"


def _group_problems(group: Any) -> list[str]:
    found = []
    if type(group.offload_policy).__name__ != "OffloadPolicy":
        found.append("offload_policy=CPUOffloadPolicy() cannot be taken over: leave it out")
    for name, method in (
        ("_all_gather_comm", "set_custom_all_gather or set_symm_mem_for_comm"),
        ("_reduce_scatter_comm", "set_custom_reduce_scatter or set_symm_mem_for_comm"),
    ):
        if not type(getattr(group, name, None)).__name__.startswith(("Default", "NoneType", "ProcessGroupAlloc")):
            found.append(f"communication set by {method} cannot be taken over: adopt the module without it")
    if getattr(group, "_all_reduce_hook", None) is not None:
        found.append("set_all_reduce_hook cannot be taken over: adopt the module without the hook")
    if getattr(group, "reduce_scatter_unused_params", False):
        found.append(
            "set_reduce_scatter_unused_params(True) says that ranks use different parameters, which compiled graphs "
            "cannot serve: set it to False if all ranks use the same ones"
        )
    if getattr(group, "_partial_reduce_output", None) is not None:
        found.append("gradients of set_requires_all_reduce(False) are not reduced yet: finish the accumulation first")
    for name in ("_post_backward_pending", "gradient_reduction_pending"):
        if getattr(group, name, False):
            found.append("a backward pass is not finished: adopt the module between two steps")
    return found


def _parameter_problems(one: Any) -> list[str]:
    found = []
    whole = getattr(one, "_unsharded_param", None)
    held = getattr(one, "unsharded_accumulated_grad", None) is not None
    if held or (whole is not None and whole.grad is not None):
        found.append("gradients that were accumulated without a reduction are held: finish the accumulation first")
    if hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather"):
        kind = type(one._sharded_local_tensor).__name__
        found.append(f"parameters of type {kind} define fsdp_pre_all_gather: adopt the model without them")
    return found


def release_fsdp2(module: nn.Module, units: list[ShardedUnit]) -> None:
    """Shard everything again and take FSDP2's hooks, classes and marks off; parameters stay the same objects.

    Args:
        module: that the units are parts of.
        units: see :func:`sharded_units`.
    """
    for unit in units:
        _release(unit)
    for part in module.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            part.__dict__.pop(mark, None)


def _release(unit: ShardedUnit) -> None:
    from torch.distributed import _composable_state

    contract: Any = importlib.import_module("torch.distributed._composable.contract")
    state = unit.state
    for group in _parameter_groups(state):
        if getattr(group, "_all_gather_result", None) is not None:
            group.wait_for_unshard()
        group._to_sharded()
        handles = (group._module_to_pre_save_state_dict_hook_handle, group._module_to_pre_load_state_dict_hook_handle)
        for handle in [one for by_module in handles for one in by_module.values()]:
            handle.remove()
        for one in group.fsdp_params:
            one._post_load_hook_handle.remove()
            one.sharded_param.__dict__.pop("_fsdp_orig_uid", None)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for module in unit.modules:
        cls = type(module)
        module.__class__ = cls.__mro__[getattr(cls, "_orig_cls_mro_index", 2)]
        for key in (contract.STATE_KEY, contract.REGISTRY_KEY):
            marks = module.__dict__.get(key, {})
            for name in [n for n in marks if getattr(n, "__name__", n) in ("fully_shard", "replicate")]:
                del marks[name]
            if not marks:
                module.__dict__.pop(key, None)
        _composable_state._module_state_mapping.pop(module, None)


def registered_forward_methods(module: nn.Module) -> dict[str, Any]:
    """What ``register_fsdp_forward_method`` put on a module: name -> the method that it wrapped."""
    found = {}
    for name, value in module.__dict__.items():
        function: Any = value.__func__ if isinstance(value, types.MethodType) else None
        if hasattr(function, "__wrapped__") and "_fully_shard" in function.__code__.co_filename:
            found[name] = function.__wrapped__
    return found


def ddp_problems(ddp: nn.parallel.DistributedDataParallel) -> list[str]:
    """Settings of a DDP wrapper that only its hooks can serve, each with the way out."""
    found = []
    if getattr(ddp, "_comm_hooks", None):
        found.append(
            "register_comm_hook cannot be taken over: adopt the model without the hook, and narrow messages with "
            "options(compress=...)"
        )
    if hasattr(ddp, "buffer_hook"):
        found.append("a buffer communication hook cannot be taken over: adopt the model without it")
    if getattr(ddp, "mixed_precision", None) is not None:
        found.append("mixed_precision cannot be taken over: use torch.autocast")
    if getattr(ddp, "_delay_all_reduce_params", None):
        found.append("delay_all_reduce_named_params cannot be taken over: leave it out")
    if getattr(ddp, "_fused_optim", None) or _steps_in_backward(ddp):
        found.append("an optimizer inside of backward cannot be taken over: step it after backward")
    if getattr(getattr(ddp, "_join_config", None), "enable", False):
        found.append("join() is active: adopt the model outside of it")
    return found


def _steps_in_backward(ddp: nn.Module) -> bool:
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters())


def ddp_syncs_buffers(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Whether forward sends rank 0's buffers to all; the setting has two names, by torch version."""
    found = ddp.__dict__.get("forward_sync_buffers")
    return bool(ddp.broadcast_buffers if found is None else found)


def release_ddp(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Take DDP's hooks off the parameters and forget its buckets."""
    ddp.reducer._remove_autograd_hooks()
    for handle in getattr(ddp, "_accum_grad_hooks", ()):
        handle.remove()
    for name in ("reducer", "logger", "_accum_grad_hooks"):
        ddp.__dict__.pop(name, None)


def after_backward(callback: Any) -> None:
    """Call a function when the backward pass that runs in this thread has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_number() -> int:
    """Which backward pass runs in this thread; -1 outside of any."""
    return int(torch._C._current_graph_task_id())
