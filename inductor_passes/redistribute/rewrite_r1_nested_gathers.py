"""R1: two nested all_gathers become one over the flat group.

before::

    y = wait(all_gather(x, a)); z = wait(all_gather(y, b))

after::

    z = wait(all_gather(x, a*b))        (with a local transposition where the flat group nests the other way round)

Matches an all_gather whose input is the wait of another and that nothing else reads, when the two groups of a rank form
a grid and their flat group exists. The collectives gather equal sizes along dimension 0 by definition; padding or
slicing between them (uneven sharding) is a node between them, and then this does not match.

Bit-exact: data moves, nothing is computed. Saves one collective; bytes stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.fx

from inductor_passes.bucket.emit import Emitter
from inductor_passes.pipeline import Context
from inductor_passes.report import PassReport, Reason, Verdict

from .mesh import nesting
from .rewriting import Exactness, Rewriter, check_exactness, gathered, transposed


@dataclass(frozen=True)
class MergeNestedGathers:
    """See the module's docstring. ``exactness`` ``off`` switches it off."""

    exactness: Exactness = "exact"
    name: str = "R1"
    group_order: ClassVar[Literal["kept", "any"]] = "any"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Merge until nothing matches."""
        report = PassReport(self.name)
        work = Rewriter(self.name, graph, context, report)
        for second in work.collectives("all_gather"):
            # A merged collective may itself be the inner one of the next.
            first = work.producer(second.inputs[0], "all_gather")
            if first is None:
                continue
            if self.exactness == "off":
                work.refuse(second, Reason.DISABLED)
                continue
            (wait,) = second.waits
            if list(second.inputs[0].users) != [second.start]:
                work.refuse(second, Reason.DATA_DEPENDENCY, "the inner gather has other readers")
                continue
            joint = work.joint_group(second, first)
            order = nesting(second.group.ranks, first.group.ranks)
            if joint is None or order is None:
                work.refuse(second, Reason.DIFFERENT_GROUP, "no flat group of both; see prepare_groups")
                continue
            outer, inner = second.group.size, first.group.size
            size = outer * inner
            flipped = tuple((k % inner) * outer + k // inner for k in range(size))
            if order not in (tuple(range(size)), flipped):
                work.refuse(second, Reason.UNSUPPORTED, "the flat group interleaves the two")
                continue
            sizes = (first.input_bytes or 0, second.output_bytes or 0)
            gain = work.gain_ns((first, second), "all_gather", sizes, joint[0])
            if gain < 0:
                work.refuse(second, Reason.NOT_PROFITABLE, "the flat ring is slower than two levels")
                continue

            def build(
                emit: Emitter,
                x: torch.fx.Node = first.inputs[0],
                name: str = joint[1],
                grid: tuple[int, int] = (inner, outer),
                straight: bool = order == tuple(range(size)),
            ) -> torch.fx.Node:
                whole = gathered(emit, x, grid[0] * grid[1], name)
                return whole if straight else transposed(emit, whole, *grid)

            removed = (wait, second.start, second.inputs[0], first.start)
            work.replace(second, wait, removed, build)
            work.decide(second, Verdict.APPLIED, Reason.PROFITABLE, f"{inner} x {outer} ranks", gain)
        return report
