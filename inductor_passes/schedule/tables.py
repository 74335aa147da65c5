"""A :class:`Problem` unfolded into flat lists, so that inner loops index instead of calling.

Computed once per problem and kept on it (a problem is immutable). Collectives on lanes that share a link exclude each
other, and both lanes and links serve in issue order, so a lane with a link is served by the link: the *machines* of
this module are the links plus the lanes that have none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from inductor_passes.schedule.problem import INPUT, Kind, Lane, Problem

_CACHE = "_tables"
#: What begins the names in ``Tables.known`` of times that hold however tasks are numbered.
ANY_NUMBERING = "any numbering/"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tables:
    """Flat view of a problem; lists are indexed by task number unless said otherwise.

    Attributes:
        n: number of tasks.
        kind: :class:`Kind` as int.
        busy_ns: time on the compute lane: the duration of a ``COMPUTE``, the issue cost of ``START`` and ``WAIT``.
        lane_ns: time on the machine, 0 unless ``START``.
        machine: number of the machine of a ``START`` or ``WAIT``, -1 for ``COMPUTE``.
        machines: how many machines there are.
        start: ``START`` of a ``WAIT``, else -1.
        waits: waits of a ``START``, else empty.
        preds, succs: all precedence edges, see :meth:`Problem.edges`.
        alloc: bytes that a task brings to life.
        transient: those of them that nobody reads and that die right after it.
        produces: storages (numbers) that a task brings to life and that somebody reads or that are pinned.
        consumes: storages (numbers) that a task reads and that are released after their last reader.
        size, readers, releasable: per storage.
        live0: bytes live before the first task.
        slowdown: percent by which kernels take longer beside a ``START``; empty where none slows anything down.
        flat: the same for the compiled core, see ``native.flat``; None: not needed so far.
        known: what was worked out of this problem, see ``once``.
    """

    n: int
    kind: list[int]
    busy_ns: list[int]
    lane_ns: list[int]
    machine: list[int]
    machines: int
    start: list[int]
    waits: list[list[int]]
    preds: list[list[int]]
    succs: list[list[int]]
    alloc: list[int]
    transient: list[int]
    produces: list[list[int]]
    consumes: list[list[int]]
    size: list[int]
    readers: list[tuple[int, ...]]
    releasable: list[bool]
    live0: int
    slowdown: list[int] = field(default_factory=list)
    flat: Any = field(default=None, compare=False, repr=False)
    known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


def once(work: Callable[[Tables], T]) -> Callable[[Tables], T]:
    """``work`` done once per problem; nobody changes what it gave."""

    @functools.wraps(work)
    def found(t: Tables) -> T:
        name = f"{work.__module__}.{work.__name__}"
        if name not in t.known:
            t.known[name] = work(t)
        result: T = t.known[name]
        return result

    return found


def of_any_numbering(t: Tables) -> dict[str, Any]:
    """What is known of a problem and holds however its tasks are numbered."""
    return {name: found for name, found in t.known.items() if name.startswith(ANY_NUMBERING)}


def tables(problem: Problem) -> Tables:
    """The flat view of ``problem``; O(tasks + edges + readers) the first time."""
    cached: Tables | None = problem.__dict__.get(_CACHE)
    if cached is None:
        cached = _build(problem)
        problem.__dict__[_CACHE] = cached
    return cached


def _machines(lanes: Sequence[Lane]) -> tuple[list[int], int]:
    """The machine that serves each lane, and how many machines there are."""
    machine_of_lane: list[int] = []
    machine_of_link: dict[str, int] = {}
    machines = 0
    for lane in lanes:
        if lane.link and lane.link in machine_of_link:
            machine_of_lane.append(machine_of_link[lane.link])
            continue
        if lane.link:
            machine_of_link[lane.link] = machines
        machine_of_lane.append(machines)
        machines += 1
    return machine_of_lane, machines


def _successors(preds: list[list[int]]) -> list[list[int]]:
    succs: list[list[int]] = [[] for _ in preds]
    for i, ps in enumerate(preds):
        for p in ps:
            succs[p].append(i)
    return succs


def _build(problem: Problem) -> Tables:
    n = len(problem.tasks)
    machine_of_lane, machines = _machines(problem.lanes)
    kind = [int(t.kind) for t in problem.tasks]
    busy = [t.duration_ns if t.kind is Kind.COMPUTE else t.issue_ns for t in problem.tasks]
    lane_ns = [t.duration_ns if t.kind is Kind.START else 0 for t in problem.tasks]
    machine = [machine_of_lane[t.lane] if t.lane >= 0 else -1 for t in problem.tasks]
    start = [t.start if t.kind is Kind.WAIT else -1 for t in problem.tasks]
    slowdown = [t.slowdown_percent for t in problem.tasks]
    waits: list[list[int]] = [[] for _ in range(n)]
    for i, s in enumerate(start):
        if s >= 0:
            waits[s].append(i)
    preds = problem.expanded

    alloc, transient = [0] * n, [0] * n
    produces: list[list[int]] = [[] for _ in range(n)]
    consumes: list[list[int]] = [[] for _ in range(n)]
    size, readers, releasable = [], [], []
    live0 = problem.base_bytes
    for number, storage in enumerate(problem.storages):
        reads = storage.readers if len(storage.readers) < 2 else tuple(sorted(set(storage.readers)))
        # An input without readers is never handed back to the allocator by the program, so it stays.
        dies = not storage.pinned and (bool(reads) or storage.producer != INPUT) and storage.size_bytes > 0
        size.append(storage.size_bytes)
        readers.append(reads)
        releasable.append(dies and bool(reads))
        if storage.producer == INPUT:
            live0 += storage.size_bytes
        else:
            alloc[storage.producer] += storage.size_bytes
            if dies and not reads:
                transient[storage.producer] += storage.size_bytes
            elif storage.size_bytes:
                produces[storage.producer].append(number)
        if dies:
            for r in reads:
                consumes[r].append(number)
    return Tables(
        n=n,
        kind=kind,
        busy_ns=busy,
        lane_ns=lane_ns,
        machine=machine,
        machines=machines,
        start=start,
        waits=waits,
        preds=preds,
        succs=_successors(preds),
        alloc=alloc,
        transient=transient,
        produces=produces,
        consumes=consumes,
        size=size,
        readers=readers,
        releasable=releasable,
        live0=live0,
        slowdown=slowdown if any(slowdown) else [],
    )
