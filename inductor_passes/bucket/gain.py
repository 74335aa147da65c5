"""What a bucket saves and what it costs, before anything is changed.

Saved per member: the latency of a collective and the time to issue it. Paid: a copy into the message, unless the
member's producer can write there itself, and a copy out of it where the received rows do not lie as the result must,
unless all that reads the result are loops that Inductor fuses: they read the message in place.
Nothing here may differ between ranks, so sizes are the collectives' own (equal, padded) and producers count only
where a rank's own padding cannot hide them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.bucket.candidates import Candidate, GroupKey
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.cost.flops import flops
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView
from inductor_passes.rewriting.members import Slot
from inductor_passes.rewriting.merge import copies_apart
from inductor_passes.rewriting.pack import received_rows, travels_as_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """What a bucket carries; loads of one key add up to the load of their union.

    Attributes:
        key: of the members.
        ranks: of the process group.
        members: how many collectives.
        sent_bytes / received_bytes: what this rank puts in and gets out.
        largest_bytes: received by the largest member.
        copied_bytes: of what is sent, the part that its producers cannot write into the message.
        copied_out / copied_out_bytes: how many tensors have to be copied out of the message, and their bytes.
        dtypes: of what is sent.
    """

    key: GroupKey
    ranks: tuple[int, ...]
    members: int
    sent_bytes: int
    received_bytes: int
    largest_bytes: int
    copied_bytes: int
    copied_out: int
    copied_out_bytes: int
    dtypes: frozenset[torch.dtype]

    def __add__(self, other: Load) -> Load:
        return Load(
            self.key,
            self.ranks,
            self.members + other.members,
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            max(self.largest_bytes, other.largest_bytes),
            self.copied_bytes + other.copied_bytes,
            self.copied_out + other.copied_out,
            self.copied_out_bytes + other.copied_out_bytes,
            self.dtypes | other.dtypes,
        )


@dataclass(frozen=True, slots=True)
class Fused:
    """Copies of buckets that are made together, in ns on the compute lane.

    A copy into a message fuses with the pointwise operators that make what it copies, and with the copy out of another
    message: these then write no memory of their own, and are no kernels of their own.

    Attributes:
        pack_ns: by bucket, None where nothing is copied.
        copy_out_ns: by bucket and member.
        producers_ns: durations of the nodes, by name, that a copy into a message fuses with.
    """

    pack_ns: tuple[int | None, ...]
    copy_out_ns: tuple[tuple[int, ...], ...]
    producers_ns: Mapping[str, int]


class BucketCosts:
    """Durations of buckets of one graph, in ns; O(1) per question about a :class:`Load`.

    Args:
        view: of the graph.
        profile: costs.
        coalesced: names of process groups whose buckets are not copied, see ``rewrite.Form``.
        owner: nodes that count as part of a start or a wait, see ``canonical.Shards``.
        uneven: shards are not of one size on all ranks, which prepare them in different ways: all count as holding
            what the longest way holds.
        compute: of the graph's compute; default: by the profile.
        exact, call_copies: which copies are made apart, whoever reads them: ``keep_sums`` and ``call_copies`` of
            ``rewriting.merge.merge``.
    """

    def __init__(
        self,
        view: GraphView,
        profile: CostProfile,
        coalesced: frozenset[str] = frozenset(),
        owner: Mapping[torch.fx.Node, torch.fx.Node] = MappingProxyType({}),
        *,
        compute: ComputeCosts | None = None,
        uneven: bool = False,
        exact: bool = False,
        call_copies: bool = False,
    ) -> None:
        self.uneven = uneven
        self._owner = owner
        self._compute = compute or ComputeCosts(view, profile)
        self._apart = copies_apart(view, keep_sums=exact, call_copies=call_copies)
        self._view = view
        self._profile = profile
        self._coalesced = coalesced
        self._loads: dict[Candidate, Load] = {}

    def load(self, members: Sequence[Candidate]) -> Load:
        """The load of a bucket of one member or more."""
        first, *others = [self._loads.get(member) or self._measure(member) for member in members]
        return sum(others, first)

    @property
    def kernel_ns(self) -> int:
        """Fixed cost of a copy kernel."""
        return self._profile.compute_ns(0, 0, "uint8", 1)

    def transfer_ns(self, load: Load) -> int:
        """Time on the communication lane."""
        return self._profile.communication_ns(load.key.kind, load.sent_bytes, load.received_bytes, load.ranks)

    def latency_ns(self, load: Load) -> int:
        """The part of :meth:`transfer_ns` that does not shrink with the message."""
        return self._profile.communication_ns(load.key.kind, 0, 0, load.ranks)

    def issue_ns(self, load: Load) -> int:
        """Time of the compute lane to issue it."""
        return self._profile.issue_ns(load.key.kind, load.sent_bytes, load.received_bytes, load.ranks)

    def pack_ns(self, load: Load) -> int:
        """Time of the compute lane to build the message; 0 for a single tensor and the coalesced form."""
        if not self.copies(load):
            return 0
        copied = load.sent_bytes if travels_as_bytes(tuple(load.dtypes)) else load.copied_bytes
        return self._profile.compute_ns(0, 2 * copied, "uint8", 1)

    def unpack_ns(self, load: Load) -> int:
        """Time of the compute lane to take the message apart; 0 where the parts are views."""
        return self._copies_ns(load.copied_out, 2 * load.copied_out_bytes) if self.copies_out(load) else 0

    def fused(self, buckets: Sequence[Sequence[Candidate]]) -> Fused:
        """What all buckets together cost in copies, and what they change of the compute beside them."""
        packing = [self.copies(self.load(bucket)) for bucket in buckets]
        packed = [member for bucket, packs in zip(buckets, packing) if packs for member in bucket]
        starts = frozenset(member.collective.start for member in packed)
        return Fused(
            tuple(self._packed_ns(bucket) if packs else None for bucket, packs in zip(buckets, packing)),
            tuple(tuple(self._copy_out_ns(member, starts) for member in bucket) for bucket in buckets),
            self.producers_ns(packed),
        )

    def producers_ns(self, members: Sequence[Candidate]) -> dict[str, int]:
        """Durations of the nodes, by name, that would fuse with copies of ``members`` into messages."""
        packed = frozenset(m.collective.start for m in members if m.key.group not in self._coalesced)
        slots = [slot for member in members if member.collective.start in packed for slot in member.slots]
        producers = {producer for slot in slots if (producer := self._producer(slot.source)) is not None}
        return {producer.name: self._compute.duration_ns(producer, packed) for producer in producers}

    def _packed_ns(self, bucket: Sequence[Candidate]) -> int:
        """Time of the compute lane to build a message; what fuses with it is not read from memory."""
        read = sum(
            _torch.tensor_bytes(slot.sent) or 0
            for member in bucket
            for slot in member.slots
            if self._producer(slot.source) is None
        )
        return self._copies_ns(1, read + self.load(bucket).sent_bytes)

    def _copy_out_ns(self, member: Candidate, packed: Collection[torch.fx.Node]) -> int:
        """Time of the compute lane to copy one member out of a message; 0 where its readers take it out themselves.

        Args:
            packed: starts whose operands are copied into messages: such a copy reads what it copies in place.
        """
        copies, size = self._copied_out(member, packed) if self.load([member]).copied_out else (0, 0)
        return self._copies_ns(copies, 2 * size)

    def _copies_ns(self, kernels: int, moved_bytes: int) -> int:
        return self._profile.compute_ns(0, moved_bytes, "uint8", kernels) if kernels else 0

    def prepared(self, members: Sequence[Candidate]) -> bool:
        """Whether a message is put together from graph inputs alone: packing then counts as part of the start."""
        sources = (slot.source for member in members for slot in member.slots)
        return all(self._view.role(source) is Role.INPUT or source in self._owner for source in sources)

    def extra_bytes(self, load: Load) -> int:
        """Memory that a bucket takes at once beyond what its largest member takes alone."""
        received = load.received_bytes
        messages = load.sent_bytes + (received if self.copies_out(load) else 0) if self.copies(load) else 0
        # What is reduced waits for the last member; what is gathered are mostly parameters, which live anyway.
        waiting = load.copied_bytes if load.key.kind.reduces else 0
        return waiting + messages + received - load.largest_bytes

    def gain_ns(self, loads: Sequence[Load]) -> int:
        """What merging the loads into one bucket saves on all lanes together; negative when it costs."""
        first, *others = loads
        return sum(map(self.all_ns, loads)) - self.all_ns(sum(others, first))

    def copies(self, load: Load) -> bool:
        """Whether there is a message that the members are copied into."""
        return load.members > 1 and load.key.group not in self._coalesced

    def copies_out(self, load: Load) -> bool:
        """Whether the members are copied out of the message, rather than views of it."""
        return self.copies(load) and not load.key.kind.reduces

    def all_ns(self, load: Load) -> int:
        """What it takes on all lanes together."""
        return self.transfer_ns(load) + self.issue_ns(load) + self.pack_ns(load) + self.unpack_ns(load)

    def _measure(self, member: Candidate) -> Load:
        copied = sum(
            _torch.tensor_bytes(slot.sent) or 0
            for slot in member.slots
            if not self._writes_in_place(member, slot.source)
        )
        load = self._loads[member] = Load(
            member.key,
            member.collective.group.ranks,
            1,
            member.input_bytes,
            member.output_bytes,
            member.output_bytes,
            copied,
            *self._copied_out(member),
            frozenset(slot.sent.dtype for slot in member.slots),
        )
        return load

    def _copied_out(self, member: Candidate, packed: Collection[torch.fx.Node] = ()) -> tuple[int, int]:
        """How many tensors of a member have to be copied out of a message, and their bytes."""
        rows = received_rows(member.collective.kind, member.collective.group.size)
        copied = [slot for slot in member.slots if self._is_copied_out(slot, rows, packed)]
        return len(copied), sum(_torch.tensor_bytes(slot.received) or 0 for slot in copied)

    def _is_copied_out(self, slot: Slot, rows: int, packed: Collection[torch.fx.Node]) -> bool:
        """Whether something reads the member in memory of its own, or a call makes the copy whoever reads it."""
        if not any(wait.users for wait in slot.waits):
            return False
        if self._apart(slot, rows):
            return True
        return any(self._is_read_in_memory(wait, packed) for wait in slot.waits)

    def _is_read_in_memory(self, node: torch.fx.Node, packed: Collection[torch.fx.Node]) -> bool:
        """Whether anything but a fused loop reads a node's value, other than what a rank alone does to its shard."""
        pending = list(node.users)
        while pending:
            user = pending.pop()
            if user in self._owner or self._view.role(user) in (Role.FREE, Role.WAIT):
                pending.extend(user.users)
            elif user not in packed and self._compute.made_by(user) is None:
                return True
        return False

    def _producer(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The node that computes a value inside of a loop that a copy of it fuses with; None where it is in memory.

        What a rank alone does to its shard does not count.
        """
        while node.all_input_nodes and (node in self._owner or self._view.role(node) is Role.FREE):
            node = node.all_input_nodes[0]
        return self._compute.made_by(node)

    def _writes_in_place(self, member: Candidate, source: torch.fx.Node) -> bool:
        """Whether the kernel that makes ``source`` can write it into the message.

        Gradients are of full size on every rank, so what makes them is the same everywhere; what prepares a shard
        is not.
        """
        if not member.collective.kind.reduces:
            return False
        while self._view.role(source) is Role.FREE and len(source.all_input_nodes) == 1:
            if len(source.users) > 1:
                return False
            source = source.all_input_nodes[0]
        return len(source.users) == 1 and self._view.role(source) is Role.COMPUTE and flops(source) is None
