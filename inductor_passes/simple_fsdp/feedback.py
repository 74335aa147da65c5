"""Error feedback as state of a managed module: added, saved with it, and forgotten on request.

What ``residuals`` says is kept in buffers of the module that owns the parameter, named after it. Each rank has its own,
so in a state dictionary they are DTensors that are split over all ranks.
"""

from __future__ import annotations

import torch
from torch import nn

from inductor_passes import _torch
from inductor_passes.simple_fsdp.access import Managed, Reader, manage_each, managed_parameters
from inductor_passes.simple_fsdp.residuals import NAMES, Losses, names_of
from inductor_passes.simple_fsdp.settings import SimpleFSDPError


def add_feedback(module: nn.Module) -> nn.Module:
    """Have a module remember what narrow messages lose of its gradients, and add it to the next ones.

        model = inductor_passes.simple_fsdp(model, mesh)         # or inductor_passes.adopt(model)
        inductor_passes.add_feedback(model)
        step = torch.compile(model, options=inductor_passes.options(compress="auto", compress_feedback="on"))

    Each parameter with a gradient gets buffers named ``<parameter>_residual`` in float32, for FSDP as large as the
    *whole* gradient on every rank: a rank narrows what it sends to all others. They are saved and loaded with the
    module, by as many ranks; :func:`reset_feedback` empties them. Parameters that ranks hold in unequal shards have
    none: their messages are never narrowed. Called again, it adds what is missing, e.g. for parameters that were
    frozen before. Without a narrow message they stay zero. Gradients
    that are held and reduced later (``no_sync``) travel as they are; residuals then wait for the next narrow message.

    Args:
        module: what ``simple_fsdp`` or ``adopt`` was called on, on real memory, before its first compiled step. All
            ranks have to call it. Changed in place.

    Returns:
        ``module``.

    Raises:
        SimpleFSDPError: no parameter is managed, all have residuals already, or one is on the meta device, has a buffer
            of that name, or is reduced in another type than float32. The module is unchanged then.
    """
    inner = getattr(module, "_orig_mod", module)
    needed = _needed(inner)
    made: dict[int, list[torch.Tensor]] = {}
    for part, losses in needed:
        names: dict[str, tuple[str, ...]] = {}
        for one, stored, lost in losses:
            found = made.setdefault(id(stored), lost.zeros(stored.device))  # type: ignore[arg-type]
            names[one.name] = tuple(_buffer_name(one.name, number) for number in range(len(found)))
            for name, residual in zip(names[one.name], found, strict=True):
                part.register_buffer(name, residual)
        setattr(part, NAMES, (*names_of(part), *(name for group in names.values() for name in group)))
        manage_each(part, lambda one, names=names: _with(one, names))  # type: ignore[misc]
    return module


def reset_feedback(module: nn.Module) -> None:
    """Forget what earlier messages lost, e.g. after weights were replaced or the learning rate was raised by much.

    Raises:
        SimpleFSDPError: there is nothing to forget: :func:`add_feedback` was not called.
    """
    inner = getattr(module, "_orig_mod", module)
    found = [(part, name) for part in inner.modules() for name in names_of(part)]
    if not found:
        raise SimpleFSDPError(f"this {type(inner).__name__} has no error feedback: call add_feedback first")
    with torch.no_grad():
        for part, name in found:
            getattr(part, name).zero_()


def _needed(module: nn.Module) -> list[tuple[nn.Module, list[tuple[Managed, torch.Tensor, Losses]]]]:
    """The parts of a module, what they store and what it needs residuals for; nothing is changed."""
    if not isinstance(module, nn.Module):
        raise SimpleFSDPError(f"module={type(module).__name__}; expected a torch.nn.Module")
    found, problems, kept = [], [], []
    for path, part in module.named_modules():
        own = []
        for one in managed_parameters(part):
            stored, label = _torch.stored_parameter(part, one.name), f"{path}.{one.name}".lstrip(".")
            if stored is None or not stored.requires_grad:
                continue
            if one.reader.residuals:
                kept.append(label)
                continue
            lost = one.reader.losses(stored)
            taken = [n for k in range(len(lost.shapes)) if hasattr(part, n := _buffer_name(one.name, k))]
            if taken:
                problems.append(f"{label} has {', '.join(taken)} already")
            elif lost.problem:
                problems.append(f"{label} {lost.problem}")
            own.append((one, stored, lost))
        if own:
            found.append((part, own))
    if problems:
        raise SimpleFSDPError(f"no error feedback for this {type(module).__name__}: {'; '.join(problems[:5])}")
    if not found and kept:
        raise SimpleFSDPError(f"every parameter of this {type(module).__name__} with a gradient has residuals already")
    if not found:
        raise SimpleFSDPError(
            f"no parameter with a gradient of this {type(module).__name__} is managed: apply simple_fsdp or adopt first"
        )
    return found


def _buffer_name(parameter: str, number: int) -> str:
    return f"{parameter}_residual{number + 1 if number else ''}"


def _with(one: Managed, names: dict[str, tuple[str, ...]]) -> Reader:
    return one.reader.keeping(names[one.name]) if names.get(one.name) else one.reader
