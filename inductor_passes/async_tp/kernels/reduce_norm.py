"""One-shot all-reduce, residual and RMSNorm in one kernel.

Every rank publishes its rows in its own symmetric buffer, then reads all ranks' rows: latency of one exchange instead
of two, right for the small messages of decoding. Sums run in rank order in float32, so all ranks get the same bits.

    h = residual + sum over ranks of x;  y = h * rsqrt(mean(h * h) + eps) * weight

Two buffers alternate by epoch. A rank writes epoch ``e + 2`` into the buffer of ``e`` only after it has seen every
peer's flag of ``e + 1``, which a peer raises after it has read ``e``: so nothing is overwritten while it is being read.

Optionally ``y`` is also quantised: ``q = clamp(y / scale, -limit, limit)`` in an 8-bit float type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inductor_passes.async_tp.kernels.signals import acquire, peer_pointer, release


@triton.jit
def _reduce_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, hidden, y, quantised, scale, buffers, flags, rank, epoch, rows, columns, eps, limit,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, QUANTISE: tl.constexpr,
):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    place = ((epoch % 2) * rows + row) * columns + offsets
    own = peer_pointer(buffers, rank, x)
    tl.store(own + place, tl.load(x + row * columns + offsets, mask=mask), mask=mask)
    flag_type = tl.pointer_type(tl.int32)
    for peer in range(WORLD):
        # Flag [row, rank] of the peer: "rank has published row".
        release(tl.load(flags + peer).to(flag_type, bitcast=True) + row * WORLD + rank, epoch)
    mine = tl.load(flags + rank).to(flag_type, bitcast=True) + row * WORLD
    total = tl.load(residual + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    for peer in range(WORLD):
        acquire(mine + peer, epoch)
        theirs = peer_pointer(buffers, peer, x)
        # Past the cache that may still hold this buffer's rows of two epochs ago.
        summed += tl.load(theirs + place, mask=mask, other=0.0, cache_modifier=".cv").to(tl.float32)
    total += summed
    tl.store(hidden + row * columns + offsets, total.to(hidden.dtype.element_ty), mask=mask)
    inverse = tl.rsqrt(tl.sum(total * total, axis=0) / columns + eps)
    normed = total * inverse * tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * columns + offsets, normed.to(y.dtype.element_ty), mask=mask)
    if QUANTISE:
        scaled = normed / tl.load(scale)
        scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
        tl.store(quantised + row * columns + offsets, scaled.to(quantised.dtype.element_ty), mask=mask)


def buffer_elements(rows: int, columns: int) -> int:
    """Elements of each rank's symmetric buffer."""
    return 2 * rows * columns


def flag_count(rows: int, world: int) -> int:
    """int32 flags in each rank's symmetric memory, zero before the first epoch."""
    return rows * world


def all_reduce_residual_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    buffers: torch.Tensor,
    flags: torch.Tensor,
    rank: int,
    world: int,
    epoch: int,
    *,
    eps: float = 1e-5,
    scale: torch.Tensor | None = None,
    quantised_dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See the module's docstring.

    Args:
        x: (rows, columns) contiguous, this rank's partial sums; rows and dtype alike on all ranks.
        residual: (rows, columns); weight: (columns,).
        buffers: int64 (world,), addresses of the ranks' buffers of :func:`buffer_elements` elements of ``x``'s dtype.
        flags: int64 (world,), addresses of the ranks' :func:`flag_count` flags.
        epoch: 1 for the first call on these buffers, one more each time.
        scale: float32 scalar tensor: also quantise.

    Returns:
        (h, y, quantised y or None).

    Raises:
        ValueError: an epoch below 1, or shapes that do not fit.
    """
    if epoch < 1:
        raise ValueError(f"epoch is {epoch}; expected at least 1")
    if x.shape != residual.shape or weight.shape != x.shape[1:] or not x.is_contiguous():
        shapes = [tuple(t.shape) for t in (x, residual, weight)]
        raise ValueError(f"x, residual and weight have shapes {shapes}; expected (rows, columns) twice and (columns,)")
    rows, columns = x.shape
    hidden, y = torch.empty_like(residual), torch.empty_like(x)
    quantised = torch.empty(x.shape, dtype=quantised_dtype, device=x.device) if scale is not None else None
    _reduce_norm[(rows,)](
        x, residual, weight, hidden, y,
        quantised if quantised is not None else y,
        scale if scale is not None else y,
        buffers, flags, rank, epoch, rows, columns, eps, torch.finfo(quantised_dtype).max,
        WORLD=world, BLOCK=triton.next_power_of_2(columns), QUANTISE=scale is not None,
    )
    return hidden, y, quantised
