"""GEMM and reduce-scatter: tiles go to the rank that owns them as soon as they are computed.

``gemm`` computes the tiles of the next rank's block first and its own last, stores each float32 tile into the slot
that the owner keeps for this rank, and raises the tile's flag there. ``reduce`` waits per tile for all ranks' flags and
adds the slots in rank order, so that the result does not depend on who came first.

Two pages alternate by epoch. A rank stores epoch ``e + 2`` only when it has reduced ``e + 1``, for which it has seen
all ranks' tiles; they computed those when they had reduced ``e``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inductor_passes.kernels.signals import PER_RANK, acquire, page, release, tile_of
from inductor_passes.kernels.tiles import Tiles, precision, programs_for, widened


@triton.jit(do_not_specialize=PER_RANK)
def _gemm(  # type: ignore[no-untyped-def]
    left, right, data, flags, data_page, flag_page, rank, counter, rows, k, n, left_m, left_k, right_k, right_n,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    epoch = tl.load(counter)
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = down * across
    for tile in range(tl.program_id(0), WORLD * tiles, tl.num_programs(0)):
        owner = (rank + 1 + tile // tiles) % WORLD
        chunk, strip = tile_of(tile % tiles, down, across, GROUP)
        row = chunk * BLOCK_M + tl.arange(0, BLOCK_M)
        column = strip * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        # Rows and columns beyond the edge read the first one's values, which are not stored.
        read_row = (owner * rows + tl.where(row < rows, row, 0)).to(tl.int64)
        in_order = tl.max_contiguous(tl.multiple_of(tl.where(column < n, column, 0), BLOCK_N), BLOCK_N)
        read_column = in_order.to(tl.int64)
        lefts = left + read_row[:, None] * left_m + inner[None, :].to(tl.int64) * left_k
        rights = right + inner[:, None].to(tl.int64) * right_k + read_column[None, :] * right_n
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for begin in range(0, k, BLOCK_K):
            if EVEN_K:
                a = tl.load(lefts)
                b = tl.load(rights)
            else:
                a = tl.load(lefts, mask=inner[None, :] < k - begin, other=0.0)
                b = tl.load(rights, mask=inner[:, None] < k - begin, other=0.0)
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            lefts += BLOCK_K * left_k
            rights += BLOCK_K * right_k
        slot = tl.multiple_of(page(data, owner, epoch, data_page).to(tl.pointer_type(tl.float32), bitcast=True), 16)
        mask = (row[:, None] < rows) & (column[None, :] < n)
        place = (rank * rows + row[:, None]).to(tl.int64) * n + column[None, :]
        tl.store(slot + place, total, mask=mask)
        flag = page(flags, owner, epoch, flag_page).to(tl.pointer_type(tl.int32), bitcast=True)
        release(flag + rank * tiles + chunk * across + strip, epoch)


@triton.jit(do_not_specialize=PER_RANK)
def _reduce(  # type: ignore[no-untyped-def]
    data, flags, out, data_page, flag_page, rank, counter, rows, n, factor,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    epoch = tl.load(counter)
    slots = tl.multiple_of(page(data, rank, epoch, data_page).to(tl.pointer_type(tl.float32), bitcast=True), 16)
    raised = page(flags, rank, epoch, flag_page).to(tl.pointer_type(tl.int32), bitcast=True)
    across = tl.cdiv(n, BLOCK_N)
    tiles = tl.num_programs(0)
    row = (tile // across * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row[:, None] < rows) & (column[None, :] < n)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for source in range(WORLD):
        acquire(raised + source * tiles + tile, epoch)
        place = (source * rows + row[:, None]) * n + column[None, :]
        # Past the cache that may still hold this page's tiles of two epochs ago.
        total += tl.load(slots + place, mask=mask, other=0.0, cache_modifier=".cv")
    tl.store(out + row[:, None] * n + column[None, :], (total * factor).to(out.dtype.element_ty), mask=mask)


def data_bytes(rows: int, n: int, world: int) -> int:
    """Bytes of each rank's page: a float32 slot for every rank."""
    return world * rows * n * 4


def flag_count(rows: int, n: int, world: int, tiles: Tiles) -> int:
    """int32 flags of each rank's page, zero before the first epoch."""
    return world * -(-rows // tiles.m) * -(-n // tiles.n)


def gemm(
    left: torch.Tensor,
    right: torch.Tensor,
    data: torch.Tensor,
    flags: torch.Tensor,
    pages: tuple[int, int],
    rank: int,
    world: int,
    epoch: torch.Tensor,
    tiles: Tiles,
    programs: int | None = None,
) -> None:
    """Compute ``left @ right`` and hand every tile to its owner.

    Args:
        left: (world * rows, k); right: (k, n); any strides.
        data / flags: int64 (world,), addresses of the ranks' slots and flags, each of two pages.
        pages: bytes from a page to the next, of the slots and of the flags.
        epoch: int32 scalar tensor, 1 for the first call on these buffers and one more each time.
        programs: how many run at once.
    """
    rows, k, n = left.shape[0] // world, left.shape[1], right.shape[1]
    count = world * -(-rows // tiles.m) * -(-n // tiles.n)
    _gemm[(programs or programs_for(left.device, count),)](
        left, right, data, flags, *pages, rank, epoch, rows, k, n, *left.stride(), *right.stride(),
        WORLD=world, BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, GROUP=tiles.group,
        EVEN_K=k % tiles.k == 0, PRECISION=precision(), WIDEN=widened(right),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )


def reduce(
    like: torch.Tensor,
    shape: tuple[int, int],
    data: torch.Tensor,
    flags: torch.Tensor,
    pages: tuple[int, int],
    rank: int,
    world: int,
    epoch: torch.Tensor,
    tiles: Tiles,
    average: bool = False,
) -> torch.Tensor:
    """This rank's (rows, n) of the sum (or average) over ranks, of dtype and device of ``like``."""
    rows, n = shape
    out = like.new_empty(shape)
    count = -(-rows // tiles.m) * -(-n // tiles.n)
    _reduce[(count,)](
        data, flags, out, *pages, rank, epoch, rows, n, 1.0 / world if average else 1.0,
        WORLD=world, BLOCK_M=tiles.m, BLOCK_N=tiles.n, num_warps=tiles.warps,
    )
    return out
