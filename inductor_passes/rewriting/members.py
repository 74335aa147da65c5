"""The tensors of a collective that can travel in a bucket, and the forms that cannot.

A *slot* is one tensor on its way: the input node, and the waits that make its result readable. A plain collective has
one slot, a coalesced one has a slot per tensor. Everything that is not exactly "start, then waits" (in-place forms,
results read in flight, symbolic sizes, hazards) is refused with a reason.
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
        sent / received: fake tensors of ``source`` and of the waited result; static shapes.
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
        return len({*self.input_splits, *self.output_splits}) <= 1


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
    splits = tuple(_static(arguments.get(name, ()), name) for name in ("input_split_sizes", "output_split_sizes"))
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
    for user in result.users:
        if user not in view.collectives_of_wait or len(view.collectives_of_wait[user]) != 1:
            raise Refused(Reason.UNSUPPORTED, f"{user.name} reads {result.name} in flight")
        if isinstance(user.meta.get("val"), (list, tuple)):
            raise Refused(Reason.UNSUPPORTED, f"{user.name} waits for a list")
    if not result.users:
        raise Refused(Reason.UNSUPPORTED, f"{result.name} is never waited for")
    return tuple(sorted(result.users, key=view.position.__getitem__))


def _tensor(node: torch.fx.Node) -> torch.Tensor:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Refused(Reason.UNSUPPORTED, f"{node.name} carries no fake tensor")
    if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
        raise Refused(Reason.UNSUPPORTED, f"{node.name} is {value.layout} {value.dtype}; expected strided real")
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(size, int) for size in sizes):
        raise Refused(Reason.NO_HINT, f"{node.name} has the symbolic size {tuple(value.shape)}")
    return value


def _static(values: Sequence[object], name: str) -> tuple[int, ...]:
    sizes = []
    for value in values:
        if not isinstance(value, int) or isinstance(value, torch.SymInt):
            raise Refused(Reason.NO_HINT, f"{name} holds the symbolic size {value}")
        sizes.append(value)
    return tuple(sizes)


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
            CollectiveKind.ALL_GATHER: received == sent * ranks,
            CollectiveKind.REDUCE_SCATTER: sent == received * ranks,
            CollectiveKind.ALL_REDUCE: slot.sent.shape == slot.received.shape,
            CollectiveKind.ALL_TO_ALL: slot.sent.dim() > 0
            and slot.received.shape[1:] == slot.sent.shape[1:]
            and (len(slot.input_splits), len(slot.output_splits)) == (ranks, ranks)
            and (sum(slot.input_splits), sum(slot.output_splits)) == (slot.sent.shape[0], slot.received.shape[0]),
        }[collective.kind]
        # Each question about a permuted fake tensor is a call of an operator: most are not asked.
        if not slot.received.is_contiguous() and (
            collective.kind != CollectiveKind.ALL_REDUCE
            or not slot.received.permute(memory_order(slot.received)).is_contiguous()
        ):
            raise Refused(Reason.UNSUPPORTED, f"the result of {slot.result.name} has strides {slot.received.stride()}")
        if not right or slot.sent.dtype != slot.received.dtype:
            raise Refused(
                Reason.UNSUPPORTED,
                f"{slot.result.name} turns {tuple(slot.sent.shape)} into {tuple(slot.received.shape)} on {ranks} ranks",
            )


def memory_order(value: torch.Tensor) -> list[int]:
    """Dimensions from slowest to fastest in memory; the identity for contiguous tensors."""
    if value.is_contiguous():
        return list(range(value.dim()))
    return sorted(range(value.dim()), key=lambda d: -value.stride(d))
