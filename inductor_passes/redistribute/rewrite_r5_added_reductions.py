"""R5: the sum of two all_reduces becomes the all_reduce of a sum.

before::

    z = wait(all_reduce(x, a)) + wait(all_reduce(y, a))

after::

    z = wait(all_reduce(x + y, a))

Matches ``sum`` and ``avg`` with equal group, op, shape and dtype whose results nothing else reads; both sides may pass
through the same chain of views. Sums of more terms are merged pair by pair. reduce_scatters likewise.

Reassociates, and in a narrow dtype the addition now precedes the reduction. Saves one collective of full size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.fx

from inductor_passes.bucket.emit import Emitter
from inductor_passes.ir.ops import is_view
from inductor_passes.ir.view import Collective
from inductor_passes.pipeline import Context
from inductor_passes.report import PassReport, Reason, Verdict

from .rewriting import Exactness, Rewriter, check_exactness, may_reassociate, reduced, scattered

KINDS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class AddBeforeReducing:
    """See the module's docstring."""

    exactness: Exactness = "exact"
    name: str = "R5"
    group_order: ClassVar[Literal["kept", "any"]] = "any"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Merge until nothing matches."""
        report = PassReport(self.name)
        work = Rewriter(self.name, graph, context, report)
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target is not torch.ops.aten.add.Tensor:
                continue
            if len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1 or node.args[0] is node.args[1]:
                continue
            if not all(isinstance(a, torch.fx.Node) for a in node.args):
                continue
            sides = [self._side(work, side) for side in node.args if isinstance(side, torch.fx.Node)]
            if sides[0] is None or sides[1] is None:
                continue
            self._merge(work, node, sides[0], sides[1])
        return report

    def _merge(
        self,
        work: Rewriter,
        add: torch.fx.Node,
        left: tuple[Collective, list[torch.fx.Node]],
        right: tuple[Collective, list[torch.fx.Node]],
    ) -> None:
        (first, views), (second, others) = sorted((left, right), key=lambda s: work.view.position[s[0].start])
        if first.kind != second.kind or first.group != second.group:
            work.refuse(second, Reason.DIFFERENT_GROUP, f"{first.group} and {second.group}")
        elif self.exactness == "off":
            work.refuse(second, Reason.DISABLED)
        elif first.reduce_op != second.reduce_op or first.reduce_op not in ("sum", "avg"):
            work.refuse(second, Reason.MIXED_REDUCE_OP, f"{first.reduce_op} and {second.reduce_op}")
        elif not _alike(first.inputs[0], second.inputs[0]) or not _same_views(views, others):
            work.refuse(second, Reason.MIXED_DTYPE, "shapes, dtypes or views of the two differ")
        elif not may_reassociate(second, self.exactness):
            work.refuse(second, Reason.NUMERICS, "adds before reducing", 'redistribute="reassociate"')
        elif not _only_used_here(first, views, add):
            work.refuse(first, Reason.DATA_DEPENDENCY, "the reduction has other readers")
        elif not _only_used_here(second, others, add):
            work.refuse(second, Reason.DATA_DEPENDENCY, "the reduction has other readers")
        elif work.written(first.inputs[0], second.inputs[0]):
            work.refuse(second, Reason.DATA_DEPENDENCY, "an input is written to")
        else:
            gain = work.gain_ns(
                (first, second), first.kind, (first.input_bytes or 0, first.output_bytes or 0), first.group.ranks
            )
            work.replace(second, add, _removed(add, (first, views), (second, others)), _build(first, second, views))
            work.decide(second, Verdict.APPLIED, Reason.PROFITABLE, f"with {first.start.name}", gain)

    def _side(self, work: Rewriter, node: torch.fx.Node) -> tuple[Collective, list[torch.fx.Node]] | None:
        """The reduction behind ``node`` and the views between, innermost first."""
        views: list[torch.fx.Node] = []
        while node.op == "call_function" and is_view(node) and node not in work.view.collectives_of_wait:
            if len(node.all_input_nodes) != 1:
                return None
            views.append(node)
            node = node.all_input_nodes[0]
        for kind in KINDS:
            found = work.producer(node, kind)
            if found is not None:
                return found, views[::-1]
        return None


def _alike(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    left, right = a.meta["val"], b.meta["val"]
    return tuple(left.shape) == tuple(right.shape) and left.dtype == right.dtype


def _same_views(a: list[torch.fx.Node], b: list[torch.fx.Node]) -> bool:
    return [(n.target, n.args[1:], n.kwargs) for n in a] == [(n.target, n.args[1:], n.kwargs) for n in b]


def _only_used_here(collective: Collective, views: list[torch.fx.Node], add: torch.fx.Node) -> bool:
    chain = [collective.waits[0], *views, add]
    return all(list(node.users) == [after] for node, after in itertools.pairwise(chain))


def _removed(
    add: torch.fx.Node, *sides: tuple[Collective, list[torch.fx.Node]]
) -> tuple[torch.fx.Node, ...]:
    removed = [add]
    for collective, views in sides:
        removed += [*reversed(views), collective.waits[0], collective.start]
    return tuple(removed)


def _build(
    first: Collective, second: Collective, views: list[torch.fx.Node]
) -> Callable[[Emitter], torch.fx.Node]:
    def build(emit: Emitter) -> torch.fx.Node:
        total = emit.call(torch.ops.aten.add.Tensor, first.inputs[0], second.inputs[0])
        if first.kind == "all_reduce":
            result = reduced(emit, total, first.reduce_op, first.group.name)
        else:
            result = scattered(emit, total, first.reduce_op, first.group.size, first.group.name)
        for view in views:
            result = emit.call(view.target, result, *view.args[1:], **view.kwargs)
        return result

    return build
