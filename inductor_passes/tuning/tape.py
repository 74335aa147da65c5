"""Where the times of a generated module's calls are written: memory that is there before the first step.

A tape counts during the warm-up call, so that it knows how many calls a step has, and then takes a begin and an end of
each. On a CPU these are the host's clock; on a device they are events on the stream that computes, because the host
only launches there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inductor_passes import _torch

#: The host's clock, in ns.
host_ns: Callable[[], int] = time.perf_counter_ns
#: Room for so many more calls per step than the warm-up had.
_MORE = 8


@dataclass(frozen=True)
class Step:
    """One timed call of a graph, in ns of this rank's clock.

    Attributes:
        begin_ns, end_ns: of the whole call.
        names: what was called, in order.
        begins, ends: of these calls.
    """

    begin_ns: int
    end_ns: int
    names: tuple[str, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]


class Tape:
    """The times of ``steps`` steps.

    Args:
        device: that computes; events of it are used where it is no CPU.

    Attributes:
        on_device: whether events of a device are recorded, not times of the host.
        overflowed: a step had more calls than the warm-up call.
    """

    def __init__(self, steps: int, device: str = "cpu") -> None:
        self._steps = steps
        self._device = device
        self._counting = True
        self._used = 0
        self._room = 0
        self._names: list[str] = []
        self._begins: list[Any] = []
        self._ends: list[Any] = []
        self._marks: list[tuple[int, Any, Any]] = []
        self._base: Any = None
        self._spare: list[Any] = []
        self.on_device = device != "cpu"
        self.overflowed = False

    def lay_out(self) -> bool:
        """End of the warm-up: make room for all steps; False where the device has no events."""
        self._counting = False
        self._room = (self._used + _MORE) * self._steps
        self._used = 0
        self._names = [""] * self._room
        self._marks = []
        if not self.on_device:
            self._begins, self._ends = [0] * self._room, [0] * self._room
            return True
        begins = _torch.timing_events(self._device, self._room + 2 * self._steps + 1)
        ends = _torch.timing_events(self._device, self._room)
        if begins is None or ends is None:
            return False
        self._base = begins.pop()
        self._spare = [begins.pop() for _ in range(2 * self._steps)]
        self._begins, self._ends = begins, ends
        self._base.record()
        return True

    def step(self, call: Callable[[], Any]) -> Any:
        """Run a step, and note where it begins and ends."""
        first, begin = self._used, self._now()
        result = call()
        self._marks.append((first, begin, self._now()))
        return result

    def _now(self) -> Any:
        if not self.on_device or self._counting:
            return host_ns()
        event = self._spare.pop()
        event.record()
        return event

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """``function``, with the times of each call written down under ``name``."""
        clock = host_ns

        def on_host(*args: Any, **kwargs: Any) -> Any:
            n = self._used
            self._used = n + 1
            if n >= self._room:
                self.overflowed = not self._counting
                return function(*args, **kwargs)
            begin = clock()
            result = function(*args, **kwargs)
            self._ends[n] = clock()
            self._begins[n] = begin
            self._names[n] = name
            return result

        def on_device(*args: Any, **kwargs: Any) -> Any:
            n = self._used
            self._used = n + 1
            if n >= self._room:
                self.overflowed = not self._counting
                return function(*args, **kwargs)
            self._begins[n].record()
            result = function(*args, **kwargs)
            self._ends[n].record()
            self._names[n] = name
            return result

        return on_device if self.on_device else on_host

    def steps(self) -> list[Step]:
        """What was written; on a device this waits, asleep, for the last event."""
        used = min(self._used, self._room)
        limits = [first for first, _, _ in self._marks[1:]] + [used]
        begins, ends = self._begins[:used], self._ends[:used]
        marks = [(begin, end) for _, begin, end in self._marks]
        if self.on_device:
            begins, ends = (_torch.event_times_ns(self._base, one) for one in (begins, ends))
            at = _torch.event_times_ns(self._base, [event for pair in marks for event in pair])
            marks = list(zip(at[::2], at[1::2]))
        return [
            Step(begin, end, tuple(self._names[a:b]), tuple(begins[a:b]), tuple(ends[a:b]))
            for (begin, end), (a, _, _), b in zip(marks, self._marks, limits)
        ]
