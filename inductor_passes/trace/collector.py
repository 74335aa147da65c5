"""Reports of the graphs that are compiled while one listens, without any trace directory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from inductor_passes.report import GraphReport

_lock = threading.Lock()
_listeners: list[list[GraphReport]] = []


@contextmanager
def collect() -> Iterator[list[GraphReport]]:
    """A list that receives the report of every graph compiled (or loaded from a cache) inside the ``with`` block.

    Process-wide: a backward may be compiled on another thread than the one that listens. A graph without
    collectives has no report.
    """
    reports: list[GraphReport] = []
    with _lock:
        _listeners.append(reports)
    try:
        yield reports
    finally:
        with _lock:
            # By identity: two listeners with equal lists are still two.
            _listeners[:] = [listener for listener in _listeners if listener is not reports]


def deliver(report: GraphReport) -> None:
    """Hand a finished report to everybody who listens."""
    with _lock:
        for reports in _listeners:
            reports.append(report)


def listening() -> bool:
    """Whether anybody would receive a report."""
    return bool(_listeners)
