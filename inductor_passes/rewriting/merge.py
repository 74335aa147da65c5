"""Several collectives become one: pack, start, wait, unpack, made node by node.

Before::

    a1 = all_gather(a); a2 = wait(a1)              p  = cat([view(a), view(b)], 1)
    ...                                       ->   s  = all_gather(p); w = wait(s)
    b1 = all_gather(b); b2 = wait(b1)              a2 = view(clone(w[:, :n])); b2 = view(clone(w[:, n:]))

Correct because the members do not depend on each other (otherwise no legal order exists and the merge is refused
before anything is changed), because every element travels to the same ranks and is reduced over the same operands, and
because the results have the shape, dtype and strides of before. Data movement is bit-exact; in which order a library
adds the operands of a reduction may depend on the message's size, as it does for any message. Saves a launch and a
latency per member, costs the copies of packing and unpacking. O(nodes + edges) for any number of merges.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.memory import is_view_op
from inductor_passes.ir.parameters import note_merged
from inductor_passes.ir.storages import FxStorage
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import COALESCED, SINGLE, CollectiveKind
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.members import Refused, Slot, reads_size, slots
from inductor_passes.rewriting.messages import note_members
from inductor_passes.rewriting.order import Stage, repaired_order
from inductor_passes.rewriting.pack import Message, aten, travels_as_bytes
from inductor_passes.rewriting.sums import Read, changes_order, reads, taken_in

Form = Literal["packed", "coalesced"]
"""``packed``: one message built by copies. ``coalesced``: one call with a list of tensors and no copies, for backends
that carry it out as one operation."""


#: What is copied in less time than a call takes, and stays in a core's cache.
CACHED_BYTES = 32 << 10


class MergeError(ValueError):
    """The collectives cannot travel together; the graph was not changed."""


@dataclass(frozen=True)
class MergedCollective:
    """What one merge did.

    Attributes:
        members: names of the collectives' start nodes before.
        start: the new collective; ``waits`` its waits (one, or one per tensor for the coalesced form).
        results: (old wait, node that holds its value now) per tensor, and per size that was read of a start.
        removed / added: names of erased and of new nodes.
    """

    kind: CollectiveKind
    group: str
    form: Form
    members: tuple[str, ...]
    start: str
    waits: tuple[str, ...]
    results: tuple[tuple[str, str], ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(eq=False)
class _Bucket:
    collectives: tuple[Collective, ...]
    slots: tuple[Slot, ...]
    form: Form
    start_stage: Stage
    wait_stage: Stage
    started: torch.fx.Node | None = None
    waits: tuple[torch.fx.Node, ...] = ()
    results: tuple[torch.fx.Node, ...] = ()
    added: tuple[torch.fx.Node, ...] = ()
    sizes: tuple[tuple[str, str], ...] = ()
    #: Slots whose results get memory of their own.
    owned: frozenset[Slot] = frozenset()


def merge(
    graph: torch.fx.Graph,
    view: GraphView,
    groups: Sequence[Sequence[Collective]],
    *,
    forms: Sequence[Form] | None = None,
    keep_sums: bool = False,
    call_copies: bool = False,
    results: Collection[torch.fx.Node] = (),
) -> list[MergedCollective]:
    """Replace every group of collectives by one collective, in place; ``view`` is stale afterwards.

    Args:
        graph: functional graph with fake tensors in ``meta["val"]``.
        view: of ``graph`` as it is.
        groups: disjoint; members of a group have the same kind, process group, reduce op and device. A message has them
            in the order in which they are given: the same one on all ranks.
        forms: one per group, see :data:`Form`; by default, and for kinds without a coalesced operator, packed.
        keep_sums: whether results keep bits that depend on how Inductor's code adds, see
            :mod:`~inductor_passes.rewriting.sums`.
        call_copies: whether members on a CPU that no loop reads, or that are small, are copied out by a call of an
            operator. Inductor would make a loop of each copy, or read the member in place; either way the code differs
            from all other code in the member's place, and layers that are alike become functions of their own.
        results: of the graph, that the user gets. One that is a member, and no more than half of its message, is
            copied into memory of its own: as long as somebody has it, it would hold the whole message.

    Raises:
        MergeError: a group is not mergeable or the merges depend on each other; the graph is unchanged.
    """
    wanted: Sequence[Form] = ["packed"] * len(groups) if forms is None else forms
    buckets = [
        _bucket(view, group, form, number) for number, (group, form) in enumerate(zip(groups, wanted, strict=True))
    ]
    starts = [c.start for bucket in buckets for c in bucket.collectives]
    if len({*starts}) != len(starts):
        raise MergeError("a collective is in two groups")
    by_stage = {stage: bucket for bucket in buckets for stage in (bucket.start_stage, bucket.wait_stage)}
    try:
        order = repaired_order(view, list(by_stage))
    except ValueError as error:
        raise MergeError(str(error)) from error
    apart = copies_apart(view, keep_sums=keep_sums, call_copies=call_copies)
    held = {storage for node in results for storage in view.storages.of(node)}
    for bucket in buckets:
        bucket.owned = _owned(view, bucket, held) if held else frozenset()
    _rewrite(graph, view, buckets, order, apart)
    return [_finish(graph, bucket) for bucket in buckets]


def _rewrite(
    graph: torch.fx.Graph,
    view: GraphView,
    buckets: Sequence[_Bucket],
    order: Sequence[torch.fx.Node | Stage],
    apart: Callable[[Slot, int], bool],
) -> None:
    """Put the graph's nodes into ``order``, with the start and the wait of each bucket where its stages are."""
    by_stage = {stage: bucket for bucket in buckets for stage in (bucket.start_stage, bucket.wait_stage)}
    emit = Emitter(graph, view.nodes[0].prev)
    now: dict[torch.fx.Node, torch.fx.Node] = {}
    sizes = {u: bucket for bucket in buckets for slot in bucket.slots for u in slot.result.users if reads_size(u)}
    for step in order:
        if isinstance(step, torch.fx.Node):
            if step in sizes:
                # Sizes of members are those of inputs: the members themselves go.
                size = emit.size(step.meta["val"])
                sizes[step].sizes += ((step.name, size.name),)
                step.replace_all_uses_with(size)
                graph.erase_node(step)
            else:
                emit.place(step)
            continue
        bucket = by_stage[step]
        made = len(emit.made)
        if step is bucket.start_stage:
            bucket.slots = tuple(_with_source(slot, now.get(slot.source, slot.source)) for slot in bucket.slots)
            _emit_start(emit, bucket)
        else:
            _emit_wait(emit, bucket, apart)
            for slot, result in zip(bucket.slots, bucket.results):
                for wait in slot.waits:
                    wait.replace_all_uses_with(result)
                    now[wait] = result
        bucket.added += tuple(emit.made[made:])


def _bucket(view: GraphView, group: Sequence[Collective], form: Form, number: int) -> _Bucket:
    members = tuple(group)
    if len(members) < 2:
        raise MergeError(f"group {number} has {len(members)} members; expected at least 2")
    try:
        found = tuple(slot for member in members for slot in slots(view, member))
    except Refused as refused:
        raise MergeError(f"group {number} ({', '.join(m.label for m in members)}): {refused}") from refused
    first = members[0]
    for member in members[1:]:
        for what in ("kind", "group", "reduce_op"):
            if getattr(member, what) != getattr(first, what):
                raise MergeError(
                    f"{first.label} and {member.label} differ in {what}: "
                    f"{getattr(first, what)} and {getattr(member, what)}"
                )
    if len({slot.sent.device for slot in found}) > 1:
        raise MergeError(f"{first.label} and others of its group live on several devices")
    if first.kind.reduces and len({slot.sent.dtype for slot in found}) > 1:
        raise MergeError(f"{first.label} and others of its group reduce several dtypes")
    starts = [m.start for m in members]
    results = [s.result for s in found if s.result not in starts]
    waits = [wait for s in found for wait in s.waits]
    return _Bucket(
        members,
        found,
        form if can_coalesce(first.kind, found) else "packed",
        Stage(f"start of {first.label}", (*starts, *results)),
        Stage(f"wait of {first.label}", tuple(waits)),
    )


def _emit_start(emit: Emitter, bucket: _Bucket) -> None:
    first = bucket.collectives[0]
    arguments = _torch.op_arguments(first.start)
    group = arguments.get("group_name", arguments.get("group"))
    if bucket.form == "coalesced":
        sent: torch.fx.Node | list[torch.fx.Node] = [_contiguous(emit, slot) for slot in bucket.slots]
        op = _torch.collective_op(COALESCED[first.kind])
        splits: tuple[list[int], ...] = ()
    else:
        message = Message(first.kind, first.group.size, bucket.slots)
        sent = message.pack(emit)
        op = _torch.collective_op(SINGLE[first.kind])
        splits = message.splits
    with emit.standing_for(first.start):
        if first.kind == CollectiveKind.ALL_GATHER:
            bucket.started = emit.call(op, sent, first.group.size, group)
        elif first.kind == CollectiveKind.REDUCE_SCATTER:
            bucket.started = emit.call(op, sent, arguments["reduce_op"], first.group.size, group)
        elif first.kind == CollectiveKind.ALL_REDUCE:
            bucket.started = emit.call(op, sent, arguments["reduce_op"], group)
        else:
            bucket.started = emit.call(op, sent, *splits, group)
    starts = [c.start for c in bucket.collectives]
    note_merged(bucket.started, starts)
    note_members(bucket.started, starts)


def _with_source(slot: Slot, source: torch.fx.Node) -> Slot:
    return slot if source is slot.source else replace(slot, source=source, sent=source.meta["val"])


def can_coalesce(kind: CollectiveKind, found: Sequence[Slot]) -> bool:
    """Whether the coalesced operator of ``kind`` carries these tensors."""
    return kind in COALESCED and not travels_as_bytes([slot.sent.dtype for slot in found])


def _contiguous(emit: Emitter, slot: Slot) -> torch.fx.Node:
    if _torch.is_contiguous(slot.sent):
        return slot.source
    with emit.standing_for(slot.result):
        return emit.call(aten.clone.default, slot.source, memory_format=torch.contiguous_format)


def _emit_wait(emit: Emitter, bucket: _Bucket, apart: Callable[[Slot, int], bool]) -> None:
    wait = _torch.collective_op("wait_tensor")
    assert bucket.started is not None
    first = bucket.collectives[0]
    if isinstance(bucket.started.meta["val"], (list, tuple)):
        waits = []
        for index, slot in enumerate(bucket.slots):
            with emit.standing_for(slot.waits[0]):
                waits.append(emit.call(wait, emit.call(operator.getitem, bucket.started, index)))
        bucket.waits = bucket.results = tuple(waits)
        return
    with emit.standing_for(bucket.slots[0].waits[0]):
        waited = emit.call(wait, bucket.started)
    bucket.waits = (waited,)
    message = Message(first.kind, first.group.size, bucket.slots)
    copied = {slot for slot in bucket.slots if apart(slot, message.received_rows)}
    unpacked = message.unpack(emit, waited, copied)
    found = zip(bucket.slots, unpacked)
    bucket.results = tuple(_own(emit, s, one, waited) if s in bucket.owned else one for s, one in found)


def _own(emit: Emitter, slot: Slot, result: torch.fx.Node, message: torch.fx.Node) -> torch.fx.Node:
    """A member in memory of its own: copied, unless it was copied out of the message."""
    origin = result
    while origin is not message:
        if not (_torch.is_op(origin.target) and is_view_op(origin.target)):
            return result
        origin = origin.all_input_nodes[0]
    with emit.standing_for(slot.waits[0]):
        return emit.call(aten.clone.default, result)


def _owned(view: GraphView, bucket: _Bucket, held: Collection[FxStorage]) -> frozenset[Slot]:
    """Slots of a message that are in ``held``, and are no more than half of it."""
    if bucket.form == "coalesced":
        return frozenset()
    sizes = {slot: _torch.tensor_bytes(slot.received) for slot in bucket.slots}
    if any(size is None for size in sizes.values()):
        return frozenset()
    whole = sum(size or 0 for size in sizes.values())
    kept = (s for s in bucket.slots if any(one in held for wait in s.waits for one in view.storages.of(wait)))
    return frozenset(s for s in kept if 2 * (sizes[s] or 0) <= whole)


def copies_apart(view: GraphView, *, keep_sums: bool, call_copies: bool) -> Callable[[Slot, int], bool]:
    """Whether an operator of ours copies a member out of a message of so many rows, see :func:`merge`; O(nodes)."""
    read = reads(view) if keep_sums else {}
    in_loops = taken_in(view) if call_copies else None
    return lambda slot, rows: _apart(slot, rows, read, in_loops)


def _apart(
    slot: Slot, rows: int, read: Mapping[torch.fx.Node, Read], in_loops: Collection[torch.fx.Node] | None
) -> bool:
    """Whether an operator of ours copies a member out of a message of several ``rows``.

    Args:
        in_loops: what loops read; None: their code is not what counts.
    """
    device = slot.received.device
    if in_loops is not None and device.type == "cpu":
        size = _torch.tensor_bytes(slot.received)
        if not any(wait in in_loops for wait in slot.waits) or (size is not None and size <= CACHED_BYTES):
            return True
    how = max((read.get(wait, Read.NOT_SUMMED) for wait in slot.waits), default=Read.NOT_SUMMED)
    folded = rows > 1 and sum(not _torch.same_size(size, 1) for size in slot.received.shape) > 1
    return changes_order(how, slot.received.numel() // rows, device, folded=folded)


def _finish(graph: torch.fx.Graph, bucket: _Bucket) -> MergedCollective:
    removed = []
    # Waits count as impure for dead-code elimination, so the old chain is erased by hand: waits first.
    for node in (*bucket.wait_stage.replaces, *reversed(bucket.start_stage.replaces)):
        removed.append(node.name)
        graph.erase_node(node)
    assert bucket.started is not None
    first = bucket.collectives[0]
    return MergedCollective(
        kind=first.kind,
        group=first.group.name,
        form=bucket.form,
        members=tuple(c.start.name for c in bucket.collectives),
        start=bucket.started.name,
        waits=tuple(w.name for w in bucket.waits),
        results=(*((s.waits[0].name, r.name) for s, r in zip(bucket.slots, bucket.results)), *bucket.sizes),
        removed=(*removed, *(name for name, _ in bucket.sizes)),
        added=tuple(n.name for n in bucket.added),
    )
