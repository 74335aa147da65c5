"""The scheduling problem, free of any compiler's data structures.

Model
-----
A program is a sequence of *tasks* issued in order by one host thread to one compute lane and to any number of
communication lanes (one per communicator). Task kinds:

``COMPUTE``
    Occupies the compute lane for ``duration_ns``.
``START``
    Issues an asynchronous collective: occupies the compute lane for ``issue_ns`` (host cost, copies into staging
    buffers) and then its communication lane for ``duration_ns``. It begins on its lane when it was issued, when
    the lane's earlier collectives have ended (communicators execute in issue order) and when the link that the
    lane uses is free (lanes that share a ``link`` do not transfer at the same time). While it transfers, kernels take
    ``slowdown_percent`` longer (*contention*).
``WAIT``
    Blocks the compute lane until the collective it belongs to has ended.

Tasks are numbered in the order of the input program, so ``range(len(tasks))`` is the input order and every
predecessor has a smaller number than its successors. An answer (an *order*) is a permutation of the task numbers in
which every task comes after its predecessors.

Memory is replayed at the level of storages: a storage comes to life when its producer runs and is released right
after the last of its readers has run (readers include the waits of collectives that read it: a backend keeps a
collective's inputs until then). Storages without a producer are inputs, live from the beginning; storages that are
``pinned`` are never released (outputs, and inputs that the caller keeps). Order inside one task: everything it
produces is allocated first, then its dead inputs are released.

Units are nanoseconds and bytes throughout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeAlias

from inductor_passes.records.convert import check_version, convert, plain
from inductor_passes.records.json_text import RecordError
from inductor_passes.records.limits import Count, Integer

SCHEMA_VERSION = 1

#: ``Storage.producer`` of a storage that is alive before the first task runs.
INPUT = -1


class Kind(IntEnum):
    """What a task does; see the module's docstring."""

    COMPUTE = 0
    START = 1
    WAIT = 2


class ProblemError(RecordError):
    """A problem or an order breaks the rules of this module; the message names the task."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A communicator: collectives on it run one at a time, in issue order.

    ``link`` names the physical link it uses; lanes with equal links exclude each other. ``fixed_order`` demands
    that its collectives keep the order of the input program (a fence, or ranks that must agree with other programs).
    """

    name: str
    link: str = ""
    fixed_order: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of the program.

    Attributes:
        name: unique in the problem; the FX node's or the scheduler node's name.
        kind: see :class:`Kind`.
        duration_ns: time on the compute lane (``COMPUTE``) or on the communication lane (``START``); 0 for ``WAIT``.
        lane: index into ``Problem.lanes`` for ``START`` and ``WAIT``; -1 for ``COMPUTE``.
        start: for ``WAIT`` the number of the ``START`` that it waits for; else -1.
        issue_ns: host time on the compute lane (``START`` and ``WAIT``).
        size_bytes: payload of a collective, for reports.
        label: short name for the normalised schedule string, e.g. ``AG3``, ``W3``, ``mm``.
        source: where the user wrote it, ``file:line``, or "".
        fence: nothing that communicates (``START`` or ``WAIT``) may cross this task in either direction.
        slowdown_percent: by how much longer a kernel takes while a ``START`` transfers; of several transfers at a time
            the largest counts.
    """

    name: str
    kind: Kind
    duration_ns: int = 0
    lane: int = -1
    start: int = -1
    issue_ns: int = 0
    size_bytes: int = 0
    label: str = ""
    source: str = ""
    fence: bool = False
    slowdown_percent: int = 0


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory with a lifetime.

    Attributes:
        size_bytes: what the allocator hands out.
        producer: task that allocates it, or ``INPUT``.
        readers: tasks that need it alive, the producer excluded; for the inputs and outputs of a collective this
            includes its waits. May be empty: then it dies right after its producer.
        pinned: never released within the program.
        name: for reports.
        workspace: whether it is memory that the backend takes for the message of its producer, a ``START``.
    """

    size_bytes: int
    producer: int
    readers: tuple[int, ...] = ()
    pinned: bool = False
    name: str = ""
    workspace: bool = False


@dataclass(frozen=True)
class Problem:
    """A whole program for the planner; immutable, printable, and equal when its content is equal.

    Attributes:
        tasks: numbered in input order.
        preds: for every task the numbers of the tasks that must run before it (data, mutation, fences and lane
            order are already expanded into these edges by the front end, except what ``Lane.fixed_order`` and
            ``Task.fence`` say, which :meth:`edges` adds).
        lanes: the communicators.
        storages: everything that takes memory.
        base_bytes: memory that is in use throughout and not listed in ``storages``.
        name: for reports, e.g. ``forward_0``.
        meta: free-form facts for people (world size, device, cost profile), strings only; not part of the digest.
    """

    tasks: tuple[Task, ...]
    preds: tuple[tuple[int, ...], ...]
    lanes: tuple[Lane, ...] = ()
    storages: tuple[Storage, ...] = ()
    base_bytes: int = 0
    name: str = ""
    meta: dict[str, str] = field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self) -> None:
        n = len(self.tasks)
        if len(self.preds) != n:
            raise ProblemError(f"{self.name}: {n} tasks but {len(self.preds)} predecessor lists")
        for i, task in enumerate(self.tasks):
            if (before := self.preds[i]) and not (min(before) >= 0 and max(before) < i):
                p = next(p for p in before if not 0 <= p < i)
                raise ProblemError(f"{self.name}: task {i} ({task.name}) has predecessor {p}; expected 0..{i - 1}")
            if task.kind is Kind.COMPUTE:
                if task.lane != -1:
                    raise ProblemError(f"{self.name}: compute task {task.name} has lane {task.lane}; expected -1")
            elif not 0 <= task.lane < len(self.lanes):
                raise ProblemError(f"{self.name}: {task.name} is on lane {task.lane} of {len(self.lanes)}")
            if task.kind is Kind.WAIT and not (
                0 <= task.start < i and self.tasks[task.start].kind is Kind.START
            ):
                raise ProblemError(f"{self.name}: wait {task.name} names {task.start}, which is no earlier start")
            if task.duration_ns < 0 or task.issue_ns < 0:
                raise ProblemError(f"{self.name}: {task.name} has a negative duration")
            if task.slowdown_percent and (task.slowdown_percent < 0 or task.kind is not Kind.START):
                found = f"{task.name} has slowdown_percent {task.slowdown_percent}"
                raise ProblemError(f"{self.name}: {found}; expected 0, or more of a START")
        for storage in self.storages:
            if storage.size_bytes < 0 or not INPUT <= storage.producer < n:
                raise ProblemError(f"{self.name}: storage {storage.name} is malformed: {storage}")
            readers = storage.readers
            if readers and not (storage.producer < min(readers) and max(readers) < n):
                raise ProblemError(
                    f"{self.name}: storage {storage.name} has a reader outside {storage.producer + 1}..{n - 1}"
                )

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def input_order(self) -> tuple[int, ...]:
        """The order of the program as it came in."""
        return tuple(range(len(self.tasks)))

    def edges(self) -> list[list[int]]:
        """Predecessor lists with every rule expanded: ``preds``, wait after start, reader after producer, lane order,
        fences. The caller's own, to change.

        O(tasks + edges): lane order is a chain, and a fence is expanded as (communication since the last fence)
        -> fence -> (communication until the next fence).
        """
        return [list(before) for before in self.expanded]

    @cached_property
    def expanded(self) -> list[list[int]]:
        """:meth:`edges`, worked out once; nobody changes it."""
        result = [list(p) for p in self.preds]
        for storage in self.storages:
            if (producer := storage.producer) != INPUT:
                for r in storage.readers:
                    result[r].append(producer)
        last_on_lane: dict[int, int] = {}
        fence = -1
        since_fence: list[int] = []
        for i, task in enumerate(self.tasks):
            extra = result[i]
            if task.kind is Kind.COMPUTE and not task.fence:
                if len(extra) > 1:
                    result[i] = sorted(set(extra))
                continue
            if task.kind is Kind.WAIT:
                extra.append(task.start)
            if task.fence:
                extra.extend(since_fence)
                if fence >= 0:
                    extra.append(fence)
                since_fence = []
            elif task.kind is not Kind.COMPUTE:
                if fence >= 0:
                    extra.append(fence)
                since_fence.append(i)
            if task.kind is Kind.START and self.lanes[task.lane].fixed_order:
                if task.lane in last_on_lane:
                    extra.append(last_on_lane[task.lane])
                last_on_lane[task.lane] = i
            if task.fence:
                fence = i
            if len(extra) > 1:
                result[i] = sorted(set(extra))
        return result

    def check_order(self, order: Sequence[int]) -> None:
        """Raise :class:`ProblemError` unless ``order`` is a legal order of this problem."""
        n = len(self.tasks)
        position = [-1] * n
        for k, i in enumerate(order):
            if not 0 <= i < n or position[i] != -1:
                raise ProblemError(f"{self.name}: order is not a permutation: task number {i} at position {k}")
            position[i] = k
        if len(order) != n:
            raise ProblemError(f"{self.name}: order has {len(order)} of {n} tasks")
        for i, preds in enumerate(self.expanded):
            own = position[i]
            for p in preds:
                if position[p] > own:
                    raise ProblemError(
                        f"{self.name}: {self.tasks[i].name} runs before its predecessor {self.tasks[p].name}"
                    )

    def schedule_text(self, order: Iterable[int] | None = None) -> str:
        """The normalised schedule, e.g. ``AG0 mm W0 mm RS1``: one label per labelled task, in order."""
        return " ".join(
            label for i in (self.input_order if order is None else order) if (label := self.tasks[i].label)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data with ``schema_version``; arrays are positional to keep large graphs small."""
        record = ProblemRecord(
            name=self.name,
            base_bytes=self.base_bytes,
            meta=dict(sorted(self.meta.items())),
            lanes=[_row(lane) for lane in self.lanes],
            tasks=[(*_row(task)[:-1], "") for task in self.tasks],
            preds=list(self.preds),
            storages=[_row(storage)[:-1] for storage in self.storages],
            workspaces=[i for i, storage in enumerate(self.storages) if storage.workspace],
            slowdowns=[(i, task.slowdown_percent) for i, task in enumerate(self.tasks) if task.slowdown_percent],
        )
        return {"schema_version": SCHEMA_VERSION, **plain(record)}

    @staticmethod
    def from_json(data: object) -> Problem:
        """Inverse of :meth:`to_json`; unknown keys are ignored.

        Raises:
            ProblemError: another schema version, a value of another type, or rules of this module broken.
        """
        try:
            record = convert(check_version(data, SCHEMA_VERSION, "problem file"), ProblemRecord, "a problem")
        except RecordError as error:
            raise ProblemError(str(error)) from None
        workspaces, slowdowns = set(record.workspaces), dict(record.slowdowns)
        return Problem(
            tasks=tuple(Task(*row[:-1], slowdowns.get(i, 0)) for i, row in enumerate(record.tasks)),
            preds=tuple(record.preds),
            lanes=tuple(Lane(*row) for row in record.lanes),
            storages=tuple(Storage(*row, i in workspaces) for i, row in enumerate(record.storages)),
            base_bytes=record.base_bytes,
            name=record.name,
            meta=record.meta,
        )

    def digest(self, order: Iterable[int] | None = None) -> str:
        """SHA-256 (first 16 hex digits) of the problem and, when given, of an order: equal on ranks that agree.

        Names are left out: nodes and process groups are not called the same on all ranks.
        """
        links: dict[str, int] = {}
        data = [
            self.base_bytes,
            [[links.setdefault(lane.link, len(links)), lane.fixed_order] for lane in self.lanes],
            [[int(t.kind), t.duration_ns, t.lane, t.start, t.issue_ns, t.size_bytes, t.fence] for t in self.tasks],
            self.preds,
            [[s.size_bytes, s.producer, s.readers, s.pinned] for s in self.storages],
        ]
        if slowdowns := [(i, t.slowdown_percent) for i, t in enumerate(self.tasks) if t.slowdown_percent]:
            data.append(slowdowns)
        hasher = hashlib.sha256(json.dumps(data, separators=(",", ":")).encode())
        if order is not None:
            hasher.update(b"|" + ",".join(map(str, order)).encode())
        return hasher.hexdigest()[:16]


#: The fields of :class:`Lane`, :class:`Task` and :class:`Storage` in their order. A task's last column says nothing:
#: files of schema version 1 have it.
LaneRow: TypeAlias = tuple[str, str, bool]
TaskRow: TypeAlias = tuple[str, Kind, Count, Integer, Integer, Count, Count, str, str, bool, str]
StorageRow: TypeAlias = tuple[Count, Integer, tuple[Count, ...], bool, str]


@dataclass(frozen=True)
class ProblemRecord:
    """A problem as JSON holds it: rows are positional; ``workspaces`` are numbers of storages, ``slowdowns`` numbers of
    tasks with their ``slowdown_percent`` where it is not 0."""

    name: str
    base_bytes: Count
    lanes: list[LaneRow]
    tasks: list[TaskRow]
    preds: list[tuple[Count, ...]]
    storages: list[StorageRow]
    meta: dict[str, str] = field(default_factory=dict)
    workspaces: list[Count] = field(default_factory=list)
    slowdowns: list[tuple[Count, Count]] = field(default_factory=list)


def _row(record: Lane | Task | Storage) -> Any:
    return tuple(getattr(record, name) for name in record.__slots__)
