"""The tensors of a collective that can travel in a bucket, and the forms that cannot.

A *slot* is one tensor on its way: the input node, and the waits that make its result readable. A plain collective has
one slot, a coalesced one has a slot per tensor. Everything that is not exactly "start, then waits" (in-place forms,
results read in flight, hazards) is refused with a reason. Sizes may be symbolic: what the layout of a message relies
on has to hold for their whole range, and sizes have to follow from those of the graph's inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason
from inductor_passes.rewriting.numbers import Numbers

#: Kinds that can be bucketed.
KINDS = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)


class Refused(Exception):
    """A collective that cannot join any bucket.

    Attributes:
        reason: from the closed vocabulary.
        detail: names or numbers for people.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, eq=False)
class Slot:
    """One tensor of a bucket.

    Attributes:
        source: node that is sent.
        result: node that the collective returns for it, in flight: the start, or a getitem of a coalesced one.
        waits: nodes after which the result may be read, in graph order; at least one.
        sent / received: fake tensors of ``source`` and of the waited result.
        input_splits / output_splits: rows per peer of an all_to_all; empty for other kinds.
    """

    source: torch.fx.Node
    result: torch.fx.Node
    waits: tuple[torch.fx.Node, ...]
    sent: torch.Tensor
    received: torch.Tensor
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()

    @property
    def even(self) -> bool:
        """Whether every peer gets and sends the same number of rows (always true but for all_to_all)."""
        splits = (*self.input_splits, *self.output_splits)
        return all(_torch.same_size(one, splits[0]) for one in splits)

    @property
    def is_symbolic(self) -> bool:
        """Whether any size is only known at run time."""
        return _torch.is_symbolic(self.sent) or _torch.is_symbolic(self.received)


def slots(view: GraphView, collective: Collective) -> tuple[Slot, ...]:
    """The slots of a collective.

    Raises:
        Refused: it cannot travel with others; see the module's docstring.
    """
    if collective.kind not in KINDS:
        raise Refused(Reason.UNSUPPORTED, f"{collective.kind} is not bucketed; expected one of {', '.join(KINDS)}")
    if collective.in_place:
        raise Refused(Reason.UNSUPPORTED, f"{_torch.op_name(collective.start.target)} writes to memory that exists")
    if collective.group.size == 0:
        raise Refused(Reason.DIFFERENT_GROUP, f"group {collective.group.name} does not exist in this process")
    start = collective.start
    if isinstance(start.meta.get("val"), (list, tuple)):
        results = _coalesced_results(start, len(collective.inputs))
    else:
        results = [start]
    arguments = _torch.op_arguments(start)
    splits = tuple(_splits(arguments.get(name, ()), name) for name in ("input_split_sizes", "output_split_sizes"))
    found = []
    for source, result in zip(collective.inputs, results):
        waits = _waits(view, result)
        sent, received = _tensor(source), _tensor(waits[0])
        input_splits, output_splits = splits
        if collective.kind == CollectiveKind.ALL_TO_ALL:
            input_splits = input_splits or _equal_splits(sent, collective.group.size)
            output_splits = output_splits or _equal_splits(received, collective.group.size)
        found.append(Slot(source, result, waits, sent, received, input_splits, output_splits))
        _check_memory(view, found[-1])
    _check_shapes(collective, found)
    _check_numbers(view, found)
    return tuple(found)


def _coalesced_results(start: torch.fx.Node, count: int) -> list[torch.fx.Node]:
    by_index: dict[int, torch.fx.Node] = {}
    for user in start.users:
        index = user.args[1] if user.target is operator.getitem else None
        if not isinstance(index, int) or index in by_index:
            raise Refused(Reason.UNSUPPORTED, f"{user.name} reads the results of {start.name} in an unknown way")
        by_index[index] = user
    if sorted(by_index) != list(range(count)):
        raise Refused(Reason.UNSUPPORTED, f"{start.name} has results that are not used")
    return [by_index[i] for i in range(count)]


def _waits(view: GraphView, result: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    readers = [user for user in result.users if not reads_size(user)]
    for user in readers:
        if user not in view.collectives_of_wait or len(view.collectives_of_wait[user]) != 1:
            raise Refused(Reason.UNSUPPORTED, f"{user.name} reads {result.name} in flight")
        if isinstance(user.meta.get("val"), (list, tuple)):
            raise Refused(Reason.UNSUPPORTED, f"{user.name} waits for a list")
    if not readers:
        raise Refused(Reason.UNSUPPORTED, f"{result.name} is never waited for")
    return tuple(sorted(readers, key=view.position.__getitem__))


def reads_size(node: torch.fx.Node) -> bool:
    """Whether a node reads a symbolic size of a tensor and none of its elements."""
    return _torch.op_name(node.target) == "aten::sym_size" and isinstance(node.meta.get("val"), torch.SymInt)


def _tensor(node: torch.fx.Node) -> torch.Tensor:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Refused(Reason.UNSUPPORTED, f"{node.name} carries no fake tensor")
    if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
        raise Refused(Reason.UNSUPPORTED, f"{node.name} is {value.layout} {value.dtype}; expected strided real")
    if _torch.tensor_bytes(value) is None:
        raise Refused(Reason.NO_HINT, f"{node.name} has the symbolic size {tuple(value.shape)}")
    return value


def _splits(values: Sequence[object], name: str) -> tuple[int, ...]:
    sizes = []
    for given in values:
        value = given.meta.get("val") if isinstance(given, torch.fx.Node) else given
        if not isinstance(value, (int, torch.SymInt)):
            raise Refused(Reason.NO_HINT, f"{name} holds {given}, which is no size")
        sizes.append(value)
    return tuple(sizes)


def _check_numbers(view: GraphView, found: list[Slot]) -> None:
    """Sizes that a message is laid out with have to be at hand."""
    symbolic = [slot for slot in found if slot.is_symbolic]
    if not symbolic:
        return
    numbers = Numbers(view.nodes)
    for slot in symbolic:
        for size in (*slot.sent.shape, *slot.received.shape):
            if isinstance(size, torch.SymInt) and not numbers.has(size):
                why = f"{slot.source.name} has the size {size}, which does not follow from the graph's inputs"
                raise Refused(Reason.RANGE, why)


def _equal_splits(tensor: torch.Tensor, ranks: int) -> tuple[int, ...]:
    return (tensor.shape[0] // ranks,) * ranks if tensor.dim() else ()


def _check_memory(view: GraphView, slot: Slot) -> None:
    """A result that somebody writes to, or waits for once more, must keep memory of its own."""
    for storage in view.storages.of(slot.result):
        again = next((m for m in storage.members if view.role(m) is Role.WAIT and m not in slot.waits), None)
        if again is not None:
            raise Refused(Reason.UNSUPPORTED, f"{again.name} waits for {slot.result.name} once more")
        if storage.writers:
            raise Refused(Reason.UNSUPPORTED, f"{storage.writers[0].name} writes to the result of {slot.result.name}")


def _check_shapes(collective: Collective, found: list[Slot]) -> None:
    """The element counts that the layout arithmetic of packing relies on."""
    ranks = collective.group.size
    for slot in found:
        sent, received = slot.sent.numel(), slot.received.numel()
        right = {
            CollectiveKind.ALL_GATHER: _torch.same_size(received, sent * ranks),
            CollectiveKind.REDUCE_SCATTER: _torch.same_size(sent, received * ranks),
            CollectiveKind.ALL_REDUCE: _torch.same_sizes(slot.sent.shape, slot.received.shape),
            CollectiveKind.ALL_TO_ALL: slot.sent.dim() > 0
            and _torch.same_sizes(slot.received.shape[1:], slot.sent.shape[1:])
            and (len(slot.input_splits), len(slot.output_splits)) == (ranks, ranks)
            and _torch.same_size(sum(slot.input_splits), slot.sent.shape[0])
            and _torch.same_size(sum(slot.output_splits), slot.received.shape[0]),
        }[collective.kind]
        dense = _torch.is_contiguous(slot.received)
        if not dense and collective.kind == CollectiveKind.ALL_REDUCE:
            dense = _torch.is_dense_in(slot.received, memory_order(slot.received))
        if not dense:
            raise Refused(Reason.UNSUPPORTED, f"the result of {slot.result.name} has strides {slot.received.stride()}")
        if not right or slot.sent.dtype != slot.received.dtype:
            turns = f"{slot.result.name} turns {tuple(slot.sent.shape)} into {tuple(slot.received.shape)}"
            if slot.is_symbolic and slot.sent.dtype == slot.received.dtype:
                raise Refused(Reason.RANGE, f"{turns}, and no size is known to divide by {ranks} ranks")
            raise Refused(Reason.UNSUPPORTED, f"{turns} on {ranks} ranks")


def memory_order(value: torch.Tensor) -> list[int]:
    """Dimensions from slowest to fastest in memory, by hint; the identity for contiguous tensors."""
    if _torch.is_contiguous(value):
        return list(range(value.dim()))
    return sorted(range(value.dim()), key=lambda d: -(_torch.size_hint(value.stride(d)) or 0))
