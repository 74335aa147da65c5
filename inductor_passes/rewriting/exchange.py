"""Small graphs that several rewrites emit: a collective with its wait, and dimension 0 read as a grid."""

from __future__ import annotations

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.operators import SINGLE, CollectiveKind
from inductor_passes.rewriting.as_bytes import from_bytes, to_bytes
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.verify.messages import KEY, Messages


def reduced(emitter: Emitter, tensor: torch.fx.Node, op: str, group: object) -> torch.fx.Node:
    """``wait(all_reduce(tensor))``."""
    start = emitter.call(_torch.collective_op(SINGLE[CollectiveKind.ALL_REDUCE]), tensor, op, group)
    return emitter.call(_torch.collective_op("wait_tensor"), start)


def gathered(emitter: Emitter, tensor: torch.fx.Node, size: int, group: object) -> torch.fx.Node:
    """``wait(all_gather(tensor))`` along dimension 0."""
    return _moved(emitter, CollectiveKind.ALL_GATHER, tensor, size, group)


def scattered(emitter: Emitter, tensor: torch.fx.Node, op: str, size: int, group: object) -> torch.fx.Node:
    """``wait(reduce_scatter(tensor))`` along dimension 0."""
    start = emitter.call(_torch.collective_op(SINGLE[CollectiveKind.REDUCE_SCATTER]), tensor, op, size, group)
    return emitter.call(_torch.collective_op("wait_tensor"), start)


def exchanged(
    emitter: Emitter,
    tensor: torch.fx.Node,
    received: list[int],
    sent: list[int],
    group: object,
    says: Messages | None = None,
) -> torch.fx.Node:
    """``wait(all_to_all(tensor))`` along dimension 0 with these splits; ``says``: what every rank sends."""
    return _moved(emitter, CollectiveKind.ALL_TO_ALL, tensor, received, sent, group, says=says)


def _moved(
    emitter: Emitter, kind: CollectiveKind, tensor: torch.fx.Node, *rest: object, says: Messages | None = None
) -> torch.fx.Node:
    """A collective that moves data and its wait; what a backend may not carry as numbers travels as bytes."""
    dtype = tensor.meta["val"].dtype
    as_bytes = dtype in _torch.BYTE_TRAVELLERS
    if as_bytes:
        tensor = to_bytes(emitter, tensor)
    start = emitter.call(_torch.collective_op(SINGLE[kind]), tensor, *rest)
    if says is not None:
        start.meta[KEY] = says
    wait = emitter.call(_torch.collective_op("wait_tensor"), start)
    return from_bytes(emitter, wait, dtype) if as_bytes else wait


def dense(emitter: Emitter, tensor: torch.fx.Node) -> torch.fx.Node:
    """The tensor in row-major memory; itself when it is."""
    if _torch.is_contiguous(tensor.meta["val"]):
        return tensor
    return emitter.call(torch.ops.aten.clone.default, tensor, memory_format=torch.contiguous_format)


def transposed(emitter: Emitter, tensor: torch.fx.Node, rows: int, columns: int) -> torch.fx.Node:
    """Dimension 0 read as a ``rows x columns`` grid of equal chunks, in column order."""
    shape = list(tensor.meta["val"].shape)
    chunk = shape[0] // (rows * columns)
    grid = emitter.view(tensor, [rows, columns, chunk, *shape[1:]])
    swapped = emitter.call(torch.ops.aten.permute.default, grid, [1, 0, *range(2, 2 + len(shape))])
    packed = emitter.call(torch.ops.aten.clone.default, swapped, memory_format=torch.contiguous_format)
    return emitter.view(packed, shape)
