"""How several tensors become one message and back: the layout arithmetic of a bucket.

A message is a matrix [rows, elements]: what goes to or comes from each peer is a row, the members lie side by side in
every row.

=================  ===========  ===============  =================================================
kind               sent rows    received rows    a member's part
=================  ===========  ===============  =================================================
``all_gather``     1            ranks            its shard | one shard per rank
``reduce_scatter`` ranks        1                one chunk per rank | its chunk, a view
``all_reduce``     1            1                all of it, in memory order | a view
``all_to_all``     ranks        ranks            one chunk per peer, when all are equally long
=================  ===========  ===============  =================================================

So packing is one ``cat`` along the columns and unpacking slices columns. Inductor writes the producers of ``cat``
(casts, paddings, divisions) straight into its buffer, as one multi-tensor kernel on GPUs, and folds the copy that
makes a received block of several rows contiguous into readers that compute pointwise; where those are part of a sum
whose order that would change, an operator of our own makes the copy. Every element is reduced over the same operands as
before.

Members of several dtypes travel as bytes, widest first, with rows padded to the widest element so that every part is
aligned for its dtype.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Sequence

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.operators import CollectiveKind
from inductor_passes.rewriting.as_bytes import from_bytes, to_bytes
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.members import Slot, memory_order
from inductor_passes.rewriting.unpack_op import unfilled

aten = torch.ops.aten
unpack = torch.ops.inductor_passes.unpack.default



def travels_as_bytes(dtypes: Sequence[torch.dtype]) -> bool:
    """Whether a message of these dtypes is a message of bytes (data movement only)."""
    return len({*dtypes}) > 1 or any(dtype in _torch.BYTE_TRAVELLERS for dtype in dtypes)


class Message:
    """The layout of one bucket.

    Args:
        kind: of collective.
        ranks: size of the group.
        slots: what travels.

    Attributes:
        as_bytes: elements are bytes.
        columns: elements per row, padding included (even messages).
        padding: bytes at the end of every row.
    """

    def __init__(self, kind: CollectiveKind, ranks: int, slots: Sequence[Slot]) -> None:
        self.kind = kind
        self.ranks = ranks
        self.slots = tuple(slots)
        self.as_bytes = travels_as_bytes([s.sent.dtype for s in slots])
        if self.as_bytes and kind.reduces:
            raise ValueError(f"{kind} cannot reduce {sorted({str(s.sent.dtype) for s in slots})} in one message")
        # The bytes between two ranks must not depend on whether one of them sees equal splits: no padding and no
        # sorting where sizes may differ between ranks.
        self.even = kind != CollectiveKind.ALL_TO_ALL or (all(s.even for s in slots) and not self.as_bytes)
        self.sent_rows = ranks if kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL) else 1
        self.received_rows = received_rows(kind, ranks)
        self._order = sorted(range(len(slots)), key=lambda i: -slots[i].sent.element_size() if self.as_bytes else 0)
        widest = max(s.sent.element_size() for s in slots)
        content = sum(self._width(s) for s in slots)
        aligned = not self.as_bytes or not self.even or _torch.is_multiple(content, widest)
        self.padding = 0 if aligned else -content % widest
        self.columns = content + self.padding

    def _elements(self, slot: Slot) -> int:
        return slot.sent.numel() * (slot.sent.element_size() if self.as_bytes else 1)

    def _width(self, slot: Slot) -> int:
        """Elements of a member in one row of the message."""
        # A quotient of sizes is what the collective's own result has: another form of it would be harder to compare.
        whole = slot.received if self.kind == CollectiveKind.REDUCE_SCATTER else slot.sent
        rows = 1 if self.kind == CollectiveKind.REDUCE_SCATTER else self.sent_rows
        if rows > 1 and slot.input_splits:
            return slot.input_splits[0] * self._row_elements(slot)
        return whole.numel() * (slot.sent.element_size() if self.as_bytes else 1) // rows

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        """(output splits, input splits) along dimension 0 of an all_to_all's message."""
        if self.even:
            return [1] * self.ranks, [1] * self.ranks
        sent, received = [0] * self.ranks, [0] * self.ranks
        for slot in self.slots:
            row = self._row_elements(slot)
            for peer in range(self.ranks):
                sent[peer] += slot.input_splits[peer] * row
                received[peer] += slot.output_splits[peer] * row
        return received, sent

    def _row_elements(self, slot: Slot) -> int:
        return math.prod(slot.sent.shape[1:]) * (slot.sent.element_size() if self.as_bytes else 1)

    def pack(self, emit: Emitter) -> torch.fx.Node:
        """Nodes that build the message; the last one is what the collective sends."""
        parts: list[torch.fx.Node] = []
        if self.even:
            for index in self._order:
                slot = self.slots[index]
                with emit.standing_for(slot.result):
                    parts.append(self._sent_matrix(emit, slot))
            if self.padding:
                with emit.standing_for(self.slots[0].result):
                    parts.append(
                        emit.call(
                            aten.full.default,
                            [self.sent_rows, self.padding],
                            0,
                            dtype=torch.uint8,
                            device=self.slots[0].sent.device,
                            pin_memory=False,
                        )
                    )
            with emit.standing_for(self.slots[0].result):
                return emit.call(aten.cat.default, parts, 1)
        flat: list[tuple[torch.fx.Node, list[int]]] = []
        for slot in self.slots:
            with emit.standing_for(slot.result):
                row = self._row_elements(slot)
                flat.append((self._flat(emit, slot, slot.source, slot.sent), _offsets(slot.input_splits, row)))
        for peer in range(self.ranks):
            for slot, (values, offsets) in zip(self.slots, flat):
                with emit.standing_for(slot.result):
                    parts.append(emit.cut(values, 0, offsets[peer], offsets[peer + 1]))
        with emit.standing_for(self.slots[0].result):
            return emit.call(aten.cat.default, parts)

    def unpack(
        self, emit: Emitter, message: torch.fx.Node, apart: Collection[Slot] = ()
    ) -> list[torch.fx.Node]:
        """Nodes that take the received message apart: one result per slot, in the order of ``slots``.

        Args:
            apart: slots whose copies nothing may read in place, see :mod:`~inductor_passes.rewriting.sums`.
        """
        results: list[torch.fx.Node | None] = [None] * len(self.slots)
        if self.even:
            column, dim = 0, 1
            if self.received_rows == 1:
                # A single row is cut as a vector: parts of a matrix would keep its row stride, gradients must not.
                dim = 0
                with emit.standing_for(self.slots[0].waits[0]):
                    message = emit.view(message, [self.columns])
            for index in self._order:
                slot = self.slots[index]
                width = self._width(slot)
                with emit.standing_for(slot.waits[0]):
                    if slot in apart and self.received_rows > 1:
                        made = emit.call_like(unfilled, unpack, message, [column], [width])
                        part = emit.call(operator.getitem, made, 0)
                    else:
                        part = emit.cut(message, dim, column, column + width)
                    results[index] = self._received_tensor(emit, slot, part)
                column += width
        else:
            received, _ = self.splits
            peer_base = _offsets(received, 1)
            before = [0] * self.ranks
            for index, slot in enumerate(self.slots):
                with emit.standing_for(slot.waits[0]):
                    row = self._row_elements(slot)
                    parts = []
                    for peer, rows in enumerate(slot.output_splits):
                        begin = peer_base[peer] + before[peer]
                        before[peer] += rows * row
                        parts.append(emit.cut(message, 0, begin, begin + rows * row))
                    block = emit.call(aten.cat.default, parts)
                    if self.as_bytes:
                        block = from_bytes(emit, block, slot.sent.dtype)
                    results[index] = emit.view(block, list(slot.received.shape))
        return [r for r in results if r is not None]

    def _sent_matrix(self, emit: Emitter, slot: Slot) -> torch.fx.Node:
        source, value = slot.source, slot.sent
        if self.kind == CollectiveKind.ALL_REDUCE:
            order = memory_order(slot.received)
            if order != list(range(value.dim())):
                source = emit.call(aten.permute.default, source, order)
                value = source.meta["val"]
        if not self.as_bytes or value.dtype is torch.uint8:
            if not _torch.is_contiguous(value):
                source = emit.call(aten.clone.default, source, memory_format=torch.contiguous_format)
            return emit.view(source, [self.sent_rows, self._width(slot)])
        flat = self._flat(emit, slot, source, value)
        return emit.view(flat, [self.sent_rows, self._width(slot)])

    def _flat(self, emit: Emitter, slot: Slot, source: torch.fx.Node, value: torch.Tensor) -> torch.fx.Node:
        if not _torch.is_contiguous(value):
            source = emit.call(aten.clone.default, source, memory_format=torch.contiguous_format)
        flat = emit.view(source, [value.numel()])
        return to_bytes(emit, flat) if self.as_bytes else flat

    def _received_tensor(self, emit: Emitter, slot: Slot, part: torch.fx.Node) -> torch.fx.Node:
        if self.as_bytes:
            part = from_bytes(emit, part, slot.received.dtype)
        if self.received_rows > 1 and not _torch.is_contiguous(part.meta["val"]):
            part = emit.call(aten.clone.default, part, memory_format=torch.contiguous_format)
        if self.kind != CollectiveKind.ALL_REDUCE:
            return emit.view(part, list(slot.received.shape))
        order = memory_order(slot.received)
        block = emit.view(part, [slot.received.shape[d] for d in order])
        if order == list(range(len(order))):
            return block
        return emit.call(aten.permute.default, block, [order.index(d) for d in range(len(order))])


def received_rows(kind: CollectiveKind, ranks: int) -> int:
    """Rows of a message as it arrives: one per rank where every rank sends its own."""
    return ranks if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL) else 1


def _offsets(sizes: Sequence[int], unit: int) -> list[int]:
    return [0, *itertools.accumulate(size * unit for size in sizes)]
