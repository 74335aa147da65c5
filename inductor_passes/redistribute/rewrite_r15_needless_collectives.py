"""R15: a collective whose result nobody reads, or that reduces what is already reduced, goes away.

before::

    wait(all_reduce(x, a))                                  (no reader)
    z = wait(all_reduce(wait(all_reduce(x, max, a)), max, a))

after::

    z = wait(all_reduce(x, max, a))

The first form is exact: no value changes. It covers every functional collective with one result; waits count as impure
for dead-code elimination, so nothing else removes them. The second is exact because min and max of equal values is that
value.
Saves the whole collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.fx

from inductor_passes.ir.view import Collective
from inductor_passes.pipeline import Context
from inductor_passes.report import PassReport, Reason, Verdict

from .rewriting import ORDER_FREE, Exactness, Rewriter, check_exactness

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class DropNeedless:
    """See the module's docstring. ``exactness`` ``off`` switches it off."""

    exactness: Exactness = "exact"
    name: str = "R15"
    group_order: ClassVar[Literal["kept", "any"]] = "kept"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Remove from the last to the first, so that what only fed a removed one goes too."""
        report = PassReport(self.name)
        work = Rewriter(self.name, graph, context, report)
        for kind in KINDS:
            for collective in reversed(list(work.collectives(kind))):
                self._drop(work, collective)
        return report

    def _drop(self, work: Rewriter, collective: Collective) -> None:
        (wait,) = collective.waits
        source = collective.inputs[0]
        before = work.producer(source, "all_reduce") if collective.kind == "all_reduce" else None
        again = (
            before is not None
            and (before.group, before.reduce_op) == (collective.group, collective.reduce_op)
            and collective.reduce_op in ORDER_FREE
        )
        if wait.users and not again:
            return
        if self.exactness == "off":
            work.refuse(collective, Reason.DISABLED)
        elif work.written(wait) or (again and work.written(source)):
            work.refuse(collective, Reason.DATA_DEPENDENCY, "the tensor is written to")
        else:
            gain = work.context.profile.communication_ns(
                collective.kind, collective.input_bytes or 0, collective.output_bytes or 0, collective.group.ranks
            )
            work.drop(collective, wait, (wait, collective.start), source)
            detail = "already reduced" if again else "nobody reads the result"
            work.decide(collective, Verdict.APPLIED, Reason.PROFITABLE, detail, gain)
