"""Collectives over hosts and devices that are narrow between hosts and wide inside them.

Rank (h, l) is at place l of host h. all_gather: codes between the hosts first, where each rank sends its own shard
only, or behind the gather inside the host, which may need no transposition::

    y = wait(all_gather(x, flat))
    y = transposed(wait(all_gather(widen(wait(all_gather(narrow(x), between))), inside)))
    y = widen(wait(all_gather(narrow(wait(all_gather(x, inside))), between)))

reduce_scatter: the host's sum first, in the type and with the operator that it had. What the other hosts get of it is
rounded once, and added in float32::

    y = wait(reduce_scatter(x, sum, flat))
    z = wait(reduce_scatter(transposed(x), sum, inside)); p = widen(wait(all_to_all(narrow(z), between)))
    y = p[0] + p[1] + ...

all_reduce: scattered inside, the narrowed all_reduce of ``emit`` between, gathered inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes.compress.levels import Levels
from inductor_passes.compress.parts import Parts, filled_up, pieces_of, rows_of, shaped
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.rewriting.exchange import dense, gathered, scattered, transposed

aten = torch.ops.aten
KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


@dataclass(frozen=True)
class Way:
    """How a collective goes over two levels.

    Attributes:
        inside_first: of an all_gather: it gathers inside the host first.
    """

    levels: Levels
    inside_first: bool = False


def in_two_levels(parts: Parts, collective: Collective, way: Way) -> torch.fx.Node:
    """What stands for a collective's wait; its kind is one of :data:`KINDS`."""
    if collective.kind is CollectiveKind.ALL_GATHER:
        return _inside_first(parts, collective, way.levels) if way.inside_first else _gather(parts, collective, way)
    if collective.kind is CollectiveKind.REDUCE_SCATTER:
        return _scatter(parts, collective, way.levels)
    return _reduce(parts, collective, way.levels)


def _gather(parts: Parts, collective: Collective, way: Way) -> torch.fx.Node:
    source = parts.source
    inside, hosts, value = way.levels.inside, parts.over.size, source.meta["val"]
    message = parts.narrow(parts.issue, rows_of(parts.issue, source, 1, parts.form))
    wide = parts.widen(parts.awaited(parts.gathered(parts.issue, message)))
    shape = [value.shape[0] * hosts, *value.shape[1:]]
    near = shaped(parts.use, wide, hosts, shape, value.dtype)
    whole = gathered(parts.use, near, inside.size, inside.name)
    return transposed(parts.use, whole, inside.size, hosts) if way.levels.by_host else whole


def _inside_first(parts: Parts, collective: Collective, levels: Levels) -> torch.fx.Node:
    inside, hosts, value = levels.inside, parts.over.size, parts.wait.meta["val"]
    near = gathered(parts.issue, parts.source, inside.size, inside.name)
    message = parts.narrow(parts.issue, rows_of(parts.issue, near, 1, parts.form))
    wide = parts.widen(parts.awaited(parts.gathered(parts.issue, message)))
    whole = shaped(parts.use, wide, hosts, value.shape, value.dtype)
    return whole if levels.by_host else transposed(parts.use, whole, hosts, inside.size)


def _scatter(parts: Parts, collective: Collective, levels: Levels) -> torch.fx.Node:
    inside, value = levels.inside, parts.wait.meta["val"]
    source = dense(parts.issue, parts.source)
    if levels.by_host:
        source = transposed(parts.issue, source, parts.over.size, inside.size)
    near = scattered(parts.issue, source, collective.reduce_op, inside.size, inside.name)
    return shaped(parts.use, parts.total(near, collective.reduce_op), 1, value.shape, value.dtype)


def _reduce(parts: Parts, collective: Collective, levels: Levels) -> torch.fx.Node:
    inside, value = levels.inside, parts.wait.meta["val"]
    elements = math.prod(value.shape)
    flat = parts.issue.view(dense(parts.issue, parts.source), [elements])
    if missing := -elements % inside.size:
        flat = filled_up(parts.issue, flat, missing)
    near = scattered(parts.issue, flat, collective.reduce_op, inside.size, inside.name)
    piece = (elements + missing) // inside.size
    wide = parts.total_everywhere(near, collective.reduce_op)
    pieces = pieces_of(piece, parts.over.size)
    whole = gathered(parts.use, shaped(parts.use, wide, pieces, [piece], value.dtype), inside.size, inside.name)
    if missing:
        cut = parts.use.cut(whole, 0, 0, elements)
        whole = parts.use.call(aten.clone.default, cut, memory_format=torch.contiguous_format)
    return parts.use.view(whole, list(value.shape))
