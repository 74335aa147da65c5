"""Which collectives may travel together, and for each that may not, why not.

Collectives with equal :class:`GroupKey` are alternatives for one bucket as far as their form goes; whether two of them
depend on each other is for :class:`~inductor_passes.bucket.dependencies.Dependencies` to say. Data movement of several
dtypes shares a key (it travels as bytes); a reduction's dtype is part of its key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from inductor_passes import _torch
from inductor_passes.ir.canonical import given, handed_on
from inductor_passes.ir.ops import Role, source_line
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Decision, Reason, Verdict
from inductor_passes.rewriting.emit import RECOMPUTE_META
from inductor_passes.rewriting.members import Refused, Slot, slots

SUBJECT = "bucket"
#: Of an element of any dtype that travels (complex ones do not).
_WIDEST_BYTES = 8


@dataclass(frozen=True)
class GroupKey:
    """What the members of a bucket have in common.

    Attributes:
        kind / group / reduce_op / device: of the collective; ``group`` is the process group's name.
        dtype: of a reduction; "" for data movement, unless padding would depend on symbolic sizes.
        epoch: number of fences before the start and the waits: nothing crosses a fence.
        tags: what checkpointing and partitioning were told about the starts, "" once that no longer matters.
        computed: a gather of what the graph computes, where others are of shards of unequal size. Some ranks pad
            theirs: in a message that has nothing else, that counts as part of the message on all ranks.
    """

    kind: CollectiveKind
    group: str
    reduce_op: str
    dtype: str
    device: str
    epoch: int
    tags: str
    computed: bool = False


@dataclass(frozen=True, eq=False)
class Candidate:
    """A collective that can join a bucket with others of the same ``key``."""

    collective: Collective
    key: GroupKey
    slots: tuple[Slot, ...]

    @property
    def input_bytes(self) -> int:
        """Bytes that this rank puts in, by hint."""
        return sum(_torch.tensor_bytes(s.sent) or 0 for s in self.slots)

    @property
    def output_bytes(self) -> int:
        """Bytes that this rank gets out, by hint."""
        return sum(_torch.tensor_bytes(s.received) or 0 for s in self.slots)


def candidates(
    view: GraphView,
    *,
    uneven_all_to_all: bool = False,
    joint: bool = False,
    apart: Collection[str] = (),
    uneven: Collection[Collective] = (),
) -> tuple[list[Candidate], list[Decision]]:
    """Every collective that could join a bucket with at least one other, in graph order, and a refusal for the rest.

    Args:
        view: of the graph.
        uneven_all_to_all: admit all_to_alls with unequal splits. Their sizes differ between ranks, so this is only
            safe when the decision what to merge does not look at sizes.
        joint: the graph is yet to be partitioned into forward and backward: only collectives with equal recompute
            tags travel together.
        apart: names of starts that must not be merged: parts that were made so that they overlap.
        uneven: collectives whose shards are of unequal size, see ``canonical.Shards``.
    """
    ready = given(view) if any(c.kind is CollectiveKind.ALL_GATHER for c in uneven) else None
    epoch_at = _epochs(view)
    found: list[Candidate] = []
    refused: dict[int, Decision] = {}
    for collective in view.collectives:
        try:
            if collective.start.name in apart:
                raise Refused(Reason.UNSUPPORTED, "one of the parts of a collective that was cut to overlap")
            its_slots = slots(view, collective)
            if not uneven_all_to_all and not all(slot.even for slot in its_slots):
                if handed_on(collective.start) is not None:
                    raise Refused(Reason.UNSUPPORTED, "all rows are handed on to one rank")
                raise Refused(Reason.RANKS_DIFFER, "unequal splits may differ between ranks, and so would the decision")
            key = _key(view, collective, its_slots, epoch_at, RECOMPUTE_META if joint else ())
            if ready is not None and collective.kind is CollectiveKind.ALL_GATHER:
                key = replace(key, computed=not ready.issuperset(collective.inputs))
        except Refused as error:
            refused[collective.index] = refusal(collective, error.reason, error.detail)
            continue
        found.append(Candidate(collective, key, its_slots))
    by_key: dict[GroupKey, list[Candidate]] = {}
    for candidate in found:
        by_key.setdefault(candidate.key, []).append(candidate)
    for key, members in by_key.items():
        # Splits of an exchange are a rank's own; all others send as much on every rank.
        if key.kind is not CollectiveKind.ALL_TO_ALL and not any(one.output_bytes for one in members):
            why = "an empty message beside empty ones, whose bytes have no other type's layout"
            refused.update({c.collective.index: refusal(c.collective, Reason.UNSUPPORTED, why) for c in members})
            found = [one for one in found if one.key != key]
    singles = [c for c in found if len(by_key[c.key]) == 1]
    for candidate in singles:
        reason, detail = _why_alone(candidate, by_key)
        refused[candidate.collective.index] = refusal(candidate.collective, reason, detail)
    return [c for c in found if len(by_key[c.key]) > 1], [refused[i] for i in sorted(refused)]


def refusal(
    collective: Collective, reason: Reason, detail: str = "", *, gain_ns: int = 0, setting: str = ""
) -> Decision:
    """The decision not to bucket a collective."""
    return Decision(
        subject=SUBJECT,
        node=collective.start.name,
        verdict=Verdict.REFUSED,
        reason=reason,
        detail=detail,
        source=source_line(collective.start),
        group=collective.group.name,
        gain_ns=gain_ns,
        setting=setting,
    )


def _epochs(view: GraphView) -> list[int]:
    epoch, result = 0, []
    for node in view.nodes:
        role = view.role(node)
        epoch += role is Role.FENCE or (role is Role.WAIT and node not in view.collectives_of_wait)
        result.append(epoch)
    return result


def _key(
    view: GraphView,
    collective: Collective,
    its_slots: Sequence[Slot],
    epoch_at: Sequence[int],
    tag_names: Sequence[str],
) -> GroupKey:
    reduces = collective.kind.reduces
    dtypes = sorted({str(slot.sent.dtype).removeprefix("torch.") for slot in its_slots})
    epoch = epoch_at[view.position[collective.start]]
    for wait in collective.waits:
        if epoch_at[view.position[wait]] != epoch:
            raise Refused(Reason.FENCE, f"a fence lies between {collective.start.name} and {wait.name}")
    meta = collective.start.meta
    return GroupKey(
        kind=collective.kind,
        group=collective.group.name,
        reduce_op=collective.reduce_op,
        dtype="+".join(dtypes) if reduces or not all(map(_is_aligned, its_slots)) else "",
        device=str(its_slots[0].sent.device),
        epoch=epoch,
        tags=" ".join(f"{name}={meta[name]}" for name in tag_names if name in meta),
    )


def _is_aligned(slot: Slot) -> bool:
    """Whether what travels of it in a row is known to be a multiple of the widest element's bytes."""
    if not slot.is_symbolic:
        return True
    rows = max(1, len(slot.input_splits))
    return _torch.is_multiple(slot.sent.numel() * slot.sent.element_size(), rows * _WIDEST_BYTES)


def _why_alone(candidate: Candidate, by_key: dict[GroupKey, list[Candidate]]) -> tuple[Reason, str]:
    """The reason that would have to go for the nearest other collective of the kind to become a companion."""
    key = candidate.key
    others = [k for k in by_key if k.kind == key.kind and k != key]
    if not others:
        return Reason.ALREADY_OPTIMAL, f"the only {key.kind} of its kind"
    nearest = min(others, key=lambda k: sum(d[0] for d in _differences(key, k)))
    _, reason, detail = max(_differences(key, nearest), key=lambda d: d[0])
    return reason, detail


def _differences(mine: GroupKey, other: GroupKey) -> Iterable[tuple[int, Reason, str]]:
    """(weight, reason, detail) per difference, the weightier the harder to remove."""
    if mine.group != other.group:
        yield 64, Reason.DIFFERENT_GROUP, f"others run on group {other.group}"
    if mine.device != other.device:
        yield 32, Reason.UNSUPPORTED, f"others live on {other.device}, this one on {mine.device}"
    if mine.reduce_op != other.reduce_op:
        yield 16, Reason.MIXED_REDUCE_OP, f"others reduce by {other.reduce_op}, this one by {mine.reduce_op}"
    if mine.dtype != other.dtype:
        yield 8, Reason.MIXED_DTYPE, f"others reduce {other.dtype}, this one {mine.dtype}"
    if mine.epoch != other.epoch:
        yield 4, Reason.FENCE, "a fence lies between it and the others"
    if mine.computed != other.computed:
        yield 1, Reason.RANKS_DIFFER, "shards that some ranks pad travel apart from what is computed"
    if mine.tags != other.tags:
        yield 2, Reason.UNSUPPORTED, f"recompute tags differ: {mine.tags or 'none'} and {other.tags or 'none'}"
