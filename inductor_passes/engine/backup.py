"""Restores a graph in place, used where the pipeline's own snapshot is not enough."""

from __future__ import annotations

from typing import Any

import torch.fx

from inductor_passes import _torch
from inductor_passes.rewriting.arrange import arrange

#: What a node has: operation, target, arguments, type and meta.
Content = tuple[str, Any, tuple[Any, ...], dict[str, Any], Any, dict[str, Any]]


class Backup:
    """The nodes of a graph with all that belongs to them, names included; O(nodes) to take and to restore."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._nodes = list(graph.nodes)
        self._names = [n.name for n in self._nodes]
        self._given_away = _torch.node_names(graph)
        self._content: list[Content] = [
            (n.op, n.target, n.args, n.kwargs, n.type, dict(n.meta)) for n in self._nodes
        ]

    def restore(self) -> None:
        """Put nodes, their order, arguments and meta back; nodes that came in since are erased.

        Erased nodes cannot come back to life: equal ones take their place, under the same names. What is made next is
        called what it would have been called had nothing been tried: plan files name it.
        """
        self._replace_erased()
        for node, content in zip(self._nodes, self._content):
            _reset(node, content)
        before = set(self._nodes)
        for node in reversed([n for n in self._graph.nodes if n not in before]):
            self._graph.erase_node(node)
        arrange(self._graph, self._nodes)
        _order_users(self._nodes)
        _torch.set_node_names(self._graph, self._given_away)

    def _replace_erased(self) -> None:
        """Make a node for every one that was erased since."""
        left = set(self._graph.nodes)
        fresh: dict[torch.fx.Node, torch.fx.Node] = {}
        for node, name, (op, target, *_) in zip(self._nodes, self._names, self._content):
            if node not in left:
                fresh[node] = self._graph.create_node(op, target)
                # The graph still reserves the name for the erased node: no other node can have taken it.
                fresh[node].name = name
        if not fresh:
            return

        def now(node: torch.fx.Node) -> torch.fx.Node:
            return fresh.get(node, node)

        self._nodes = [now(node) for node in self._nodes]
        self._content = [
            (op, target, torch.fx.node.map_arg(args, now), torch.fx.node.map_arg(kwargs, now), kind, meta)
            for op, target, args, kwargs, kind, meta in self._content
        ]


def _reset(node: torch.fx.Node, content: Content) -> None:
    """Give a node back what it had. Writing takes long, and most nodes have all of it."""
    _, target, args, kwargs, kind, meta = content
    if node.target is not target:
        node.target = target
    if node.args is not args:
        node.args = args
    if node.kwargs is not kwargs:
        node.kwargs = kwargs
    if node.type is not kind:
        node.type = kind
    if len(node.meta) != len(meta) or any(node.meta.get(key, node) is not value for key, value in meta.items()):
        node.meta = dict(meta)


def _order_users(nodes: list[torch.fx.Node]) -> None:
    """Users in graph order, whatever was tried."""
    position = {node: place for place, node in enumerate(nodes)}
    for node in nodes:
        users = node.users
        if len(users) > 1:
            for user in sorted(users, key=position.__getitem__):
                users[user] = users.pop(user)
