"""What the forms of narrowed collectives share: blocks of a tensor, messages of them, and sums of what arrived.

Where rows of blocks do not divide what a rank has, its last block is filled with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.fx

from inductor_passes.compress.form import Form
from inductor_passes.rewriting.contract import Rounding
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import dense, exchanged, gathered

aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Over:
    """The group that a narrowed message travels on.

    Attributes:
        size: its ranks.
        argument: what a start names it by.
    """

    size: int
    argument: object


@dataclass
class Parts:
    """Nodes in front of the message, and behind what arrived.

    Attributes:
        source: what the collective carries, which may have become another node since it was found.
        wait: that of the collective as it was; what arrives is waited for at its place.
        over: the group on which codes travel.
        read: names of the nodes that widen.
        message: the first that is narrowed.
        roundings: of this rank, in order.
    """

    issue: Emitter
    use: Emitter
    form: Form
    source: torch.fx.Node
    wait: torch.fx.Node
    over: Over
    read: list[str] = field(default_factory=list)
    message: torch.fx.Node | None = None
    roundings: list[Rounding] = field(default_factory=list)

    def narrow(self, emit: Emitter, rows: torch.fx.Node) -> torch.fx.Node:
        """A message of blocks."""
        found = self.form.narrowed(emit, rows)
        self.message = self.message or found
        self.roundings.append(Rounding(rows.name, found.name, self.form.name, float(self.form.error)))
        return found

    def widen(self, message: torch.fx.Node, emit: Emitter | None = None) -> torch.fx.Node:
        """Blocks in float32 of a message: by ``use`` of one that arrived."""
        found = self.form.widened(emit or self.use, message)
        self.read.append(found.name)
        return found

    def awaited(self, received: torch.fx.Node) -> torch.fx.Node:
        """What was issued is waited for where the collective was, and used behind."""
        self.wait.append(received)
        self.use.cursor = received
        return received

    def gathered(self, emit: Emitter, message: torch.fx.Node) -> torch.fx.Node:
        """A message of every rank, in their order."""
        return gathered(emit, message, self.over.size, self.over.argument)

    def exchanged(self, source: torch.fx.Node) -> torch.fx.Node:
        """A tensor cut into a piece for every rank: narrowed pieces of all ranks, in their order, waited for."""
        ranks = self.over.size
        message = self.narrow(self.issue, rows_of(self.issue, source, ranks, self.form))
        blocks = [message.meta["val"].shape[0] // ranks] * ranks
        return self.awaited(exchanged(self.issue, message, blocks, blocks, self.over.argument))

    def total(self, source: torch.fx.Node, reduce_op: str) -> torch.fx.Node:
        """This rank's piece of a tensor's reduction: [blocks, block] in float32."""
        ranks, emit = self.over.size, self.use
        wide = self.widen(self.exchanged(source))
        blocks = wide.meta["val"].shape[0] // ranks
        total: torch.fx.Node | None = None
        for rank in range(ranks):
            term = emit.cut(wide, 0, rank * blocks, (rank + 1) * blocks)
            total = term if total is None else emit.call(aten.add.Tensor, total, term)
        assert total is not None
        return emit.call(aten.div.Tensor, total, ranks) if reduce_op == "avg" else total

    def total_everywhere(self, source: torch.fx.Node, reduce_op: str) -> torch.fx.Node:
        """A tensor's reduction on all ranks: blocks of its pieces in float32. See :func:`pieces_of`."""
        message = self.narrow(self.use, self.total(source, reduce_op))
        return self.widen(self.gathered(self.use, message))


def pieces_of(elements: int, ranks: int) -> int:
    """How many equal pieces :func:`rows_of` makes of a tensor for so many ranks: one where they do not divide it."""
    return ranks if elements % ranks == 0 else 1


def rows_of(emit: Emitter, source: torch.fx.Node, pieces: int, form: Form) -> torch.fx.Node:
    """A tensor as blocks of float32, for each of ``pieces`` equally many.

    Equal pieces are filled up with zeros one by one; a tensor that has none is filled up at its end.
    """
    value = source.meta["val"]
    elements = math.prod(value.shape)
    each = -(-elements // pieces)
    filled = form.blocks(each) * form.block
    flat = emit.view(dense(emit, source), [elements])
    if each * pieces != elements:
        flat = filled_up(emit, flat, filled * pieces - elements)
    elif filled != each:
        flat = filled_up(emit, emit.view(flat, [pieces, each]), filled - each)
    rows = emit.view(flat, [pieces * filled // form.block, form.block])
    return rows if value.dtype is torch.float32 else emit.call(_cast, rows, torch.float32)


def filled_up(emit: Emitter, source: torch.fx.Node, missing: int) -> torch.fx.Node:
    """A tensor with so many zeros behind its last dimension.

    Joined, not padded: Inductor asks of each element of a padded tensor whether it is one, without vectors.
    """
    value = source.meta["val"]
    zeros = emit.call(aten.full.default, [*value.shape[:-1], missing], 0.0, dtype=value.dtype, device=value.device)
    return emit.call(aten.cat.default, [source, zeros], value.dim() - 1)


def shaped(emit: Emitter, rows: torch.fx.Node, pieces: int, shape: Sequence[int], dtype: torch.dtype) -> torch.fx.Node:
    """Blocks of equal pieces as a tensor of this shape and type."""
    if dtype is not torch.float32:
        rows = emit.call(_cast, rows, dtype)
    shape, filled = list(shape), math.prod(rows.meta["val"].shape) // pieces
    each = math.prod(shape) // pieces
    if filled == each:
        # Without a view of pieces in between: Inductor would divide for the address of each element, without vectors.
        return emit.view(rows, shape)
    flat = emit.cut(emit.view(rows, [pieces, filled]), 1, 0, each)
    flat = emit.call(aten.clone.default, flat, memory_format=torch.contiguous_format)
    return emit.view(flat, shape)
