"""The one simulator: what an order of a problem costs in time and memory.

The compute lane executes the order strictly in sequence. A ``START`` occupies it for its issue cost and then queues on
its machine (lane or shared link), which serves in issue order; a ``WAIT`` holds the compute lane until the collective
has ended and then costs its own issue time. The makespan ends when the compute lane and all machines are done, so

    makespan = compute + issue + exposed + contention,

where *exposed* is time in which the compute lane stood still in a wait, or, for a collective that nobody waits for,
the time by which it outlives everything else, and *contention* what kernels take longer because something transfers
beside them (``Task.slowdown_percent``). Everything here is O(tasks + storages' readers).

Constructions and searches know no contention (:func:`replay_time`); their orders are judged with it (:func:`timed`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from inductor_passes.schedule import native
from inductor_passes.schedule.memory import live_bytes
from inductor_passes.schedule.problem import Kind, Problem, ProblemError
from inductor_passes.schedule.tables import Tables, tables

_COMPUTE, _START = int(Kind.COMPUTE), int(Kind.START)


@dataclass(frozen=True)
class Timeline:
    """What happens when; lists are indexed by task number, times are ns from the beginning.

    Attributes:
        makespan_ns: when everything has ended.
        compute_ns: sum of the durations of ``COMPUTE`` tasks.
        issue_ns: sum of the issue costs of ``START`` and ``WAIT`` tasks.
        communication_ns: sum of the durations of collectives.
        contention_ns: what ``COMPUTE`` tasks take longer than their durations, because of transfers beside them.
        start_ns, end_ns: stay of a task on the compute lane (``START``: its issue; ``WAIT``: from being reached
            until the compute lane goes on).
        lane_begin_ns, lane_end_ns: stay of a ``START`` on its machine, -1 for other tasks.
        exposed_ns, hidden_ns: per ``START``, 0 for other tasks; hidden is the part of its own duration that is not
            exposed. A collective that queued may be exposed for longer than its duration.
        peak_bytes: highest number of live bytes.
    """

    makespan_ns: int
    compute_ns: int
    issue_ns: int
    communication_ns: int
    start_ns: list[int]
    end_ns: list[int]
    lane_begin_ns: list[int]
    lane_end_ns: list[int]
    exposed_ns: list[int]
    hidden_ns: list[int]
    peak_bytes: int
    contention_ns: int = 0

    @property
    def total_exposed_ns(self) -> int:
        """Time in which the compute lane stood still."""
        return sum(self.exposed_ns)


@dataclass(frozen=True, slots=True)
class Trace:
    """Times only, in ns by task number: stay on the compute lane, stay on the machine (-1: none), exposed time."""

    makespan: int
    begin: list[int]
    end: list[int]
    lane_begin: list[int]
    lane_end: list[int]
    exposed: list[int]


def replay_time(t: Tables, order: Sequence[int]) -> Trace:
    """What happens when in an order, if transfers slowed no kernel down. O(N).

    Raises:
        ProblemError: a wait comes before its start.
    """
    return _replayed(t, order, contended=False)


def timed(t: Tables, order: Sequence[int]) -> Trace:
    """What happens when in an order. O(N machines).

    Raises:
        ProblemError: a wait comes before its start.
    """
    return _replayed(t, order, contended=bool(t.slowdown))


class _Transfers:
    """The transfers of each machine that have not ended, the earliest first.

    All that may be under way while a kernel runs were issued before it, so their times are known.
    """

    def __init__(self, machines: int) -> None:
        self._of: list[deque[tuple[int, int, int]]] = [deque() for _ in range(machines)]

    def add(self, machine: int, begin: int, end: int, percent: int) -> None:
        self._of[machine].append((begin, end, percent))

    def end_of_work(self, now: int, work: int) -> int:
        """When a kernel ends that begins ``now`` and takes ``work`` ns alone."""
        while work > 0:
            percent, until = 0, -1
            for transfers in self._of:
                while transfers and transfers[0][1] <= now:
                    transfers.popleft()
                if not transfers:
                    continue
                begin, end, slowdown = transfers[0]
                if begin <= now:
                    percent = max(percent, slowdown)
                change = end if begin <= now else begin
                until = change if until < 0 else min(until, change)
            needed = (work * (100 + percent) + 99) // 100
            if until < 0 or needed <= until - now:
                return now + needed
            work -= (until - now) * 100 // (100 + percent)
            now = until
        return now


def _replayed(t: Tables, order: Sequence[int], contended: bool) -> Trace:
    found = native.flat(t) if len(order) == t.n else None
    if found is not None:
        return Trace(*native.replay(*found, order, contended))
    transfers = _Transfers(t.machines)
    n = t.n
    kind, busy, lane_ns, machine, start_of = t.kind, t.busy_ns, t.lane_ns, t.machine, t.start
    begin, end = [0] * n, [0] * n
    lane_begin, lane_end, exposed = [-1] * n, [-1] * n, [0] * n
    free = [0] * t.machines
    now = 0
    last = -1
    for i in order:
        begin[i] = now
        k = kind[i]
        if k == _COMPUTE:
            now = transfers.end_of_work(now, busy[i]) if contended else now + busy[i]
        elif k == _START:
            now += busy[i]
            m = machine[i]
            b = free[m]
            if b < now:
                b = now
            lane_begin[i] = b
            free[m] = lane_end[i] = b + lane_ns[i]
            if contended:
                transfers.add(m, b, lane_end[i], t.slowdown[i])
            if last < 0 or lane_end[i] >= lane_end[last]:
                last = i
        else:
            done = lane_end[start_of[i]]
            if done < 0:
                raise ProblemError(f"task {i} waits before its start {start_of[i]}")
            if done > now:
                exposed[start_of[i]] += done - now
                now = done
            now += busy[i]
        end[i] = now
    makespan = now
    if last >= 0 and lane_end[last] > now:
        makespan = lane_end[last]
        exposed[last] += makespan - now
    return Trace(makespan, begin, end, lane_begin, lane_end, exposed)


def value(t: Tables, order: Sequence[int]) -> tuple[int, int]:
    """Makespan in ns and peak in bytes of an order. O(N).

    Raises:
        ProblemError: a wait comes before its start.
    """
    found = native.flat(t) if len(order) == t.n else None
    if found is not None:
        return native.value(*found, order, bool(t.slowdown))
    return timed(t, order).makespan, max(live_bytes(t, order), default=t.live0)


def simulate(problem: Problem, order: Sequence[int] | None = None) -> Timeline:
    """Replay ``order`` (default: the input order). O(N).

    The order must be legal (:meth:`Problem.check_order`); only what would make the replay meaningless is checked here.

    Raises:
        ProblemError: the order's length is not the number of tasks, or a wait comes before its start.
    """
    t = tables(problem)
    if order is None:
        order = range(t.n)
    elif len(order) != t.n:
        raise ProblemError(f"{problem.name}: order has {len(order)} of {t.n} tasks")
    trace = timed(t, order)
    compute = sum(b for b, k in zip(t.busy_ns, t.kind) if k == _COMPUTE)
    taken = sum(e - b for b, e, k in zip(trace.begin, trace.end, t.kind) if k == _COMPUTE)
    return Timeline(
        makespan_ns=trace.makespan,
        compute_ns=compute,
        issue_ns=sum(t.busy_ns) - compute,
        communication_ns=sum(t.lane_ns),
        start_ns=trace.begin,
        end_ns=trace.end,
        lane_begin_ns=trace.lane_begin,
        lane_end_ns=trace.lane_end,
        exposed_ns=trace.exposed,
        hidden_ns=[d - e if e < d else 0 for d, e in zip(t.lane_ns, trace.exposed)],
        peak_bytes=max(live_bytes(t, order), default=t.live0),
        contention_ns=taken - compute,
    )
