"""Restores a graph in place, used where the pipeline's own snapshot is not enough."""

from __future__ import annotations

import torch.fx

from inductor_passes import _torch
from inductor_passes.rewriting.arrange import arrange


class Backup:
    """The nodes of a graph with all that belongs to them, names included; O(nodes) to take and to restore."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._nodes = list(graph.nodes)
        self._names = [n.name for n in self._nodes]
        self._given_away = _torch.node_names(graph)
        self._content = [(n.op, n.target, n.args, n.kwargs, n.type, dict(n.meta)) for n in self._nodes]

    def restore(self) -> None:
        """Put nodes, their order, arguments and meta back; nodes that came in since are erased.

        Erased nodes cannot come back to life: equal ones take their place, under the same names. What is made next is
        called what it would have been called had nothing been tried: plan files name it.
        """
        before = set(self._nodes)
        if before <= set(self._graph.nodes):
            self._reset(before)
        else:
            self._rebuild()
        _torch.set_node_names(self._graph, self._given_away)

    def _reset(self, before: set[torch.fx.Node]) -> None:
        for node, (_, target, args, kwargs, kind, meta) in zip(self._nodes, self._content):
            node.target, node.args, node.kwargs, node.type, node.meta = target, args, kwargs, kind, dict(meta)
        for node in reversed([n for n in self._graph.nodes if n not in before]):
            self._graph.erase_node(node)
        arrange(self._graph, self._nodes)

    def _rebuild(self) -> None:
        graph = self._graph
        for node in reversed(list(graph.nodes)):
            node.args, node.kwargs = (), {}
        for node in list(graph.nodes):
            graph.erase_node(node)
        fresh: dict[torch.fx.Node, torch.fx.Node] = {}
        for node, name, (op, target, args, kwargs, kind, meta) in zip(self._nodes, self._names, self._content):
            new = graph.create_node(
                op,
                target,
                torch.fx.node.map_arg(args, fresh.__getitem__),
                torch.fx.node.map_arg(kwargs, fresh.__getitem__),
                type_expr=kind,
            )
            # The graph still reserves the name for the erased node: no other node can have taken it.
            new.name = name
            new.meta = dict(meta)
            fresh[node] = new
        self._nodes = [fresh[node] for node in self._nodes]
        self._content = [(n.op, n.target, n.args, n.kwargs, n.type, dict(n.meta)) for n in self._nodes]
