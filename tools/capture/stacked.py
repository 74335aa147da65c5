"""Graphs as deep as wanted from a capture of a few layers: the backward graph several times, one behind the other.

Tracing takes most of the time of capturing, and layers repeat. Each repetition has inputs of its own. It begins with
what the one before computed last, so that no order can run them beside each other.
"""

from __future__ import annotations

import torch
import torch.fx

aten = torch.ops.aten


def stacked(gm: torch.fx.GraphModule, nodes: int) -> torch.fx.GraphModule:
    """A graph of at least ``nodes`` nodes, made of repetitions of a backward graph.

    Args:
        gm: its gradients begin with scalars, the placeholders ``tangents_*``.

    Raises:
        ValueError: it has no such placeholder.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    body = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    seeds = [n for n in inputs if n.name.startswith("tangents_") and n.meta["val"].ndim == 0]
    if not seeds:
        raise ValueError("only a backward graph whose gradients begin with a scalar can be stacked")
    output = gm.graph.output_node()
    first = len(inputs) + len(body) + 1
    # Two nodes join a repetition to the one before, in the place of its seeds.
    further = len(inputs) - len(seeds) + len(body) + 2
    copies = 1 + max(0, -(-(nodes - first) // further))
    graph = torch.fx.Graph()
    fresh: list[dict[torch.fx.Node, torch.fx.Node]] = [{} for _ in range(copies)]
    for number, mine in enumerate(fresh):
        for node in inputs:
            if not number or node not in seeds:
                mine[node] = graph.node_copy(node)
                mine[node].target = mine[node].name
    results: list[torch.fx.Node] = []
    for number, mine in enumerate(fresh):
        if number:
            mine.update(dict.fromkeys(seeds, _scalar(graph, fresh[number - 1][body[-1]], seeds[0])))
        for node in body:
            mine[node] = graph.node_copy(node, mine.__getitem__)
        results += [mine[node] for node in output.all_input_nodes]
    graph.output(tuple(results)).meta["val"] = tuple(node.meta.get("val") for node in results)
    graph.lint()
    return torch.fx.GraphModule(gm, graph)


def _scalar(graph: torch.fx.Graph, value: torch.fx.Node, like: torch.fx.Node) -> torch.fx.Node:
    """A scalar that depends on a value, with the meaning of ``like``."""
    total = graph.call_function(aten.sum.default, (value,))
    wide = graph.call_function(aten._to_copy.default, (total,), {"dtype": like.meta["val"].dtype})
    with value.meta["val"].fake_mode:
        total.meta["val"] = value.meta["val"].sum()
        wide.meta["val"] = total.meta["val"].to(like.meta["val"].dtype)
    return wide
