"""Whether a rewrite that keeps tensors alive for longer stays within the memory budget."""

from __future__ import annotations

import torch.fx

from inductor_passes.ir.view import GraphView
from inductor_passes.pipeline import Context
from inductor_passes.reorder.canonical import shards
from inductor_passes.reorder.problem import NoHintError
from inductor_passes.schedule.memory import peak_bytes


def gathers_twice(view: GraphView) -> bool:
    """Whether some tensor is gathered twice over one group."""
    gathers = [(c.inputs, c.group) for c in view.collectives if c.kind == "all_gather"]
    return len(set(gathers)) < len(gathers)


def graph_peak_bytes(graph: torch.fx.Graph, context: Context) -> int | None:
    """The peak that the planner sees (equal on all ranks, see ``reorder.canonical``); None without hints."""
    try:
        return peak_bytes(context.problem(graph).problem)
    except NoHintError:
        return None


def may_be_asked(graph: torch.fx.Graph, context: Context) -> bool:
    """Whether all ranks get one answer from the budget: peaks are alike on them, or it is unlimited."""
    return context.config.budget.unlimited or shards(context.view(graph)).ranks_agree


def exceeds(graph: torch.fx.Graph, context: Context, before: int | None) -> bool:
    """Whether a graph, changed since it peaked at ``before`` bytes, is above the budget now."""
    context.forget_view()
    after = graph_peak_bytes(graph, context)
    if before is None or after is None:
        return False
    limit = context.limit_bytes(before)
    return limit is not None and after > max(limit, before)
