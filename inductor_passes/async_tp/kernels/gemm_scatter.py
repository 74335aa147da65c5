"""GEMM and reduce-scatter: tiles go to the rank that owns them as soon as they are computed.

``gemm`` computes the tiles of the next rank's block first and its own last, stores each float32 tile into the slot
that the owner keeps for this rank, and raises the tile's flag there. ``reduce`` waits per tile for all ranks' flags and
adds the slots in rank order, so that the result does not depend on who came first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inductor_passes.async_tp.kernels.signals import acquire, release


@triton.jit
def _gemm(  # type: ignore[no-untyped-def]
    left, right, slots, flags, rank, epoch, rows, k, n,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = down * across
    for tile in range(tl.program_id(0), WORLD * tiles, tl.num_programs(0)):
        owner = (rank + 1 + tile // tiles) % WORLD
        within = tile % tiles
        row = within // across * BLOCK_M + tl.arange(0, BLOCK_M)
        column = within % across * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for begin in range(0, k, BLOCK_K):
            inner = begin + tl.arange(0, BLOCK_K)
            a = tl.load(
                left + (owner * rows + row[:, None]) * k + inner[None, :],
                mask=(row[:, None] < rows) & (inner[None, :] < k),
                other=0.0,
            )
            b = tl.load(
                right + inner[:, None] * n + column[None, :],
                mask=(inner[:, None] < k) & (column[None, :] < n),
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision="ieee")
        slot = tl.load(slots + owner).to(tl.pointer_type(tl.float32), bitcast=True) + rank * rows * n
        mask = (row[:, None] < rows) & (column[None, :] < n)
        tl.store(slot + row[:, None] * n + column[None, :], total, mask=mask)
        flag = tl.load(flags + owner).to(tl.pointer_type(tl.int32), bitcast=True) + rank * tiles + within
        release(flag, epoch)


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    slots, flags, out, epoch, rows, n, factor,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    across = tl.cdiv(n, BLOCK_N)
    tiles = tl.num_programs(0)
    row = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row[:, None] < rows) & (column[None, :] < n)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for source in range(WORLD):
        acquire(flags + source * tiles + tile, epoch)
        place = (source * rows + row[:, None]) * n + column[None, :]
        total += tl.load(slots + place, mask=mask, other=0.0, cache_modifier=".cv")
    tl.store(out + row[:, None] * n + column[None, :], (total * factor).to(out.dtype.element_ty), mask=mask)


BLOCK_M = BLOCK_N = BLOCK_K = 32


def slot_elements(rows: int, n: int, world: int) -> int:
    """float32 elements of each rank's symmetric slots."""
    return world * rows * n


def flag_count(rows: int, n: int, world: int) -> int:
    """int32 flags in each rank's symmetric memory, zero before the first epoch."""
    return world * -(-rows // BLOCK_M) * -(-n // BLOCK_N)


def gemm(
    left: torch.Tensor, right: torch.Tensor, slots: torch.Tensor, flags: torch.Tensor, rank: int, world: int,
    epoch: int, programs: int,
) -> None:
    """Compute ``left @ right`` and hand every tile to its owner.

    Args:
        left: (world * rows, k); right: (k, n); contiguous.
        slots / flags: int64 (world,), addresses of the ranks' slots and flags.
        epoch: 1 for the first call, one more each time; slots of the epoch before must have been reduced everywhere.
        programs: how many run at once.
    """
    rows, k, n = left.shape[0] // world, left.shape[1], right.shape[1]
    _gemm[(programs,)](
        left, right, slots, flags, rank, epoch, rows, k, n,
        WORLD=world, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
    )


def reduce(
    own_slots: torch.Tensor, own_flags: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, world: int,
    epoch: int, average: bool = False,
) -> torch.Tensor:
    """This rank's (rows, n) of the sum (or average) over ranks, from its slots (float32) and flags (int32)."""
    rows, n = shape
    out = torch.empty(shape, dtype=dtype, device=own_slots.device)
    tiles = -(-rows // BLOCK_M) * -(-n // BLOCK_N)
    _reduce[(tiles,)](
        own_slots, own_flags, out, epoch, rows, n, 1.0 / world if average else 1.0,
        WORLD=world, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )
    return out
