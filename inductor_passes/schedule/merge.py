"""What a problem becomes when collectives travel together.

Members of a bucket give way to one start and one wait. A *packed* bucket copies its members' inputs into a message
before the start, and each member's output out of the received message after the wait. The copies are tasks of the
compute lane (packing is part of the start where it only prepares what is there from the beginning), and the message
takes memory of its own, but the members' inputs may die as soon as they are packed. Without copies the members are sent
from where they lie.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from inductor_passes.schedule.problem import INPUT, Kind, Problem, ProblemError, Storage, Task


@dataclass(frozen=True, slots=True)
class Bucket:
    """Collectives that travel together, and what that costs.

    Attributes:
        starts: their ``START`` tasks, two or more, on one lane.
        duration_ns: on the lane. ``issue_ns``: on the compute lane.
        pack_ns: copying the inputs into the message on the compute lane; None: no copy, no message.
        unpack_ns: per member, copying its output out of the received message; None: the outputs are received in place.
        prepared: packing is part of the start.
        held: what the start reads and what it makes for itself is held until the wait.
        sent_bytes, received_bytes: of the messages, where there are copies.
        shared_output: without ``unpack_ns``: the outputs are views of one allocation and die together.
    """

    starts: tuple[int, ...]
    duration_ns: int
    issue_ns: int = 0
    pack_ns: int | None = None
    unpack_ns: tuple[int, ...] | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    shared_output: bool = False
    prepared: bool = False
    held: bool = False


@dataclass(slots=True)
class _Merging:
    """The new tasks, appended to the old ones under fresh numbers, and who takes over what from a merged task.

    ``entry``: who inherits its predecessors; ``exit``: whom its successors follow; ``chains``: tasks of each bucket in
    sequence up to its wait; ``unpacks``: start of a member -> the task that copies its output. Old numbers map to
    themselves unless merged; merged tasks are None in ``tasks``. ``units``: what stands together, in sequence, and
    the old place where it stands unless something needs it earlier.
    """

    tasks: list[Task | None]
    units: list[tuple[int, list[int]]]
    entry: list[int]
    exit: list[int]
    waits: dict[int, list[int]]
    chains: list[list[int]] = field(default_factory=list)
    unpacks: dict[int, int] = field(default_factory=dict)


def merge(
    problem: Problem, buckets: Sequence[Bucket], durations_ns: Mapping[str, int] = MappingProxyType({})
) -> Problem:
    """``problem`` with each bucket's starts and waits replaced. O(tasks + edges log edges).

    The input order of the result is the one that merging makes of a graph (``rewriting.order``): that of ``problem``,
    but everything comes after what it needs. A merged start comes where its last member stood, a wait where the last
    member's wait stood, each earlier where something asks for it. Plans depend on the input order, so a forecast has
    to have the graph's.

    Args:
        durations_ns: of compute tasks, by name, that take another time beside the buckets.

    Raises:
        ProblemError: a bucket has fewer than two members, members on different lanes, a fence between members, a
            member in two buckets, or a dependency path between members (through other buckets too).
    """
    n = len(problem)
    waits: dict[int, list[int]] = {}
    for i, task in enumerate(problem.tasks):
        if task.kind is Kind.WAIT:
            waits.setdefault(task.start, []).append(i)
    _check(problem, buckets, waits)
    m = _Merging([*changed(problem.tasks, durations_ns)], [], list(range(n)), list(range(n)), waits)
    for bucket in buckets:
        _append(problem, bucket, m)
    m.units += [(i, [i]) for i in range(n) if m.tasks[i] is not None]
    bucket_of = {s: b for b, bucket in enumerate(buckets) for s in bucket.starts}
    # With repetitions: sets of so few take longer.
    preds: list[list[int]] = [[] for _ in m.tasks]
    order_edges: list[tuple[int, int]] = []
    for chain in m.chains:
        for before, after in itertools.pairwise(chain):
            preds[after].append(before)
    for bucket, chain in zip(buckets, m.chains):
        for start in bucket.starts:
            if start in m.unpacks:
                preds[m.unpacks[start]].append(chain[-1])

    def together(before: int, after: int) -> bool:
        """Starts of one bucket. What one needs of another comes from its wait: between starts is only an order."""
        return bucket_of.get(before, -1) == bucket_of.get(after, -2)

    for i, expanded in enumerate(problem.expanded):
        for p in problem.preds[i]:
            # Inside a bucket the chain says it all.
            if (problem.tasks[i].start != p or m.tasks[i] is not None) and not together(p, i):
                preds[m.entry[i]].append(m.exit[p])
        for p in expanded:
            if problem.tasks[i].start != p and not together(p, i):
                order_edges.append((m.exit[p], m.entry[i]))
    storages = _storages(problem, buckets, m)
    return _renumber(problem, m, _order(problem, m, preds, order_edges, storages), preds, storages)


def changed(tasks: Sequence[Task], durations_ns: Mapping[str, int]) -> Iterator[Task]:
    """The tasks, compute tasks of those names with those durations."""
    for task in tasks:
        own = durations_ns.get(task.name)
        if own is None or own == task.duration_ns or task.kind is not Kind.COMPUTE:
            yield task
        else:
            yield dataclasses.replace(task, duration_ns=own)


def _check(problem: Problem, buckets: Sequence[Bucket], waits: dict[int, list[int]]) -> None:
    fences = [i for i, t in enumerate(problem.tasks) if t.fence]
    seen: set[int] = set()
    for bucket in buckets:
        names = ", ".join(problem.tasks[s].name for s in bucket.starts)
        if len(bucket.starts) < 2:
            raise ProblemError(f"{problem.name}: a bucket needs two members or more; got [{names}]")
        if any(problem.tasks[s].kind is not Kind.START for s in bucket.starts):
            raise ProblemError(f"{problem.name}: bucket [{names}] has a member that is not a START")
        if len({problem.tasks[s].lane for s in bucket.starts}) > 1:
            raise ProblemError(f"{problem.name}: bucket [{names}] has members on different lanes")
        if seen & set(bucket.starts) or len(set(bucket.starts)) < len(bucket.starts):
            raise ProblemError(f"{problem.name}: a member of bucket [{names}] is there twice")
        seen |= set(bucket.starts)
        ends = [*bucket.starts, *(w for s in bucket.starts for w in waits.get(s, ()))]
        if any(min(ends) <= f <= max(ends) for f in fences):
            raise ProblemError(f"{problem.name}: bucket [{names}] would cross a fence")


def _append(problem: Problem, bucket: Bucket, m: _Merging) -> None:
    """Add the tasks of one bucket and retire its members."""
    members = [problem.tasks[s] for s in bucket.starts]
    waits = [w for s in bucket.starts for w in m.waits.get(s, ())]
    place = max(bucket.starts)
    needed = max(place, min(waits, default=place))
    name = f"{members[0].name}+{len(members) - 1}"
    size = sum(task.size_bytes for task in members)
    label = "+".join(task.label for task in members if task.label)
    chain: list[int] = []

    def add(task: Task) -> None:
        chain.append(len(m.tasks))
        m.tasks.append(task)

    issue_ns = bucket.issue_ns
    if bucket.pack_ns is not None and bucket.prepared:
        issue_ns += bucket.pack_ns
    elif bucket.pack_ns is not None:
        add(Task(f"pack_{name}", Kind.COMPUTE, bucket.pack_ns, label="pack"))
    start = len(m.tasks)
    merged = dataclasses.replace(members[0], name=name, size_bytes=size, label=label)
    add(dataclasses.replace(merged, duration_ns=bucket.duration_ns, issue_ns=issue_ns))
    m.units.append((place, chain.copy()))
    add(
        Task(
            f"wait_{name}",
            Kind.WAIT,
            lane=members[0].lane,
            start=start,
            issue_ns=max((problem.tasks[w].issue_ns for w in waits), default=0),
            size_bytes=sum(problem.tasks[w].size_bytes for w in waits),
            label=f"W({label})" if label else "",
        )
    )
    wait = start + 1
    m.chains.append(chain)
    arrived = [wait]
    # All copies are made where the message arrives, whatever stood there.
    m.units.append((needed, arrived))
    for k, s in enumerate(bucket.starts):
        m.tasks[s], m.entry[s], m.exit[s] = None, chain[0], start
        if bucket.unpack_ns is not None:
            m.unpacks[s] = len(m.tasks)
            copied = f"unpack_{problem.tasks[s].name}"
            m.tasks.append(Task(copied, Kind.COMPUTE, bucket.unpack_ns[k], label="unpack"))
            arrived.append(m.unpacks[s])
        for w in m.waits.get(s, ()):
            m.tasks[w], m.entry[w], m.exit[w] = None, wait, m.unpacks.get(s, wait)


def _storages(problem: Problem, buckets: Sequence[Bucket], m: _Merging) -> list[Storage]:
    result: list[Storage] = []
    bucket_of = {s: b for b, bucket in enumerate(buckets) for s in bucket.starts}
    views: dict[int, list[Storage]] = {}
    held: dict[int, list[Storage]] = {}
    for storage in problem.storages:
        own = bucket_of.get(storage.producer)
        if own is not None and storage.workspace:
            held.setdefault(own, []).append(storage)
            continue
        if own is not None and buckets[own].pack_ns is not None and _sent(problem, storage):
            # It is written to the message right away.
            if buckets[own].held:
                start = m.exit[storage.producer]
                result.append(Storage(storage.size_bytes, start, (start + 1,), name=storage.name))
            continue
        producer = storage.producer
        if own is not None:
            producer = m.unpacks.get(producer, m.exit[producer])
        readers: list[int] = []
        for r in storage.readers:
            task = problem.tasks[r]
            if task.kind is Kind.WAIT and task.start in bucket_of:
                b = bucket_of[task.start]
                if task.start == storage.producer:
                    # Received in place; a copy of it exists from the unpacking on.
                    if buckets[b].unpack_ns is None:
                        readers.append(m.entry[r])
                    continue
                # The message is held until the wait; what was packed into it is not.
                readers.append(m.chains[b][0] if buckets[b].pack_ns is not None else m.entry[r])
            else:
                readers.append(m.entry[r])
                # Where packing is no part of the start, only the packing reads it.
                if r in bucket_of and buckets[bucket_of[r]].held and m.entry[r] == m.exit[r]:
                    readers.append(m.exit[r] + 1)
        if own is None and producer != INPUT:
            producer = m.exit[producer]
        # Not ``dataclasses.replace``: that takes as long as everything else here.
        moved = Storage(
            storage.size_bytes, producer, tuple(readers), storage.pinned, storage.name, storage.workspace
        )
        if own is not None and buckets[own].shared_output and buckets[own].unpack_ns is None:
            views.setdefault(own, []).append(moved)
        else:
            result.append(moved)
    for parts in views.values():
        result.append(
            Storage(
                sum(part.size_bytes for part in parts),
                parts[0].producer,
                tuple({r for part in parts for r in part.readers}),
                any(part.pinned for part in parts),
                "+".join(part.name for part in parts if part.name),
            )
        )
    return [*result, *_of_messages(buckets, m, held)]


def _of_messages(buckets: Sequence[Bucket], m: _Merging, held: Mapping[int, list[Storage]]) -> Iterator[Storage]:
    """What the buckets' own messages take; ``held``: by the bucket's number, what its members hold until the wait."""
    for b, (bucket, chain) in enumerate(zip(buckets, m.chains)):
        start = m.exit[bucket.starts[0]]
        if b in held:
            size_bytes = sum(part.size_bytes for part in held[b])
            yield Storage(size_bytes, start, (start + 1,), name="workspace", workspace=True)
        if bucket.pack_ns is not None:
            until = (start + 1,) if bucket.prepared else (start, start + 1)
            yield Storage(bucket.sent_bytes, chain[0], until, name="message")
        if bucket.unpack_ns is not None:
            copies = (m.unpacks[s] for s in bucket.starts)
            yield Storage(bucket.received_bytes, start, (start + 1, *copies), name="received")


def _sent(problem: Problem, storage: Storage) -> bool:
    """Whether a storage that a start makes is what it sends (a cast that is part of it): only its waits read it."""
    tasks, start = problem.tasks, storage.producer
    if not storage.readers or storage.pinned:
        return False
    return all(tasks[r].kind is Kind.WAIT and tasks[r].start == start for r in storage.readers)


def _moved(wait: Task, start: int) -> Task:
    """The task with another start. Not ``dataclasses.replace``: that takes as long as everything else here."""
    return Task(
        *(wait.name, wait.kind, wait.duration_ns, wait.lane, start, wait.issue_ns, wait.size_bytes, wait.label),
        *(wait.source, wait.fence, wait.slowdown_percent),
    )


def _renumber(
    problem: Problem,
    m: _Merging,
    order: Sequence[int],
    preds: Sequence[Sequence[int]],
    storages: Sequence[Storage],
) -> Problem:
    """Everything renumbered to an order of all tasks that stay."""
    # One more, because ``INPUT`` is the last index.
    number = [INPUT] * (len(m.tasks) + 1)
    for k, i in enumerate(order):
        number[i] = k
    tasks = [_moved(t, number[t.start]) if t.kind is Kind.WAIT else t for t in map(m.tasks.__getitem__, order) if t]
    return Problem(
        tasks=tuple(tasks),
        preds=tuple([places(number, preds[i]) for i in order]),
        lanes=problem.lanes,
        storages=tuple(
            [
                Storage(s.size_bytes, number[s.producer], places(number, s.readers), s.pinned, s.name, s.workspace)
                for s in storages
            ]
        ),
        base_bytes=problem.base_bytes,
        name=problem.name,
        meta=dict(problem.meta),
    )


def places(number: Sequence[int], ones: Collection[int]) -> tuple[int, ...]:
    """The numbers of tasks, each once, ascending."""
    if len(ones) < 2:
        return tuple([number[one] for one in ones])
    return tuple(sorted({number[one] for one in ones}))


def _order(
    problem: Problem,
    m: _Merging,
    preds: Sequence[Sequence[int]],
    order_edges: Sequence[tuple[int, int]],
    storages: Sequence[Storage],
) -> list[int]:
    """The order that the merge makes of the input order, see :func:`merge`: units, each after what it needs."""
    m.units.sort()
    unit_of = [0] * len(m.tasks)
    for u, (_, tasks_of_unit) in enumerate(m.units):
        for i in tasks_of_unit:
            unit_of[i] = u
    needs: list[list[int]] = [[] for _ in m.units]
    for i, before in enumerate(preds):
        needs[unit_of[i]] += [unit_of[p] for p in before]
    for p, i in order_edges:
        needs[unit_of[i]].append(unit_of[p])
    for s in storages:
        if s.producer != INPUT:
            for r in s.readers:
                needs[unit_of[r]].append(unit_of[s.producer])
    last: dict[int, int] = {}
    lanes: list[tuple[int, int]] = []
    for u, (_, tasks_of_unit) in enumerate(m.units):
        for i in tasks_of_unit:
            task = m.tasks[i]
            assert task is not None
            if task.kind is Kind.WAIT:
                needs[u].append(unit_of[task.start])
            elif task.kind is Kind.START and i < len(problem):
                # What is not merged keeps its order on its lane where it can.
                if task.lane in last:
                    lanes.append((last[task.lane], u))
                last[task.lane] = u
    ordered, circle = _sorted(needs, lanes)
    if circle:
        ordered, circle = _sorted(needs, [])
    if circle:
        tied = {*itertools.chain(*m.chains), *m.unpacks.values()}
        stuck = [t.name for u in circle for i in m.units[u][1] if i in tied and (t := m.tasks[i]) is not None]
        raise ProblemError(
            f"{problem.name}: members of a bucket depend on each other; one of {', '.join(stuck)}"
        )
    return [i for u in ordered for i in m.units[u][1]]


def _sorted(needs: Sequence[Sequence[int]], extra: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """All units by their numbers, each after what it needs (depth first), and a circle that forbids it, or [].

    Args:
        needs: per unit the units before it. ``extra``: more pairs (before, after).
    """
    more: dict[int, list[int]] = {}
    for first, second in extra:
        more.setdefault(second, []).append(first)

    def before(unit: int) -> Iterator[int]:
        return iter(sorted({*needs[unit], *more.get(unit, ())} - {unit}))

    order: list[int] = []
    # None: not seen, False: being emitted, True: emitted.
    state: list[bool | None] = [None] * len(needs)
    for root in range(len(needs)):
        if state[root]:
            continue
        state[root] = False
        stack = [(root, before(root))]
        while stack:
            unit, remaining = stack[-1]
            for other in remaining:
                if state[other] is None:
                    state[other] = False
                    stack.append((other, before(other)))
                    break
                if state[other] is False:
                    path = [u for u, _ in stack]
                    return [], path[path.index(other) :]
            else:
                state[unit] = True
                order.append(unit)
                stack.pop()
    return order, []
