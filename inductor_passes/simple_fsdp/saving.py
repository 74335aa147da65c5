"""``save_pretrained`` of a managed module: the whole values, gathered on all ranks and written by one.

Writers of single files (safetensors) cannot take sharded tensors. Where a module's class has the method as Hugging Face
transformers define it, with a ``state_dict`` argument, the state dict that it would take from the module is replaced by
a gathered one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from inductor_passes import _torch
from inductor_passes.simple_fsdp.arrival import meet
from inductor_passes.simple_fsdp.residuals import left_out
from inductor_passes.simple_fsdp.settings import Settings


def saves_whole(cls: type[nn.Module]) -> bool:
    """Whether a class has ``save_pretrained(..., state_dict=...)``."""
    method = getattr(cls, "save_pretrained", None)
    return method is not None and "state_dict" in inspect.signature(method).parameters


def with_whole_values(method: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """``save_pretrained`` with the gathered values by default; collective, the files are there when it returns.

    Args:
        method: the class' own.
        settings: of the module.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def save_pretrained(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(module, *args, **kwargs)
        if call.arguments.get("state_dict") is not None or call.arguments.get("distributed_checkpoint"):
            return method(*call.args, **call.kwargs)
        meet(settings.ranks, f"save_pretrained of a {type(module).__name__}")
        call.arguments["state_dict"] = _whole_values(module)
        try:
            return method(*call.args, **call.kwargs)
        finally:
            for group in settings.groups:
                dist.barrier(_torch.process_group(group))

    return save_pretrained


def _whole_values(module: nn.Module) -> dict[str, Any]:
    """The gathered state dict on the CPU of rank 0; empty on the others."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with left_out(module):
        return dict(get_model_state_dict(module, options=options))
