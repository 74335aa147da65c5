"""One call of a compiled graph on a device: what its compute stream and its transfers did, by communication event.

The host only launches; time passes on streams. Transfers run on streams of their own and show as they are. The compute
stream stands still because of a transfer from when it has nothing more to do (or, if that is later, from when the host
has launched what comes next: until then the host is the reason) until the transfer ends or the stream goes on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inductor_passes.trace.profile_events import WAIT, Call, DeviceWork, Event


@dataclass(frozen=True)
class Block:
    """Compute between two neighbouring communication events: ns that the compute stream was busy, and per library call
    (name, ns).
    """

    busy_ns: int
    library: list[tuple[str, int]]


@dataclass(frozen=True)
class OnDevice:
    """A call's quantities in ns, by position among its communication events.

    Attributes:
        transfers: of starts that show a transfer of their own.
        stalls: of waits for those.
        issues: of starts: compute-stream time that belongs to them (copies into the message).
        blocks: one before every event and one after the last.
        step_ns: from the first start to the end of the last wait, as the compute stream sees them.
    """

    transfers: dict[int, int]
    stalls: dict[int, int]
    issues: dict[int, int]
    blocks: list[Block]
    step_ns: int


def on_device(call: Call, start_of: Mapping[int, int]) -> OnDevice:
    """Measure ``call``; ``start_of`` maps positions of waits to those of the starts that they wait for."""
    events = [e for e in call.events if e.kind]
    work = sorted(call.work, key=lambda w: w.launched_ns)
    stream = _compute_stream(work)
    compute = [w for w in work if w.stream == stream]
    launched = [w.launched_ns for w in compute]
    moved = {
        k: inside
        for k, e in enumerate(events)
        if e.kind != WAIT and (inside := [w for w in work if w.stream != stream and _inside(w, e)])
    }
    ends = {k: max(w.end_ns for w in inside) for k, inside in moved.items()}
    stalls: dict[int, int] = {}
    times: list[int] = []
    done = 0
    for k, e in enumerate(events):
        before = bisect_left(launched, e.begin_ns)
        if before:
            done = max(done, compute[before - 1].end_ns)
        if e.kind == WAIT and (end := ends.get(start_of.get(k, -1))) is not None:
            after = bisect_left(launched, e.end_ns)
            follows = compute[after] if after < len(compute) else None
            idle = max(done, follows.launched_ns if follows else e.begin_ns)
            until = min(end, follows.begin_ns) if follows else end
            stalls[k] = max(0, until - idle)
            done = max(done, until)
        times.append(max(done, e.begin_ns))
    return OnDevice(
        {k: ends[k] - min(w.begin_ns for w in inside) for k, inside in moved.items()},
        stalls,
        {k: sum(w.ns for w in compute if _inside(w, e)) for k, e in enumerate(events) if e.kind != WAIT},
        _blocks(call, compute),
        times[-1] - times[0] if times else 0,
    )


def _inside(work: DeviceWork, event: Event) -> bool:
    return event.begin_ns <= work.launched_ns < event.end_ns


def _compute_stream(work: Sequence[DeviceWork]) -> tuple[str, str]:
    """The stream that is busiest with what is no collective's kernel."""
    busy: dict[tuple[str, str], int] = {}
    for w in work:
        if "nccl" not in w.name.lower() and "rccl" not in w.name.lower():
            busy[w.stream] = busy.get(w.stream, 0) + w.ns
    return max(busy, key=lambda s: busy[s], default=("", ""))


def _blocks(call: Call, compute: Sequence[DeviceWork]) -> list[Block]:
    launched = [w.launched_ns for w in compute]

    def busy(begin: int, end: int) -> int:
        return sum(w.ns for w in compute[bisect_left(launched, begin) : bisect_left(launched, end)])

    found: list[Block] = []
    library: list[tuple[str, int]] = []
    begin = call.begin_ns
    for e in call.events:
        if not e.kind:
            library.append((e.name, busy(e.begin_ns, e.end_ns)))
            continue
        found.append(Block(busy(begin, e.begin_ns), library))
        library, begin = [], e.end_ns
    found.append(Block(busy(begin, call.end_ns), library))
    return found
