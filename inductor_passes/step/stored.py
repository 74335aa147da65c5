"""A whole step as a file: both problems, what backward could compute again, and what could be kept.

Everything that the choice of ``recompute`` reads is plain data, so it can be made again for other links, without the
model: with scaled durations, or with the prices of another cost profile.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inductor_passes.cost.compute import ComputeCosts, Work
from inductor_passes.cost.flops import bodies_of
from inductor_passes.cost.profile import CostProfile
from inductor_passes.cost.specs import CPU
from inductor_passes.ir.view import GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.problems.fx import FxProblem
from inductor_passes.records.convert import check_version, convert, plain
from inductor_passes.records.json_text import RecordError
from inductor_passes.records.limits import Count
from inductor_passes.schedule.partition import Costs
from inductor_passes.schedule.problem import INPUT, Kind, Problem, Storage
from inductor_passes.step import derived, merging
from inductor_passes.step.derived import Candidate, Step
from inductor_passes.step.keep import Gathered
from inductor_passes.step.merging import Mergeable, Merging

SCHEMA_VERSION = 1
#: In the file's object: what tells it from a problem of one graph.
KEY = "forward"
#: Kinds of which other numbers of ranks leave one side of the message as it is: the gathered one, the whole gradient.
_SHARDED = (CollectiveKind.ALL_GATHER.value, CollectiveKind.REDUCE_SCATTER.value)


@dataclass(frozen=True)
class Message:
    """A collective that is a task of forward or backward: what a cost profile prices.

    Attributes:
        name: of its start.
        kind: as ``CollectiveKind`` has it.
        input_bytes, output_bytes: of a rank.
        ranks: the group's global ranks.
    """

    name: str
    kind: str
    input_bytes: Count
    output_bytes: Count
    ranks: tuple[Count, ...]


@dataclass(frozen=True)
class Computed:
    """A compute task of forward or backward: its name, and what a cost profile prices it by."""

    name: str
    work: Work


@dataclass(frozen=True)
class StoredStep:
    """A step, the gathered parameters that could be kept, best first, and what takes time in it, by graph.

    Attributes:
        messages: its collectives.
        computed: its compute; tasks that are not there take on any device as long as they did.
        mergeable: which of its collectives may travel together.
    """

    step: Step
    gathered: tuple[Gathered, ...] = ()
    messages: tuple[tuple[Message, ...], tuple[Message, ...]] = ((), ())
    computed: tuple[tuple[Computed, ...], tuple[Computed, ...]] = ((), ())
    mergeable: tuple[Mergeable, Mergeable] = (Mergeable(), Mergeable())

    @property
    def merging(self) -> Merging:
        """Buckets that the step could have."""
        return Merging(self.step.forward, self.step.backward, self.mergeable)

    def to_json(self) -> dict[str, Any]:
        """Plain data with ``schema_version``."""
        step = self.step
        record = _Record(
            candidates=list(step.candidates),
            needs=sorted(step.needs.items()),
            reads=sorted(step.reads.items()),
            callers=list(step.callers),
            latent=sorted(step.latent.items()),
            gathered=list(self.gathered),
            messages=[list(ones) for ones in self.messages],
            computed=[list(ones) for ones in self.computed],
            mergeable=list(self.mergeable),
        )
        graphs = {"forward": step.forward.to_json(), "backward": step.backward.to_json()}
        return {"schema_version": SCHEMA_VERSION, **graphs, **plain(record)}

    @staticmethod
    def from_json(data: object) -> StoredStep:
        """Inverse of :meth:`to_json`; unknown keys are ignored.

        Raises:
            RecordError: another schema version, a value of another type, or a number of a task or of a storage that
                there is none of.
        """
        top = check_version(data, SCHEMA_VERSION, "step file")
        forward, backward = (Problem.from_json(top.get(key)) for key in ("forward", "backward"))
        record = convert(top, _Record, "a step")
        _check(record, forward, backward)
        linked = dict(record.needs), dict(record.reads), tuple(record.callers), dict(record.latent)
        step = Step(forward, backward, tuple(record.candidates), *linked)
        derived.check(step)
        messages, computed = (tuple(map(tuple, both)) for both in (record.messages, record.computed))
        mergeable = record.mergeable[0], record.mergeable[1]
        return StoredStep(step, tuple(record.gathered), messages, computed, mergeable)  # type: ignore[arg-type]

    def changed(self, change: Callable[[Problem], Problem]) -> StoredStep:
        """The same step with other durations; ``change`` may not touch anything else."""
        forward, backward = change(self.step.forward), change(self.step.backward)
        step = dataclasses.replace(self.step, forward=forward, backward=backward)
        mine = merging.rescaled(self.mergeable[0], self.step.forward, forward)
        theirs = merging.rescaled(self.mergeable[1], self.step.backward, backward)
        gathered = _ranked(self.gathered, forward)
        return dataclasses.replace(self, step=step, gathered=gathered, mergeable=(mine, theirs))

    def priced(self, profile: CostProfile, ranks: int | None = None) -> StoredStep:
        """The same step on the links and the device of a cost profile.

        Args:
            ranks: that many ranks share parameters and gradients; None: as many as did.

        Raises:
            ValueError: another number of ranks would change more than the shards of parameters and gradients.
        """
        if ranks is not None:
            self._check_sharded()
        graphs = zip((self.step.forward, self.step.backward), self.messages, self.computed)
        both = [_priced(problem, messages, computed, profile, ranks) for problem, messages, computed in graphs]
        step = dataclasses.replace(self.step, forward=both[0], backward=both[1])
        parts = [_travelling(part, ones, profile, ranks) for part, ones in zip(self.mergeable, self.messages)]
        gathered = _ranked(self.gathered, both[0])
        return dataclasses.replace(self, step=step, gathered=gathered, mergeable=(parts[0], parts[1]))

    def _check_sharded(self) -> None:
        everyone = [m for ones in self.messages for m in ones]
        others = sorted({m.kind for m in everyone} - set(_SHARDED))
        groups = {m.ranks for m in everyone}
        if others or len(groups) > 1:
            found = f"it has {', '.join(others)}" if others else f"it has groups of {len(groups)} kinds"
            raise ValueError(
                "another number of ranks is known for steps with all_gather and reduce_scatter over one group, "
                f"{found}; write the step with that many ranks"
            )


@dataclass(frozen=True)
class _Record:
    """What a file has beside both problems."""

    candidates: list[Candidate]
    needs: list[tuple[Count, tuple[Count, ...]]]
    reads: list[tuple[Count, tuple[Count, ...]]]
    callers: list[Count]
    latent: list[tuple[Count, Count]] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)
    messages: list[list[Message]] = field(default_factory=lambda: [[], []])
    computed: list[list[Computed]] = field(default_factory=lambda: [[], []])
    mergeable: list[Mergeable] = field(default_factory=lambda: [Mergeable(), Mergeable()])


def messages_of(view: GraphView) -> tuple[Message, ...]:
    """The collectives of a graph whose sizes and ranks are known."""
    return tuple(
        Message(c.start.name, c.kind.value, c.input_bytes, c.output_bytes, tuple(c.group.ranks))
        for c in view.collectives
        if c.input_bytes is not None and c.output_bytes is not None and c.group.ranks
    )


def computed_in(view: GraphView, fx: FxProblem, profile: CostProfile) -> tuple[Computed, ...]:
    """What the compute tasks of a graph that take time do, as far as it is known: not what runs graphs of its own."""
    costs = ComputeCosts(view, profile)
    nodes = [(task, m[0]) for task, m in zip(fx.problem.tasks, fx.members) if m and not bodies_of(m[0])]
    works = [(node.name, costs.work(node)) for task, node in nodes if task.kind is Kind.COMPUTE and task.duration_ns]
    return tuple(Computed(name, work) for name, work in works if work is not None)


def _check(record: _Record, forward: Problem, backward: Problem) -> None:
    """Refuse numbers of tasks and storages that there are none of."""
    tasks, storages = len(forward), len(forward.storages)
    back_tasks, back_storages = len(backward), len(backward.storages)

    def within(what: str, numbers: Iterable[int], count: int) -> None:
        for number in numbers:
            if not 0 <= number < count:
                raise RecordError(f"{what} names {number}; expected 0..{count - 1}")

    for one in record.candidates:
        within(f"the chain of candidate {one.name}", one.chain, tasks)
        within(f"candidate {one.name}", [one.forward_storage], storages)
        within(f"candidate {one.name} in backward", one.backward_storages, back_storages)
        within(f"candidate {one.name} in backward", one.readers, back_tasks)
        if one.size_bytes < 0 or not one.backward_storages or forward.storages[one.forward_storage].producer == INPUT:
            raise RecordError(f"candidate {one.name} is not made by forward and saved for backward")
    for what, rows, count in (("needs", record.needs, back_tasks), ("reads", record.reads, back_storages)):
        within(what, (task for task, _ in rows), tasks)
        within(what, itertools.chain.from_iterable(theirs for _, theirs in rows), count)
    within("callers", record.callers, storages)
    within("latent", (storage for storage, _ in record.latent), back_storages)
    for what, count in (
        ("messages", len(record.messages)),
        ("computed", len(record.computed)),
        ("mergeable", len(record.mergeable)),
    ):
        if count != 2:
            raise RecordError(f"{what} has {count} entries; expected one for forward and one for backward")
    for part in record.mergeable:
        if any(min(one.sent_bytes, one.received_bytes) < 0 for one in part.members):
            raise RecordError("mergeable has a collective of negative size")
        if any(not 0 <= n < float("inf") for line in part.costs.values() for n in _numbers(line)):
            raise RecordError("mergeable has a cost that is negative or not finite")
    if any(g.held_bytes < 1 or g.link_ns < 0 for g in record.gathered):
        raise RecordError("gathered has a parameter without bytes, or of negative time")
    if any(not m.ranks for ones in record.messages for m in ones):
        raise RecordError("messages has one over no ranks; expected some")
    if any(m.kind not in {kind.value for kind in CollectiveKind} for ones in record.messages for m in ones):
        kinds = ", ".join(kind.value for kind in CollectiveKind)
        raise RecordError(f"messages has one of an unknown kind; expected one of {kinds}")


def _numbers(line: Costs) -> tuple[float, ...]:
    return (
        *(line.alpha_ns, line.beta_ns_per_byte, line.issue_ns),
        *(line.launch_ns, line.pack_ns_per_byte, line.unpack_ns_per_byte),
    )


def _travelling(part: Mergeable, messages: Sequence[Message], profile: CostProfile, ranks: int | None) -> Mergeable:
    """What may travel together, at its sizes and prices elsewhere."""
    known = {m.name: m for m in messages}
    members, by_key = [], dict[str, list[tuple[Message, int, int]]]()
    for one in part.members:
        m = known.get(one.name)
        if m is None:
            continue
        sizes = _sizes(m, ranks)
        members.append(dataclasses.replace(one, sent_bytes=sizes[0], received_bytes=sizes[1]))
        by_key.setdefault(one.key, []).append((m, *sizes))
    costs = {}
    for key, line in part.costs.items():
        if key not in by_key:
            continue
        m, *_ = by_key[key][0]
        group = m.ranks if ranks is None else tuple(range(ranks))
        sent, received = sum(one[1] for one in by_key[key]), sum(one[2] for one in by_key[key])
        latency = profile.communication_ns(m.kind, 0, 0, group)
        kernel = profile.compute_ns(0, 0, "uint8", 1)
        per_byte = (profile.compute_ns(0, 2 * sent, "uint8", 1) - kernel) / max(1, sent)
        costs[key] = dataclasses.replace(
            line,
            alpha_ns=latency,
            beta_ns_per_byte=(profile.communication_ns(m.kind, sent, received, group) - latency)
            / max(1, sent, received),
            launch_ns=kernel,
            pack_ns_per_byte=per_byte,
            unpack_ns_per_byte=per_byte,
        )
    return Mergeable(tuple(members), costs)


def _sizes(m: Message, ranks: int | None) -> tuple[int, int]:
    """What a message sends and receives where ``ranks`` share it."""
    sizes = [m.input_bytes, m.output_bytes]
    if ranks is not None:
        side = 0 if m.kind == CollectiveKind.ALL_GATHER.value else 1
        sizes[side] = -(-sizes[1 - side] // ranks)
    return sizes[0], sizes[1]


def _ranked(gathered: Sequence[Gathered], forward: Problem) -> tuple[Gathered, ...]:
    """Parameters that could be kept with the link time that they take now, best first."""
    taken = {t.name: t.duration_ns for t in forward.tasks if t.kind is Kind.START}
    now = [dataclasses.replace(g, link_ns=taken.get(g.start, g.link_ns)) for g in gathered]
    return tuple(sorted(now, key=lambda g: g.rank))


def _priced(
    problem: Problem,
    messages: Sequence[Message],
    computed: Sequence[Computed],
    profile: CostProfile,
    ranks: int | None,
) -> Problem:
    """A problem with the prices of its tasks, and with ``ranks`` the shards of its collectives, elsewhere."""
    known = {m.name: m for m in messages}
    works = {one.name: one.work for one in computed}
    tasks, lanes, shards = list(problem.tasks), list(problem.lanes), dict[int, tuple[int, int]]()
    for i, task in enumerate(problem.tasks):
        if task.kind is Kind.COMPUTE and task.name in works:
            tasks[i] = dataclasses.replace(task, duration_ns=works[task.name].duration_ns(profile))
            continue
        m = known.get(task.name)
        if task.kind is not Kind.START or m is None:
            continue
        group = m.ranks if ranks is None else tuple(range(ranks))
        sizes = _sizes(m, ranks)
        if ranks is not None:
            side = 0 if m.kind == CollectiveKind.ALL_GATHER.value else 1
            shards[i] = (m.input_bytes, m.output_bytes)[side], sizes[side]
        # What the host takes to issue it stays: it is the host on which the step was captured.
        link_ns = profile.communication_ns(m.kind, sizes[0], sizes[1], group)
        slowdown = profile.slowdown_percent(m.kind, group)
        tasks[i] = dataclasses.replace(task, duration_ns=link_ns, slowdown_percent=slowdown)
        lanes[task.lane] = dataclasses.replace(lanes[task.lane], link=profile.link(group))
    storages = [_resized(problem, s, shards) for s in problem.storages]
    if profile.spec is not CPU:
        # Gloo copies messages, and moves what is on CPUs. Storages keep their numbers.
        storages = [dataclasses.replace(s, size_bytes=0) if s.workspace else s for s in storages]
    return dataclasses.replace(problem, tasks=tuple(tasks), lanes=tuple(lanes), storages=tuple(storages))


def _resized(problem: Problem, storage: Storage, shards: dict[int, tuple[int, int]]) -> Storage:
    """A storage that is a shard of a message, at its size elsewhere."""
    touching = [storage.producer, *storage.readers]
    for i in touching:
        was, now = shards.get(i, (-1, -1))
        if storage.size_bytes == was:
            return dataclasses.replace(storage, size_bytes=now)
    return storage
