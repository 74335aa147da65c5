"""An emulated link: when collectives begin and end on it, in wall time and in virtual time.

The link is a server with one queue: a collective is ready when every rank of its group has issued it, the
link serves one at a time, of those that are ready the first that was issued, and serving takes ``latency + bytes /
bandwidth``. Ranks on one host tell each other their issue times through shared memory, so all of them compute the
same times.

Two clocks run beside each other. Wall time is what a user sees, and is disturbed by whatever else the machine
does. Virtual time is the CPU time of the compute thread plus the waits that the model says it must take; it
flows only while the program works or waits for its link, so a loaded machine does not change it (with one
intra-op thread per rank).

Units: ns and bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

#: How often a rank that waits for another rank's issue time looks again.
POLL_S = 50e-6
#: How long a busy machine may hold back another rank before it counts as one that issues in another order.
PATIENCE_S = 2.0


@dataclass(frozen=True)
class Rate:
    """What a link does: ``latency_ns`` per collective, then ``bytes_per_s`` (``inf`` for an infinitely fast
    link).
    """

    latency_ns: int = 0
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if self.latency_ns < 0 or not self.bytes_per_s > 0:
            raise ValueError(
                f"a link needs latency_ns of at least 0 and bytes_per_s above 0; got {self.latency_ns} and "
                f"{self.bytes_per_s}"
            )

    def duration_ns(self, wire_bytes: int) -> int:
        """Time on the link of a collective in which each rank sends ``wire_bytes``."""
        return self.latency_ns + round(wire_bytes / self.bytes_per_s * 1e9)


@dataclass(slots=True)
class Times:
    """One collective on one clock. ``exposed_ns`` is how long the compute thread stood still in its wait."""

    issue_ns: int = -1
    begin_ns: int = -1
    end_ns: int = -1
    wait_begin_ns: int = -1
    wait_end_ns: int = -1

    @property
    def exposed_ns(self) -> int:
        """Length of the wait; 0 when it has not been waited for."""
        return self.wait_end_ns - self.wait_begin_ns


@dataclass(slots=True)
class Record:
    """One collective in the log.

    Attributes:
        number: position in the group's sequence.
        kind: as in ``cost.communication.KINDS``, or ``barrier``, ``gather``, ``scatter``, ``reduce``.
        group: name of the process group; ``ranks`` its size.
        link: name of the link.
        input_bytes / output_bytes: what this rank put in and got out.
        wire_bytes: what it sent, by the ring model.
        duration_ns: time on the link.
        wall / virtual: the two clocks' times.
        late_ns: how much later than the emulated end the real transfer arrived; 0 when it was in time.
    """

    number: int
    kind: str
    group: str
    ranks: int
    link: str
    input_bytes: int
    output_bytes: int
    wire_bytes: int
    duration_ns: int
    wall: Times = field(default_factory=Times)
    virtual: Times = field(default_factory=Times)
    late_ns: int = 0

    @property
    def settled(self) -> bool:
        """Whether its times are known on both clocks."""
        return self.wall.end_ns >= 0 and self.virtual.end_ns >= 0

    @property
    def violates_model(self) -> bool:
        """Whether the real transfer came so late that the emulated times are wrong (by 2 % and 0.2 ms)."""
        return self.late_ns > max(200_000, self.duration_ns // 50)


@dataclass
class Message:
    """What one collective carried on this rank: flat copies of its inputs as they were issued and of its results as
    they arrived; ``outputs`` is empty until it was waited for.
    """

    record: Record
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)


class VirtualClock:
    """CPU time of the thread that made it, plus the waits charged to it."""

    def __init__(self) -> None:
        self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        self._waited_ns = 0
        self._zero_ns = 0

    def now_ns(self) -> int:
        """Virtual time since the last :meth:`reset`."""
        return time.clock_gettime_ns(self._cpu_clock) + self._waited_ns - self._zero_ns

    def charge(self, wait_ns: int) -> None:
        """The compute thread stood still for ``wait_ns``."""
        self._waited_ns += wait_ns

    def reset(self) -> None:
        """Make now zero."""
        self._zero_ns += self.now_ns()


class IssueTimes:
    """When each member issued its collectives: a table in memory that the members' processes share.

    Row ``number % rows`` holds for each member (number + 1, wall ns, virtual ns); the first tells whether the
    entry belongs to that number already.
    """

    _ENTRY = struct.Struct("qqq")

    def __init__(self, memory: mmap.mmap, offset: int, rows: int, members: int) -> None:
        self._memory = memory
        self._offset = offset
        self._rows = rows
        self._members = members

    @classmethod
    def size_bytes(cls, rows: int, members: int) -> int:
        """How much memory a table takes."""
        return rows * members * cls._ENTRY.size

    def _at(self, number: int, member: int) -> int:
        return self._offset + (number % self._rows * self._members + member) * self._ENTRY.size

    def write(self, number: int, member: int, wall_ns: int, virtual_ns: int) -> None:
        """``member`` issued collective ``number``."""
        self._ENTRY.pack_into(self._memory, self._at(number, member), number + 1, wall_ns, virtual_ns)

    def latest(self, number: int) -> tuple[int, int] | None:
        """When the last member issued ``number``, on both clocks; None while some member has not."""
        wall = virtual = 0
        for member in range(self._members):
            stamp, member_wall, member_virtual = self._ENTRY.unpack_from(self._memory, self._at(number, member))
            if stamp < number + 1:
                return None
            if stamp > number + 1:
                raise RuntimeError(f"more than {self._rows} collectives of a group are in flight on the emulated link")
            wall, virtual = max(wall, member_wall), max(virtual, member_virtual)
        return wall, virtual


class GroupTables:
    """All issue times of a group of ``ranks``: one table for its collectives, one per ordered pair for
    messages.
    """

    COLLECTIVE_ROWS = 4096
    MESSAGE_ROWS = 256

    def __init__(self, path: str, ranks: int) -> None:
        collectives = IssueTimes.size_bytes(self.COLLECTIVE_ROWS, ranks)
        pair = IssueTimes.size_bytes(self.MESSAGE_ROWS, 2)
        with open(path, "r+b") as file:
            file.truncate(collectives + ranks * ranks * pair)
            memory = mmap.mmap(file.fileno(), 0)
        self.collectives = IssueTimes(memory, 0, self.COLLECTIVE_ROWS, ranks)
        self.messages = {
            (source, destination): IssueTimes(
                memory, collectives + (source * ranks + destination) * pair, self.MESSAGE_ROWS, 2
            )
            for source in range(ranks)
            for destination in range(ranks)
        }

    @staticmethod
    def make_file() -> str:
        """A new file, in memory where there is such a folder; whoever made it removes it."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, path = tempfile.mkstemp(prefix="emulated_link_", dir=folder)
        os.close(handle)
        return path


class Ready(Protocol):
    """Answers when a collective was issued by all who must issue it, on both clocks; None while unknown."""

    def __call__(self) -> tuple[int, int] | None: ...


def _served(waiting: list[tuple[Times, int, int]], until: Times, free_ns: int) -> int:
    """Serve (times, ready, duration), in issue order, on one clock up to ``until``; when the link is free then."""
    left = [one for one in waiting if one[0].end_ns < 0]
    while until.end_ns < 0:
        now = max(free_ns, min(ready for _, ready, _ in left))
        number = next(k for k, (_, ready, _) in enumerate(left) if ready <= now)
        times, _, duration = left.pop(number)
        times.begin_ns, times.end_ns = now, now + duration
        free_ns = times.end_ns
    return free_ns


class Link:
    """One serial link of this rank. Its rate may be changed between collectives, on all ranks alike."""

    def __init__(self, name: str, rate: Rate) -> None:
        self.name = name
        self.rate = rate
        self._queue: deque[tuple[Record, Ready]] = deque()
        # Futures wait on threads of their own.
        self._lock = threading.Lock()
        #: How long to wait for another rank to issue what is ahead in the queue.
        self.patience_s = PATIENCE_S
        self._free_wall_ns = 0
        self._free_virtual_ns = 0

    def issue(self, record: Record, ready: Ready) -> None:
        """Put a collective into the queue."""
        with self._lock:
            self._queue.append((record, ready))

    def settle(self, record: Record) -> None:
        """Give ``record`` its begin and end on both clocks, and all those that go before it.

        Waits, asleep, until everything in the queue is ready: on each clock the link serves the earliest issued of
        those that are ready by then on that clock, so a rank that the machine holds back changes nothing in virtual
        time. What another rank does not issue within ``patience_s`` is overtaken: ranks issue in different orders.
        From then on nothing is waited for, until the next :meth:`restart`.
        """
        until = time.monotonic() + self.patience_s
        while True:
            with self._lock:
                if all(one is not record for one, _ in self._queue):
                    return  # served by now, or dropped by a restart
                ready = {id(one): times for one, known in self._queue if (times := known()) is not None}
                everybody = len(ready) == len(self._queue)
                if id(record) in ready and (everybody or time.monotonic() >= until):
                    self._serve(record, ready)
                    if not everybody:
                        self.patience_s = 0.0
                    return
            time.sleep(POLL_S)

    def _serve(self, record: Record, ready: Mapping[int, tuple[int, int]]) -> None:
        """Serve ``record`` and what goes before it; ``ready``: (wall, virtual) by ``id`` of the record."""
        known = [(one, ready[id(one)]) for one, _ in self._queue if id(one) in ready]
        self._free_wall_ns = _served(
            [(one.wall, times[0], one.duration_ns) for one, times in known], record.wall, self._free_wall_ns
        )
        self._free_virtual_ns = _served(
            [(one.virtual, times[1], one.duration_ns) for one, times in known], record.virtual, self._free_virtual_ns
        )
        self._queue = deque(entry for entry in self._queue if not entry[0].settled)

    def restart(self) -> None:
        """Idle again at virtual time zero. What has not been waited for counts as arrived."""
        with self._lock:
            for record, _ in self._queue:
                for times in (record.wall, record.virtual):
                    times.begin_ns = times.end_ns = times.issue_ns
            self._queue.clear()
            self._free_virtual_ns = 0
            self.patience_s = PATIENCE_S


@dataclass(frozen=True)
class StepTime:
    """One measured step.

    Attributes:
        wall_ns: as a watch shows it.
        virtual_ns: compute thread's CPU time plus exposed communication; does not depend on the machine's
            load.
        cpu_ns: the compute thread's CPU time alone.
        exposed_ns: waits on the virtual clock; ``exposed_wall_ns`` those on the wall clock.
        link_busy_ns: sum of durations per link.
        records: the log of the step.
    """

    wall_ns: int
    virtual_ns: int
    cpu_ns: int
    exposed_ns: int
    exposed_wall_ns: int
    link_busy_ns: dict[str, int]
    records: tuple[Record, ...]

    @property
    def violations(self) -> int:
        """Collectives whose real transfer came later than the emulated one."""
        return sum(r.violates_model for r in self.records)

    def counts(self) -> dict[str, int]:
        """Collectives by kind, barriers left out."""
        result: dict[str, int] = {}
        for record in self.records:
            if record.kind != "barrier":
                result[record.kind] = result.get(record.kind, 0) + 1
        return dict(sorted(result.items()))


class StepClock:
    """Measures steps on both clocks; a context manager whose ``time`` is set on leaving it.

    All ranks enter together (``align`` is a barrier), which makes their virtual times comparable. The program
    must use one intra-op thread, as the clock counts the CPU time of one.
    """

    time: StepTime

    def __init__(
        self, clock: VirtualClock, links: Iterable[Link], log: deque[Record], align: Callable[[], object]
    ) -> None:
        self._clock = clock
        self._links = list(links)
        self._log = log
        self._align = align

    def __enter__(self) -> StepClock:
        self._align()
        for link in self._links:
            link.restart()
        self._log.clear()
        self._clock.reset()
        self._begin_ns = time.monotonic_ns()
        return self

    def __exit__(self, *exc_info: object) -> None:
        virtual_ns = self._clock.now_ns()
        wall_ns = time.monotonic_ns() - self._begin_ns
        records = tuple(self._log)
        exposed_ns = sum(r.virtual.exposed_ns for r in records)
        busy: dict[str, int] = {}
        for record in records:
            busy[record.link] = busy.get(record.link, 0) + record.duration_ns
        self.time = StepTime(
            wall_ns=wall_ns,
            virtual_ns=virtual_ns,
            cpu_ns=virtual_ns - exposed_ns,
            exposed_ns=exposed_ns,
            exposed_wall_ns=sum(r.wall.exposed_ns for r in records),
            link_busy_ns=busy,
            records=records,
        )
