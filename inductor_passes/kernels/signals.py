"""Flags between ranks: a rank releases a number into a peer's memory, the peer spins until it has arrived.

A flag holds the epoch of its last use and only grows, so it is never reset: "at least this epoch" is the test. A
release comes after all the program's earlier stores have been made visible to the system, an acquire before its later
loads. Addresses of peers' buffers come as a tensor of integers, as symmetric memory hands them out.

Buffers and flags have two pages that take turns by epoch. The epoch is read from device memory, so that a recorded
CUDA graph counts on when it is replayed.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Arguments that differ from rank to rank. Triton compiles another kernel for 0 and for 1 than for other numbers unless
#: it is told not to: all ranks are to run the same code, and to find it in a cache that they share.
PER_RANK = ["rank"]

@triton.jit
def release(flag, epoch):  # type: ignore[no-untyped-def]
    """Publish this program's stores: set ``flag`` (pointer to int32) to ``epoch``."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def acquire(flag, epoch):  # type: ignore[no-untyped-def]
    """Spin until ``flag`` (pointer to int32) is at least ``epoch``."""
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < epoch:
        pass
    tl.debug_barrier()


@triton.jit
def release_all(flags, stride, epoch, place, WORLD: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """:func:`release` the flag at ``place`` of all ranks, side by side: one after the other costs a trip each.

    Args:
        flags: int64 (WORLD,), addresses of the ranks' flags; stride: see :func:`page`.
        LANES: power of two of at least ``WORLD``.
    """
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    there = lane < WORLD
    own = tl.load(flags + lane, mask=there, other=0) + (epoch % 2).to(tl.int64) * stride
    flag = own.to(tl.pointer_type(tl.int32), bitcast=True) + place
    tl.atomic_xchg(flag, lane * 0 + epoch, mask=there, sem="release", scope="sys")


@triton.jit
def acquire_all(flag, epoch, WORLD: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """:func:`acquire` ``WORLD`` neighbouring flags, side by side."""
    lane = tl.arange(0, LANES)
    there = lane < WORLD
    least = epoch - 1
    while least < epoch:
        seen = tl.atomic_add(flag + lane, lane * 0, mask=there, sem="acquire", scope="sys")
        least = tl.min(tl.where(there, seen, epoch), axis=0)
    tl.debug_barrier()


@triton.jit
def page(addresses, rank, epoch, stride):  # type: ignore[no-untyped-def]
    """Address of the page of ``epoch`` in the buffer of ``rank``; ``stride`` is a page's size in bytes.

    Pages of data are aligned to 16 bytes. A compiler cannot see that in a number: who makes a pointer of it for wide
    loads says so (``tl.multiple_of``), else they are taken element by element.
    """
    return tl.load(addresses + rank) + (epoch % 2).to(tl.int64) * stride


@triton.jit
def tile_of(number, down, across, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row, column) of a tile in grouped order: ``GROUP`` rows of tiles share what they read of the right operand."""
    per_group = GROUP * across
    first = number // per_group * GROUP
    height = tl.minimum(down - first, GROUP)
    within = number % per_group
    return first + within % height, within // height
