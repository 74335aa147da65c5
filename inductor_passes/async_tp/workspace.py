"""Memory that all ranks of a group map: buffers and flags for kernels that communicate.

A workspace belongs to one process group and one kind of operator. Each rank contributes one block: two pages of data
and two pages of flags (see ``kernels``), zero at first. All ranks call the operators of a graph alike, so they ask for
equal sizes in equal order: the first request allocates, and a larger one allocates anew once every rank has come to it
with nothing running on the old block any more.

Blocks come from torch's symmetric memory on CUDA devices. On CPUs, where kernels run in Triton's interpreter, they are
a file in shared memory that every process of the host maps; its name is gone as soon as all have opened it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inductor_passes import _torch

#: Smallest page; pages grow in powers of two, so that slowly growing problems do not allocate each time.
_LEAST_BYTES = 1 << 16
_FLAG_BYTES = 4


@dataclass(frozen=True, eq=False)
class Workspace:
    """One rank's view of a group's block.

    Attributes:
        rank / world: in the group.
        own: this rank's block, bytes.
        data / flags: int64 (world,), addresses of all ranks' data and flags.
        pages: bytes from a page to the next, of data and of flags.
        epoch: int32 scalar, counts calls.
        keep: what keeps the peers' memory mapped.
    """

    rank: int
    world: int
    own: torch.Tensor
    data: torch.Tensor
    flags: torch.Tensor
    pages: tuple[int, int]
    epoch: torch.Tensor
    keep: Any

    def next_epoch(self) -> torch.Tensor:
        """Begin a call: the epoch's counter, one higher than before."""
        self.epoch.add_(1)
        return self.epoch

    def page_copy(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A copy of what the current epoch's own page holds, without asking the device which page that is."""
        size = torch.Size(shape).numel() * dtype.itemsize
        both = self.own[: 2 * self.pages[0]].view(2, self.pages[0])[:, :size].view(dtype)
        return both.index_select(0, (self.epoch % 2).long()).view(shape)


def workspace(name: str, kind: str, data_bytes: int, flag_count: int, device: torch.device) -> Workspace:
    """The workspace of a group for one kind of operator, with pages of at least these sizes.

    Collective when it has to allocate: all ranks of the group ask alike.

    Raises:
        RuntimeError: it has to allocate while a CUDA graph is being recorded.
    """
    known = _registry.setdefault(_torch.default_group(), {})
    key = (name, kind, str(device))
    wanted = (_size(data_bytes), _size(flag_count * _FLAG_BYTES))
    generation = 0
    if key in known:
        generation, found = known[key]
        if wanted[0] <= found.pages[0] and wanted[1] <= found.pages[1]:
            return found
        wanted = (max(wanted[0], found.pages[0]), max(wanted[1], found.pages[1]))
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the workspace for {kind!r} of process group {name!r} has to grow to {sum(wanted)} bytes per page, "
                "which a CUDA graph cannot record; run the graph once before recording it"
            )
        torch.cuda.synchronize(device)
    # Behind this exchange no rank has a kernel running on the old block: it may go.
    _torch.exchange(name, f"inductor_passes/workspace/{kind}/{device.type}/{generation}/idle", "idle")
    made = _allocate(name, f"inductor_passes/workspace/{kind}/{device.type}/{generation}", wanted, device)
    known[key] = generation + 1, made
    return made


def _size(needed: int) -> int:
    return max(_LEAST_BYTES, 1 << (needed - 1).bit_length()) if needed else _LEAST_BYTES


def _allocate(name: str, key: str, pages: tuple[int, int], device: torch.device) -> Workspace:
    found = _torch.resolve_group_ranks(name)
    assert found is not None
    world, rank = len(found[1]), found[1].index(_torch.process_rank())
    size = 2 * sum(pages)
    if device.type == "cuda":
        own, addresses, keep = _torch.symmetric_buffer(size, name, device)
        own.zero_()
        torch.cuda.synchronize(device)
    else:
        whole = _mapped(name, key, rank, size * world)
        own, keep = whole[rank * size : (rank + 1) * size], whole
        addresses = [whole.data_ptr() + r * size for r in range(world)]
    # Nobody writes to a peer's block before that is zero.
    _torch.exchange(name, f"{key}/zero", "zero")
    data = torch.tensor(addresses, dtype=torch.int64)
    return Workspace(
        rank,
        world,
        own,
        data.to(device),
        (data + 2 * pages[0]).to(device),
        pages,
        torch.zeros(1, dtype=torch.int32, device=device),
        keep,
    )


def _mapped(name: str, key: str, rank: int, size: int) -> torch.Tensor:
    """A file of zeros that all ranks of the group map."""
    path = ""
    if rank == 0:
        shared = Path("/dev/shm")
        handle, path = tempfile.mkstemp(prefix="inductor_passes_", dir=shared if shared.is_dir() else None)
        os.truncate(handle, size)
        os.close(handle)
    try:
        path = _torch.exchange(name, f"{key}/file", path or "-")[0]
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        _torch.exchange(name, f"{key}/open", "open")
    finally:
        if rank == 0:
            Path(path).unlink(missing_ok=True)
    return torch.frombuffer(memory, dtype=torch.uint8)


_Known = dict[tuple[str, str, str], tuple[int, Workspace]]
_registry: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
