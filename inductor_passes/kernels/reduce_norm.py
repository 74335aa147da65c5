"""All-reduce, residual and RMSNorm in one kernel, in one or two shots.

    h = residual + sum over ranks of x;  y = h * rsqrt(mean(h * h) + eps) * weight

One shot: every rank publishes its rows in its own buffer, then reads all ranks' rows. The latency of one exchange,
``world`` times the bytes: right for the small messages of decoding. Two shots: the owner of a row reads it from all
ranks and hands the float32 sum to all: two latencies, but the bytes do not grow with the world. Either way each rank
adds its own residual and norms all rows: nothing has to be known about whether residuals are equal.

Sums run in rank order in float32, so all ranks get the same bits. Programs take rows in order and wait only for what
concerns the same row on other ranks, so the smallest row that is not finished anywhere can always go on.

Two pages alternate by epoch. A rank writes epoch ``e + 2`` only after it has seen every peer's flag of ``e + 1``, which
a peer raises after it has read ``e``: so nothing is overwritten while it is being read.

Optionally ``y`` is also quantised: ``q = clamp(y / scale, -limit, limit)`` in an 8-bit float type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inductor_passes.kernels.signals import PER_RANK, acquire, acquire_all, page, release, release_all
from inductor_passes.kernels.tiles import programs_for


@triton.jit
def _sum_row(  # type: ignore[no-untyped-def]
    like, data, epoch, data_page, place, mask, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    # Written out, so that the loads are under way together.
    for peer in tl.static_range(WORLD):
        theirs = tl.multiple_of(page(data, peer, epoch, data_page).to(like.dtype, bitcast=True), 16)
        # Past the cache that may still hold this page's rows of two epochs ago.
        summed += tl.load(theirs + place, mask=mask, other=0.0, cache_modifier=".cv").to(tl.float32)
    return summed


@triton.jit
def _normed(total, weight, offsets, mask, columns, eps):  # type: ignore[no-untyped-def]
    inverse = tl.rsqrt(tl.sum(total * total, axis=0) / columns + eps)
    return total * inverse * tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_quantised(quantised, scale, normed, place, mask, limit):  # type: ignore[no-untyped-def]
    scaled = tl.minimum(tl.maximum(normed / tl.load(scale), -limit), limit)
    tl.store(quantised + place, scaled.to(quantised.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=PER_RANK)
def _one_shot(  # type: ignore[no-untyped-def]
    x, residual, weight, hidden, y, quantised, scale, data, flags, data_page, flag_page, rank, counter, rows, columns,
    eps, limit, WORLD: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, QUANTISE: tl.constexpr,
):
    epoch = tl.load(counter)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    wide = tl.full([BLOCK], 1, tl.int64) * columns
    flag_type = tl.pointer_type(tl.int32)
    own = tl.multiple_of(page(data, rank, epoch, data_page).to(x.dtype, bitcast=True), 16)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        place = row * wide + offsets
        tl.store(own + place, tl.load(x + place, mask=mask), mask=mask)
        # Flag [row, rank] of a peer: "rank has published row".
        release_all(flags, flag_page, epoch, row * WORLD + rank, WORLD, LANES)
        mine = page(flags, rank, epoch, flag_page).to(flag_type, bitcast=True) + row * WORLD
        acquire_all(mine, epoch, WORLD, LANES)
        total = tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        total += _sum_row(x, data, epoch, data_page, place, mask, WORLD, BLOCK)
        tl.store(hidden + place, total.to(hidden.dtype.element_ty), mask=mask)
        normed = _normed(total, weight, offsets, mask, columns, eps)
        tl.store(y + place, normed.to(y.dtype.element_ty), mask=mask)
        if QUANTISE:
            _store_quantised(quantised, scale, normed, place, mask, limit)


@triton.jit(do_not_specialize=PER_RANK)
def _two_shot(  # type: ignore[no-untyped-def]
    x, residual, weight, hidden, y, quantised, scale, data, flags, data_page, flag_page, rank, counter, rows, columns,
    eps, limit, part, WORLD: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, QUANTISE: tl.constexpr,
):
    epoch = tl.load(counter)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    wide = tl.full([BLOCK], 1, tl.int64) * columns
    flag_type = tl.pointer_type(tl.int32)
    own = page(data, rank, epoch, data_page)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        place = row * wide + offsets
        tl.store(own.to(x.dtype, bitcast=True) + place, tl.load(x + place, mask=mask), mask=mask)
        owner = row % WORLD
        # Flags [row, rank]: "rank has published row"; the one behind them: "row is done".
        to_owner = page(flags, owner, epoch, flag_page).to(flag_type, bitcast=True)
        release(to_owner + row * (WORLD + 1) + rank, epoch)
        mine = page(flags, rank, epoch, flag_page).to(flag_type, bitcast=True) + row * (WORLD + 1)
        if owner == rank:
            acquire_all(mine, epoch, WORLD, LANES)
            summed = _sum_row(x, data, epoch, data_page, place, mask, WORLD, BLOCK)
            for step in range(WORLD):
                peer = (rank + step) % WORLD
                target = (page(data, peer, epoch, data_page) + part).to(tl.pointer_type(tl.float32), bitcast=True)
                tl.store(target + place, summed, mask=mask)
            release_all(flags, flag_page, epoch, row * (WORLD + 1) + WORLD, WORLD, LANES)
        acquire(mine + WORLD, epoch)
        sums = (own + part).to(tl.pointer_type(tl.float32), bitcast=True)
        total = tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(sums + place, mask=mask, other=0.0, cache_modifier=".cv")
        tl.store(hidden + place, total.to(hidden.dtype.element_ty), mask=mask)
        normed = _normed(total, weight, offsets, mask, columns, eps)
        tl.store(y + place, normed.to(y.dtype.element_ty), mask=mask)
        if QUANTISE:
            _store_quantised(quantised, scale, normed, place, mask, limit)


def _part_bytes(rows: int, columns: int) -> int:
    """Bytes of each of a page's two parts in two shots: what this rank sends, and float32 sums."""
    return -(-rows * columns * 4 // 16) * 16


def data_bytes(rows: int, columns: int, dtype: torch.dtype, two_shot: bool) -> int:
    """Bytes of each rank's page."""
    return 2 * _part_bytes(rows, columns) if two_shot else rows * columns * dtype.itemsize


def flag_count(rows: int, world: int) -> int:
    """int32 flags of each rank's page, zero before the first epoch."""
    return rows * (world + 1)


def all_reduce_residual_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    data: torch.Tensor,
    flags: torch.Tensor,
    pages: tuple[int, int],
    rank: int,
    world: int,
    epoch: torch.Tensor,
    *,
    eps: float = 1e-5,
    two_shot: bool = False,
    scale: torch.Tensor | None = None,
    y_dtype: torch.dtype | None = None,
    programs: int | None = None,
    quantised_dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See the module's docstring.

    Args:
        x: (rows, columns) contiguous, this rank's partial sums; rows and dtype alike on all ranks.
        residual: (rows, columns) contiguous; weight: (columns,).
        data / flags: int64 (world,), addresses of the ranks' buffers and flags, each of two pages.
        pages: bytes from a page to the next, of the buffers and of the flags.
        epoch: int32 scalar tensor, 1 for the first call on these buffers and one more each time; buffers serve either
            one shot or two.
        scale: float32 scalar tensor: also quantise.
        y_dtype: of y; that of x without.
        programs: how many run at once; where ranks share a device, those of all ranks must fit on it.

    Returns:
        (h of the residual's dtype, y, quantised y or None).

    Raises:
        ValueError: shapes that do not fit.
    """
    if x.dim() != 2 or x.shape != residual.shape or weight.shape != x.shape[1:] or not x.is_contiguous():
        shapes = [tuple(t.shape) for t in (x, residual, weight)]
        raise ValueError(f"x, residual and weight have shapes {shapes}; expected (rows, columns) twice and (columns,)")
    rows, columns = x.shape
    hidden, y = torch.empty_like(residual), torch.empty_like(x, dtype=y_dtype or x.dtype)
    quantised = torch.empty(x.shape, dtype=quantised_dtype, device=x.device) if scale is not None else None
    block = triton.next_power_of_2(columns)
    common = (
        x, residual, weight, hidden, y,
        quantised if quantised is not None else y,
        scale if scale is not None else y,
        data, flags, *pages, rank, epoch, rows, columns, eps, torch.finfo(quantised_dtype).max,
    )
    launch = {"WORLD": world, "LANES": triton.next_power_of_2(world), "BLOCK": block, "QUANTISE": scale is not None}
    launch["num_warps"] = 16 if block >= 8192 else 8
    grid = (programs or programs_for(x.device, rows),)
    if two_shot:
        _two_shot[grid](*common, _part_bytes(rows, columns), **launch)
    else:
        _one_shot[grid](*common, **launch)
    return hidden, y, quantised
