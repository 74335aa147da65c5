"""What R1 to R4 share: a collective that reads nothing but the result of another one."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx

from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.mesh import nesting
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import Movement, movement_behind
from inductor_passes.rewrites.work import Work, refuse


@dataclass(frozen=True)
class Nested:
    """``second`` reads ``first`` through ``between``, and nobody else does.

    Attributes:
        between: the data movement from the wait of ``first`` to the input of ``second``; without nodes when there is
            none.
    """

    first: Collective
    second: Collective
    between: Movement

    @property
    def result(self) -> torch.fx.Node:
        """The wait whose value stays."""
        return self.second.waits[0]

    @property
    def removed(self) -> tuple[torch.fx.Node, ...]:
        """All nodes of the pair, users before producers."""
        middle = (n for n in reversed(self.between.nodes) if n is not self.first.waits[0])
        return (self.result, self.second.start, *middle, self.first.waits[0], self.first.start)

    def undisturbed(self, work: Work) -> None:
        """Refuse when others read what lies between, or when something writes where the joined collective reads."""
        chain = (self.first.waits[0], *self.between.nodes)
        inside = {*chain, self.second.start}
        for node in chain:
            if not inside.issuperset(node.users):
                refuse(Reason.DATA_DEPENDENCY, "the inner result has other readers")
        work.unwritten(self.first.inputs[0], self.first.start, self.result)
        # What is written to the result has to reach the same memory as before.
        work.never_written(*chain, self.result)

    def may_be_reduced(self, work: Work) -> None:
        """Refuse when an all_reduce of what the first one reads, in the place of the result, might disturb others."""
        work.not_in_flight(self.first.inputs[0], self.first.start, self.result)


def nested(work: Work, root: torch.fx.Node, inner: CollectiveKind, outer: CollectiveKind) -> Nested | None:
    """The pair that ends in the collective ``root`` of kind ``outer``; None when it does not read one of ``inner``."""
    second = work.collective(root, outer)
    if second is None:
        return None
    between = movement_behind(second.inputs[0])
    first = work.behind(between.source, inner)
    return None if first is None else Nested(first, second, between)


def straight_or_flipped(outer: Collective, inner: Collective) -> bool:
    """Whether the flat group nests as the two do (True) or the other way round (False, a transposition apart)."""
    order = nesting(outer.group.ranks, inner.group.ranks)
    a, b = outer.group.size, inner.group.size
    if order == tuple(range(a * b)):
        return True
    if order != tuple((k % b) * a + k // b for k in range(a * b)):
        refuse(Reason.UNSUPPORTED, "the flat group interleaves the two")
    return False
