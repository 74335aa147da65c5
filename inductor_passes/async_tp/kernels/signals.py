"""Flags between ranks: a rank releases a number into a peer's memory, the peer spins until it has arrived.

A flag holds the epoch of its last use and only grows, so it is never reset: "at least this epoch" is the test. A
release comes after all the program's earlier stores have been made visible to the system, an acquire before its later
loads. Addresses of peers' buffers come as a tensor of integers, as symmetric memory hands them out.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def peer_pointer(addresses, rank, like):  # type: ignore[no-untyped-def]
    """The buffer of ``rank`` as a pointer of the type of ``like``; ``addresses`` points to one int64 per rank."""
    return tl.load(addresses + rank).to(like.dtype, bitcast=True)
