"""List scheduling: build an order by simulating the machines and picking, whenever the compute lane is free, the best
task that may run.

Rules (R. L. Graham, *Bounds on multiprocessing timing anomalies*, 1969, for list scheduling; the longest tail first for
the priority):

* a wait whose collective has ended is taken at once, it costs nothing and makes its readers ready;
* before a compute task begins, every machine that would fall idle during it is given the best collectives that are
  ready, no more: issuing earlier than the machine can serve gains no time and costs memory (``eager`` issues all);
* then the ready compute task of highest priority runs, and only when there is none does the compute lane wait, for
  the collective that ends first;
* under a memory cap a task runs only if the reference order can still be finished within the cap after it
  (:class:`~inductor_passes.schedule.memory.Continuation`), so the cap holds wherever memory is scarce and prefetching
  is free everywhere else.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from inductor_passes.schedule import native
from inductor_passes.schedule.memory import Continuation
from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.tables import Tables

_COMPUTE, _START = int(Kind.COMPUTE), int(Kind.START)
#: How many candidates are tried against the memory cap before falling back to the reference order.
_TRIES = 6
_FOREVER = 1 << 62


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """One way to schedule.

    Attributes:
        name: for ``Plan.method``.
        compute: priority of each ``COMPUTE``, smallest first.
        collective: priority of each ``START``, smallest first.
        eager: issue collectives as soon as they are ready instead of when their machine would fall idle.
        fill: while the compute lane would only wait, issue what is ready, as far as that takes no longer: issuing
            costs time of the compute lane, here it is free.
        strict: compute tasks run exactly in the order of their priority, even when that means to wait.
        release: per ``START`` the ns of compute-lane work before which it is not issued; None: no such limit.
    """

    name: str
    compute: Sequence[int]
    collective: Sequence[int]
    eager: bool = False
    strict: bool = False
    fill: bool = False
    release: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Reach:
    """A legal order within ``cap_bytes`` that a schedule can always fall back on."""

    order: Sequence[int]
    cap_bytes: int


def list_schedule(
    t: Tables, rule: PriorityRule, reach: Reach | None = None, first: Sequence[int] = ()
) -> list[int]:
    """A legal order by ``rule``; within the cap of ``reach`` if its order is. O(N log N + edges).

    ``first`` runs as it is: the beginning of a legal order, that of ``reach`` if there is one.
    """
    if (flat := native.flat(t)) is not None:
        memory = None if reach is None else (reach.order, reach.cap_bytes)
        priorities = (rule.compute, rule.collective, rule.release)
        found = native.list_schedule(*flat, priorities, (rule.eager, rule.strict, rule.fill), memory, first)
        if found is not None:
            return found
    builder = _Builder(t, rule, None if reach is None else Continuation(t, reach.order, reach.cap_bytes))
    for i in first:
        if t.kind[i] > _START:
            builder.now = max(builder.now, builder.lane_end[t.start[i]])
        builder._run(i)
    return builder.build()


class _Builder:
    def __init__(self, t: Tables, rule: PriorityRule, memory: Continuation | None) -> None:
        self.t = t
        self.rule = rule
        self.memory = memory
        self.now = 0
        self.progress = 0
        self.free = [0] * t.machines
        self.lane_end = [0] * t.n
        self.missing = [len(p) for p in t.preds]
        self.computes: list[tuple[int, int]] = []
        self.starts: list[list[tuple[int, int]]] = [[] for _ in range(t.machines)]
        self.waits: list[tuple[int, int]] = []
        self.order: list[int] = []
        self.ran = bytearray(t.n)
        self.sequence: list[int] = []
        self.turn = 0
        if rule.strict:
            self.sequence = sorted((i for i in range(t.n) if t.kind[i] == _COMPUTE), key=rule.compute.__getitem__)
        for i in range(t.n):
            if not self.missing[i]:
                self._ready(i)

    def build(self) -> list[int]:
        while len(self.order) < self.t.n:
            if self.waits and self.waits[0][0] <= self.now:
                self._run_wait()
                continue
            compute = self._next_compute()
            if compute >= 0:
                # Zero-length tasks need no cover; whatever follows them gets it.
                if self.t.busy_ns[compute]:
                    before = self.now
                    self._feed(self.now + self.t.busy_ns[compute], self.t.busy_ns[compute])
                    if self.now != before and self.waits and self.waits[0][0] <= self.now:
                        continue
                    if self.memory is not None and not self.memory.admits(compute):
                        continue
                self._run_compute(compute)
            elif self._feed(self.now + 1, 1) or self._step_reference() or (self.rule.fill and self._fill()):
                continue
            elif not self._run_wait():
                # Only collectives without waits keep the machines busy: queue the rest behind them.
                self._feed(max(self.free) + 1, _FOREVER)
        return self.order

    # -- what is ready ---------------------------------------------------------------------------------------------

    def _ready(self, i: int) -> None:
        kind = self.t.kind[i]
        if kind == _COMPUTE:
            heapq.heappush(self.computes, (self.rule.compute[i], i))
        elif kind == _START:
            heapq.heappush(self.starts[self.t.machine[i]], (self.rule.collective[i], i))
        else:
            heapq.heappush(self.waits, (self.lane_end[self.t.start[i]], i))

    def _next_compute(self) -> int:
        """The compute task to run now, -1 when none may; it stays in the queue."""
        heap, ran = self.computes, self.ran
        while heap and ran[heap[0][1]]:
            heapq.heappop(heap)
        if not heap:
            return -1
        best = heap[0][1]
        if self.rule.strict:
            while ran[self.sequence[self.turn]]:
                self.turn += 1
            if best != self.sequence[self.turn]:
                return -1
        if self.memory is None or self.memory.admits(best):
            return best
        refused: list[tuple[int, int]] = []
        found = -1
        while heap and len(refused) < _TRIES and found < 0:
            entry = heapq.heappop(heap)
            refused.append(entry)
            if not ran[entry[1]] and self.memory.admits(entry[1]):
                found = entry[1]
            if self.rule.strict:
                break
        for entry in refused:
            heapq.heappush(heap, entry)
        return found

    # -- running tasks ---------------------------------------------------------------------------------------------

    def _run(self, i: int) -> None:
        self.order.append(i)
        self.ran[i] = 1
        self.now += self.t.busy_ns[i]
        self.progress += self.t.busy_ns[i]
        if self.memory is not None:
            self.memory.run(i)
        if self.t.kind[i] == _START:
            m = self.t.machine[i]
            begin = self.free[m]
            if begin < self.now:
                begin = self.now
            self.free[m] = self.lane_end[i] = begin + self.t.lane_ns[i]
        missing = self.missing
        for j in self.t.succs[i]:
            missing[j] -= 1
            if not missing[j]:
                self._ready(j)

    def _run_compute(self, i: int) -> None:
        if self.computes[0][1] == i:
            heapq.heappop(self.computes)
        self._run(i)

    def _run_wait(self) -> bool:
        """Let the compute lane wait for the collective that ends first; False when none is in flight."""
        if not self.waits:
            return False
        end, i = heapq.heappop(self.waits)
        if not self.ran[i]:
            self.now = max(self.now, end)
            self._run(i)
        return True

    def _feed(self, until: int, work: int) -> bool:
        """Issue collectives so that no machine falls idle before ``until``, ``work`` ns of compute-lane work from now;
        whether any was issued.
        """
        horizon = self.progress + work
        issued = False
        for m, heap in enumerate(self.starts):
            while heap and (self.rule.eager or self.free[m] < until):
                i = self._next_start(heap, horizon)
                if i < 0:
                    break
                self._run(i)
                issued = True
        return issued

    def _fill(self) -> bool:
        """Issue one collective within the time until the next wait ends; whether there was one."""
        if not self.waits:
            return False
        gap = self.waits[0][0] - self.now
        for heap in self.starts:
            if heap and self.t.busy_ns[heap[0][1]] <= gap:
                i = self._next_start(heap, _FOREVER)
                if i >= 0:
                    self._run(i)
                    return True
        return False

    def _next_start(self, heap: list[tuple[int, int]], horizon: int) -> int:
        """Take the best collective that is due and that memory admits from ``heap``; -1: none of the first few."""
        release = self.rule.release
        refused: list[tuple[int, int]] = []
        found = -1
        while heap and len(refused) < _TRIES:
            entry = heapq.heappop(heap)
            if self.ran[entry[1]]:
                continue
            if (release is None or release[entry[1]] < horizon) and (
                self.memory is None or self.memory.admits(entry[1])
            ):
                found = entry[1]
                break
            refused.append(entry)
        for entry in refused:
            heapq.heappush(heap, entry)
        return found

    def _step_reference(self) -> bool:
        """Nothing may run ahead of the reference: run what it has next, unless waiting may change that."""
        if self.memory is None:
            return False
        i = self.memory.upcoming()
        if self.waits and (self.rule.strict or self.t.kind[i] != _COMPUTE):
            return False
        self._run(i)
        return True
