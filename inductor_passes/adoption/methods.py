"""What users call on a wrapped module, on an adopted one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from inductor_passes import _torch
from inductor_passes.adoption.accumulation import Owner, Unit
from inductor_passes.adoption.settings import AdoptError
from inductor_passes.simple_fsdp.access import Reader, manage_again
from inductor_passes.simple_fsdp.apply import to_device
from inductor_passes.simple_fsdp.forward import reads_gather
from inductor_passes.simple_fsdp.settings import Reshard, Settings


class AdoptedModule(FSDPModule):
    """A module that ``fully_shard`` or ``replicate`` was called on before it was adopted.

    Has FSDP2's methods. Those that tune the order of what hooks do (prefetching, buffers, streams) do nothing: the
    compiler passes plan that. Those that replace the communication are refused.
    """

    _adoption: Owner
    _adopted_by_inductor_passes = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of the own class, as for any module; ``FSDPModule`` would give one of another."""
        return nn.Module.__new__(cls)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module._apply(self, *args, **kwargs)  # type: ignore[arg-type]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the following backward passes reduce gradients, or hold them for a later one."""
        for unit in _units(self, recurse):
            unit.set_reduces(reduces=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """As :meth:`set_requires_gradient_sync`: what is held are whole gradients, where FSDP2 holds shards."""
        for unit in _units(self, recurse):
            unit.set_reduces(all_reduces=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the compiled backward gathers again; compiled code is compiled anew."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward={reshard_after_forward!r}; expected True or False")
        reshard: Reshard = "always" if reshard_after_forward else "never"
        _change(_units(self, recurse), reshard=reshard)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of the ranks' gradients is divided by, for the parameters of this call of ``fully_shard``."""
        _change(_units(self, False), divisor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather now: until :meth:`reshard`, reads outside of forward give whole values. All ranks have to call it."""
        for unit in _units(self, False):
            for entry in unit.entries:
                for module, name in entry.owners:
                    with torch.no_grad(), reads_gather():
                        module._adoption.whole[name] = getattr(module, name)  # type: ignore[union-attr]
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Forget what :meth:`unshard` gathered."""
        for unit in _units(self, False):
            for entry in unit.entries:
                for module, name in entry.owners:
                    module._adoption.whole.pop(name, None)  # type: ignore[union-attr]

    def reset_iter_state(self) -> None:
        """Forget gradients that are held, after a step that failed."""
        for unit in _units(self, True):
            for entry in unit.entries:
                entry.take()
            unit.set_reduces()

    def _get_fsdp_state(self) -> NoReturn:
        raise AdoptError("this module was adopted by inductor_passes: it has no FSDP state")


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    found = {id(m._adoption.unit): m._adoption.unit for m in module.modules() if isinstance(m, AdoptedModule)}
    return list(found.values()) if recurse else [module._adoption.unit]  # type: ignore[union-attr]


def _change(units: list[Unit], **changes: Any) -> None:
    """Other settings for the parameters of some units."""
    for unit in units:
        owners = {id(module): module for entry in unit.entries for module, _ in entry.owners}
        for module in owners.values():
            manage_again(module, functools.partial(_changed, changes))
        for entry in unit.entries:
            if entry.layout is not None and "divisor" in changes:
                entry.layout = dataclasses.replace(entry.layout, divisor=changes["divisor"])


def _changed(changes: dict[str, Any], reader: Reader) -> Reader:
    settings = getattr(reader, "settings", None)
    if not isinstance(settings, Settings) or not dataclasses.is_dataclass(reader):
        return reader
    return dataclasses.replace(reader, settings=dataclasses.replace(settings, **changes))  # type: ignore[return-value]


#: FSDP2's methods that say in which order, on which stream or in which buffers hooks work: planned by the passes now.
PLANNED = (
    "set_is_last_backward",
    "set_reshard_after_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_post_optim_event",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
    "set_unshard_in_backward",
    "set_allocate_memory_from_process_group_for_comm",
    "_set_unshard_async_op",
)
#: Those that replace what a collective does.
REFUSED = (
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_symm_mem_for_comm",
)


def _does_nothing(name: str) -> Callable[..., None]:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        del self, args, kwargs

    method.__name__ = name
    method.__doc__ = "Without effect: the compiler passes plan what this tunes."
    return method


def _refuses(name: str) -> Callable[..., None]:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise AdoptError(f"{name} has no place in an adopted {type(self).__name__}: its collectives are in the graph")

    method.__name__ = name
    method.__doc__ = "Refused: the collectives are part of the compiled graph."
    return method


def _unused_parameters(self: nn.Module, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
    """Refuses True: compiled graphs are the same on all ranks."""
    del recurse
    if reduce_scatter_unused_params:
        raise AdoptError(
            "set_reduce_scatter_unused_params(True) says that ranks use different parameters, which the compiled "
            f"graphs of an adopted {type(self).__name__} cannot serve"
        )


for _name in PLANNED:
    setattr(AdoptedModule, _name, _does_nothing(_name))
for _name in REFUSED:
    setattr(AdoptedModule, _name, _refuses(_name))
AdoptedModule.set_reduce_scatter_unused_params = _unused_parameters  # type: ignore[method-assign,assignment]


class AdoptedDDP(DistributedDataParallel):
    """A ``DistributedDataParallel`` that was adopted: calls its module, whose reads reduce gradients.

    Buffers come from the group's first rank as in DDP: before a forward pass that follows one whose gradients were
    reduced, and once before an evaluation.
    """

    _adoption: Owner
    _syncs_buffers: bool
    _buffers_due: bool
    _evaluated: bool
    _adopted_by_inductor_passes = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Of the wrapped module."""
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = to_device(inputs, device), to_device(kwargs, device)
        if self._syncs_buffers:
            self._send_buffers()
        unit = self._adoption.unit
        before, unit.called = unit.called, True
        try:
            return self.module(*inputs, **kwargs)
        finally:
            unit.called = before

    def _send_buffers(self) -> None:
        training = torch.is_grad_enabled()
        if self._buffers_due and (training or not self._evaluated):
            with torch.no_grad():
                send_buffers(self.module, self.parameters_to_ignore, str(self.process_group.group_name))
        if training:
            self._buffers_due = self._adoption.unit.reduces
            self._evaluated = False
        else:
            self._evaluated = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are added up on each rank; the first backward pass outside reduces their sum."""
        unit = self._adoption.unit
        before = unit.reduces
        unit.set_reduces(reduces=False)
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            unit.set_reduces(reduces=before)
            self.require_backward_grad_sync = before

    def __getstate__(self) -> dict[str, Any]:
        """Without the process group and what was compiled, which stay with the process."""
        state: dict[str, Any] = nn.Module.__getstate__(self)  # type: ignore[operator]
        return {key: value for key, value in state.items() if key != "process_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As it was, in the default process group."""
        nn.Module.__setstate__(self, state)
        self.process_group = _torch.default_group()

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a rank that ran out of inputs would have to run the others' collectives."""
        raise AdoptError("join() has no place in an adopted model: give all ranks equally many batches")

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the collectives are part of the compiled graph."""
        raise AdoptError(
            "register_comm_hook has no place in an adopted model: its collectives are in the graph. To narrow messages "
            'use options(compress="bf16") or another form of docs/compress.md'
        )


def send_buffers(module: nn.Module, ignored: set[str], group: str) -> None:
    """Give all ranks the buffers of the group's first, in one message for each dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for name, buffer in module.named_buffers():
        # Residuals of error feedback are each rank's own.
        if name not in ignored and not isinstance(buffer, DTensor):
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        sent = _torch.broadcast_in(torch.cat([buffer.reshape(-1) for buffer in buffers]), group)
        for buffer, part in zip(buffers, sent.split([buffer.numel() for buffer in buffers])):
            # An earlier forward pass may wait for its backward pass, which needs the buffer: DDP hides the write, too.
            torch.ops.inductor_passes.replace_unseen.default(buffer, part.view(buffer.shape))
