"""What all frameworks need: adopt a module that the framework wrapped, then compile it in place."""

from __future__ import annotations

from typing import Any

from torch import nn

from inductor_passes.adoption import AdoptError, adopt
from inductor_passes.plugin import compile_options


def adopt_in_place(module: nn.Module, find_unused_parameters: bool | None, how: dict[str, Any]) -> None:
    """Adopt a wrapped module and compile its calls; the framework keeps the object that it holds.

    Args:
        module: what ``fully_shard`` was called on, or a ``DistributedDataParallel``; nothing happens to an adopted one.
        find_unused_parameters: as for :func:`inductor_passes.adopt`.
        how: arguments of ``torch.compile``; none: our options.

    Raises:
        AdoptError: a module that was compiled before, or what :func:`inductor_passes.adopt` refuses.
    """
    if is_adopted(module):
        return
    refuse_compiled(module, "compile nothing before: the integration compiles the whole model, after adoption")
    adopt(module, find_unused_parameters=find_unused_parameters)
    compile_in_place(module, how)


def is_adopted(module: nn.Module) -> bool:
    """Whether ``adopt`` took the module, or parts of it, over before."""
    return any(getattr(type(part), "_adopted_by_inductor_passes", False) for part in module.modules())


def refuse_compiled(module: nn.Module, way_out: str) -> None:
    """Raise where a module or a part of it was compiled by itself: collectives can overlap only inside of one graph.

    Raises:
        AdoptError: names the part.
    """
    for path, part in module.named_modules():
        if hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None:
            where = path or f"this {type(module).__name__}"
            raise AdoptError(f"{where} was compiled before it was adopted: {way_out}")


def compile_in_place(module: nn.Module, how: dict[str, Any]) -> None:
    """Compile the calls of a module as ``torch.compile(**how)`` does; with our options if ``how`` is empty."""
    module.compile(**(how or {"options": compile_options()}))
