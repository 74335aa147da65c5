"""Opaque operators for a gather or scatter inside a matmul, and their implementation for any backend.

The generic implementation sends shards point to point in sub-slabs and multiplies each one as it arrives, writing into
its place of the result (``mm`` with ``out``), the own shard first; the scatter computes the peers' blocks first, the
own one last, and adds what arrives in rank order in float32 or wider, so that all ranks round alike. There is no
assembling copy, and only one node in the graph, which nothing can reorder: use it where the graph's own
scheduling cannot help (no other work beside the matmul), else the ``decompose`` lowering.

Registered as ``inductor_passes::gathered_mm`` and ``inductor_passes::mm_scattered`` with fake kernels; results are
contiguous. They are for graphs behind autograd. All ranks of the group must call them in the same order.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from inductor_passes import _torch

__all__ = ["gathered_mm", "mm_scattered"]


def _blocks(rows: int, parts: int) -> list[tuple[int, int]]:
    """Ranges that cut ``rows`` into ``parts`` of nearly equal size, empty ones left out."""
    edges = [rows * i // parts for i in range(parts + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _members(group_name: str) -> tuple[Any, int, int]:
    group = _torch.process_group(group_name)
    return group, group.rank(), group.size()


@torch.library.custom_op("inductor_passes::gathered_mm", mutates_args=())
def gathered_mm(shard: torch.Tensor, right: torch.Tensor, world: int, group_name: str, parts: int) -> torch.Tensor:
    """``all_gather(shard) @ right``.

    Args:
        shard: (rows, k) of this rank.
        right: (k, n).
        world: ranks of the group.
        parts: sub-slabs per shard.

    Returns:
        (world * rows, n), contiguous; rank ``r``'s rows are ``r * rows`` and following.
    """
    group, rank, size = _members(group_name)
    shard = shard.contiguous()
    rows = shard.shape[0]
    blocks = _blocks(rows, parts)
    out = shard.new_empty(size * rows, right.shape[1])
    arriving = []
    sent = []
    for block, (begin, end) in enumerate(blocks):
        for step in range(1, size):
            source, target = (rank - step) % size, (rank + step) % size
            buffer = shard.new_empty(end - begin, shard.shape[1])
            arriving.append((group.recv([buffer], source, block), buffer, source * rows + begin))
            sent.append(group.send([shard[begin:end]], target, block))
    torch.mm(shard, right, out=out[rank * rows : (rank + 1) * rows])
    for work, buffer, row in arriving:
        work.wait()
        torch.mm(buffer, right, out=out[row : row + buffer.shape[0]])
    for work in sent:
        work.wait()
    return out


@gathered_mm.register_fake
def _(shard: torch.Tensor, right: torch.Tensor, world: int, group_name: str, parts: int) -> torch.Tensor:
    return shard.new_empty(world * shard.shape[0], right.shape[1])


@torch.library.custom_op("inductor_passes::mm_scattered", mutates_args=())
def mm_scattered(
    left: torch.Tensor, right: torch.Tensor, reduce_op: str, world: int, group_name: str, parts: int
) -> torch.Tensor:
    """``reduce_scatter(left @ right)`` along dimension 0.

    Args:
        left: (world * rows, k); right: (k, n).
        reduce_op: ``sum`` or ``avg``.
        world: ranks of the group.
        parts: sub-slabs per block.

    Returns:
        (rows, n), contiguous.
    """
    group, rank, size = _members(group_name)
    rows = left.shape[0] // size
    blocks = _blocks(rows, parts)
    columns = right.shape[1]
    received = {
        (source, block): left.new_empty(end - begin, columns)
        for block, (begin, end) in enumerate(blocks)
        for source in range(size)
        if source != rank
    }
    arriving = {(s, block): group.recv([buffer], s, block) for (s, block), buffer in received.items()}
    sent = []
    for block, (begin, end) in enumerate(blocks):
        for step in range(1, size):
            target = (rank + step) % size
            partial = torch.mm(left[target * rows + begin : target * rows + end], right)
            sent.append((group.send([partial], target, block), partial))
    own = torch.mm(left[rank * rows : (rank + 1) * rows], right)
    wide = torch.promote_types(own.dtype, torch.float32)
    out = torch.empty_like(own)
    for block, (begin, end) in enumerate(blocks):
        total: torch.Tensor | None = None
        for source in range(size):
            if source == rank:
                term = own[begin:end]
            else:
                arriving[source, block].wait()
                term = received[source, block]
            total = term.to(wide) if total is None else total + term
        assert total is not None
        out[begin:end] = total / size if reduce_op == "avg" else total
    for work, _ in sent:
        work.wait()
    return out


@mm_scattered.register_fake
def _(
    left: torch.Tensor, right: torch.Tensor, reduce_op: str, world: int, group_name: str, parts: int
) -> torch.Tensor:
    return left.new_empty(left.shape[0] // world, right.shape[1])
