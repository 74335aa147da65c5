"""A step, the activations that its backward could compute again, and both problems when some of them are.

Everything is derived from the two problems of the step as it came, without a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.merge import places
from inductor_passes.schedule.problem import INPUT, Kind, Problem, ProblemError, Storage, Task

#: Added to the names of tasks that run again in backward.
AGAIN = ".again"


@dataclass(frozen=True)
class Candidate:
    """A block of memory that forward saves and backward could compute again.

    Attributes:
        name: of the saved value.
        size_bytes: what it holds from forward to its last reader in backward.
        chain: forward's tasks that would run again, in order; where they read another saved value they end. Gathers of
            parameters that backward does not gather otherwise are among them, starts and waits.
        forward_storage: index of the block among forward's storages.
        backward_storages: indices of backward's inputs that are the block.
        nodes: names of the FX nodes of ``chain``.
        source: the user's ``file:line``, or "".
        readers: backward's tasks that read the value. Its memory may be used elsewhere: where kernels compute these.
            Empty: those that use the memory.
    """

    name: str
    size_bytes: int
    chain: tuple[int, ...]
    forward_storage: int
    backward_storages: tuple[int, ...]
    nodes: tuple[str, ...] = ()
    source: str = ""
    readers: tuple[int, ...] = ()

    @property
    def maker(self) -> int:
        """The task of forward that makes the value: everything else in its chain comes before. Its memory may be
        allocated earlier, by the first part of a concatenation."""
        return max(self.chain)


@dataclass(frozen=True)
class Step:
    """Both problems of a step as Inductor would separate it, and what backward could compute again.

    Attributes:
        forward, backward: everything that was saved is saved, every parameter is gathered again.
        candidates: in the order in which forward makes them.
        needs: forward's task -> tasks that are in backward already and that it needs there (gathers).
        reads: forward's task -> storages that are in backward already and that it reads there.
        callers: forward's inputs that backward does not have; chains that read them make it hold them.
        latent: backward's storage -> bytes that it takes once a chain reads it too: a value that kernels compute where
            it is read, as long as nobody else reads it.
    """

    forward: Problem
    backward: Problem
    candidates: tuple[Candidate, ...]
    needs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    reads: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    callers: tuple[int, ...] = ()
    latent: Mapping[int, int] = field(default_factory=dict)

    def added_ns(self, again: Collection[int]) -> tuple[int, int]:
        """What candidates add to backward when they are computed again: time of compute, and of communication."""
        tasks = [self.forward.tasks[t] for t in {t for i in again for t in self.candidates[i].chain}]
        computed = sum(t.duration_ns for t in tasks if t.kind is Kind.COMPUTE)
        return computed, sum(t.duration_ns for t in tasks) - computed


def derived(step: Step, again: Sequence[int]) -> tuple[Problem, Problem] | None:
    """Forward and backward when the candidates ``again`` are not saved; None where no order of backward can do it.

    Chains run directly before their first reader, as torch places them, and what they need is brought forward.
    """
    chosen = [step.candidates[i] for i in sorted(again)]
    if not chosen:
        return step.forward, step.backward
    gone = {c.forward_storage for c in chosen}
    storages = [
        Storage(s.size_bytes, s.producer, s.readers, False, s.name, s.workspace) if i in gone else s
        for i, s in enumerate(step.forward.storages)
    ]
    taken = set(again)
    others = {c.maker for i, c in enumerate(step.candidates) if i not in taken}
    forward = _without_unread(dataclasses.replace(step.forward, storages=tuple(storages)), chosen, others)
    backward = _Backward(step, chosen)
    order = backward.order()
    return None if order is None else (forward, backward.problem(order))


def _without_unread(forward: Problem, chosen: Sequence[Candidate], others: Collection[int]) -> Problem:
    """Forward without what it computed only to save it: such tasks keep their numbers, and take no time or memory.

    Args:
        others: tasks that make what is saved all the same.
    """
    needed = {s.producer for s in forward.storages if s.pinned}.union(others)
    needed.update(i for i, task in enumerate(forward.tasks) if task.kind is not Kind.COMPUTE or task.fence)
    readers: list[list[int]] = [[] for _ in forward.tasks]
    for i, before in enumerate(forward.edges()):
        for p in before:
            readers[p].append(i)
    unread: set[int] = set()
    for i in sorted({t for c in chosen for t in c.chain}, reverse=True):
        if i not in needed and unread.issuperset(readers[i]):
            unread.add(i)
    if not unread:
        return forward
    storages = []
    for s in forward.storages:
        gone = s.producer in unread
        if gone or not unread.isdisjoint(s.readers):
            left = tuple([r for r in s.readers if r not in unread])
            s = Storage(0 if gone else s.size_bytes, s.producer, left, s.pinned, s.name, s.workspace)
        storages.append(s)
    return dataclasses.replace(
        forward,
        tasks=tuple(
            [dataclasses.replace(t, duration_ns=0) if i in unread else t for i, t in enumerate(forward.tasks)]
        ),
        storages=tuple(storages),
    )


class _Backward:
    """Backward's tasks and, with numbers above them, forward's tasks that run again."""

    def __init__(self, step: Step, chosen: Sequence[Candidate]) -> None:
        self.step = step
        self.first = len(step.backward)
        self.again = sorted({t for c in chosen for t in c.chain})
        self.number = {t: self.first + k for k, t in enumerate(self.again)}
        self.producer = {b: self._allocated_by(c) for c in chosen for b in c.backward_storages}
        self.maker = {b: self.number[c.maker] for c in chosen for b in c.backward_storages}
        # Where nobody noted that several inputs are one block they count for themselves. Made again they are one.
        self.whole = {b: c.backward_storages[0] for c in chosen for b in c.backward_storages[1:]}
        self.twin = {c.forward_storage for c in chosen}
        self.lanes = list(step.backward.lanes)
        known = {lane.name: i for i, lane in enumerate(self.lanes)}
        #: Forward's lane -> backward's lane of its name.
        self.lane: dict[int, int] = {}
        for i, lane in enumerate(step.forward.lanes):
            if lane.name not in known:
                known[lane.name] = len(self.lanes)
                self.lanes.append(lane)
            self.lane[i] = known[lane.name]
        self.preds = step.backward.edges() + [self._preds(t) for t in self.again]
        for c in chosen:
            users = [r for b in c.backward_storages for r in step.backward.storages[b].readers]
            for reader in dict.fromkeys((*c.readers, *users)):
                self.preds[reader].append(self.number[c.maker])
        self.readers: dict[int, list[int]] = {}
        for t in self.again:
            for b in step.reads.get(t, ()):
                self.readers.setdefault(b, []).append(self.number[t])
                if b in self.maker and self.maker[b] != self.number[t]:
                    self.preds[self.number[t]].append(self.maker[b])

    def _allocated_by(self, candidate: Candidate) -> int:
        return self.number[self.step.forward.storages[candidate.forward_storage].producer]

    def _preds(self, task: int) -> list[int]:
        forward = self.step.forward
        before = {self.number[p] for p in forward.preds[task] if p in self.number}
        if (start := forward.tasks[task].start) >= 0:
            before.add(self.number[start])
        return sorted({*before, *self.step.needs.get(task, ())})

    def order(self) -> list[int] | None:
        """All tasks in backward's order, each chain as late as its first reader allows; None for a circle."""
        done, result = [0] * len(self.preds), []
        for root in range(self.first):
            stack = [root]
            while stack:
                one = stack[-1]
                if done[one] == 2:
                    stack.pop()
                    continue
                waiting = [p for p in self.preds[one] if done[p] != 2]
                if not waiting:
                    done[one] = 2
                    result.append(one)
                    stack.pop()
                    continue
                if done[one] == 1 and any(done[p] == 1 for p in waiting):
                    return None
                done[one] = 1
                # The last one pushed comes first.
                stack.extend(sorted(set(waiting), reverse=True))
        return result if len(result) == len(self.preds) else None

    def problem(self, order: Sequence[int]) -> Problem:
        """The problem with its tasks renumbered in ``order``."""
        backward, forward = self.step.backward, self.step.forward
        # One more, because ``INPUT`` is the last index.
        place = [INPUT] * (len(order) + 1)
        for k, one in enumerate(order):
            place[one] = k
        tasks = []
        for one in order:
            if one >= self.first:
                tasks.append(self._run_again(forward.tasks[self.again[one - self.first]], place))
            else:
                task = backward.tasks[one]
                tasks.append(task if task.start < 0 else dataclasses.replace(task, start=place[task.start]))
        preds = [*backward.preds, *self.preds[self.first :]]
        return dataclasses.replace(
            backward,
            tasks=tuple(tasks),
            preds=tuple([places(place, preds[one]) for one in order]),
            lanes=tuple(self.lanes),
            storages=(*self._moved(place), *self._inside(place)),
        )

    def _run_again(self, task: Task, place: Sequence[int]) -> Task:
        """A task of forward as it is in backward."""
        if task.kind is Kind.COMPUTE:
            return Task(task.name + AGAIN, task.kind, task.duration_ns, label=task.label, source=task.source)
        start = place[self.number[task.start]] if task.start >= 0 else -1
        return dataclasses.replace(task, name=task.name + AGAIN, lane=self.lane[task.lane], start=start, fence=False)

    def _moved(self, place: Sequence[int]) -> list[Storage]:
        """Backward's own memory, with its tasks renumbered."""
        of_whole: dict[int, list[int]] = {}
        for view, whole in self.whole.items():
            of_whole.setdefault(whole, []).append(view)
        storages = self.step.backward.storages
        result = []
        for b, s in enumerate(storages):
            producer = self.producer.get(b, s.producer)
            readers: Collection[int] = s.readers
            if b in self.readers or b in of_whole:
                blocks = [b, *of_whole.get(b, ())]
                everyone = {r for one in blocks for r in (*storages[one].readers, *self.readers.get(one, ()))}
                readers = everyone - {producer}
            size_bytes = 0 if b in self.whole else s.size_bytes
            if b in self.readers:
                size_bytes = self.step.latent.get(b, size_bytes)
            moved = place[producer], places(place, readers)
            result.append(Storage(size_bytes, *moved, s.pinned, s.name, s.workspace))
        return result

    def _inside(self, place: Sequence[int]) -> list[Storage]:
        """Memory that only the chains need."""
        found = []
        for i in self.step.callers:
            s = self.step.forward.storages[i]
            readers = tuple(sorted(place[self.number[r]] for r in s.readers if r in self.number))
            if readers:
                found.append(Storage(s.size_bytes, INPUT, readers, True, s.name))
        for i, s in enumerate(self.step.forward.storages):
            if s.producer not in self.number or i in self.twin:
                continue
            made = place[self.number[s.producer]]
            # Who comes before reads what was saved of it: a value that may share this memory, as dropout's result may.
            readers = tuple(sorted(p for r in s.readers if r in self.number and (p := place[self.number[r]]) > made))
            found.append(Storage(s.size_bytes, made, readers, False, s.name + AGAIN, s.workspace))
        return found


def peak_of(step: Step) -> int:
    """The peak of the step as it came: what a budget is relative to."""
    return max(peak_bytes(step.forward), peak_bytes(step.backward))


def check(step: Step) -> None:
    """Raise :class:`ProblemError` unless the numbers in ``step`` are numbers of its tasks and storages."""
    for one in step.candidates:
        producer = step.forward.storages[one.forward_storage].producer
        if producer not in one.chain:
            raise ProblemError(f"{step.forward.name}: the chain of {one.name} does not make it")
        if any((start := step.forward.tasks[t].start) >= 0 and start not in one.chain for t in one.chain):
            raise ProblemError(f"{step.forward.name}: the chain of {one.name} waits for what it does not send")
        for b in one.backward_storages:
            if step.backward.storages[b].producer != INPUT:
                raise ProblemError(f"{step.backward.name}: {step.backward.storages[b].name} is not saved")
