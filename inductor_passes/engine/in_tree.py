"""Inductor's own communication passes. We do not combine with them: two schedulers on one graph undo each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.engine.complain import warn_once
from inductor_passes.engine.options import SIMPLE_OVERLAP, has_simple_overlap
from inductor_passes.engine.ours import is_ours
from inductor_passes.settings.errors import ConfigError

_OFF = (None, False, "none")
#: The option without which Inductor calls no pass behind its own.
POST_GRAD = "use_post_grad_passes"

#: Options that, when on, make Inductor reorder, merge or replace collectives itself.
CLASHING = (
    "bucket_all_gathers_fx",
    "bucket_reduce_scatters_fx",
    "bucket_all_reduces_fx",
    "_micro_pipeline_tp",
    "_fuse_ddp_communication",
    "aten_distributed_optimizations.enable_overlap_scheduling",
    "aten_distributed_optimizations.collective_bucketing",
    "aten_distributed_optimizations.enable_low_contention_collectives",
    "aten_distributed_optimizations.allow_comms_decompositions",
)


def clashes(lookup: Callable[[str], Any]) -> list[str]:
    """``option=value`` for everything that is on beside us.

    Args:
        lookup: current value of an option, None when it does not exist.
    """
    found = [f"{name}={value!r}" for name in CLASHING if (value := lookup(name)) not in _OFF]
    foreign = [p for p in lookup("reorder_for_compute_comm_overlap_passes") or [] if not is_ours(p)]
    if foreign and lookup("reorder_for_compute_comm_overlap"):
        found.append(f"reorder_for_compute_comm_overlap_passes={foreign!r}")
    return found


def left_to_inductor(settings: PassConfig) -> bool:
    """Whether to leave graphs to Inductor's own passes, which are on.

    Raises:
        ConfigError: they are on and ``in_tree_passes`` is ``error``.
    """
    if settings.codegen != "inductor":
        return False
    found = clashes(_torch.inductor_option)
    if has_simple_overlap() and _torch.inductor_option(SIMPLE_OVERLAP):
        found.append(f"{SIMPLE_OVERLAP}=True")
    if not found:
        return False
    complain_about(found, settings)
    return True


def complain_about(found: list[str], settings: PassConfig) -> None:
    """Warn that graphs are left alone, or raise :class:`ConfigError`, as ``in_tree_passes`` says."""
    shown = ", ".join(found)
    if settings.in_tree_passes == "error":
        raise ConfigError(
            "in-tree communication passes",
            shown,
            'all of them off, or inductor_passes.options(in_tree_passes="warn") to leave such graphs to them',
        )
    warn_once(f"inductor_passes: leaving graphs alone, Inductor's own communication passes are on: {shown}")


def switched_off(lookup: Callable[[str], Any]) -> bool:
    """Whether Inductor is told not to call the passes after its own, ours among them, as ``mode="lite"`` tells it."""
    return lookup(POST_GRAD) is False


def warn_if_switched_off() -> None:
    """Say so where torch was told without :func:`inductor_passes.options`, which refuses it."""
    if switched_off(_torch.inductor_option):
        warn_once(
            f"inductor_passes: nothing is planned, {POST_GRAD}=False (as mode=\"lite\" sets it) keeps Inductor from "
            "calling the passes"
        )


def overlay(options: Mapping[str, Any]) -> Callable[[str], Any]:
    """Look options up in ``options`` first and in Inductor's current configuration after that."""
    return lambda name: options[name] if name in options else _torch.inductor_option(name)
