"""A process group of any size in one process: every collective is the copies that it would cost this device.

For one GPU: collectives run on a stream of their own, beside compute, as NCCL's do, and really move the bytes (a gather
writes all ranks' parts, a reduction reads all of its input), so that what overlaps and what does not is measured and
not modelled. Results are those of ranks that all hold the same data. ``repeats`` copies several times, which stands for
a slower link.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from inductor_passes import _torch

BACKEND = "loopback"
#: How often each collective moves its bytes.
repeats = 1

_streams: dict[int, torch.cuda.Stream] = {}
_library: torch.library.Library | None = None


class LoopbackWork(dist.Work):
    """Copies in flight: a wait makes the current stream wait, not the host."""

    def __init__(self, outputs: list[torch.Tensor], done: Any) -> None:
        super().__init__()
        self._outputs, self._done = outputs, done

    def wait(self, timeout: Any = None) -> bool:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done is None or bool(self._done.query())

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._outputs


class LoopbackGroup(dist.ProcessGroup):
    """The process group; its methods have the names by which torch calls one."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, name

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def getSize(self) -> int:
        return self._size

    def getRank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _run(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], outputs: list[torch.Tensor]) -> LoopbackWork:
        """Copy each (target, source); on a GPU on the group's stream, after what the current stream has issued."""
        if not outputs[0].is_cuda:
            for _ in range(repeats):
                for target, source in pairs:
                    target.copy_(source)
            return LoopbackWork(outputs, None)
        device = outputs[0].device.index
        stream = _streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(repeats):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        for target, source in pairs:
            target.record_stream(stream)
            source.record_stream(stream)
        return LoopbackWork(outputs, done)

    def _gathers(self, output: torch.Tensor, input: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(part, input) for part in output.view(self._size, *input.shape)]

    def _reductions(self, output: torch.Tensor, input: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = list(input.chunk(self._size))
        # The own part last: it is what stays.
        return [(output, part) for part in (*parts[: self._rank], *parts[self._rank + 1 :], parts[self._rank])]

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> LoopbackWork:
        return self._run(self._gathers(output, input), [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LoopbackWork:
        return self._run([pair for o, i in zip(outputs, inputs) for pair in self._gathers(o, i)], list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> LoopbackWork:
        return self._run(self._reductions(output, input), [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LoopbackWork:
        return self._run([pair for o, i in zip(outputs, inputs) for pair in self._reductions(o, i)], list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def allreduce(self, tensors: Any, opts: Any = None) -> LoopbackWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return self._run([(t, t.clone()) for t in tensors], tensors)

    allreduce_coalesced = allreduce

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> LoopbackWork:
        """The form with a list of tensors per rank, by which torch gathers objects."""
        pairs = [(part, one) for parts, one in zip(outputs, inputs) for part in parts]
        return self._run(pairs, [part for part, _ in pairs])

    def broadcast(self, tensors: Any, opts: Any = None) -> LoopbackWork:
        return self._run([], [tensors] if isinstance(tensors, torch.Tensor) else list(tensors))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> LoopbackWork:
        return self._run([(outputs[0], inputs[0][self._rank])], list(outputs))

    def barrier(self, opts: Any = None) -> LoopbackWork:
        return LoopbackWork([], None)


def start(size: int) -> None:
    """Make a default process group of ``size`` ranks, all of them this process, which is rank 0."""
    global _library
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

    def make(options: Any, _: Any) -> LoopbackGroup:
        return LoopbackGroup(options.group_rank, options.group_size, str(options.group_id))

    if _library is None:
        dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=devices)
        # These two call the group through a C++ method that a Python process group cannot override before 2.14.
        _library = torch.library.Library("_c10d_functional", "IMPL")
        for device in devices:
            _library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, device.upper())
            _library.impl("reduce_scatter_tensor_out", _reduce_scatter_tensor_out, device.upper())
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=size)


def _all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    method = _torch.group_method(_torch.process_group(group_name), "all_gather_single", "_allgather_base")
    _torch.register_work(out, method(out, input.contiguous(), c10d.AllgatherOptions()))
    return out


def _reduce_scatter_tensor_out(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    method = _torch.group_method(_torch.process_group(group_name), "reduce_scatter_single", "_reduce_scatter_base")
    _torch.register_work(out, method(out, input.contiguous(), dist.ReduceScatterOptions()))
    return out
