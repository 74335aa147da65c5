"""What a bucket saves and what it costs, before anything is changed.

Saved per member: the latency of a collective and the time to issue it. Paid: a copy into the message, unless the
member's producer can write there itself, and a copy out of it where the received rows do not lie as the result must.
Nothing here may differ between ranks, so sizes are the collectives' own (equal, padded) and producers count only
where a rank's own padding cannot hide them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx

from inductor_passes.bucket.candidates import Candidate
from inductor_passes.bucket.pack import travels_as_bytes
from inductor_passes.cost.compute import flops
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView


class BucketCosts:
    """Durations of buckets of one graph, in ns.

    Args:
        view: of the graph.
        profile: costs.
        coalesced: names of process groups whose buckets are not copied, see ``rewrite.Form``.
        room_bytes: what the memory budget leaves above the peak of the graph as it is; None: unlimited.
    """

    def __init__(
        self,
        view: GraphView,
        profile: CostProfile,
        coalesced: frozenset[str] = frozenset(),
        room_bytes: int | None = None,
    ) -> None:
        self.room_bytes = room_bytes
        self._view = view
        self._profile = profile
        self._coalesced = coalesced

    @property
    def kernel_ns(self) -> int:
        """Fixed cost of a copy kernel."""
        return self._profile.compute_ns(0, 0, "uint8", 1)

    def transfer_ns(self, members: Sequence[Candidate]) -> int:
        """Time on the communication lane."""
        return self._profile.communication_ns(*self._message(members))

    def latency_ns(self, members: Sequence[Candidate]) -> int:
        """The part of :meth:`transfer_ns` that does not shrink with the message."""
        first = members[0].collective
        return self._profile.communication_ns(first.kind, 0, 0, first.group.ranks)

    def issue_ns(self, members: Sequence[Candidate]) -> int:
        """Time of the compute lane to issue it."""
        return self._profile.issue_ns(*self._message(members))

    def pack_ns(self, members: Sequence[Candidate]) -> int:
        """Time of the compute lane to build the message; 0 for a single member and the coalesced form."""
        if not self.copies(members):
            return 0
        as_bytes = travels_as_bytes([slot.sent.dtype for member in members for slot in member.slots])
        moved = 0
        for member in members:
            for slot in member.slots:
                if as_bytes or not self._writes_in_place(member, slot.source):
                    moved += 2 * slot.sent.numel() * slot.sent.element_size()
        return self._profile.compute_ns(0, moved, "uint8", 1)

    def unpack_ns(self, members: Sequence[Candidate]) -> int:
        """Time of the compute lane to take the message apart; 0 where the parts are views."""
        if not self.copies_out(members):
            return 0
        moved = 2 * sum(member.output_bytes for member in members)
        return self._profile.compute_ns(0, moved, "uint8", sum(len(member.slots) for member in members))

    def extra_bytes(self, members: Sequence[Candidate]) -> int:
        """Memory that a bucket takes at once beyond what its largest member takes alone."""
        sent, received = [sum(getattr(m, side) for m in members) for side in ("input_bytes", "output_bytes")]
        alone = max(m.output_bytes for m in members)
        if not self.copies(members):
            return received - alone
        return sent + received + (received if self.copies_out(members) else 0) - alone

    def gain_ns(self, parts: Sequence[Sequence[Candidate]]) -> int:
        """What merging the buckets ``parts`` into one saves on all lanes together; negative when it costs."""
        merged = [member for part in parts for member in part]
        return sum(map(self._all_ns, parts)) - self._all_ns(merged)

    def _all_ns(self, members: Sequence[Candidate]) -> int:
        return self.transfer_ns(members) + self.issue_ns(members) + self.pack_ns(members) + self.unpack_ns(members)

    def _message(self, members: Sequence[Candidate]) -> tuple[str, int, int, tuple[int, ...]]:
        first = members[0].collective
        return (
            first.kind,
            sum(member.input_bytes for member in members),
            sum(member.output_bytes for member in members),
            first.group.ranks,
        )

    def copies(self, members: Sequence[Candidate]) -> bool:
        """Whether there is a message that the members are copied into."""
        several = len(members) > 1 or len(members[0].slots) > 1
        return several and members[0].collective.group.name not in self._coalesced

    def copies_out(self, members: Sequence[Candidate]) -> bool:
        """Whether the members are copied out of the message, rather than views of it."""
        return self.copies(members) and members[0].collective.kind in ("all_gather", "all_to_all")

    def _writes_in_place(self, member: Candidate, source: torch.fx.Node) -> bool:
        """Whether the kernel that makes ``source`` can write it into the message.

        Gradients are of full size on every rank, so what makes them is the same everywhere; what prepares a shard
        is not.
        """
        if member.collective.kind not in ("reduce_scatter", "all_reduce"):
            return False
        while self._view.role(source) is Role.FREE and len(source.all_input_nodes) == 1:
            if len(source.users) > 1:
                return False
            source = source.all_input_nodes[0]
        return len(source.users) == 1 and self._view.role(source) is Role.COMPUTE and flops(source) is None
