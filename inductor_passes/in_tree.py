"""Inductor's own communication passes: two schedulers on one graph undo each other, so we do not combine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inductor_passes import _torch

_OFF = (None, False, "none")

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
#: On by default from torch 2.14 on: edits the order last, after us. We switch it off and mind when it is forced on.
SIMPLE_OVERLAP = "aten_distributed_optimizations.enable_simple_overlap"


def has_simple_overlap() -> bool:
    """Whether this torch has the pass that edits the order after everybody else."""
    return _torch.inductor_option(SIMPLE_OVERLAP, None) is not None


def clashes(lookup: Callable[[str], Any], is_ours: Callable[[object], bool]) -> list[str]:
    """``option=value`` for everything that is on beside us.

    Args:
        lookup: current value of an option, None when it does not exist.
        is_ours: whether an entry of the reordering hook's list belongs to us.
    """
    found = [f"{name}={value!r}" for name in CLASHING if (value := lookup(name)) not in _OFF]
    foreign = [p for p in lookup("reorder_for_compute_comm_overlap_passes") or [] if not is_ours(p)]
    if foreign and lookup("reorder_for_compute_comm_overlap"):
        found.append(f"reorder_for_compute_comm_overlap_passes={foreign!r}")
    return found


def overlay(options: Mapping[str, Any]) -> Callable[[str], Any]:
    """Look options up in ``options`` first and in Inductor's current configuration after that."""
    return lambda name: options[name] if name in options else _torch.inductor_option(name)
