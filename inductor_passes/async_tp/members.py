"""Members of coalesced collectives next to matmuls.

A coalesced collective cannot be cut into parts; its members can. It is taken apart when a member becomes part of a
region, and stays whole otherwise. The other members travel alone then, or with others of their kind: what the whole
graph takes is compared with the graph as it came, and bucketing runs later.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.fx

from inductor_passes.bucket.split import Split, split, splittable
from inductor_passes.ir.view import GraphView
from inductor_passes.pipeline import Context, Snapshot


def taken_apart(
    graph: torch.fx.Graph, context: Context, wanted: Callable[[GraphView], set[torch.fx.Node]]
) -> list[Split]:
    """Take coalesced collectives apart, in place, of which ``wanted`` chooses a member's start when all are apart."""
    view = context.view(graph)
    wholes = splittable(view)
    if not wholes:
        return []
    snapshot = context.snapshot or Snapshot(graph)
    splits = [split(graph, collective) for collective in wholes]
    context.forget_view()
    chosen = wanted(context.view(graph))
    names = {one.name for one in splits if not chosen.isdisjoint(one.starts)}
    if len(names) == len(splits):
        return splits
    snapshot.restore()
    context.forget_view()
    splits = [split(graph, c) for c in splittable(context.view(graph)) if c.start.name in names]
    context.forget_view()
    return splits
