"""All-gather inside a GEMM: tiles wait for the rows that they read, and no longer.

``push`` copies this rank's shard into every rank's gathered buffer, chunk by chunk, and raises a flag per chunk there
(on accelerators a copy engine can do it). ``gemm`` computes the own shard's tiles first, then the peers' in ring order,
and spins on a chunk's flag right before the first load from it. Persistent programs take tiles in that order, so a
program never waits for a tile of a program that has not been started.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inductor_passes.async_tp.kernels.signals import acquire, peer_pointer, release


@triton.jit
def _push(  # type: ignore[no-untyped-def]
    shard, gathered, flags, rank, epoch, rows, columns, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WORLD: tl.constexpr
):
    chunk, step = tl.program_id(0), tl.program_id(1)
    peer = (rank + step) % WORLD
    target = peer_pointer(gathered, peer, shard) + rank * rows * columns
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = (row[:, None] < rows) & (column[None, :] < columns)
        place = row[:, None] * columns + column[None, :]
        tl.store(target + place, tl.load(shard + place, mask=mask), mask=mask)
    chunks = tl.num_programs(0)
    flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32), bitcast=True) + rank * chunks + chunk
    release(flag, epoch)


@triton.jit
def _gemm(  # type: ignore[no-untyped-def]
    gathered, right, out, flags, rank, epoch, rows, k, n,
    WORLD: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    chunks = tl.cdiv(rows, CHUNK)
    across = tl.cdiv(n, BLOCK_N)
    for tile in range(tl.program_id(0), WORLD * chunks * across, tl.num_programs(0)):
        source = (rank + tile // (chunks * across)) % WORLD
        chunk = tile % (chunks * across) // across
        acquire(flags + source * chunks + chunk, epoch)
        row = chunk * CHUNK + tl.arange(0, CHUNK)
        column = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros([CHUNK, BLOCK_N], dtype=tl.float32)
        for begin in range(0, k, BLOCK_K):
            inner = begin + tl.arange(0, BLOCK_K)
            left = tl.load(
                gathered + (source * rows + row[:, None]) * k + inner[None, :],
                mask=(row[:, None] < rows) & (inner[None, :] < k),
                other=0.0,
                cache_modifier=".cg",
            )
            weights = tl.load(
                right + inner[:, None] * n + column[None, :],
                mask=(inner[:, None] < k) & (column[None, :] < n),
                other=0.0,
            )
            total = tl.dot(left, weights, total, input_precision="ieee")
        place = (source * rows + row[:, None]) * n + column[None, :]
        mask = (row[:, None] < rows) & (column[None, :] < n)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


def flag_count(rows: int, world: int, chunk: int) -> int:
    """int32 flags in each rank's symmetric memory, zero before the first epoch."""
    return world * -(-rows // chunk)


def push(
    shard: torch.Tensor, gathered: torch.Tensor, flags: torch.Tensor, rank: int, world: int, epoch: int, chunk: int
) -> None:
    """Send the shard (rows, k) to all ranks.

    Args:
        gathered / flags: int64 (world,), addresses of the ranks' gathered buffers (world * rows, k) and flags.
        epoch: 1 for the first call, one more each time; nobody may still read the buffers of the epoch before.
        chunk: rows per flag, a power of two.
    """
    rows, columns = shard.shape
    _push[(-(-rows // chunk), world)](
        shard, gathered, flags, rank, epoch, rows, columns, CHUNK=chunk, BLOCK=64, WORLD=world
    )


def gemm(
    gathered: torch.Tensor,
    right: torch.Tensor,
    own_flags: torch.Tensor,
    rank: int,
    world: int,
    epoch: int,
    chunk: int,
    programs: int,
) -> torch.Tensor:
    """``gathered @ right`` as chunks arrive: (world * rows, n), accumulated in float32.

    Args:
        gathered: this rank's buffer (world * rows, k), being filled by :func:`push`.
        own_flags: this rank's flags (int32).
        programs: how many run at once; at most as many as fit on the device together with whoever pushes.
    """
    rows, k, n = gathered.shape[0] // world, gathered.shape[1], right.shape[1]
    out = gathered.new_empty(world * rows, n)
    _gemm[(programs,)](
        gathered, right.contiguous(), out, own_flags, rank, epoch, rows, k, n,
        WORLD=world, CHUNK=chunk, BLOCK_N=32, BLOCK_K=32,
    )
    return out
