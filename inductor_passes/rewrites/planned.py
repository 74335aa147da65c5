"""Steps of a plan in the place of nodes that redistribute one tensor: what R11 and R17 share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.fx

from inductor_passes.redistribute.steps import Step
from inductor_passes.report import Reason
from inductor_passes.rewrites.unroll import Unroller
from inductor_passes.rewrites.work import Work, refuse
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import dense


def check_replaceable(
    work: Work, source: torch.fx.Node, nodes: Sequence[torch.fx.Node], result: torch.fx.Node, steps: Sequence[Step]
) -> None:
    """Refuse unless ``steps`` of ``source`` may stand for ``result``, which ``nodes``, in order, make of it."""
    value = source.meta["val"]
    if not value.is_contiguous() or value.is_conj():
        refuse(Reason.UNSUPPORTED, "the source is not dense")
    work.unwritten(source, nodes[0], result)
    work.never_written(*nodes)
    if not steps:
        work.may_stand_for(source, result)
    if any(step.kind == "all_reduce" for step in steps):
        work.not_in_flight(source, nodes[0], result)


def builder(unroller: Unroller, source: torch.fx.Node, steps: list[Step]) -> Callable[[Emitter], torch.fx.Node]:
    """Emits the steps; complex elements travel as pairs of real ones."""

    def build(emit: Emitter) -> torch.fx.Node:
        if not source.meta["val"].dtype.is_complex or not steps:
            return unroller.run(emit, source, steps)
        pairs = emit.call(torch.ops.aten.view_as_real.default, source)
        return emit.call(torch.ops.aten.view_as_complex.default, dense(emit, unroller.run(emit, pairs, steps)))

    return build


def as_many_or_more(steps: Sequence[Step], cheapest: Sequence[Step], reductions: int) -> bool:
    """Whether nothing but reductions would become as many collectives, or send more bytes than they need.

    Latency is shared by those that are bucketed, bytes are not. They are left to R2, R3, R4 and R6.
    """
    least = sum(step.bytes for step in cheapest)
    return sum(s.communicates for s in steps) >= reductions or sum(s.bytes for s in steps) > least


def described(steps: Sequence[Step]) -> str:
    """For a report."""
    return ", ".join(f"{s.kind} ({s.bytes} bytes)" if s.communicates else "slice" for s in steps) or "nothing"
