"""What the first steps of a tuned contender say (``tune``), on the emulated link."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from inductor_passes.emulation import link as emulated_link
from inductor_passes.report import GraphReport
from inductor_passes.tuning import tape


def virtual_clock() -> AbstractContextManager[Any]:
    """Steps are timed by the clock that contenders are compared by: another process on this machine is no late peer."""
    return mock.patch.object(tape, "host_ns", emulated_link.now_ns)


def is_over(reports: Sequence[GraphReport], profile: Path) -> bool:
    """Whether all planned graphs were timed, and the costs are in their file."""
    planned = [report for report in reports if report.schedules]
    return bool(planned) and all(report.timing is not None for report in planned) and profile.is_file()


def told(reports: Sequence[GraphReport]) -> list[str]:
    """A line per graph: what its step was predicted to take, and what it took."""
    timed = ((report.phase, report.timing) for report in reports if report.timing is not None)
    return [f"{phase} predicted {t.predicted_ns / 1e6:.1f}, took {t.measured_ns / 1e6:.1f} ms" for phase, t in timed]
