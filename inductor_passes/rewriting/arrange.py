"""Putting a graph's nodes into an order."""

from __future__ import annotations

from itertools import pairwise

import torch.fx


def arrange(graph: torch.fx.Graph, order: list[torch.fx.Node]) -> None:
    """Put a graph's nodes into the given order (a permutation of them); O(nodes)."""
    # The node in front is moved first: everything else then follows its predecessor.
    first = next(iter(graph.nodes))
    if order and first is not order[0]:
        first.prepend(order[0])
    for before, node in pairwise(order):
        before.append(node)
