"""What a torch.profiler trace shows of compiled graphs: their calls, the host's operations and the device's work.

The format is Kineto's: host operations are slices of category ``cpu_op``; a kernel or copy on a device is a slice of
its own that shares its ``correlation`` with the runtime or driver call that launched it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Larger profiles are refused before they are parsed.
MAX_BYTES = 2**30

WAIT = "wait"

_REGION = "## Call CompiledFxGraph"
_HOST = ("cpu_op", "user_annotation")
_LAUNCH = ("cuda_runtime", "cuda_driver", "xpu_runtime")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_KNOWN = {*_HOST, *_LAUNCH, *_DEVICE}
_OP = re.compile(r"_c10d_functional::(\w+)")
_KINDS = (
    ("all_gather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_reduce", "all_reduce"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
)


class ProfileTraceError(ValueError):
    """A profile that cannot be read or matched; the message says what was expected."""


@dataclass(frozen=True)
class Event:
    """One communication call or library call on the compute thread, in ns; ``kind`` is "" for a library call."""

    kind: str
    name: str
    begin_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        """Its length."""
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class Work:
    """A kernel or copy on a device, in ns; ``launched_ns`` is when the host asked for it, ``stream`` where it ran."""

    name: str
    launched_ns: int
    begin_ns: int
    end_ns: int
    stream: tuple[str, str]

    @property
    def ns(self) -> int:
        """Its length."""
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class Call:
    """One call of a compiled graph: what its thread did from ``begin_ns`` to ``end_ns``, and what it launched."""

    begin_ns: int
    end_ns: int
    events: list[Event]
    work: list[Work] = field(default_factory=list)

    @property
    def signature(self) -> list[str]:
        """Kinds of its communication events, by which its graph is recognised."""
        return [e.kind for e in self.events if e.kind]


def read_profile(path: Path) -> tuple[int | None, list[Call]]:
    """The rank that a profile names (None: it does not) and the calls of compiled graphs, in order; O(N log N).

    Raises:
        ProfileTraceError: too large, no Chrome trace, or without any compiled graph.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ProfileTraceError(f"{path}: too large for a profile; expected at most {MAX_BYTES} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
        raw = data["traceEvents"]
        rank = data.get("distributedInfo", {}).get("rank")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ProfileTraceError):
            raise
        raise ProfileTraceError(f"{path}: not a Chrome trace of torch.profiler: {type(error).__name__}") from error
    host = _Timelines()
    launches: dict[str, tuple[str, int]] = {}
    work: list[tuple[str, dict[str, Any], int, int]] = []
    for category, thread, begin, end, e in _slices(raw):
        if category in _HOST:
            host.add(thread, begin, -end, str(e["name"]))
        elif category in _LAUNCH:
            launches[_correlation(e)] = (thread, begin)
        elif category in _DEVICE:
            work.append((_correlation(e), e, begin, end))
    launched = _Timelines()
    for correlation, e, begin, end in work:
        if correlation and correlation in launches:
            thread, when = launches[correlation]
            stream = str(e["pid"]), str(e["args"].get("stream", e["tid"]))
            launched.add(thread, when, begin, Work(str(e["name"]), when, begin, end, stream))
    regions = sorted(
        (begin, -minus_end, thread)
        for thread, rows in host.by_thread.items()
        for begin, minus_end, _, name in rows
        if name.startswith(_REGION)
    )
    if not regions:
        raise ProfileTraceError(f"{path}: no call of a compiled graph; profile a step after the first one")
    calls = []
    for begin, end, thread in regions:
        events = _events(host.between(thread, begin, end), end)
        calls.append(Call(begin, end, events, [w for *_, w in launched.between(thread, begin, end)]))
    return rank if isinstance(rank, int) else None, calls


def _slices(raw: Any) -> Iterator[tuple[str, str, int, int, dict[str, Any]]]:
    """(category, thread, begin, end, event) of complete events with a known category; malformed ones are left out."""
    for e in raw if isinstance(raw, list) else ():
        try:
            category = e.get("cat")
            if e["ph"] == "X" and "name" in e and category in _KNOWN:
                begin = round(float(e["ts"]) * 1000)
                yield category, f"{e['pid']}/{e['tid']}", begin, begin + round(float(e["dur"]) * 1000), e
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue


def _correlation(e: dict[str, Any]) -> str:
    """What ties a launch to the work that it launched; "" when the event does not say."""
    arguments = e.get("args")
    return str(arguments.get("correlation", "")) if isinstance(arguments, dict) else ""


class _Timelines:
    """Rows per thread, in order of time."""

    def __init__(self) -> None:
        self.by_thread: dict[str, list[tuple[int, int, int, Any]]] = {}
        self._sorted = False

    def add(self, thread: str, when: int, then: int, what: Any) -> None:
        """A row; ``then`` orders rows of equal time."""
        rows = self.by_thread.setdefault(thread, [])
        rows.append((when, then, len(rows), what))
        self._sorted = False

    def between(self, thread: str, begin: int, end: int) -> list[tuple[int, int, int, Any]]:
        """Rows from ``begin`` on, before ``end``."""
        if not self._sorted:
            for rows in self.by_thread.values():
                rows.sort()
            self._sorted = True
        rows = self.by_thread.get(thread, [])
        return rows[bisect_left(rows, (begin,)) : bisect_left(rows, (end,))]


def _events(rows: list[tuple[int, int, int, Any]], last: int) -> list[Event]:
    """Outermost communication and library calls among a thread's host slices, until ``last``."""
    found: list[Event] = []
    reached = 0
    for begin, minus_end, _, name in rows:
        if begin < reached or -minus_end > last or name.startswith(_REGION):
            continue
        kind = _kind(name)
        if kind or name.startswith("aten::"):
            found.append(Event(kind, name.partition("::")[2], begin, -minus_end))
            reached = -minus_end
    return found


def _kind(name: str) -> str:
    match = _OP.match(name)
    if match is None:
        return ""
    if match[1].startswith("wait_tensor"):
        return WAIT
    return next((kind for prefix, kind in _KINDS if match[1].startswith(prefix)), "")
