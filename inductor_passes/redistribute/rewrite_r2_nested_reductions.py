"""R2: two nested all_reduces become one over the flat group.

before::

    y = wait(all_reduce(x, op, a)); z = wait(all_reduce(y, op, b))

after::

    z = wait(all_reduce(x, op, a*b))

Matches equal reduce ops (sum, avg, min, max, product) where nothing else reads the inner result, the two groups of a
rank form a grid and their flat group exists. An average of averages over equal groups is the average.

Reassociates sums, averages and products (min, max and integer sums are exact); replicas along the outer group, which
nested reductions may leave different in the last bit, become equal. Saves ``2(a-1)/a + 2(b-1)/b - 2(ab-1)/(ab)`` of the
tensor's bytes per rank and one collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.fx

from inductor_passes.bucket.emit import Emitter
from inductor_passes.pipeline import Context
from inductor_passes.report import PassReport, Reason, Verdict

from .rewriting import Exactness, Rewriter, check_exactness, may_reassociate, reduced
from .spec import REDUCE_OPS


@dataclass(frozen=True)
class MergeNestedReductions:
    """See the module's docstring."""

    exactness: Exactness = "exact"
    name: str = "R2"
    group_order: ClassVar[Literal["kept", "any"]] = "any"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Merge until nothing matches."""
        report = PassReport(self.name)
        work = Rewriter(self.name, graph, context, report)
        for second in work.collectives("all_reduce"):
            first = work.producer(second.inputs[0], "all_reduce")
            if first is None:
                continue
            if self.exactness == "off":
                work.refuse(second, Reason.DISABLED)
                continue
            if first.reduce_op != second.reduce_op or second.reduce_op not in REDUCE_OPS:
                work.refuse(second, Reason.MIXED_REDUCE_OP, f"{first.reduce_op} and {second.reduce_op}")
                continue
            if not may_reassociate(second, self.exactness):
                work.refuse(second, Reason.NUMERICS, "sums in another order", 'redistribute="reassociate"')
                continue
            if list(second.inputs[0].users) != [second.start]:
                work.refuse(second, Reason.DATA_DEPENDENCY, "the inner reduction has other readers")
                continue
            joint = work.joint_group(second, first)
            if joint is None:
                work.refuse(second, Reason.DIFFERENT_GROUP, "no flat group of both; see prepare_groups")
                continue
            size = first.input_bytes or 0
            gain = work.gain_ns((first, second), "all_reduce", (size, size), joint[0])
            if gain < 0:
                work.refuse(second, Reason.NOT_PROFITABLE, "the flat ring is slower than two levels")
                continue

            def build(
                emit: Emitter, x: torch.fx.Node = first.inputs[0], op: str = second.reduce_op, name: str = joint[1]
            ) -> torch.fx.Node:
                return reduced(emit, x, op, name)

            (wait,) = second.waits
            work.replace(second, wait, (wait, second.start, second.inputs[0], first.start), build)
            work.decide(second, Verdict.APPLIED, Reason.PROFITABLE, f"{len(joint[0])} ranks", gain)
        return report
