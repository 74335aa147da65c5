"""R14: a gather of what was gathered before is the earlier one's result.

before::

    y = wait(all_gather(x, a)); ... ; z = wait(all_gather(x, a))

after::

    y = wait(all_gather(x, a)); ... ; z is y

Matches all_gathers of one tensor, moved and padded in the same way, over one group: a rank with a smaller shard pads it
for every gather, and has to come to what the others come to. What then unpacks the same result twice is shared as well.
Refused when anything in the graph writes to the source or to one of the results. Bit-exact. Saves the whole collective;
the result lives longer, which is the memory budget's to judge.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import ClassVar

import torch.fx

from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import Movement, is_split, movement_behind, step_behind
from inductor_passes.rewrites.work import Match, Work, refuse


class ShareGathers:
    """See the module's docstring."""

    name: ClassVar[str] = "R14"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every all_gather."""
        return work.collectives(CollectiveKind.ALL_GATHER)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The first gather of the same tensor, when it is another one."""
        gather = work.collective(root, CollectiveKind.ALL_GATHER)
        if gather is None:
            return None
        sent = movement_behind(gather.inputs[0])
        others = [
            other
            for user in _readers(sent)
            if user < root
            and (other := work.collective(user, CollectiveKind.ALL_GATHER)) is not None
            and other.group == gather.group
            and movement_behind(other.inputs[0]).signature == sent.signature
        ]
        if not others:
            return None
        first, source = min(others, key=lambda other: other.start), sent.source
        (kept,), (wait,) = first.waits, gather.waits
        if wait < kept:
            refuse(Reason.DATA_DEPENDENCY, "the earlier gather is waited for later")
        work.unwritten(source, first.start, gather.start)
        work.never_written(kept, wait)
        work.may_stand_for(kept, wait)

        def apply() -> None:
            work.drop(self.name, gather.start, (wait, gather.start), kept)
            _share_readers(work, self.name, kept)

        return Match(work.price_ns(gather), f"same as {first.start.name}", apply, extends=True)


def _readers(sent: Movement) -> Iterator[torch.fx.Node]:
    """Who reads the source of a movement through as many steps; O(readers of the source and of its copies)."""
    near = [sent.source]
    for _ in sent.nodes:
        near = [user for node in near for user in node.users if (step := step_behind(user)) and step[0] is node]
    for node in near:
        yield from node.users


def _share_readers(work: Work, subject: str, node: torch.fx.Node) -> None:
    """One of each kind of unpacking: readers that move the same elements the same way."""
    todo = [node]
    while todo:
        seen: dict[str, torch.fx.Node] = {}
        for user in sorted(todo.pop().users):
            if not (is_split(user) or user.target is operator.getitem or step_behind(user) is not None):
                continue
            first = seen.setdefault(f"{user.target} {user.args} {user.kwargs}", user)
            if first is user:
                continue
            if not work.is_written(first) and not work.is_written(user):
                work.drop(subject, user, (user,), first)
                todo.append(first)
