"""A certificate that the ranks cannot hang, whatever the order of events.

Collectives and transfers are *instances* shared by ranks: the n-th collective of a group, the n-th transfer between
two ranks. If one rank must finish instance a before it can join b, a precedes b. If precedence over all ranks has no
cycle, some instance is always ready on all of its ranks, so the programs run to the end.

What a rank must finish before it joins an instance depends on the backend. Each group runs its own instances in order.
A wait blocks everything after it. Where only ``max_in_flight`` collectives run at the same time (hardware queues,
thread pools), an issue may have to wait for earlier ones of other groups. So with a limit the certificate requires a
launch order over all groups without a cycle. Without a limit it requires that for groups and waits only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inductor_passes.report import Finding
from inductor_passes.verify.events import Action, Event
from inductor_passes.verify.ranks import Programs, check_ranks, per_rank_events

#: (group, number) of a collective; (group, sender, receiver, tag, number) of a transfer.
Instance = tuple[object, ...]


@dataclass(frozen=True)
class Certification:
    """Outcome of :func:`certify`; holds when ``findings`` is empty.

    Attributes:
        findings: what stands against the programs.
        proven: properties that were shown.
        assumed: what was taken for granted.
    """

    findings: tuple[Finding, ...]
    proven: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing stands against the programs."""
        return not self.findings


def certify(programs: Programs, *, max_in_flight: int | None = 1) -> Certification:
    """Whether the programs of all ranks run to the end.

    Args:
        programs: per global rank a graph, its snapshot or its events. A single program stands for all ranks.
        max_in_flight: how many collectives the backend is sure to run at a time; None: any number.

    Raises:
        ValueError: ``max_in_flight`` is below 1.
    """
    if max_in_flight is not None and max_in_flight < 1:
        raise ValueError(f"inductor_passes: max_in_flight={max_in_flight} is not allowed; expected None or at least 1")
    by_rank = per_rank_events(programs)
    proven: list[str] = []
    assumed = ["each process group runs its collectives in the order in which a rank issues them"]
    if len(by_rank) == 1:
        assumed.append("every rank runs this program (compare digests to check it)")
        proven.append("one program has one launch order, which has no cycle")
        findings: list[Finding] = list(_unpaired(by_rank))
    else:
        findings = check_ranks(by_rank)
        missing = _absent(by_rank)
        if missing:
            assumed.append(f"ranks {missing} fit: their programs were not given")
        if not findings:
            proven.append("the order per group is equal on all ranks")
            proven.append("sends and receives are paired")
        cycle = _cycle(by_rank, max_in_flight)
        if cycle:
            findings.append(cycle)
        else:
            what = "launch order over all groups" if max_in_flight else "order by groups and waits"
            proven.append(f"the {what} has no cycle")
    if max_in_flight is None:
        assumed.append("the backend runs any number of collectives at a time")
    assumed.extend(_unknown(by_rank))
    return Certification(tuple(findings), tuple(proven), tuple(assumed))


def _unpaired(by_rank: Mapping[int, Sequence[Event]]) -> list[Finding]:
    """One program for all ranks cannot name single ranks: its transfers cannot be paired."""
    return [
        Finding("transfer-unmatched", e.name, f"{e} names a rank: give the programs of all ranks", source=e.source)
        for events in by_rank.values()
        for e in events
        if e.action in (Action.SEND, Action.RECEIVE)
    ]


def _absent(by_rank: Mapping[int, Sequence[Event]]) -> list[int]:
    named = {r for events in by_rank.values() for e in events for r in (*e.ranks, e.peer) if r >= 0}
    return sorted(named - by_rank.keys())


def _unknown(by_rank: Mapping[int, Sequence[Event]]) -> list[str]:
    ops = sorted({e.what for events in by_rank.values() for e in events if e.action is Action.FENCE})
    return [f"{op} does not wait for another rank (nothing that communicates moves across it)" for op in ops]


def instances(by_rank: Mapping[int, Sequence[Event]]) -> dict[int, list[tuple[Event, Instance | None]]]:
    """Events of each rank with the instance that they belong to; None for waits and fences."""
    result: dict[int, list[tuple[Event, Instance | None]]] = {}
    for rank, events in by_rank.items():
        count: dict[Instance, int] = {}
        rows: list[tuple[Event, Instance | None]] = []
        for e in events:
            line: Instance | None = None
            if e.action in (Action.START, Action.BLOCKING):
                line = (e.group,)
            elif e.action is Action.SEND:
                line = (e.group, rank, e.peer, e.tag)
            elif e.action is Action.RECEIVE:
                line = (e.group, e.peer, rank, e.tag)
            if line is None:
                rows.append((e, None))
            else:
                rows.append((e, (*line, count.get(line, 0))))
                count[line] = count.get(line, 0) + 1
        result[rank] = rows
    return result


class _Precedence:
    """What must be done before what, over all ranks: instances, and per rank a chain of points where it waits."""

    def __init__(self, by_rank: Mapping[int, Sequence[Event]], max_in_flight: int | None) -> None:
        self.after: dict[Instance, dict[Instance, int]] = {}
        self.event: dict[Instance, Event] = {}
        for rank, rows in instances(by_rank).items():
            self._rank(rank, _batches(rows), max_in_flight)

    def _edge(self, before: Instance, after: Instance, rank: int) -> None:
        self.after.setdefault(before, {}).setdefault(after, rank)
        self.after.setdefault(after, {})

    def _rank(self, rank: int, batches: Sequence[tuple[Event, list[Instance]]], max_in_flight: int | None) -> None:
        by_start: dict[str, list[Instance]] = {}
        last_of_group: dict[str, list[Instance]] = {}
        previous: list[Instance] = []
        point: Instance | None = None
        for number, (event, joined) in enumerate(batches):
            by_start.setdefault(event.name, []).extend(joined)
            for instance in joined:
                self.event.setdefault(instance, event)
                self.after.setdefault(instance, {})
                before = [*last_of_group.get(event.group, ()), *(previous if max_in_flight is not None else ())]
                for other in before:
                    self._edge(other, instance, rank)
                if point is not None:
                    self._edge(point, instance, rank)
            if joined:
                last_of_group[event.group] = previous = joined
            if event.action in (Action.WAIT, Action.BLOCKING):
                here: Instance = ("point", rank, number)
                waited = joined or [i for s in event.starts for i in by_start.get(s, ())]
                for instance in waited:
                    self._edge(instance, here, rank)
                if point is not None:
                    self._edge(point, here, rank)
                point = here

    def cycle(self) -> list[Instance]:
        """One cycle, empty when there is none; O(events)."""
        degree = dict.fromkeys(self.after, 0)
        for followers in self.after.values():
            for follower in followers:
                degree[follower] += 1
        ready = [i for i, d in degree.items() if d == 0]
        while ready:
            instance = ready.pop()
            del degree[instance]
            for follower in self.after[instance]:
                degree[follower] -= 1
                if degree[follower] == 0:
                    ready.append(follower)
        if not degree:
            return []
        # Everything left has a predecessor that is left too: walking back must come around.
        before = {follower: i for i in degree for follower in self.after[i] if follower in degree}
        seen: dict[Instance, int] = {}
        path: list[Instance] = []
        current = next(iter(before))
        while current not in seen:
            seen[current] = len(path)
            path.append(current)
            current = before[current]
        return list(reversed(path[seen[current] :]))


def _batches(rows: Sequence[tuple[Event, Instance | None]]) -> list[tuple[Event, list[Instance]]]:
    """Events with their instances; the transfers of one batch are one entry, as they are issued together."""
    result: list[tuple[Event, list[Instance]]] = []
    for event, instance in rows:
        joined = [] if instance is None else [instance]
        if result and joined and result[-1][0].name == event.name and result[-1][1]:
            result[-1][1].extend(joined)
        else:
            result.append((event, joined))
    return result


def _cycle(by_rank: Mapping[int, Sequence[Event]], max_in_flight: int | None) -> Finding | None:
    precedence = _Precedence(by_rank, max_in_flight)
    path = precedence.cycle()
    if not path:
        return None
    steps = []
    rank = -1
    shown = [i for i in path if i in precedence.event]
    for position, instance in enumerate(path):
        follower = path[(position + 1) % len(path)]
        rank = precedence.after[instance][follower]
        if instance in precedence.event:
            steps.append(f"{precedence.event[instance]} before what rank {rank} does next")
    event = precedence.event[shown[0]]
    return Finding("launch-cycle", event.name, f"ranks wait for each other: {'; '.join(steps)}", source=event.source)
