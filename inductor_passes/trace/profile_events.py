"""What a torch.profiler trace shows of compiled graphs: their calls, the host's operations and the device's work.

The format is Kineto's: host operations are slices of category ``cpu_op``; a kernel or copy on a device is a slice of
its own that shares its ``correlation`` with the runtime or driver call that launched it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from inductor_passes.operators import GROUP_KINDS
from inductor_passes.records.json_text import RecordError, content
from inductor_passes.records.limits import MOST
from inductor_passes.records.text import printable

#: Larger profiles, and those of more events, are refused before they are parsed.
MAX_BYTES = 2**29
MAX_EVENTS = 4_000_000

WAIT = "wait"

_REGION = "## Call CompiledFxGraph"
_HOST = ("cpu_op", "user_annotation")
_LAUNCH = ("cuda_runtime", "cuda_driver", "xpu_runtime")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_KNOWN = {*_HOST, *_LAUNCH, *_DEVICE}
_OP = re.compile(r"_c10d_functional::(\w+)")


class ProfileTraceError(RecordError):
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
class DeviceWork:
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
    work: list[DeviceWork] = field(default_factory=list)

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
        whole = _read(path)
    except RecordError as error:
        raise ProfileTraceError(f"{path}: {error}") from None
    rank = whole.info.get("rank") if isinstance(whole.info, dict) else None
    host = _Timelines()
    launches: dict[str, tuple[str, int]] = {}
    work: list[tuple[str, DeviceWork]] = []
    for e, begin, end in _slices(whole.events):
        thread = f"{e.pid}/{e.tid}"
        if e.cat in _HOST:
            host.add(thread, begin, -end, str(e.name))
            continue
        correlation, stream = _arguments(e)
        if e.cat in _LAUNCH:
            launches[correlation] = (thread, begin)
        elif correlation:
            work.append((correlation, DeviceWork(str(e.name), 0, begin, end, (str(e.pid), stream or str(e.tid)))))
    launched = _Timelines()
    for correlation, one in work:
        if correlation in launches:
            thread, when = launches[correlation]
            launched.add(thread, when, one.begin_ns, replace(one, launched_ns=when))
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


class _Event(msgspec.Struct):
    """What we read of an event; ``args`` is most of a profile's text and stays text until it is asked for."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    ts: Any = None
    dur: Any = None
    pid: Any = None
    tid: Any = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Profile(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    info: Any = msgspec.field(name="distributedInfo", default=None)


def _read(path: Path) -> _Profile:
    what = "a Chrome trace of torch.profiler"
    data = content(path, what, max_bytes=MAX_BYTES)
    count = max(data.count(b'"ph"'), (data.count(b"{") + data.count(b"[")) // 4)
    if count > MAX_EVENTS:
        raise RecordError(f"{count} events are too many for {what}; expected at most {MAX_EVENTS}")
    try:
        return msgspec.json.decode(data, type=_Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"not {what}: {printable(str(error))}") from None


def _slices(events: list[_Event]) -> Iterator[tuple[_Event, int, int]]:
    """(event, begin, end) of complete events with a known category; malformed ones are left out."""
    for e in events:
        if e.ph != "X" or e.name is None or not isinstance(e.cat, str) or e.cat not in _KNOWN:
            continue
        times = (e.ts, e.dur)
        if all(isinstance(t, (int, float)) and abs(t) <= MOST / 1000 for t in times) and e.dur >= 0:
            begin = round(e.ts * 1000)
            yield e, begin, begin + round(e.dur * 1000)


def _arguments(e: _Event) -> tuple[str, str]:
    """What ties a launch to the work that it launched, and the work's stream; "" where the event does not say."""
    try:
        found = msgspec.json.decode(e.args)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", ""
    if not isinstance(found, dict):
        return "", ""
    return str(found.get("correlation", "")), str(found.get("stream", ""))


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
    return next((kind for kind in GROUP_KINDS if match[1].startswith(kind)), "")
