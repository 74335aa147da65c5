"""Inductor's own overlap scheduling on a captured graph, with our costs instead of its estimates.

It is called by its own function and arguments. ``custom_runtime_estimation`` answers for every node, in milliseconds,
so that all contenders see the same costs. It computes a roofline of its own besides and discards it; that needs a GPU,
or a description of one: :class:`DescribedGPU`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from inductor_passes import _torch
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import Collective, GraphView

#: Name of a variant -> the arguments that make it.
VARIANTS: dict[str, dict[str, bool]] = {
    "scheduling": {"collective_bucketing": False, "pre_bucketing_fsdp_collectives": False},
    "+ bucketing": {"collective_bucketing": True, "pre_bucketing_fsdp_collectives": False},
    "+ pre-bucketing": {"collective_bucketing": True, "pre_bucketing_fsdp_collectives": True},
}
#: Memory limits by budget. Unlimited memory also lifts the limit on bytes in flight. (No limit at all, ``None`` for
#: both, fails in torch 2.13: "'NoneType' object has no attribute 'schedule_node'".)
LIMITS: dict[str, dict[str, float]] = {
    "unlimited": {"max_memory_increase_gb": 10_000.0, "max_in_flight_gb": 10_000.0},
    "0": {"max_memory_increase_gb": 0.0, "max_memory_increase_ratio": 0.0},
}


class DescribedGPU:
    """What Triton tells about a GPU's memory (an H100's, 3.35 TB/s), where there is none."""

    @property
    def utils(self) -> DescribedGPU:
        """Triton asks its driver's ``utils`` for properties."""
        return self

    def get_device_interface(self) -> DescribedGPU:
        """Triton asks its driver's device interface for the current device."""
        return self

    def current_device(self) -> int:
        """There is only one."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Clock in kHz, bus width in bits."""
        return {"mem_clock_rate": 2_619_000, "mem_bus_width": 5120}


def estimator(profile: CostProfile) -> Callable[[torch.fx.Node, int | None], float]:
    """Our durations in ms for any node of the graph that is being scheduled, also after it was rewritten."""
    known: dict[torch.fx.Node, float] = {}
    collectives: dict[torch.fx.Node, Collective] = {}

    def transfer_ms(one: Collective, share: float = 1.0) -> float:
        sizes = round((one.input_bytes or 0) * share), round((one.output_bytes or 0) * share)
        return profile.communication_ns(one.kind, *sizes, one.group.ranks) / 1e6

    def learn(graph: torch.fx.Graph) -> None:
        view = GraphView(graph)
        costs = ComputeCosts(view, profile)
        collectives.update(view.by_start)
        for node in view.nodes:
            known[node] = costs.duration_ns(node) / 1e6
        for one in view.collectives:
            known[one.start] = transfer_ms(one)

    def estimate(node: torch.fx.Node, override_size: int | None) -> float:
        if node not in known:
            learn(node.graph)
        if override_size is None:
            return known[node]
        one = collectives[node]
        return transfer_ms(one, override_size / max(1, one.input_bytes or 0, one.output_bytes or 0))

    return estimate


def has_collectives(graph: torch.fx.Graph) -> bool:
    """Whether there is something to schedule."""
    return Role.START in GraphView(graph).roles.values()


def schedule(gm: torch.fx.GraphModule, profile: CostProfile, variant: str, budget: str) -> None:
    """Schedule ``gm`` in place; inside the process group that it was captured in.

    Args:
        variant: a key of :data:`VARIANTS`.
        budget: a key of :data:`LIMITS`.
    """
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing
    from triton.runtime import driver

    driver.set_active(DescribedGPU())
    logging.getLogger("torch._inductor.fx_passes").setLevel(logging.WARNING)
    options: dict[str, Any] = {**VARIANTS[variant], **LIMITS[budget]}
    schedule_overlap_bucketing(
        gm, custom_runtime_estimation=estimator(profile), compute_estimator="analytical", **options
    )


def compile_options(profile: CostProfile) -> dict[str, Any]:
    """Inductor's options that switch its overlap scheduling on, with bucketing, our durations and its own limits."""
    if not torch.cuda.is_available():
        from triton.runtime import driver

        driver.set_active(DescribedGPU())
    prefix = "aten_distributed_optimizations."
    found = {
        f"{prefix}enable_overlap_scheduling": True,
        f"{prefix}collective_bucketing": True,
        f"{prefix}custom_runtime_estimation": estimator(profile),
    }
    # From torch 2.12 on it measures kernels where nobody says otherwise.
    if _torch.is_inductor_option(f"{prefix}compute_estimator"):
        found[f"{prefix}compute_estimator"] = "analytical"
    return found
