"""R14: a gather of what was gathered before is the earlier one's result.

before::

    y = wait(all_gather(x, a)); ... ; z = wait(all_gather(x, a))

after::

    y = wait(all_gather(x, a)); ... ; z is y

Matches all_gathers of one node over one group. Refused when anything in the graph writes to the source or to one of the
results. Bit-exact. Saves the whole collective; the result lives longer, which is the memory budget's to judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.fx

from inductor_passes.ir.view import Collective
from inductor_passes.pipeline import Context
from inductor_passes.report import PassReport, Reason, Verdict

from .rewriting import Exactness, Rewriter, check_exactness


@dataclass(frozen=True)
class ShareGathers:
    """See the module's docstring. ``exactness`` ``off`` switches it off."""

    exactness: Exactness = "exact"
    name: str = "R14"
    group_order: ClassVar[Literal["kept", "any"]] = "kept"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Keep the first of equal gathers."""
        report = PassReport(self.name)
        work = Rewriter(self.name, graph, context, report)
        seen: dict[tuple[torch.fx.Node, str], Collective] = {}
        for gather in work.collectives("all_gather"):
            key = (gather.inputs[0], gather.group.name)
            first = seen.setdefault(key, gather)
            if first is gather:
                continue
            (kept,), (wait,) = first.waits, gather.waits
            if self.exactness == "off":
                work.refuse(gather, Reason.DISABLED)
            elif work.view.position[kept] > work.view.position[wait]:
                work.refuse(gather, Reason.DATA_DEPENDENCY, "the earlier gather is waited for later")
            elif work.written(gather.inputs[0], kept, wait):
                work.refuse(gather, Reason.DATA_DEPENDENCY, "the source or a result is written to")
            else:
                gain = context.profile.communication_ns(
                    "all_gather", gather.input_bytes or 0, gather.output_bytes or 0, gather.group.ranks
                )
                work.drop(gather, wait, (wait, gather.start), kept)
                work.decide(gather, Verdict.APPLIED, Reason.PROFITABLE, f"same as {first.start.name}", gain)
        return report
