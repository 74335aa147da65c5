"""Which results of a graph the user gets: those may live for as long as somebody likes."""

from __future__ import annotations

import torch.fx

#: In a forward graph's ``GraphModule.meta``: how many of its results are not values that are saved for backward.
META_KEY = "inductor_passes_results"


def note(forward: torch.fx.GraphModule, count: int) -> None:
    """Leave with a forward graph how many of its results, the first ones, are not saved for backward."""
    forward.meta[META_KEY] = count


def of_user(graph: torch.fx.Graph, phase: str) -> list[torch.fx.Node]:
    """The results that the user gets; none of backward: gradients are added up, or kept as parameters are.

    Args:
        phase: ``forward``, ``backward`` or ``inference``.
    """
    results = graph.output_node().args[0]
    if phase == "backward" or not isinstance(results, (tuple, list)):
        return []
    module = graph.owning_module
    count = len(results) if phase == "inference" else 0 if module is None else module.meta.get(META_KEY, 0)
    return [one for one in results[:count] if isinstance(one, torch.fx.Node)]
