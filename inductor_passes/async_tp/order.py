"""A legal order for a graph with new nodes that want to stand in certain places."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch.fx

from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView

#: (position of a node of the original graph, before (0) or behind (1) it, rank among equals)
OrderKey = tuple[int, int, int]
Edge: TypeAlias = Callable[[torch.fx.Node, torch.fx.Node], None]


def legal_order(
    graph: torch.fx.Graph, keys: dict[torch.fx.Node, OrderKey], position: dict[torch.fx.Node, int]
) -> list[torch.fx.Node]:
    """The graph's nodes in a legal order that follows ``keys`` (new nodes) and ``position`` (old ones).

    The graph is in a legal order already. Kept besides data flow: memory hazards and effects, fences against everything
    that communicates, and the order of the old collectives of a group. Beside messages between two ranks the old starts
    of all groups keep their order, and no old wait moves in front of a start (``problems/transfers.py`` says why).
    Kahn's algorithm with the smallest key first, O((nodes + edges) log nodes).

    Raises:
        ValueError: the constraints have a cycle.
    """
    view = GraphView(graph)
    nodes = view.nodes
    key = [keys[n] if n in keys else (position[n], 1, 0) for n in nodes]
    after: list[list[int]] = [[] for _ in nodes]
    left = [0] * len(nodes)

    def edge(before: torch.fx.Node, behind: torch.fx.Node) -> None:
        after[view.position[before]].append(view.position[behind])
        left[view.position[behind]] += 1

    for node in nodes:
        for source in node.all_input_nodes:
            edge(source, node)
    for before, behind in view.ordering_edges():
        edge(before, behind)
    _fences(view, edge)
    last: dict[str, torch.fx.Node] = {}
    for collective in view.collectives:
        if collective.start in keys:
            continue
        if collective.group.name in last:
            edge(last[collective.group.name], collective.start)
        last[collective.group.name] = collective.start
    if view.transfer_waits:
        _beside_messages(view, sorted((n for n in nodes if n not in keys), key=position.__getitem__), edge)
    heap = [(key[i], i) for i in range(len(nodes)) if not left[i]]
    heapq.heapify(heap)
    order: list[torch.fx.Node] = []
    while heap:
        _, i = heapq.heappop(heap)
        order.append(nodes[i])
        for follower in after[i]:
            left[follower] -= 1
            if not left[follower]:
                heapq.heappush(heap, (key[follower], follower))
    if len(order) != len(nodes):
        raise ValueError("the graph has no legal order: its constraints have a cycle")
    return order


def _beside_messages(view: GraphView, old: Sequence[torch.fx.Node], edge: Edge) -> None:
    issued: torch.fx.Node | None = None
    for node in old:
        start = node in view.by_start or node in view.transfer_waits
        if issued is not None and (start or view.role(node) is Role.WAIT):
            edge(issued, node)
        if start:
            issued = node


def _fences(view: GraphView, edge: Edge) -> None:
    since: list[torch.fx.Node] = []
    fence: torch.fx.Node | None = None
    for node in view.nodes:
        role = view.role(node)
        if role is Role.FENCE:
            for one in since:
                edge(one, node)
            since, fence = [], node
        elif role in (Role.START, Role.WAIT):
            since.append(node)
            if fence is not None:
                edge(fence, node)
