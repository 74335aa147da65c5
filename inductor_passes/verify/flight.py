"""What is in flight along an order of scheduler nodes: results are waited for, not read before, and not overwritten.

A collective writes its results from its start until the wait for each, and reads its inputs until its last wait.
Results of a coalesced collective are taken out of its list first; each of them is in flight separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from inductor_passes import _torch
from inductor_passes.report import Finding
from inductor_passes.verify.snode_order import SnodeOrder


def flight(order: SnodeOrder) -> Iterator[Finding]:
    """Everything that is read, written or waited for at the wrong time; O(nodes + reads)."""
    state = _Flight(order)
    for i, kind in enumerate(order.kinds):
        if kind == "wait":
            yield from state.wait(i)
            continue
        yield from state.read(i)
        yield from state.write(i)
        if kind == "start":
            state.start(i)
    yield from state.left()


class _Flight:
    """What is in flight at one place of the order."""

    def __init__(self, order: SnodeOrder) -> None:
        self._order = order
        #: memory -> the collective that writes it
        self._written_by: dict[str, int] = {}
        #: memory -> the collectives that read it
        self._read_by: dict[str, set[int]] = {}
        self._results: dict[int, set[str]] = {}
        self._inputs: dict[int, list[str]] = {}
        #: list of a coalesced collective -> results that are still in it
        self._untaken = Counter(order.parcel.values())
        kinds, outputs = enumerate(order.kinds), order.outputs
        self._started = {r for i, kind in kinds if kind == "start" for r in order.roots_of(outputs[i])}
        fences = (i for i in range(len(order.nodes)) if order.is_fence(i))
        self._unknown = {r for i in fences for r in order.roots_of(outputs[i])}

    def start(self, i: int) -> None:
        """A collective sets out."""
        order = self._order
        own = order.roots_of(order.outputs[i])
        self._results[i] = set(own)
        reads = order.roots_of(_torch.snode_data_reads(order.nodes[i]))
        self._inputs[i] = [r for r in reads if r not in self._results[i]]
        self._written_by.update(dict.fromkeys(own, i))
        for read in self._inputs[i]:
            self._read_by.setdefault(read, set()).add(i)

    def wait(self, i: int) -> Iterator[Finding]:
        """Results arrive; with the last one of a collective, its inputs are free."""
        order = self._order
        for root in order.roots_of(_torch.snode_waited_buffers(order.nodes[i])):
            start = self._written_by.pop(root, None)
            if start is None:
                started = order.parcel.get(root, root) in self._started
                if root in order.producer and not started and root not in self._unknown:
                    message = f"{order.names[i]} waits for {root}: no collective"
                    yield order.finding("wait-without-start", i, message)
                continue
            self._results[start].discard(root)
            if not self._results[start]:
                for read in self._inputs[start]:
                    self._read_by[read].discard(start)

    def read(self, i: int) -> Iterator[Finding]:
        """Nobody reads a result before its wait."""
        order = self._order
        packed = {order.parcel[b] for b in order.outputs[i] if b in order.parcel}
        for read in order.roots_of(_torch.snode_data_reads(order.nodes[i])):
            start = self._written_by.get(read)
            if start is None or start == i:
                continue
            if read in packed:
                self._take_out(i, read, start)
                continue
            message = f"{order.names[i]} reads {read}, which {order.names[start]} is still writing"
            yield order.finding("read-before-wait", i, message, order.names[start])

    def _take_out(self, i: int, parcel: str, start: int) -> None:
        """One result of a coalesced collective is taken out of the list; it stays in flight."""
        for buffer in self._order.outputs[i]:
            self._written_by[buffer] = start
            self._results[start].add(buffer)
        self._untaken[parcel] -= 1
        if not self._untaken[parcel]:
            self._written_by.pop(parcel)
            self._results[start].discard(parcel)

    def write(self, i: int) -> Iterator[Finding]:
        """Nobody writes to memory that a collective reads or writes."""
        order = self._order
        for root in order.roots_of(_torch.snode_mutations(order.nodes[i])):
            start = self._written_by.get(root, next(iter(self._read_by.get(root, ())), None))
            if start is not None:
                message = f"{order.names[i]} writes {root}, which {order.names[start]} has in flight"
                yield order.finding("write-in-flight", i, message, order.names[start])

    def left(self) -> Iterator[Finding]:
        """What nobody waited for."""
        for root, start in self._written_by.items():
            if root in self._results[start]:
                message = f"{self._order.names[start]}: nothing waits for {root}"
                yield self._order.finding("missing-wait", start, message)
