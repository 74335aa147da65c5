"""Why nothing was planned in this process: kept so that it is said once, and handed to those who listen.

A graph with collectives is planned and has a report. A process whose graphs have none would show nothing at all, and
its user would not know whether the passes were on. So the first such graph leaves one line; once a graph with
collectives was seen, none does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from inductor_passes.report import GraphReport, NothingPlanned
from inductor_passes.trace.artifacts import emit_nothing_planned


@dataclass
class _Seen:
    """Of this process.

    Attributes:
        planned: whether a graph with collectives was compiled, or came out of a cache.
        said: reasons that were written down.
        listeners: lists that get every line, said before or not.
    """

    planned: bool = False
    said: set[NothingPlanned] = field(default_factory=set)
    listeners: list[list[str]] = field(default_factory=list)


#: A process of one rank may make its process group after its first graph, and a managed model may come later.
_NOT_LAST = frozenset({NothingPlanned.ONE_RANK, NothingPlanned.MANAGED})
_lock = threading.Lock()
_seen = _Seen()


def planned() -> None:
    """A graph with collectives was compiled or loaded: whoever looks finds a report."""
    _seen.planned = True


def is_settled() -> bool:
    """Whether another graph without collectives would say nothing new."""
    return not _seen.listeners and (_seen.planned or bool(_seen.said - _NOT_LAST))


def say(about: GraphReport, reason: NothingPlanned, line: str) -> bool:
    """Hand the line to those who listen, else write it into the trace once; whether it was new."""
    with _lock:
        for listener in _seen.listeners:
            listener.append(line)
        if is_settled() or _seen.listeners or reason in _seen.said:
            return False
        _seen.said.add(reason)
    emit_nothing_planned(about, reason, line)
    return True


@contextmanager
def listen() -> Iterator[list[str]]:
    """A list that receives the line of every graph that was left alone inside the ``with`` block."""
    lines: list[str] = []
    with _lock:
        _seen.listeners.append(lines)
    try:
        yield lines
    finally:
        with _lock:
            # By identity: two empty lists are equal.
            _seen.listeners[:] = [one for one in _seen.listeners if one is not lines]
