"""Measuring what a collective slows kernels down by: matmuls while it is under way, against the same ones alone.

On a device the times are events on the stream that computes, so a transfer that outlives the matmuls does not count.
All ranks issue the same collectives, whatever they measure: only how many matmuls a rank does depends on its own times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch

from inductor_passes import _torch
from inductor_passes.cost.profile import MOST_SLOWDOWN
from inductor_passes.cost.roofline import synchronize

#: Rows and columns of the matmuls.
_CPU_SIDE, _ACCELERATOR_SIDE = 128, 1024
#: Matmuls take this part of the collective's time, if at least so many fit, and at most so many.
_PART, _LEAST, _MOST = 0.7, 3, 2000
#: A smaller slowdown is noise.
_NOISE = 0.05


class Collective(Protocol):
    """One that can be issued, and be waited for later."""

    def issue(self) -> torch.Tensor:
        """Issue it; what it gives is ready after :meth:`finish`."""

    def finish(self, result: torch.Tensor) -> None:
        """Wait for it."""


def slowdown(
    collective: Collective, link_ns: float, device: torch.device, repeats: int, barrier: Callable[[], object]
) -> float:
    """By what share matmuls take longer beside the collective; 0.0 where it is too short to tell.

    All ranks of the collective's group call it together.

    Args:
        link_ns: what the collective takes.
        repeats: how often both are measured, in turn.
        barrier: of these ranks.
    """
    side = _CPU_SIDE if device.type == "cpu" else _ACCELERATOR_SIDE
    a = torch.ones(side, side, device=device)
    out = torch.empty_like(a)

    def burst(count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                torch.mm(a, a, out=out)

        return run

    # Libraries choose their kernels on the first call.
    span_ns(burst(_LEAST), device)
    one_ns = median(span_ns(burst(_LEAST), device) for _ in range(repeats)) / _LEAST
    count = min(_MOST, int(_PART * link_ns / max(1.0, one_ns)))
    alone, beside = [], []
    for _ in range(repeats):
        barrier()
        alone.append(span_ns(burst(count), device))
        barrier()
        result = collective.issue()
        beside.append(span_ns(burst(count), device))
        collective.finish(result)
        synchronize(device)
    if count < _LEAST:
        return 0.0
    found = median(beside) / max(1, median(alone)) - 1
    return min(MOST_SLOWDOWN, found) if found >= _NOISE else 0.0


def span_ns(run: Callable[[], None], device: torch.device) -> int:
    """How long the device's computing stream is busy with ``run``; on a CPU by the wall clock."""
    events = None if device.type == "cpu" else _torch.timing_events(device.type, 2)
    if events is None:
        synchronize(device)
        begin = time.perf_counter_ns()
        run()
        if device.type != "cpu":
            synchronize(device)
        return time.perf_counter_ns() - begin
    first, last = events
    first.record()
    run()
    last.record()
    return _torch.event_times_ns(first, [last])[0]
