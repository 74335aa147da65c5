"""Which collectives of a step may travel together, for whoever plans a step before its graphs are bucketed.

What is merged takes memory that kept parameters and saved activations could take, and saves latencies that would count
for them. So a state of the step is looked at with buckets as well as without: neighbours in the order of the graph, up
to a size, as fixed-size bucketing takes them. They are found once, in the step as it came, for several sizes; a state
gets those of their members that it still has. The bucket pass decides anew, on the graph: this is its forecast, and
one of the partitions that it is proposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from inductor_passes.schedule.least_memory import least_peak
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.partition import Costs, Member, merge_what_is_legal
from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.tables import tables

#: Sizes of buckets that are tried, as shares of the graph's peak: one over these.
_SHARES = (128, 32, 8)
#: Buckets that save a smaller share of a graph's time than one over this are not looked at.
_WORTH = 50
#: Members of a bucket, at most, and keys that are looked at: those with most members.
_MEMBERS, _KEYS = 64, 8
#: Merged problems that are looked at to see what fits, per graph.
_FITTED = 12
#: Tasks of both graphs above which buckets of one size are looked at only.
_LARGE_TASKS = 6000


@dataclass(frozen=True)
class Travels:
    """A collective that others of its key may share a message with.

    Attributes:
        name: of its ``START`` task.
        sent_bytes, received_bytes: of this rank.
        key: equal for those that may travel together.
    """

    name: str
    sent_bytes: int
    received_bytes: int
    key: str


@dataclass(frozen=True)
class Mergeable:
    """The collectives of one graph that may travel together, and what their buckets cost, by key."""

    members: tuple[Travels, ...] = ()
    costs: Mapping[str, Costs] = field(default_factory=dict)


#: Names of the members of each bucket, with their key; and without.
Buckets = tuple[tuple[str, tuple[str, ...]], ...]
Proposal = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Way:
    """Forward and backward of a state with some of their messages merged.

    Attributes:
        problems: with the merged messages.
        proposed: names of the starts of each bucket, by graph.
    """

    problems: tuple[Problem, Problem]
    proposed: tuple[Proposal, Proposal] = ((), ())


class Merging:
    """Buckets of forward and backward of a step, of several sizes.

    Attributes:
        sizes: how many there are; 0 where buckets save next to nothing.
    """

    def __init__(self, forward: Problem, backward: Problem, both: tuple[Mergeable, Mergeable]) -> None:
        self._of = tuple({one.name: one for one in part.members} for part in both)
        self._costs = tuple(part.costs for part in both)
        shares = _SHARES[-1:] if len(forward) + len(backward) > _LARGE_TASKS else _SHARES
        found: dict[tuple[Buckets, Buckets], None] = {}
        for share in shares:
            pair = self._found(0, forward, share), self._found(1, backward, share)
            if self._worth(forward, backward, pair):
                found[pair] = None
        self._buckets = tuple(found)

    @property
    def sizes(self) -> int:
        """See the class."""
        return len(self._buckets)

    def merged(self, both: tuple[Problem, Problem]) -> list[tuple[Problem, Problem]]:
        """Forward and backward of a state with the buckets of each size, without those that it does not have."""
        return list(zip(self.merged_in(0, both[0]), self.merged_in(1, both[1])))

    def merged_in(self, graph: int, problem: Problem) -> list[Problem]:
        """Forward (0) or backward (1) of a state with the buckets of each size."""
        return [self._merge(graph, problem, buckets[graph])[0] for buckets in self._buckets]

    def ways(self, both: tuple[Problem, Problem], sizes: Collection[int]) -> list[tuple[int, Way]]:
        """A state with buckets of these sizes, the largest first, and at last with none: that is size 0."""
        found = []
        for size in range(self.sizes, 0, -1):
            if size in sizes:
                buckets = self._buckets[size - 1]
                (forward, mine), (backward, theirs) = (self._merge(k, both[k], buckets[k]) for k in (0, 1))
                found.append((size, Way((forward, backward), (mine, theirs))))
        return [*found, (0, Way(both))] if 0 in sizes else found

    def way(self, both: tuple[Problem, Problem], proposed: tuple[Proposal, Proposal]) -> Way:
        """A state with these buckets."""
        buckets = ([(self._of[k][names[0]].key, names) for names in part] for k, part in enumerate(proposed))
        (forward, mine), (backward, theirs) = (self._merge(k, both[k], tuple(one)) for k, one in enumerate(buckets))
        return Way((forward, backward), (mine, theirs))

    def fitting(self, both: tuple[Problem, Problem], cap_bytes: int) -> Way:
        """A state with the largest buckets for which some order keeps within ``cap_bytes``, and others beside them."""
        (forward, mine), (backward, theirs) = (self._fitting(k, both[k], cap_bytes) for k in (0, 1))
        return Way((forward, backward), (mine, theirs))

    def _fitting(self, graph: int, problem: Problem, cap_bytes: int) -> tuple[Problem, Proposal]:
        found: tuple[Problem, Proposal] = problem, ()
        taken: list[tuple[str, tuple[str, ...]]] = []
        left = _FITTED
        for buckets in reversed(self._buckets):
            inside = {name for _, names in taken for name in names}
            waiting = [[one for one in buckets[graph] if inside.isdisjoint(one[1])]]
            while waiting and left:
                group = waiting.pop(0)
                if not group:
                    continue
                left -= 1
                tried = self._merge(graph, problem, (*taken, *group))
                if least_peak(tables(tried[0])) <= cap_bytes:
                    taken += group
                    found = tried
                elif len(group) > 1:
                    half = len(group) // 2
                    waiting[:0] = [group[:half], group[half:]]
        return found

    def _found(self, graph: int, problem: Problem, share: int) -> Buckets:
        known, costs = self._of[graph], self._costs[graph]
        by_key: dict[str, list[int]] = {}
        for i, task in enumerate(problem.tasks):
            one = known.get(task.name) if task.kind is Kind.START else None
            if one is not None and one.key in costs:
                by_key.setdefault(one.key, []).append(i)
        room = peak_bytes(problem) // share
        edges = problem.edges()
        result = []
        for key in sorted(by_key, key=lambda k: (-len(by_key[k]), k))[:_KEYS]:
            for starts in _alike(problem, edges, by_key[key]):
                names = [problem.tasks[i].name for i in starts]
                result += [(key, part) for part in _filled(names, known, room) if len(part) > 1]
        return tuple(result)

    def _worth(self, forward: Problem, backward: Problem, pair: tuple[Buckets, Buckets]) -> bool:
        """Whether buckets save time of the links that anybody would notice."""
        saved = total = 0
        for graph, problem in enumerate((forward, backward)):
            total += sum(task.duration_ns for task in problem.tasks)
            alone = {t.name: t.duration_ns + t.issue_ns for t in problem.tasks if t.kind is Kind.START}
            for key, names in pair[graph]:
                members = [Member(0, o.sent_bytes, o.received_bytes) for o in map(self._of[graph].__getitem__, names)]
                bucket = self._costs[graph][key].bucket(members)
                copies = (bucket.pack_ns or 0) + sum(bucket.unpack_ns or ())
                saved += sum(alone[n] for n in names) - bucket.duration_ns - bucket.issue_ns - copies
        return saved * _WORTH > total

    def _merge(self, graph: int, problem: Problem, buckets: Buckets) -> tuple[Problem, Proposal]:
        number = {t.name: i for i, t in enumerate(problem.tasks) if t.kind is Kind.START}
        parts = []
        for key, names in buckets:
            there = [n for n in names if n in number]
            if len(there) > 1:
                ones = [(number[n], self._of[graph][n]) for n in there]
                members = [Member(start, one.sent_bytes, one.received_bytes) for start, one in ones]
                parts.append(self._costs[graph][key].bucket(members))
        merged, done = merge_what_is_legal(problem, parts)
        return merged, tuple(tuple(problem.tasks[s].name for s in bucket.starts) for bucket in done)


def _alike(problem: Problem, edges: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[int]]:
    """``starts`` on one lane of which none waits for another, in groups."""
    own = set(starts)
    depth = [0] * len(problem)
    groups: dict[tuple[int, int], list[int]] = {}
    for i, before in enumerate(edges):
        depth[i] = max((depth[p] + (p in own) for p in before), default=0)
        if i in own:
            groups.setdefault((problem.tasks[i].lane, depth[i]), []).append(i)
    return list(groups.values())


def _filled(names: Sequence[str], known: Mapping[str, Travels], room: int) -> list[tuple[str, ...]]:
    """Neighbours together, as many as ``room`` bytes hold."""
    result: list[tuple[str, ...]] = []
    part: list[str] = []
    held = 0
    for name in names:
        size = known[name].sent_bytes + known[name].received_bytes
        if part and (held + size > room or len(part) == _MEMBERS):
            result.append(tuple(part))
            part, held = [], 0
        part.append(name)
        held += size
    return [*result, tuple(part)] if part else result


def rescaled(part: Mergeable, before: Problem, after: Problem) -> Mergeable:
    """The same collectives where every task takes the time that it has in ``after``."""
    was, now = ({t.name: t.duration_ns for t in p.tasks if t.kind is Kind.START} for p in (before, after))
    by_key: dict[str, list[Travels]] = {}
    for one in part.members:
        if one.name in was:
            by_key.setdefault(one.key, []).append(one)
    compute = [sum(t.duration_ns for t in p.tasks if t.kind is Kind.COMPUTE) for p in (before, after)]
    speed = compute[1] / compute[0] if compute[0] else 1.0
    costs = {}
    for key, line in part.costs.items():
        line = dataclasses.replace(
            line,
            launch_ns=line.launch_ns * speed,
            pack_ns_per_byte=line.pack_ns_per_byte * speed,
            unpack_ns_per_byte=line.unpack_ns_per_byte * speed,
        )
        costs[key] = _through(line, by_key.get(key, []), was, now)
    return dataclasses.replace(part, costs=costs)


def _through(line: Costs, members: Sequence[Travels], was: Mapping[str, int], now: Mapping[str, int]) -> Costs:
    """``line`` moved as the durations of its members moved: latency and time per byte each, where sizes tell them."""
    if not members:
        return line

    def size(one: Travels) -> int:
        return max(one.sent_bytes, one.received_bytes)

    small, large = min(members, key=size), max(members, key=size)
    apart = size(large) - size(small)
    slope = [(d[large.name] - d[small.name]) / apart if apart else 0.0 for d in (was, now)]
    rest = [d[small.name] - s * size(small) for d, s in zip((was, now), slope)]
    if min(*slope, *rest) <= 0:
        grown = sum(now[one.name] for one in members) / max(1, sum(was[one.name] for one in members))
        return dataclasses.replace(
            line, alpha_ns=line.alpha_ns * grown, beta_ns_per_byte=line.beta_ns_per_byte * grown
        )
    return dataclasses.replace(
        line,
        alpha_ns=line.alpha_ns * rest[1] / rest[0],
        beta_ns_per_byte=line.beta_ns_per_byte * slope[1] / slope[0],
    )
