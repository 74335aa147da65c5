"""One launch that takes the message of a gathered bucket apart, for GPUs.

A message is a matrix [ranks, columns] and a member a range of columns; its result is that range, dense. A program
copies one block of one row: it counts blocks through the members until its own is found. Results are arguments of the
launch, so no table of pointers has to be copied to the device first and the launch may be captured in a CUDA graph.
Imported only where it runs: Triton need not be there otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

#: Results of one launch; more are several launches.
MEMBERS = 16
#: Elements per program.
BLOCK = 1024


@triton.jit
def _copied(message, out, first, width, columns, row, at, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy block ``at`` of one row if the member has so many; how many blocks are left to count behind it."""
    blocks = tl.cdiv(width, block)
    if (at >= 0) & (at < blocks):
        offsets = at * block + tl.arange(0, block)
        inside = offsets < width
        values = tl.load(message + row * columns + first + offsets, mask=inside)
        tl.store(out + row * width + offsets, values, mask=inside)
    return at - blocks


@triton.jit
def take_apart(message, outs, firsts, widths, columns, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid: (blocks of all members in a row, rows). ``outs``, ``firsts`` and ``widths`` are tuples, one per member."""
    at = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    for member in tl.static_range(len(outs)):
        at = _copied(message, outs[member], firsts[member], widths[member], columns, row, at, block)


def unpacked(message: torch.Tensor, firsts: Sequence[int], widths: Sequence[int]) -> list[torch.Tensor]:
    """Dense [rows, width] tensors of ranges of columns of a dense [rows, columns] matrix."""
    rows, columns = message.shape
    outs = [message.new_empty(rows, width) for width in widths]
    for k in range(0, len(outs), MEMBERS):
        some = [j for j in range(k, min(k + MEMBERS, len(outs))) if widths[j]]
        blocks = sum(triton.cdiv(widths[j], BLOCK) for j in some)
        if blocks and rows:
            take_apart[blocks, rows](
                message,
                tuple(outs[j] for j in some),
                tuple(firsts[j] for j in some),
                tuple(widths[j] for j in some),
                columns,
                block=BLOCK,
            )
    return outs
