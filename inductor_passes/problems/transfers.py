"""Which orders of a graph with messages between two ranks cannot make ranks wait for each other for ever.

The ranks of a pipeline run different graphs, so nothing may depend on what another rank does. The rules look at one
rank:

- What is issued in one queue (``ir.transfers.queues``) keeps its order. Where a backend may run messages and
  collectives in the order of their issue, all of a rank's starts are in one queue.
- No wait moves in front of a start that it was behind. It may move down, and a start may move up across waits.

Why no rank can hang then, if none did before: what a rank issues begins when everything in front of it in its queue has
begun, the waits in front of it are over, and its own operands are there. The first is as before. The waits in front of
a start are those of before, or fewer. Operands need what they needed. So every event waits for no more than before, on
every rank, whatever order the other ranks chose by these rules. A limit on how many messages run at a time changes
nothing: what was issued earlier is the same.

The same holds for a rank without messages whose graph the other ranks do not have: they may send some. Collectives of
ranks that agree may change places with each other as they do elsewhere, between two transfers or waits
for them: all ranks of their groups do the same there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

#: The queue of collectives where messages between two ranks have queues of their own.
COLLECTIVES = "collective"


@dataclass(frozen=True, slots=True)
class Event:
    """A start or a wait.

    Attributes:
        task: its number.
        queues: that a start is issued in; () for a wait.
        transfer: it is a message between two ranks, or waits for one.
    """

    task: int
    queues: tuple[str, ...] = ()
    transfer: bool = False


@dataclass(slots=True)
class _Queue:
    """What was issued last: ``hub``, and after it ``free`` collectives that may change places with each other."""

    hub: int | None = None
    free: list[int] = field(default_factory=list)
    stretch: int = 0

    def ended(self) -> Iterator[tuple[int, int]]:
        """Make the last collective that may change places the one that all others stay in front of."""
        if self.free:
            *others, self.hub = self.free
            self.free = []
            yield from ((one, self.hub) for one in others)

    def behind(self, task: int) -> Iterator[tuple[int, int]]:
        """Keep a task behind the hub."""
        if self.hub is not None:
            yield self.hub, task


def kept_order(events: Iterable[Event], *, agreed: bool) -> Iterator[tuple[int, int]]:
    """Pairs of tasks (before, after) that keep the rules of the module's docstring; O(events).

    Args:
        events: all starts and waits of a graph, in order.
        agreed: whether the ranks of the collectives' groups all compile the graph.
    """
    queues: dict[str, _Queue] = {}
    stretch = 0
    for event in events:
        for name in event.queues:
            queue = queues.setdefault(name, _Queue())
            if event.transfer or not agreed:
                yield from queue.behind(event.task)
                yield from ((one, event.task) for one in queue.free)
                queue.hub, queue.free = event.task, []
                continue
            if queue.stretch != stretch:
                yield from queue.ended()
            queue.stretch = stretch
            yield from queue.behind(event.task)
            queue.free.append(event.task)
        if not event.queues:
            for queue in queues.values():
                if event.transfer or queue.stretch != stretch:
                    yield from queue.ended()
                yield from queue.behind(event.task)
        stretch += event.transfer
