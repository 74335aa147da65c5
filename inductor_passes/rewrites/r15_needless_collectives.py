"""R15: a collective whose result nobody reads, or that reduces what is equal on all ranks already, goes away.

before::

    wait(all_reduce(x, a))                                  (no reader)
    z = wait(all_reduce(wait(all_reduce(x, max, a)), max, a))
    z = wait(all_reduce(wait(all_gather(x, a)), max, a))

after::

    z = wait(all_reduce(x, max, a))
    z = wait(all_gather(x, a))

The first form is exact: no value changes. Waits count as impure for dead-code elimination, so nothing else removes
them. An exchange with splits is left alone: a rank that receives nothing does not read what others do. The other forms
are exact because min and max of equal values is that value (data movement in between keeps values equal).
A reduction of zeros stays: a replicated value becomes a pending sum as zeros on all ranks but one, so that what is zero
here need not be zero elsewhere. Saves the whole collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch.fx

from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.plan import ORDER_FREE
from inductor_passes.rewrites.movement import movement_behind
from inductor_passes.rewrites.work import Match, Work

KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


class DropNeedless:
    """See the module's docstring."""

    name: ClassVar[str] = "R15"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every collective, from the last to the first, so that what only fed a removed one goes too."""
        return iter(sorted(work.collectives(*KINDS), reverse=True))

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """Why this collective is not needed."""
        collective = work.collective(root, *KINDS)
        why = "" if collective is None else _why(work, collective)
        if collective is None or not why:
            return None
        (wait,) = collective.waits
        source = collective.inputs[0]
        work.never_written(wait)
        if wait.users:
            work.never_written(source)
            work.may_stand_for(source, wait)
        return Match(
            work.price_ns(collective),
            why,
            lambda: work.drop(self.name, collective.start, (wait, collective.start), source),
        )


def _why(work: Work, collective: Collective) -> str:
    if not collective.waits[0].users:
        return "nobody reads the result"
    if collective.kind != CollectiveKind.ALL_REDUCE:
        return ""
    source = movement_behind(collective.inputs[0]).source
    if collective.reduce_op in ORDER_FREE:
        before = work.behind(source, CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
        equal = before is not None and (before.kind == CollectiveKind.ALL_GATHER or before.reduce_op in ORDER_FREE)
        if before is not None and equal and before.group == collective.group:
            return "equal on all ranks already"
    return ""
