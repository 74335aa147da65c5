"""Collectives whose messages are narrower than what they carry.

all_gather, before and after::

    y = wait(all_gather(x))
    y = widen(wait(all_gather(narrow(x))))

reduce_scatter: the pieces are exchanged and added up in float32, so nothing is added in the narrow type::

    y = wait(reduce_scatter(x, sum))
    p = widen(wait(all_to_all(narrow(x)))); y = p[0] + p[1] + ...

all_reduce: the same, and the sum's pieces are narrowed once more and gathered. all_to_all: what is sent is narrowed.

``two_levels`` has the forms that are narrow between hosts only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch.fx

from inductor_passes import _torch
from inductor_passes.compress.form import Form
from inductor_passes.compress.parts import Over, Parts, pieces_of, rows_of, shaped
from inductor_passes.compress.two_levels import Way, in_two_levels
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.rewriting.contract import Rounding
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.verify import Certificate, Narrowed

SUBJECT = "compress"


class Replaced(NamedTuple):
    """What the verifier and the report are told; ``roundings`` are those of this rank, in order."""

    certificate: Certificate
    roundings: tuple[Rounding, ...]


def replace(
    graph: torch.fx.Graph,
    collective: Collective,
    form: Form,
    way: Way | None = None,
    sent: torch.fx.Node | None = None,
) -> Replaced:
    """Send what a collective carries in a narrower type, in place; its start and wait are gone then.

    Args:
        way: between hosts only, and how; None: over the whole group.
        sent: the call of ``sent`` of what the collective carries, behind its start; becomes what this rank widens from
            its own message. Not in two levels.
    """
    assert way is None or sent is None
    start, wait = collective.start, collective.waits[0]
    over = Over(collective.group.size, collective.group_argument)
    if way is not None:
        over = Over(way.levels.between.size, way.levels.between.name)
    source = next(iter(_torch.op_arguments(start).values()))
    parts = Parts(Emitter(graph, start.prev), Emitter(graph, wait), form, source, wait, over)
    with parts.issue.standing_for(start), parts.use.standing_for(wait):
        result = _EMIT[collective.kind](parts, collective) if way is None else in_two_levels(parts, collective, way)
    wait.replace_all_uses_with(result)
    names: tuple[str, ...] = wait.name, start.name
    graph.erase_node(wait)
    graph.erase_node(start)
    arrive, made = len(parts.read), [*parts.issue.made, *parts.use.made]
    replaced = [(names[0], result.name)]
    if sent is not None:
        kept = Emitter(graph, sent)
        own = _own(kept, parts, collective, sent)
        sent.replace_all_uses_with(own)
        graph.erase_node(sent)
        names, made, replaced = (*names, sent.name), [*made, *kept.made], [*replaced, (sent.name, own.name)]
    between = () if way is None else way.levels.between.ranks
    narrowed = tuple(
        Narrowed(name, form.error, own=number >= arrive, over=between) for number, name in enumerate(parts.read)
    )
    added = tuple(node.name for node in made)
    certificate = Certificate(SUBJECT, names, added, tuple(replaced), narrowed=narrowed)
    return Replaced(certificate, tuple(parts.roundings))


def _own(emit: Emitter, parts: Parts, collective: Collective, sent: torch.fx.Node) -> torch.fx.Node:
    """What this rank's own message brings of what the collective carries."""
    assert parts.message is not None
    value = sent.meta["val"]
    ranks = 1 if collective.kind is CollectiveKind.ALL_GATHER else collective.group.size
    with emit.standing_for(sent):
        wide = parts.widen(parts.message, emit)
        return shaped(emit, wide, pieces_of(math.prod(value.shape), ranks), value.shape, value.dtype)


def exact(graph: torch.fx.Graph, sent: torch.fx.Node) -> Certificate:
    """Have a call of ``sent`` be its operand: its message is exact."""
    (value,) = sent.args
    assert isinstance(value, torch.fx.Node)
    sent.replace_all_uses_with(value)
    graph.erase_node(sent)
    return Certificate(SUBJECT, (sent.name,), (), ((sent.name, value.name),))


def _gather(parts: Parts, collective: Collective) -> torch.fx.Node:
    message = parts.narrow(parts.issue, rows_of(parts.issue, parts.source, 1, parts.form))
    wide = parts.widen(parts.awaited(parts.gathered(parts.issue, message)))
    return _as_it_was(parts, wide, parts.over.size)


def _scatter(parts: Parts, collective: Collective) -> torch.fx.Node:
    return _as_it_was(parts, parts.total(parts.source, collective.reduce_op), 1)


def _reduce(parts: Parts, collective: Collective) -> torch.fx.Node:
    wide = parts.total_everywhere(parts.source, collective.reduce_op)
    return _as_it_was(parts, wide, pieces_of(math.prod(parts.wait.meta["val"].shape), parts.over.size))


def _exchange(parts: Parts, collective: Collective) -> torch.fx.Node:
    wide = parts.widen(parts.exchanged(parts.source))
    return _as_it_was(parts, wide, parts.over.size)


def _as_it_was(parts: Parts, rows: torch.fx.Node, pieces: int) -> torch.fx.Node:
    value = parts.wait.meta["val"]
    return shaped(parts.use, rows, pieces, value.shape, value.dtype)


_EMIT: dict[CollectiveKind, Callable[[Parts, Collective], torch.fx.Node]] = {
    CollectiveKind.ALL_GATHER: _gather,
    CollectiveKind.REDUCE_SCATTER: _scatter,
    CollectiveKind.ALL_REDUCE: _reduce,
    CollectiveKind.ALL_TO_ALL: _exchange,
}
KINDS = tuple(_EMIT)
