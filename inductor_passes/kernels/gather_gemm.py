"""All-gather inside a GEMM: tiles wait for the rows that they read, and no longer.

``push`` copies this rank's shard into every rank's gathered buffer, chunk by chunk, and raises a flag per chunk there.
``gemm`` computes the own shard's tiles first, then the peers' in ring order, and spins on a chunk's flag right before
the first load from it. Persistent programs take tiles in that order, so a program never waits for a tile of a program
that has not been started.

Two pages alternate by epoch. A rank pushes epoch ``e + 2`` only when it has seen all flags of ``e + 1``, which a peer
raises when it has read all of ``e``: nothing is overwritten while it is being read, flags included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inductor_passes.kernels.signals import PER_RANK, acquire, page, release, tile_of
from inductor_passes.kernels.tiles import Tiles, precision, programs_for, widened

#: Multiprocessors that are left to whoever sends meanwhile, at the least.
RESERVED = 4


@triton.jit(do_not_specialize=PER_RANK)
def _push(  # type: ignore[no-untyped-def]
    shard, data, flags, data_page, flag_page, rank, counter, rows, columns,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WORLD: tl.constexpr,
):
    chunk, step = tl.program_id(0), tl.program_id(1)
    epoch = tl.load(counter)
    peer = (rank + step) % WORLD
    target = tl.multiple_of(page(data, peer, epoch, data_page).to(shard.dtype, bitcast=True), 16)
    row = chunk * CHUNK + tl.arange(0, CHUNK).to(tl.int64)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = (row[:, None] < rows) & (column[None, :] < columns)
        value = tl.load(shard + row[:, None] * columns + column[None, :], mask=mask)
        tl.store(target + (rank * rows + row[:, None]) * columns + column[None, :], value, mask=mask)
    flag = page(flags, peer, epoch, flag_page).to(tl.pointer_type(tl.int32), bitcast=True)
    release(flag + rank * tl.num_programs(0) + chunk, epoch)


@triton.jit(do_not_specialize=PER_RANK)
def _gemm(  # type: ignore[no-untyped-def]
    data, right, bias, out, flags, data_page, flag_page, rank, counter, rows, k, n, right_k, right_n,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    epoch = tl.load(counter)
    gathered = tl.multiple_of(page(data, rank, epoch, data_page).to(right.dtype, bitcast=True), 16)
    raised = page(flags, rank, epoch, flag_page).to(tl.pointer_type(tl.int32), bitcast=True)
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in range(tl.program_id(0), WORLD * down * across, tl.num_programs(0)):
        source = (rank + tile // (down * across)) % WORLD
        chunk, strip = tile_of(tile % (down * across), down, across, GROUP)
        acquire(raised + source * down + chunk, epoch)
        row = chunk * BLOCK_M + tl.arange(0, BLOCK_M)
        column = strip * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        # Rows and columns beyond the edge read the first one's values, which are not stored.
        read_row = (source * rows + tl.where(row < rows, row, 0)).to(tl.int64)
        in_order = tl.max_contiguous(tl.multiple_of(tl.where(column < n, column, 0), BLOCK_N), BLOCK_N)
        read_column = in_order.to(tl.int64)
        lefts = gathered + read_row[:, None] * k + inner[None, :]
        rights = right + inner[:, None].to(tl.int64) * right_k + read_column[None, :] * right_n
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for begin in range(0, k, BLOCK_K):
            if EVEN_K:
                a = tl.load(lefts, cache_modifier=".cg")
                b = tl.load(rights)
            else:
                left_in_k = inner[None, :] < k - begin
                a = tl.load(lefts, mask=left_in_k, other=0.0, cache_modifier=".cg")
                b = tl.load(rights, mask=inner[:, None] < k - begin, other=0.0)
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            lefts += BLOCK_K
            rights += BLOCK_K * right_k
        if HAS_BIAS:
            total += tl.load(bias + read_column)[None, :].to(tl.float32)
        place = (source * rows + row[:, None]).to(tl.int64) * n + column[None, :]
        mask = (row[:, None] < rows) & (column[None, :] < n)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


def data_bytes(rows: int, k: int, world: int, dtype: torch.dtype) -> int:
    """Bytes of each rank's page: the gathered matrix."""
    return world * rows * k * dtype.itemsize


def flag_count(rows: int, world: int, tiles: Tiles) -> int:
    """int32 flags of each rank's page, zero before the first epoch."""
    return world * -(-rows // tiles.m)


def push(
    shard: torch.Tensor,
    data: torch.Tensor,
    flags: torch.Tensor,
    pages: tuple[int, int],
    rank: int,
    world: int,
    epoch: torch.Tensor,
    tiles: Tiles,
) -> None:
    """Send the contiguous shard (rows, k) to all ranks.

    Args:
        data / flags: int64 (world,), addresses of the ranks' buffers and flags, each of two pages.
        pages: bytes from a page to the next, of the buffers and of the flags.
        epoch: int32 scalar tensor, 1 for the first call on these buffers and one more each time.
    """
    rows, columns = shard.shape
    _push[(-(-rows // tiles.m), world)](
        shard, data, flags, *pages, rank, epoch, rows, columns, CHUNK=tiles.m, BLOCK=64, WORLD=world
    )


def gemm(
    shape: tuple[int, int],
    right: torch.Tensor,
    bias: torch.Tensor | None,
    data: torch.Tensor,
    flags: torch.Tensor,
    pages: tuple[int, int],
    rank: int,
    world: int,
    epoch: torch.Tensor,
    tiles: Tiles,
    programs: int | None = None,
) -> torch.Tensor:
    """``gathered @ right (+ bias)`` as chunks arrive: (world * rows, n) contiguous, accumulated in float32.

    Args:
        shape: (rows, k) of a shard; right: (k, n), any strides; bias: (n,).
        programs: how many run at once; at most as many as fit on the device together with whoever pushes.
    """
    (rows, k), n = shape, right.shape[1]
    out = right.new_empty(world * rows, n)
    count = world * -(-rows // tiles.m) * -(-n // tiles.n)
    _gemm[(programs or programs_for(right.device, count, reserved=RESERVED),)](
        data, right, right if bias is None else bias, out, flags, *pages, rank, epoch, rows, k, n, *right.stride(),
        WORLD=world, BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, GROUP=tiles.group,
        EVEN_K=k % tiles.k == 0, HAS_BIAS=bias is not None, PRECISION=precision(), WIDEN=widened(right),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )
    return out
