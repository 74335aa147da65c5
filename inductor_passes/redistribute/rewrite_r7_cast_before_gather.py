"""R7: a narrowing cast moves before the all_gather that it follows.

before::

    y = cast(wait(all_gather(x, a)), bfloat16)

after::

    y = wait(all_gather(cast(x, bfloat16), a))

Matches a cast to a dtype of fewer bytes that is the only reader of a gather (views in between are not matched). A cast
acts on every element alone, and gathering moves elements, so the two commute bit for bit; reductions are never crossed.
Saves the share of the gather's bytes by which the dtype shrinks (half for fp32 to bf16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.fx

from inductor_passes.bucket.emit import Emitter
from inductor_passes.pipeline import Context
from inductor_passes.report import PassReport, Reason, Verdict

from .rewriting import Exactness, Rewriter, check_exactness, gathered

CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)


@dataclass(frozen=True)
class CastBeforeGather:
    """See the module's docstring. ``exactness`` ``off`` switches it off."""

    exactness: Exactness = "exact"
    name: str = "R7"
    group_order: ClassVar[Literal["kept", "any"]] = "kept"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Move every cast that pays."""
        report = PassReport(self.name)
        work = Rewriter(self.name, graph, context, report)
        for gather in work.collectives("all_gather"):
            (wait,) = gather.waits
            casts = [user for user in wait.users if user.target in CASTS]
            if not casts:
                continue
            cast = casts[0]
            after, before = cast.meta["val"].dtype, wait.meta["val"].dtype
            if self.exactness == "off":
                work.refuse(gather, Reason.DISABLED)
            elif len(wait.users) > 1:
                work.refuse(gather, Reason.DATA_DEPENDENCY, "the gathered tensor has other readers")
            elif set(cast.kwargs) - {"dtype"}:
                work.refuse(gather, Reason.UNSUPPORTED, f"a cast that also changes {sorted(cast.kwargs)}")
            elif after.itemsize >= before.itemsize:
                work.refuse(gather, Reason.NOT_PROFITABLE, f"{before} to {after} does not narrow")
            elif work.written(gather.inputs[0], wait):
                work.refuse(gather, Reason.DATA_DEPENDENCY, "the tensor is written to")
            else:
                self._move(work, gather.start, cast)
        return report

    def _move(self, work: Rewriter, start: torch.fx.Node, cast: torch.fx.Node) -> None:
        gather = work.view.by_start[start]
        (wait,) = gather.waits
        sizes = [n.meta["val"].numel() * cast.meta["val"].dtype.itemsize for n in (gather.inputs[0], wait)]
        gain = work.gain_ns((gather,), "all_gather", (sizes[0], sizes[1]), gather.group.ranks)

        def build(emit: Emitter) -> torch.fx.Node:
            narrow = emit.call(cast.target, gather.inputs[0], *cast.args[1:], **cast.kwargs)
            return gathered(emit, narrow, gather.group.size, gather.group.name)

        detail = f"{wait.meta['val'].dtype} to {cast.meta['val'].dtype}"
        # The gather stays where it was: its position among the collectives is the other passes' business.
        work.replace(gather, cast, (cast, wait, start), build, before=start)
        work.decide(gather, Verdict.APPLIED, Reason.PROFITABLE, detail, gain)
