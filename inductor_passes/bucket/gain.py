"""What a bucket saves and what it costs, before anything is changed.

Saved per member: the latency of a collective and the time to issue it. Paid: a copy into the message, unless the
member's producer can write there itself, and a copy out of it where the received rows do not lie as the result must.
Nothing here may differ between ranks, so sizes are the collectives' own (equal, padded) and producers count only
where a rank's own padding cannot hide them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.bucket.candidates import Candidate, GroupKey
from inductor_passes.cost.compute import flops
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView
from inductor_passes.rewriting.pack import travels_as_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """What a bucket carries; loads of one key add up to the load of their union.

    Attributes:
        key: of the members.
        ranks: of the process group.
        members / slots: how many collectives and tensors.
        sent_bytes / received_bytes: what this rank puts in and gets out.
        largest_bytes: received by the largest member.
        copied_bytes: of what is sent, the part that its producers cannot write into the message.
        dtypes: of what is sent.
    """

    key: GroupKey
    ranks: tuple[int, ...]
    members: int
    slots: int
    sent_bytes: int
    received_bytes: int
    largest_bytes: int
    copied_bytes: int
    dtypes: frozenset[torch.dtype]

    def __add__(self, other: Load) -> Load:
        return Load(
            self.key,
            self.ranks,
            self.members + other.members,
            self.slots + other.slots,
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            max(self.largest_bytes, other.largest_bytes),
            self.copied_bytes + other.copied_bytes,
            self.dtypes | other.dtypes,
        )


class BucketCosts:
    """Durations of buckets of one graph, in ns; O(1) per question about a :class:`Load`.

    Args:
        view: of the graph.
        profile: costs.
        coalesced: names of process groups whose buckets are not copied, see ``rewrite.Form``.
        owner: nodes that count as part of a start or a wait, see ``canonical.Shards``.
    """

    def __init__(
        self,
        view: GraphView,
        profile: CostProfile,
        coalesced: frozenset[str] = frozenset(),
        owner: Mapping[torch.fx.Node, torch.fx.Node] = MappingProxyType({}),
    ) -> None:
        self._owner = owner
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
        return self._profile.compute_ns(0, 2 * load.received_bytes, "uint8", load.slots) if self.copies_out(load) else 0

    def copy_out_ns(self, member: Candidate) -> int:
        """Time of the compute lane to copy one member out of a message."""
        load = self.load([member])
        return self._profile.compute_ns(0, 2 * load.received_bytes, "uint8", load.slots)

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
        return sum(map(self._all_ns, loads)) - self._all_ns(sum(others, first))

    def copies(self, load: Load) -> bool:
        """Whether there is a message that the members are copied into."""
        return load.members > 1 and load.key.group not in self._coalesced

    def copies_out(self, load: Load) -> bool:
        """Whether the members are copied out of the message, rather than views of it."""
        return self.copies(load) and not load.key.kind.reduces

    def _all_ns(self, load: Load) -> int:
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
            len(member.slots),
            member.input_bytes,
            member.output_bytes,
            member.output_bytes,
            copied,
            frozenset(slot.sent.dtype for slot in member.slots),
        )
        return load

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
