"""One rank of the kernel tests: Triton's interpreter on memory that all ranks' processes map.

    TRITON_INTERPRET=1 python -m tests.support.async_tp_kernel_worker RANK WORLD FILE EPOCHS

Prints ``ok`` and the number of results compared. Each epoch begins after a random delay, different on every rank.
"""

from __future__ import annotations

import functools
import mmap
import random
import sys
import time
from typing import Any

import torch

from inductor_passes.kernels import gather_gemm, gemm_scatter, reduce_norm
from inductor_passes.kernels.tiles import Tiles

SEGMENT = 1 << 16
ROWS, K, N = 40, 24, 36
TILES = Tiles(16, 32, 16, group=2)


class Shared:
    """Segments of every rank in one shared file: ``local(name)`` tensors, ``addresses(name)`` of all ranks."""

    def __init__(self, file: str, rank: int, world: int) -> None:
        with open(file, "r+b") as handle:
            self._memory = mmap.mmap(handle.fileno(), 0)
        self._all = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.rank, self.world = rank, world
        self._names: list[str] = []

    def _begin(self, name: str, rank: int) -> int:
        if name not in self._names:
            self._names.append(name)
        return (self._names.index(name) * self.world + rank) * SEGMENT

    def local(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        assert size <= SEGMENT, (name, size)
        begin = self._begin(name, self.rank)
        return self._all[begin : begin + size].view(dtype).view(shape)

    def addresses(self, name: str) -> torch.Tensor:
        return torch.tensor([self._all.data_ptr() + self._begin(name, r) for r in range(self.world)])


def barrier(shared: Shared, number: int) -> None:
    """All ranks have come here ``number`` times."""
    mine = shared.local("barrier", (1,), torch.int32)
    mine[0] = number
    begins = [shared._begin("barrier", r) for r in range(shared.world)]
    while any(int(shared._all[b : b + 4].view(torch.int32)) < number for b in begins):
        time.sleep(1e-3)


def integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(torch.float32)


class Pages:
    """Two pages of data and of flags of every rank under a name, and the counter of calls."""

    def __init__(self, shared: Shared, name: str) -> None:
        shared.local(name, (1,), torch.int32)
        shared.local(f"{name} flags", (1,), torch.int32)
        self.data, self.flags = shared.addresses(name), shared.addresses(f"{name} flags")
        self.pages = (SEGMENT // 2, SEGMENT // 2)
        self.epoch = torch.zeros(1, dtype=torch.int32)

    def next(self, shared: Shared) -> tuple[Any, ...]:
        self.epoch += 1
        return (self.data, self.flags, self.pages, shared.rank, shared.world, self.epoch)


@functools.cache
def pages(shared: Shared, name: str) -> Pages:
    return Pages(shared, name)


def check_norm(shared: Shared, epoch: int) -> int:
    rank, world, columns = shared.rank, shared.world, 20
    rows = 3 + epoch % 2
    parts = [integers((rows, columns), 100 * epoch + r) for r in range(world)]
    residual, weight = integers((rows, columns), epoch), integers((columns,), 7)
    expected = residual + sum(parts)
    normed = expected * torch.rsqrt(expected.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    for two_shot in (False, True):
        assert reduce_norm.data_bytes(rows, columns, torch.float32, two_shot) <= SEGMENT // 2
        assert 4 * reduce_norm.flag_count(rows, world) <= SEGMENT // 2
        hidden, y, quantised = reduce_norm.all_reduce_residual_rms_norm(
            parts[rank], residual, weight, *pages(shared, f"norm {two_shot}").next(shared),
            scale=torch.tensor(0.5) if epoch % 2 else None, two_shot=two_shot,
        )
        assert torch.equal(hidden, expected)
        torch.testing.assert_close(y, normed, rtol=1e-5, atol=1e-5)
        if quantised is not None:
            rounded = (normed / 0.5).to(torch.float8_e4m3fn).float()
            torch.testing.assert_close(quantised.float(), rounded, rtol=0.13, atol=0.02)
    return 4


def check_gather(shared: Shared, epoch: int) -> int:
    rank, world = shared.rank, shared.world
    shards, right = [integers((ROWS, K), 200 * epoch + r) for r in range(world)], integers((K, N), epoch)
    bias = integers((N,), 3) if epoch % 2 else None
    common = pages(shared, "gathered").next(shared)
    assert gather_gemm.data_bytes(ROWS, K, world, torch.float32) <= SEGMENT // 2
    gather_gemm.push(shards[rank], *common, TILES)
    expected = torch.cat(shards) @ right + (0 if bias is None else bias)
    for one in (right, right.t().contiguous().t()):
        assert torch.equal(gather_gemm.gemm((ROWS, K), one, bias, *common, TILES, programs=2), expected)
    return 2


def check_scatter(shared: Shared, epoch: int) -> int:
    rank, world = shared.rank, shared.world
    lefts, right = [integers((world * ROWS, K), 300 * epoch + r) for r in range(world)], integers((K, N), epoch)
    common = pages(shared, "slots").next(shared)
    assert gemm_scatter.data_bytes(ROWS, N, world) <= SEGMENT // 2
    gemm_scatter.gemm(lefts[rank], right, *common, TILES, programs=2)
    out = gemm_scatter.reduce(right, (ROWS, N), *common, TILES, average=epoch % 2 == 0)
    total = sum(left @ right for left in lefts)[rank * ROWS : (rank + 1) * ROWS]
    assert torch.equal(out, total / world if epoch % 2 == 0 else total)
    return 1


def main() -> None:
    rank, world, file, epochs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    shared = Shared(file, rank, world)
    barrier(shared, 1)
    noise = random.Random(rank)
    compared = 0
    for epoch in range(1, epochs + 1):
        for check in (check_norm, check_gather, check_scatter):
            time.sleep(noise.random() * 0.05)
            compared += check(shared, epoch)
    print("ok", compared)


if __name__ == "__main__":
    main()
