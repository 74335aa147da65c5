"""What the first steps of a tuned contender say (``tune``), on the emulated link."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from inductor_passes.emulation import link as emulated_link
from inductor_passes.report import GraphReport, Swap, SwapOutcome, Timing
from inductor_passes.tuning import tape


def virtual_clock() -> AbstractContextManager[Any]:
    """Steps are timed by the clock that contenders are compared by: another process on this machine is no late peer."""
    return mock.patch.object(tape, "host_ns", emulated_link.now_ns)


def is_over(reports: Sequence[GraphReport], profile: Path) -> bool:
    """Whether all planned graphs were timed, their costs are in the file, and nothing is swapped any more."""
    timings = [report.timing for report in reports if report.schedules]
    return bool(timings) and all(map(_is_settled, timings)) and profile.is_file()


def _is_settled(timing: Timing | None) -> bool:
    if timing is None or timing.swap is None:
        return False
    return timing.swap.outcome not in (SwapOutcome.AGREED, SwapOutcome.SWAPPED)


def told(reports: Sequence[GraphReport]) -> list[str]:
    """A line per graph: what its step was predicted to take, what it took, and what its second plan took."""
    timed = ((report.phase, report.timing) for report in reports if report.timing is not None)
    return [
        f"{phase} predicted {t.predicted_ns / 1e6:.1f}, took {t.measured_ns / 1e6:.1f} ms{_again(t.swap)}"
        for phase, t in timed
    ]


def _again(swap: Swap | None) -> str:
    if swap is None:
        return ""
    took = f" ({swap.before_ns / 1e6:.1f} -> {swap.after_ns / 1e6:.1f} ms)" if swap.after_ns else ""
    return f", planned again: {swap.outcome.value}{took}" + f": {swap.why}" * bool(swap.why)


def of_any_program(plans: str) -> str:
    """A file of plans for a program that numbers its graphs otherwise."""
    data = json.loads(plans)
    for graph in data["graphs"]:
        graph.pop("graph_index", None)
    return json.dumps(data)
