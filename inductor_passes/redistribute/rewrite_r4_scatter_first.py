"""R4: a reduction is done on the shard, not on the whole.

before::

    y = wait(all_reduce(x, op, a)); z = wait(reduce_scatter(y, op, b))
    y = wait(all_gather(x, b));     z = wait(all_reduce(y, op, a))

after::

    y = wait(reduce_scatter(x, op, b)); z = wait(all_reduce(y, op, a))
    y = wait(all_reduce(x, op, a));     z = wait(all_gather(y, b))

Matches orthogonal groups (a rank's two groups form a grid) where nothing else reads the inner result; the reduce ops
of the first form must be equal. Gathering moves elements and a reduction acts on each alone, so the second form holds
for every op. Hybrid-sharded gradients come in the first form: a is the replicate axis, usually the slow one between
hosts.

The first form reassociates sums, averages and products (min, max and integer sums are exact). The second reduces the
same operands in the same group; a ring may add a chunk's elements in another order, so it counts as reassociating too.
Saves ``2(a-1)/a * (1 - 1/b)`` of the whole tensor's bytes per rank, on the axis ``a``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.fx

from inductor_passes.bucket.emit import Emitter
from inductor_passes.ir.view import Collective
from inductor_passes.pipeline import Context
from inductor_passes.report import PassReport, Reason, Verdict

from .mesh import product
from .rewriting import Exactness, Rewriter, check_exactness, gathered, may_reassociate, reduced, scattered
from .spec import REDUCE_OPS


@dataclass(frozen=True)
class ReduceOnShards:
    """See the module's docstring."""

    exactness: Exactness = "exact"
    name: str = "R4"
    group_order: ClassVar[Literal["kept", "any"]] = "any"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Swap every pair that pays."""
        report = PassReport(self.name)
        work = Rewriter(self.name, graph, context, report)
        for second in work.collectives("reduce_scatter"):
            first = work.producer(second.inputs[0], "all_reduce")
            if first is not None:
                self._swap(work, first, second, reduction=first)
        for second in work.collectives("all_reduce"):
            first = work.producer(second.inputs[0], "all_gather")
            if first is not None:
                self._swap(work, first, second, reduction=second)
        return report

    def _swap(self, work: Rewriter, first: Collective, second: Collective, reduction: Collective) -> None:
        scatter = second.kind == "reduce_scatter"
        whole, part = (first.input_bytes, second.output_bytes) if scatter else (second.output_bytes, first.input_bytes)
        if self.exactness == "off":
            work.refuse(second, Reason.DISABLED)
        elif reduction.reduce_op not in REDUCE_OPS or (scatter and first.reduce_op != second.reduce_op):
            work.refuse(second, Reason.MIXED_REDUCE_OP, f"{first.reduce_op} and {second.reduce_op}")
        elif not may_reassociate(reduction, self.exactness):
            work.refuse(second, Reason.NUMERICS, "sums in another order", 'redistribute="reassociate"')
        elif list(second.inputs[0].users) != [second.start]:
            work.refuse(second, Reason.DATA_DEPENDENCY, "the inner result has other readers")
        elif product(first.group.ranks, second.group.ranks) is None:
            work.refuse(second, Reason.DIFFERENT_GROUP, "the groups form no grid")
        else:
            # The other collective stays what it is; only the reduction shrinks.
            sizes = (part or 0, part or 0)
            gain = work.gain_ns((reduction,), "all_reduce", sizes, reduction.group.ranks)

            def build(emit: Emitter) -> torch.fx.Node:
                x = first.inputs[0]
                if scatter:
                    shard = scattered(emit, x, second.reduce_op, second.group.size, second.group.name)
                    return reduced(emit, shard, first.reduce_op, first.group.name)
                shard = reduced(emit, x, second.reduce_op, second.group.name)
                return gathered(emit, shard, first.group.size, first.group.name)

            (wait,) = second.waits
            work.replace(second, wait, (wait, second.start, second.inputs[0], first.start), build)
            work.decide(second, Verdict.APPLIED, Reason.PROFITABLE, f"{whole} to {part} bytes reduced", gain)
