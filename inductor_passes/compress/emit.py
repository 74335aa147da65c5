"""Collectives whose messages are narrower than what they carry.

all_gather, before and after::

    y = wait(all_gather(x))
    y = widen(wait(all_gather(narrow(x))))

reduce_scatter: the pieces are exchanged and added up in float32, so nothing is added in the narrow type::

    y = wait(reduce_scatter(x, sum))
    p = widen(wait(all_to_all(narrow(x)))); y = p[0] + p[1] + ...

all_reduce: the same, and the sum's pieces are narrowed once more and gathered. all_to_all: what is sent is narrowed.

Where rows of blocks do not divide what a rank has, its last block is filled with zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.compress.form import Form
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import dense, exchanged, gathered
from inductor_passes.verify import Certificate, Narrowed

aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default
SUBJECT = "compress"


@dataclass
class _Parts:
    """Nodes in front of the message, and behind what arrived."""

    issue: Emitter
    use: Emitter
    form: Form
    read: list[str]
    #: What the collective carries, which may have become another node since it was found.
    source: torch.fx.Node
    #: The first message.
    message: torch.fx.Node | None = None

    def narrow(self, emit: Emitter, rows: torch.fx.Node) -> torch.fx.Node:
        found = self.form.narrowed(emit, rows)
        self.message = self.message or found
        return found

    def widen(self, emit: Emitter, message: torch.fx.Node) -> torch.fx.Node:
        found = self.form.widened(emit, message)
        self.read.append(found.name)
        return found


def replace(
    graph: torch.fx.Graph, collective: Collective, form: Form, sent: torch.fx.Node | None = None
) -> Certificate:
    """Send what a collective carries in a narrower type, in place; its start and wait are gone then.

    Args:
        sent: the call of ``sent`` of what the collective carries, behind its start; becomes what this rank widens from
            its own message.
    """
    start, wait = collective.start, collective.waits[0]
    source = next(iter(_torch.op_arguments(start).values()))
    parts = _Parts(Emitter(graph, start.prev), Emitter(graph, wait), form, [], source)
    with parts.issue.standing_for(start), parts.use.standing_for(wait):
        result = _EMIT[collective.kind](parts, collective, wait)
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
    narrowed = tuple(Narrowed(name, form.error, number >= arrive) for number, name in enumerate(parts.read))
    return Certificate(SUBJECT, names, tuple(node.name for node in made), tuple(replaced), narrowed=narrowed)


def _own(emit: Emitter, parts: _Parts, collective: Collective, sent: torch.fx.Node) -> torch.fx.Node:
    """What this rank's own message brings of what the collective carries."""
    assert parts.message is not None
    ranks = 1 if collective.kind is CollectiveKind.ALL_GATHER else collective.group.size
    pieces = ranks if math.prod(sent.meta["val"].shape) % ranks == 0 else 1
    with emit.standing_for(sent):
        return _shaped(emit, parts.widen(emit, parts.message), pieces, sent)


def exact(graph: torch.fx.Graph, sent: torch.fx.Node) -> Certificate:
    """Have a call of ``sent`` be its operand: its message is exact."""
    (value,) = sent.args
    assert isinstance(value, torch.fx.Node)
    sent.replace_all_uses_with(value)
    graph.erase_node(sent)
    return Certificate(SUBJECT, (sent.name,), (), ((sent.name, value.name),))


def _gather(parts: _Parts, collective: Collective, wait: torch.fx.Node) -> torch.fx.Node:
    message = parts.narrow(parts.issue, _rows(parts.issue, parts.source, 1, parts.form))
    received = gathered(parts.issue, message, collective.group.size, collective.group_argument)
    wide = parts.widen(_awaited(parts, wait, received), received)
    return _shaped(parts.use, wide, collective.group.size, wait)


def _scatter(parts: _Parts, collective: Collective, wait: torch.fx.Node) -> torch.fx.Node:
    total = _total(parts, collective, wait)
    return _shaped(parts.use, total, 1, wait)


def _reduce(parts: _Parts, collective: Collective, wait: torch.fx.Node) -> torch.fx.Node:
    message = parts.narrow(parts.use, _total(parts, collective, wait))
    received = gathered(parts.use, message, collective.group.size, collective.group_argument)
    ranks = collective.group.size
    pieces = ranks if math.prod(wait.meta["val"].shape) % ranks == 0 else 1
    return _shaped(parts.use, parts.widen(parts.use, received), pieces, wait)


def _exchange(parts: _Parts, collective: Collective, wait: torch.fx.Node) -> torch.fx.Node:
    received = _sent(parts, collective, collective.group.size)
    wide = parts.widen(_awaited(parts, wait, received), received)
    return _shaped(parts.use, wide, collective.group.size, wait)


def _awaited(parts: _Parts, wait: torch.fx.Node, received: torch.fx.Node) -> Emitter:
    """What arrives is waited for where it was before."""
    wait.append(received)
    parts.use.cursor = received
    return parts.use


def _total(parts: _Parts, collective: Collective, wait: torch.fx.Node) -> torch.fx.Node:
    """This rank's piece of the reduction: [blocks, block] in float32."""
    ranks = collective.group.size
    received = _sent(parts, collective, ranks)
    emit = _awaited(parts, wait, received)
    wide = parts.widen(emit, received)
    blocks = wide.meta["val"].shape[0] // ranks
    total: torch.fx.Node | None = None
    for rank in range(ranks):
        term = emit.call(aten.slice.Tensor, wide, 0, rank * blocks, (rank + 1) * blocks)
        total = term if total is None else emit.call(aten.add.Tensor, total, term)
    assert total is not None
    return emit.call(aten.div.Tensor, total, ranks) if collective.reduce_op == "avg" else total


def _sent(parts: _Parts, collective: Collective, ranks: int) -> torch.fx.Node:
    """Narrowed pieces for every rank, exchanged: blocks of all ranks in their order."""
    rows = _rows(parts.issue, parts.source, ranks, parts.form)
    blocks = rows.meta["val"].shape[0] // ranks
    message = parts.narrow(parts.issue, rows)
    return exchanged(parts.issue, message, [blocks] * ranks, [blocks] * ranks, collective.group_argument)


def _rows(emit: Emitter, source: torch.fx.Node, pieces: int, form: Form) -> torch.fx.Node:
    """A tensor as blocks of float32, for each of ``pieces`` equally many.

    Equal pieces are filled up with zeros one by one; a tensor that has none is filled up at its end.
    """
    value = source.meta["val"]
    elements = math.prod(value.shape)
    each = -(-elements // pieces)
    filled = form.blocks(each) * form.block
    flat = emit.view(dense(emit, source), [elements])
    if each * pieces != elements:
        flat = _filled(emit, flat, filled * pieces - elements)
    elif filled != each:
        flat = _filled(emit, emit.view(flat, [pieces, each]), filled - each)
    rows = emit.view(flat, [pieces * filled // form.block, form.block])
    return rows if value.dtype is torch.float32 else emit.call(_cast, rows, torch.float32)


def _filled(emit: Emitter, source: torch.fx.Node, missing: int) -> torch.fx.Node:
    """A tensor with so many zeros behind its last dimension.

    Joined, not padded: Inductor asks of each element of a padded tensor whether it is one, without vectors.
    """
    value = source.meta["val"]
    zeros = emit.call(aten.full.default, [*value.shape[:-1], missing], 0.0, dtype=value.dtype, device=value.device)
    return emit.call(aten.cat.default, [source, zeros], value.dim() - 1)


def _shaped(emit: Emitter, rows: torch.fx.Node, pieces: int, wait: torch.fx.Node) -> torch.fx.Node:
    """Blocks of equal pieces as the tensor that ``wait`` was."""
    value = wait.meta["val"]
    if value.dtype is not torch.float32:
        rows = emit.call(_cast, rows, value.dtype)
    shape, filled = list(value.shape), math.prod(rows.meta["val"].shape) // pieces
    each = math.prod(shape) // pieces
    if filled == each:
        # Without a view of pieces in between: Inductor would divide for the address of each element, without vectors.
        return emit.view(rows, shape)
    flat = emit.call(aten.slice.Tensor, emit.view(rows, [pieces, filled]), 1, 0, each)
    flat = emit.call(aten.clone.default, flat, memory_format=torch.contiguous_format)
    return emit.view(flat, shape)


_EMIT = {
    CollectiveKind.ALL_GATHER: _gather,
    CollectiveKind.REDUCE_SCATTER: _scatter,
    CollectiveKind.ALL_REDUCE: _reduce,
    CollectiveKind.ALL_TO_ALL: _exchange,
}
KINDS = tuple(_EMIT)
