"""Reports of the graphs that are compiled while one listens, without any trace directory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from inductor_passes.report import GraphReport, Timing
from inductor_passes.trace import measured


@dataclass(eq=False)
class _Listener:
    what_if: bool
    reports: list[GraphReport] = field(default_factory=list)


_lock = threading.Lock()
_listeners: list[_Listener] = []
#: Reports that somebody got, for what becomes known of their graphs later.
_delivered: list[weakref.ref[GraphReport]] = []


@contextmanager
def collect(*, what_if: bool = True) -> Iterator[list[GraphReport]]:
    """A list that receives the report of every graph compiled (or loaded from a cache) inside the ``with`` block.

    Process-wide: a backward may be compiled on another thread than the one that listens. A graph without
    collectives has no report.

    Args:
        what_if: plan again to say which setting would help each collective and by how much. Most of a
            compilation's time with us; without it those settings are empty and gains 0, unless somebody else asks.
    """
    listener = _Listener(what_if)
    with _lock:
        _listeners.append(listener)
    try:
        yield listener.reports
    finally:
        with _lock:
            _listeners.remove(listener)


def deliver(report: GraphReport) -> None:
    """Hand a finished report to everybody who listens; what is measured later is entered into it."""
    measured.follow(report)
    with _lock:
        for listener in _listeners:
            listener.reports.append(report)
        # A graph that is compiled anew, after a reset, has the digest and the number of the one before.
        _delivered[:] = [one for one in _delivered if (kept := one()) is not None and _about(kept) != _about(report)]
        if _listeners:
            _delivered.append(weakref.ref(report))


def amend(digest: str, compile_id: str, found: Timing) -> None:
    """Enter what was measured of a graph into the report of it, if somebody got it and still has it.

    Not where the graph was compiled anew since: what is measured then is of the new code.
    """
    with _lock:
        for one in _delivered:
            report = one()
            if report is not None and _about(report) == (digest, compile_id):
                report.timing = found


def _about(report: GraphReport) -> tuple[str, str]:
    return report.digest, report.compile_id


def listening() -> bool:
    """Whether anybody would receive a report."""
    return bool(_listeners)


def what_if_wanted() -> bool:
    """Whether anybody who listens wants settings and gains."""
    with _lock:
        return any(listener.what_if for listener in _listeners)
