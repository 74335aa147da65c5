"""The one builder of scheduling problems, whatever their tasks stand for.

A front end goes through its nodes in order and says of each what it is: compute, a start, a wait. Of memory it says who
allocates a block and who touches it. What follows from that is here: numbers of tasks, lanes and waits, prices of
collectives, and which memory a task needs for itself only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch.fx

from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir import ops
from inductor_passes.ir.groups import Group
from inductor_passes.ir.view import Collective
from inductor_passes.schedule.problem import INPUT, Kind, Lane, Problem, Storage, Task

#: Inputs that belong to the caller of a backward: parameters and inputs saved by reference, and incoming gradients.
CALLERS = ("primals_", "tangents_", "bwd_seed")
#: In the meta of an input of a backward: what forward saved is a view of one of its own inputs, so the caller holds it.
OF_CALLER = "inductor_passes_of_caller"


class NoHintError(ValueError):
    """A symbolic size has no hint, so durations and memory are unknown."""


@dataclass(slots=True, eq=False)
class Block:
    """Memory as a front end describes it.

    Attributes:
        name: for reports.
        size_bytes: blocks of 0 bytes are left out.
        producer: the task that allocates it, or ``INPUT``.
        users: tasks that need it; the producer may be among them.
        pinned: nobody frees it.
        span: in a task of several nodes the places of the first and the last of them that use the block; None for a
            producer that is one node, or none.
        workspace: whether the backend takes it for the message that the producer starts.
    """

    name: str
    size_bytes: int
    producer: int
    users: set[int] = field(default_factory=set)
    pinned: bool = False
    span: tuple[int, int] | None = None
    workspace: bool = False

    @property
    def readers(self) -> tuple[int, ...]:
        """Tasks other than the producer that need it."""
        return tuple(sorted(self.users - {self.producer}))

    @property
    def inside(self) -> bool:
        """Whether it lives and dies between the nodes of one task."""
        return self.span is not None and not self.pinned and self.producer != INPUT and not self.readers


class Builder:
    """Puts a problem together.

    Args:
        estimator: own durations of FX nodes, before those of the profile.
        hold_unknown: whether collectives of a group that is not known keep their order. Not needed where dependencies
            say so already.

    Attributes:
        tasks, waits_of: what has been entered so far, and per start its waits.
    """

    def __init__(
        self,
        profile: CostProfile,
        estimator: Callable[[torch.fx.Node], float | None] | None,
        *,
        name: str,
        hold_unknown: bool,
    ) -> None:
        self._profile = profile
        self._estimator = estimator
        self._name = name
        self._hold_unknown = hold_unknown
        self._preds: list[set[int]] = []
        self._lanes: dict[str, int] = {}
        self._lane_list: list[Lane] = []
        self._storages: list[Storage] = []
        self.tasks: list[Task] = []
        self.waits_of: dict[int, list[int]] = {}

    def compute(
        self,
        name: str,
        duration_ns: int,
        preds: Collection[int],
        *,
        label: str = "",
        source: str = "",
        fence: bool = False,
    ) -> int:
        """Enter a task on the compute lane; its number."""
        return self._add(Task(name, Kind.COMPUTE, duration_ns, label=label, source=source, fence=fence), preds)

    def start(
        self, name: str, collective: Collective, preds: Collection[int], *, copied: bool = False, queue: str = ""
    ) -> int:
        """Enter a collective or a transfer that does not block; its number.

        Args:
            copied: the message is cast or packed as part of the start.
            queue: of a transfer, see ``ir.transfers``: it has a lane of its own, on the group's link.

        Raises:
            NoHintError: its size is not known.
        """
        input_bytes, output_bytes = collective.input_bytes, collective.output_bytes
        if input_bytes is None or output_bytes is None:
            raise NoHintError(f"{collective.start.name} has a symbolic size without a hint")
        arguments = (collective.kind, input_bytes, output_bytes, collective.group.ranks or (0,))
        own = self._estimator(collective.start) if self._estimator is not None else None
        copy_ns = self._profile.compute_ns(0, 2 * input_bytes, "float32", 1) if copied else 0
        task = Task(
            name,
            Kind.START,
            self._profile.communication_ns(*arguments) if own is None else max(0, round(own)),
            lane=self._lane(collective.group, queue),
            issue_ns=self._profile.issue_ns(*arguments) + copy_ns,
            size_bytes=max(input_bytes, output_bytes),
            label=collective.label,
            source=ops.source_line(collective.start),
            slowdown_percent=self._profile.slowdown_percent(collective.kind, collective.group.ranks or (0,)),
        )
        return self._add(task, preds)

    def wait(self, name: str, start: int, preds: Collection[int], *, source: str = "") -> int:
        """Enter a wait for the collective ``start``; its number. Only the first wait of a collective has a label."""
        begun = self.tasks[start]
        waits = self.waits_of.setdefault(start, [])
        label = "" if waits else f"W{begun.label}"
        number = self._add(Task(name, Kind.WAIT, lane=begun.lane, start=start, label=label, source=source), preds)
        waits.append(number)
        return number

    def require(self, before: int, after: int) -> None:
        """Keep two tasks in their order."""
        self._preds[after].add(before)

    def keep_sends_early(self, sends: Collection[int]) -> None:
        """Let no compute move in front of a message that it is behind: another rank may need it to go on.

        So each message is issued behind no more than before, and no rank gets one later than it did.
        """
        last: int | None = None
        for number, task in enumerate(self.tasks):
            if number in sends:
                last = number
            elif last is not None and task.kind is Kind.COMPUTE:
                self.require(last, number)

    def in_flight(self, task: int) -> tuple[int, ...]:
        """The tasks that hold what ``task`` reads and writes: itself and, for a start, its waits."""
        return (task, *self.waits_of.get(task, ()))

    def add_memory(self, blocks: Sequence[Block]) -> None:
        """Enter blocks of memory."""
        self._storages += self.storages(blocks)

    def storages(self, blocks: Sequence[Block]) -> list[Storage]:
        """The storages of blocks of memory.

        What lives and dies between the nodes of one task is one storage, of what the task takes at its peak.
        """
        found = [
            Storage(b.size_bytes, b.producer, b.readers, b.pinned, b.name, b.workspace)
            for b in blocks
            if b.size_bytes and not b.inside
        ]
        by_task: dict[int, list[Block]] = {}
        for block in blocks:
            if block.span is not None:
                by_task.setdefault(block.producer, []).append(block)
        for task in dict.fromkeys(b.producer for b in blocks if b.inside):
            if size := _working_bytes(by_task[task]):
                found.append(Storage(size, task, (), False, f"{self.tasks[task].name}.working"))
        return found

    def problem(self) -> Problem:
        """Everything that was entered."""
        return Problem(
            tasks=tuple(self.tasks),
            preds=tuple(tuple(sorted(p)) for p in self._preds),
            lanes=tuple(self._lane_list),
            storages=tuple(self._storages),
            name=self._name,
        )

    def _add(self, task: Task, preds: Iterable[int]) -> int:
        self.tasks.append(task)
        self._preds.append(set(preds))
        return len(self.tasks) - 1

    def _lane(self, group: Group, queue: str) -> int:
        name = f"{group.name} {queue}" if queue else group.name
        if name not in self._lanes:
            self._lanes[name] = len(self._lane_list)
            known = bool(group.ranks)
            link = self._profile.link(group.ranks) if known else f"unknown:{group.name}"
            self._lane_list.append(Lane(name, link, fixed_order=self._hold_unknown and not known))
        return self._lanes[name]


def _working_bytes(blocks: Sequence[Block]) -> int:
    """What a task of several nodes takes at its peak beyond what outlives it, from all that it allocates."""
    spans = [(b, b.span) for b in blocks if b.span is not None]
    change = [0] * (max(last for _, (_, last) in spans) + 2)
    for block, (first, last) in spans:
        change[first] += block.size_bytes
        if block.inside:
            change[last + 1] -= block.size_bytes
    kept = sum(block.size_bytes for block in blocks if not block.inside)
    return max(0, max(itertools.accumulate(change)) - kept)
