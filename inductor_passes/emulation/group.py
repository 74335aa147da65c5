"""The emulated link's process group and its ``Work``; see ``emulated_link`` for what they are good for."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from inductor_passes import _torch
from inductor_passes.cost.communication import KINDS, GroupLayout, wire_bytes
from inductor_passes.emulation.link_model import GroupTables, Link, Message, Rate, Record, VirtualClock

BACKEND = "emulated"
#: The log keeps so many of the latest collectives.
LOG_LENGTH = 200_000
#: What torch passes for "no timeout of its own".
_NO_TIMEOUT = timedelta(milliseconds=-1)


class LinkState:
    """A process's links, clock and log. Make it on the thread that computes.

    Args:
        rates: the links by name.
        ranks_per_host: which global ranks count as one host; 0: all.
    """

    def __init__(self, rates: Mapping[str, Rate], ranks_per_host: int) -> None:
        self.clock = VirtualClock()
        self.log: deque[Record] = deque(maxlen=LOG_LENGTH)
        self.links = {name: Link(name, rate) for name, rate in rates.items()}
        self.ranks_per_host = ranks_per_host
        #: Receives what every collective carries, while there is a listener; else None, and nothing is copied.
        self.watched: list[Message] | None = None


class EmulatedWork(dist.Work):
    """A collective in flight: done when gloo is done and the emulated link has served it."""

    def __init__(
        self,
        state: LinkState,
        link: Link,
        record: Record,
        work: Any,
        outputs: Sequence[torch.Tensor],
        message: Message | None = None,
    ) -> None:
        super().__init__()
        self._state = state
        self._link = link
        self._record = record
        self._work = work
        self._outputs = list(outputs)
        self._message = message
        self._done = False

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Sleep until it has arrived. ``timeout`` bounds the real transfer only."""
        if self._done:
            return True
        record, clock = self._record, self._state.clock
        record.wall.wait_begin_ns, record.virtual.wait_begin_ns = time.monotonic_ns(), clock.now_ns()
        self._sleep_until_end(timeout)
        record.wall.wait_end_ns = time.monotonic_ns()
        record.virtual.wait_end_ns = max(record.virtual.wait_begin_ns, record.virtual.end_ns)
        clock.charge(record.virtual.exposed_ns)
        if self._message is not None:
            # Copied now: the next reader of the result may write over it.
            self._message.outputs = _copies(self._outputs)
        self._done = True
        self._work = None
        return True

    def _sleep_until_end(self, timeout: timedelta) -> None:
        record = self._record
        began_ns = time.monotonic_ns()
        in_time = self._work.is_completed()
        if timeout == _NO_TIMEOUT:
            self._work.wait()
        else:
            self._work.wait(timeout)
        arrived_ns = time.monotonic_ns()
        self._link.settle(record)
        if not in_time:
            record.late_ns = max(0, arrived_ns - max(record.wall.end_ns, began_ns))
        remaining_ns = record.wall.end_ns - time.monotonic_ns()
        if remaining_ns > 0:
            time.sleep(remaining_ns * 1e-9)

    def is_completed(self) -> bool:
        """Whether a wait would return at once."""
        if self._done:
            return True
        if not self._work.is_completed():
            return False
        self._link.settle(self._record)
        return time.monotonic_ns() >= self._record.wall.end_ns

    def synchronize(self) -> None:
        """Same as :meth:`wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future that a thread of its own completes; waits on it are not logged."""
        future: Future[list[torch.Tensor]] = Future()

        def complete() -> None:
            try:
                if not self._done:
                    self._sleep_until_end(_NO_TIMEOUT)
                future.set_result(self._outputs)
            except RuntimeError as error:
                future.set_exception(error)

        threading.Thread(target=complete, name="emulated_link", daemon=True).start()
        return future


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class EmulatedGroup(dist.ProcessGroup):
    """The process group. Its methods have the names by which torch calls a process group."""

    def __init__(
        self, state: LinkState, store: Any, rank: int, size: int, name: str, ranks: Sequence[int], timeout: timedelta
    ) -> None:
        super().__init__(rank, size)
        self._state = state
        self._rank, self._size, self._name = rank, size, name
        self._gloo = _torch.gloo_group(store, rank, size, timeout)
        layout = GroupLayout.of(tuple(ranks), state.ranks_per_host or max(ranks) + 1)
        self._link = state.links[layout.link]
        self._number = 0
        self._tables = _shared_tables(store, rank, size)
        self._messages: dict[tuple[int, int], int] = {}

    def align(self) -> None:
        """A barrier that the log and the link do not see."""
        self._gloo.barrier().wait()

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return BACKEND

    def getSize(self) -> int:
        return self._size

    def getRank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _run(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        names: Sequence[str],
        *args: Any,
        message: tuple[int, int] | None = None,
    ) -> EmulatedWork:
        """Stamp the issue, start the real transfer (the first of ``names`` that exists), put it on the link.

        ``message`` is (source, destination) for a transfer between two ranks.
        """
        state = self._state
        input_bytes, output_bytes = _bytes(inputs), _bytes(outputs)
        if kind in KINDS:
            wire = wire_bytes(kind, input_bytes, output_bytes, self._size)
        else:
            wire = 0 if kind == "barrier" else max(input_bytes, output_bytes)
        duration = self._link.rate.duration_ns(wire) if self._size > 1 else 0
        number = self._next_number(message)
        record = Record(
            number, kind, self._name, self._size, self._link.name, input_bytes, output_bytes, wire, duration
        )
        carried = None
        if state.watched is not None:
            carried = Message(record, _copies(inputs))
            state.watched.append(carried)
        record.wall.issue_ns, record.virtual.issue_ns = time.monotonic_ns(), state.clock.now_ns()
        own = (record.wall.issue_ns, record.virtual.issue_ns)
        if message is None:
            table = self._tables.collectives
            table.write(number, self._rank, *own)
        else:
            table = self._tables.messages[message]
            table.write(number, message.index(self._rank), *own)
        # A send leaves when it is issued; everything else needs the others.
        self._link.issue(record, (lambda: own) if kind == "send" else (lambda: table.latest(number)))
        state.log.append(record)
        work = _torch.group_method(self._gloo, *names)(*args)
        return EmulatedWork(state, self._link, record, work, outputs, carried)

    def _next_number(self, message: tuple[int, int] | None) -> int:
        if message is None:
            self._number += 1
            return self._number - 1
        self._messages[message] = self._messages.get(message, -1) + 1
        return self._messages[message]

    def allreduce(self, tensors: Any, opts: Any = None) -> EmulatedWork:
        tensors = _as_list(tensors)
        return self._run("all_reduce", tensors, tensors, ("allreduce",), tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> EmulatedWork:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._run("all_reduce", tensors, tensors, ("allreduce_coalesced",), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any) -> EmulatedWork:
        tensors = _as_list(tensors)
        return self._run("broadcast", tensors, tensors, ("broadcast",), tensors, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> EmulatedWork:
        opts = opts or c10d.AllgatherOptions()
        names = ("all_gather_single", "_allgather_base")
        return self._run("all_gather", [input], [output], names, output, input, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        opts = opts or c10d.AllgatherOptions()
        names = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        return self._run("all_gather", inputs, outputs, names, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        inputs = _as_list(inputs)
        outputs = outputs if isinstance(outputs[0], (list, tuple)) else [outputs]
        flat = [t for group in outputs for t in group]
        opts = opts or c10d.AllgatherOptions()
        return self._run("all_gather", inputs, flat, ("allgather",), outputs, inputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> EmulatedWork:
        opts = opts or dist.ReduceScatterOptions()
        names = ("reduce_scatter_single", "_reduce_scatter_base")
        return self._run("reduce_scatter", [input], [output], names, output, input, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        opts = opts or dist.ReduceScatterOptions()
        names = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
        return self._run("reduce_scatter", inputs, outputs, names, outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        outputs = _as_list(outputs)
        inputs = inputs if isinstance(inputs[0], (list, tuple)) else [inputs]
        flat = [t for group in inputs for t in group]
        opts = opts or dist.ReduceScatterOptions()
        return self._run("reduce_scatter", flat, outputs, ("reduce_scatter",), outputs, inputs, opts)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> EmulatedWork:
        opts = opts or dist.AllToAllOptions()
        names = ("all_to_all_single", "alltoall_base")
        return self._run("all_to_all", [input], [output], names, output, input, output_splits, input_splits, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        opts = opts or dist.AllToAllOptions()
        return self._run("all_to_all", inputs, outputs, ("alltoall",), outputs, inputs, opts)

    def reduce(self, tensors: Any, opts: Any) -> EmulatedWork:
        return self._run("reduce", tensors, tensors, ("reduce",), tensors, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> EmulatedWork:
        flat = [t for group in outputs for t in group]
        return self._run("gather", inputs, flat, ("gather",), outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> EmulatedWork:
        flat = [t for group in inputs for t in group]
        return self._run("scatter", flat, outputs, ("scatter",), outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> EmulatedWork:
        return self._run("barrier", [], [], ("barrier",), opts or dist.BarrierOptions())

    def send(self, tensors: Any, destination: int, tag: int = 0) -> EmulatedWork:
        return self._run("send", tensors, [], ("send",), tensors, destination, tag, message=(self._rank, destination))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> EmulatedWork:
        return self._run("recv", [], tensors, ("recv",), tensors, source, tag, message=(source, self._rank))


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone().flatten() for t in tensors]


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _shared_tables(store: Any, rank: int, size: int) -> GroupTables:
    """The group's issue times; the first rank makes the file and removes its name when all have opened it."""
    if rank == 0:
        store.set("emulated_link_tables", GroupTables.make_file())
    path = store.get("emulated_link_tables").decode()
    tables = GroupTables(path, size)
    if store.add("emulated_link_opened", 1) == size:
        store.set("emulated_link_all_opened", "1")
    store.wait(["emulated_link_all_opened"])
    if rank == 0:
        os.unlink(path)
    return tables
