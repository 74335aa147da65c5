"""R3: two nested reduce_scatters become one over the flat group.

before::

    y = wait(reduce_scatter(x, op, a)); z = wait(reduce_scatter(y, op, b))

after::

    z = wait(reduce_scatter(x, op, a*b))    (with a local transposition where the flat group nests the other way round)

Matches equal reduce ops where nothing else reads the inner result, the two groups of a rank form a grid and their flat
group exists. Both collectives split dimension 0 evenly by definition, so the flat one does.

Reassociates sums, averages and products (min, max and integer sums are exact). Saves one collective; bytes per rank are
the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.fx

from inductor_passes.bucket.emit import Emitter
from inductor_passes.pipeline import Context
from inductor_passes.report import PassReport, Reason, Verdict

from .mesh import nesting
from .rewriting import Exactness, Rewriter, check_exactness, may_reassociate, scattered, transposed
from .spec import REDUCE_OPS


@dataclass(frozen=True)
class MergeNestedScatters:
    """See the module's docstring."""

    exactness: Exactness = "exact"
    name: str = "R3"
    group_order: ClassVar[Literal["kept", "any"]] = "any"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Merge until nothing matches."""
        report = PassReport(self.name)
        work = Rewriter(self.name, graph, context, report)
        for second in work.collectives("reduce_scatter"):
            first = work.producer(second.inputs[0], "reduce_scatter")
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
            joint = work.joint_group(first, second)
            # Rank (i, j) ends with chunk i * b + j; the flat group hands chunk s to its member s.
            order = nesting(first.group.ranks, second.group.ranks)
            if joint is None or order is None:
                work.refuse(second, Reason.DIFFERENT_GROUP, "no flat group of both; see prepare_groups")
                continue
            a, b = first.group.size, second.group.size
            flipped = tuple((k % b) * a + k // b for k in range(a * b))
            if order not in (tuple(range(a * b)), flipped):
                work.refuse(second, Reason.UNSUPPORTED, "the flat group interleaves the two")
                continue
            sizes = (first.input_bytes or 0, second.output_bytes or 0)
            gain = work.gain_ns((first, second), "reduce_scatter", sizes, joint[0])
            if gain < 0:
                work.refuse(second, Reason.NOT_PROFITABLE, "the flat ring is slower than two levels")
                continue

            def build(
                emit: Emitter,
                x: torch.fx.Node = first.inputs[0],
                op: str = second.reduce_op,
                name: str = joint[1],
                grid: tuple[int, int] = (a, b),
                straight: bool = order == tuple(range(a * b)),
            ) -> torch.fx.Node:
                packed = x if straight else transposed(emit, x, *grid)
                return scattered(emit, packed, op, grid[0] * grid[1], name)

            (wait,) = second.waits
            work.replace(second, wait, (wait, second.start, second.inputs[0], first.start), build)
            work.decide(second, Verdict.APPLIED, Reason.PROFITABLE, f"{a} x {b} ranks", gain)
        return report
