"""Hugging Face Accelerate: what ``accelerator.prepare`` made is adopted and compiled.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    adopt_prepared(accelerator, model)

Accelerate's own compilation comes at the wrong time for FSDP2 (before ``fully_shard``, around the module that it is
called on), so this one takes its place.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn

from inductor_passes.adoption import AdoptError
from inductor_passes.integrations.compiling import adopt_in_place, compile_in_place, is_adopted

#: Ways of Accelerate to distribute a model whose wrapper is FSDP2 or DDP.
_ADOPTED = ("FSDP", "MULTI_")


def adopt_prepared(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    find_unused_parameters: bool | None = None,
    **how: Any,
) -> nn.Module:
    """Adopt what ``accelerator.prepare`` returned for a model, and compile it in place.

    ``accelerator.accumulate``, ``no_sync``, ``clip_grad_norm_``, ``save_state``, ``load_state`` and ``unwrap_model``
    keep their meaning. All ranks have to call it. In a run of one process the model is compiled and that is all, so
    that one script serves both.

    Args:
        accelerator: that prepared the model; FSDP2 or DDP.
        model: what ``prepare`` returned.
        find_unused_parameters: False says that all ranks use the same parameters although DDP was given
            ``find_unused_parameters=True``.
        **how: arguments of ``torch.compile``; default: ``options=inductor_passes.options()``.

    Returns:
        ``model``.

    Raises:
        AdoptError: Accelerate compiles as well, or a setting that only hooks can serve.
    """
    refuse_dynamo(accelerator, "leave dynamo_backend, dynamo_plugin and ACCELERATE_DYNAMO_BACKEND out")
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind == "NO" and not is_adopted(model):
        compile_in_place(model, how)
        return model
    if not kind.startswith(_ADOPTED):
        raise AdoptError(f"distributed_type={kind}; only FSDP2 (fsdp_version=2) and DDP can be adopted")
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise AdoptError("fsdp_version=1 has flat parameters that cannot be taken over: set fsdp_version=2")
    adopt_in_place(model, find_unused_parameters, how)
    return model


def refuse_dynamo(accelerator: Accelerator, way_out: str) -> None:
    """Raise where Accelerate compiles by itself.

    Raises:
        AdoptError: names the backend and the way out.
    """
    backend = str(accelerator.state.dynamo_plugin.backend.value)
    if backend != "NO":
        raise AdoptError(
            f"dynamo_backend={backend.lower()} makes Accelerate compile by itself, under FSDP2 before it shards the "
            f"model: {way_out}; the integration compiles, with what it is given for torch.compile"
        )
