"""Executes the programs of all ranks against queues, to test what a deadlock certificate promises.

Each rank has one queue per process group, run in order, and issues events in program order. A collective runs when it
is at the head of its group's queue on every member. Members that bring different collectives are a mismatch. A wait
blocks the rank; so does an issue while ``max_in_flight`` collectives of the rank are not done. Nothing here looks
ahead or builds a graph: programs are stuck when no event of any rank can happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inductor_passes.verify.events import Action, Event
from inductor_passes.verify.ranks import Programs, per_rank_events


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        stuck: rank -> the event that it cannot get past; empty when all programs ended.
        mismatch: first collective whose members disagree, as text, or "".
        done: number of collectives and transfers that ran.
    """

    stuck: Mapping[int, str]
    mismatch: str
    done: int

    @property
    def completed(self) -> bool:
        """Whether every rank ran to its end."""
        return not self.stuck and not self.mismatch


@dataclass
class _Operation:
    rank: int
    event: Event
    done: bool = False


@dataclass
class _Rank:
    program: list[list[Event]]
    position: int = 0
    in_flight: list[_Operation] = field(default_factory=list)
    queues: dict[str, deque[_Operation]] = field(default_factory=dict)
    issued: dict[str, list[_Operation]] = field(default_factory=dict)
    #: what a blocking collective waits for
    blocked_on: list[_Operation] = field(default_factory=list)


def run(programs: Programs, *, max_in_flight: int | None = 1) -> Outcome:
    """Play the programs of all ranks.

    Args:
        programs: per global rank a graph, its snapshot or its events.
        max_in_flight: how many collectives of a rank run at a time; None: any number. The transfers of one batch
            count as one.
    """
    ranks = {rank: _Rank(_grouped(events)) for rank, events in per_rank_events(programs).items()}
    done = 0
    progress = True
    while progress:
        progress = False
        for rank, state in ranks.items():
            while _issue(rank, state, max_in_flight):
                progress = True
        landed, mismatch = _land(ranks)
        if mismatch:
            return Outcome({}, mismatch, done)
        done += landed
        progress = progress or landed > 0
    stuck = {
        rank: str(state.program[state.position][0])
        for rank, state in ranks.items()
        if state.position < len(state.program)
    }
    for rank, state in ranks.items():
        left = [o for queue in state.queues.values() for o in queue]
        if left and rank not in stuck:
            stuck[rank] = str(left[0].event)
    return Outcome(stuck, "", done)


def _grouped(events: Sequence[Event]) -> list[list[Event]]:
    """Events; the transfers of one batch together."""
    result: list[list[Event]] = []
    for event in events:
        if result and event.peer >= 0 and result[-1][0].name == event.name:
            result[-1].append(event)
        else:
            result.append([event])
    return result


def _issue(rank: int, state: _Rank, max_in_flight: int | None) -> bool:
    """Let a rank do its next event if nothing blocks it."""
    if any(not o.done for o in state.blocked_on) or state.position >= len(state.program):
        return False
    batch = state.program[state.position]
    action = batch[0].action
    if action is Action.WAIT:
        if any(not o.done for name in batch[0].starts for o in state.issued.get(name, ())):
            return False
    elif action is not Action.FENCE:
        state.in_flight = [o for o in state.in_flight if not o.done]
        names = {o.event.name for o in state.in_flight}
        if max_in_flight is not None and len(names) >= max_in_flight:
            return False
        operations = [_Operation(rank, event) for event in batch]
        for operation in operations:
            state.queues.setdefault(_queue(operation), deque()).append(operation)
        state.in_flight.extend(operations)
        state.issued.setdefault(batch[0].name, []).extend(operations)
        if action is Action.BLOCKING:
            state.blocked_on = operations
    state.position += 1
    return True


def _queue(operation: _Operation) -> str:
    """Collectives of a group share a queue; the transfers of a batch run side by side."""
    e = operation.event
    if e.action is Action.SEND:
        return f"{e.group}|{operation.rank}>{e.peer}|{e.tag}"
    if e.action is Action.RECEIVE:
        return f"{e.group}|{e.peer}>{operation.rank}|{e.tag}"
    return e.group


def _land(ranks: Mapping[int, _Rank]) -> tuple[int, str]:
    """Run every collective and transfer that is at the head of all of its queues; (how many, mismatch)."""
    landed = 0
    for rank, state in ranks.items():
        for queue in list(state.queues.values()):
            while queue:
                together = _partners(ranks, rank, queue[0])
                if together is None:
                    break
                for other in together:
                    if not _agree(queue[0].event, other.event):
                        return landed, f"rank {rank}: {queue[0].event}; rank {other.rank}: {other.event}"
                for other in together:
                    other.done = True
                    ranks[other.rank].queues[_queue(other)].popleft()
                landed += 1
    return landed, ""


def _agree(a: Event, b: Event) -> bool:
    if a.peer >= 0 or b.peer >= 0:
        return a.what == b.what
    return (a.action, a.what) == (b.action, b.what)


def _partners(ranks: Mapping[int, _Rank], rank: int, head: _Operation) -> list[_Operation] | None:
    """The operations, one per member, that run together with ``head``; None while somebody is missing."""
    event = head.event
    members = sorted({rank, event.peer}) if event.peer >= 0 else list(event.ranks or ranks)
    found = []
    for member in members:
        state = ranks.get(member)
        if state is None:
            continue
        queue = state.queues.get(_queue(head))
        if not queue:
            return None
        found.append(queue[0])
    return found
