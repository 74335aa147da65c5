"""What became of second plans (``tune_swap``) on the emulated link."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from inductor_passes.emulation import link as emulated_link
from inductor_passes.report import GraphReport, Swap, SwapOutcome
from inductor_passes.tuning import tape

_OPEN = (SwapOutcome.AGREED, SwapOutcome.SWAPPED)


def virtual_clock() -> AbstractContextManager[Any]:
    """Steps are timed by the clock that contenders are compared by: another process on this machine is no late peer."""
    return mock.patch.object(tape, "host_ns", emulated_link.now_ns)


def swaps(reports: Sequence[GraphReport]) -> list[tuple[str, Swap]]:
    """Phase and second plan of every planned graph that has one."""
    timed = ((report.phase, report.timing) for report in reports if report.schedules)
    return [(phase, timing.swap) for phase, timing in timed if timing is not None and timing.swap is not None]


def is_over(reports: Sequence[GraphReport]) -> bool:
    """Whether nothing will become of the planned graphs any more."""
    found = swaps(reports)
    planned = sum(bool(report.schedules) for report in reports)
    return len(found) == planned and all(swap.outcome not in _OPEN for _, swap in found)


def told(reports: Sequence[GraphReport]) -> list[str]:
    """A sentence per graph, for people."""
    lines = []
    for phase, swap in swaps(reports):
        steps = f", {swap.before_ns / 1e6:.1f} -> {swap.after_ns / 1e6:.1f} ms" if swap.after_ns else ""
        lines.append(f"{phase} {swap.outcome.value}{steps}{': ' if swap.why else ''}{swap.why}")
    return lines
