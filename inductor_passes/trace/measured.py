"""Errors of narrowed messages: from the operators that measure them into reports and the trace, while graphs run.

A report is handed out when its graph is compiled, before it runs. Whoever keeps it sees later measurements in it. The
trace gets a record after the first, second, fourth, ... measured run, and one when the process ends.
"""

from __future__ import annotations

import atexit
import functools
from typing import Any

from inductor_passes import _torch
from inductor_passes.report import GraphReport, NarrowedReport
from inductor_passes.trace.artifacts import MEASURED, artifact_name, emit_measured, identify


class _Followed:
    """One report whose graph measures."""

    def __init__(self, report: GraphReport) -> None:
        from inductor_passes._torch import measure_op

        self.identity: dict[str, Any] = identify(report)
        self.name = artifact_name(MEASURED, report)
        self.narrowed = [one for one in report.narrowed if one.places]
        self.figures = [[measure_op.figure(place) for place in one.places] for one in self.narrowed]
        self.written = 0

    def heard(self, one: NarrowedReport, figures: list[Any]) -> None:
        """One message was measured."""
        _enter(one, figures)
        if one.runs <= self.written or one.runs & (one.runs - 1):
            return
        # All messages of a run are measured: the last one writes for all.
        if min(other.runs for other in self.narrowed) == one.runs:
            self.write()

    def write(self) -> None:
        """Write what is new into the trace."""
        runs = min(one.runs for one in self.narrowed)
        if runs > self.written:
            self.written = runs
            emit_measured(self.identity, self.name, self.narrowed)


def _enter(one: NarrowedReport, figures: list[Any]) -> None:
    one.runs = min(figure.runs for figure in figures)
    if one.runs:
        one.measured = max(figure.last for figure in figures)
        one.largest = max(figure.largest for figure in figures)


def follow(report: GraphReport) -> None:
    """Enter into a report what its graph measures from now on."""
    if not any(one.places for one in report.narrowed):
        return
    followed = _Followed(report)
    for one, figures in zip(followed.narrowed, followed.figures):
        for figure in figures:
            figure.heard.append(functools.partial(followed.heard, one, figures))
    if _torch.trace_enabled():
        atexit.register(followed.write)
