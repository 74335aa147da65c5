"""As many nodes on ranks that hold a whole shard as on those that pad theirs, while a partitioner looks at the graph.

torch's partitioner numbers the operators of forward. Of a long chain that could be computed again it saves the value
that is more than 100 numbers behind the chain's beginning. A shard that is smaller than those of other ranks is padded
before it is gathered: one operator more, so that ranks would save different values. What they gather in backward would
differ, too: a job that hangs, or where shards have equal sizes computes with another parameter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.canonical import is_padded, shards
from inductor_passes.ir.view import GraphView
from inductor_passes.operators import CollectiveKind

_MARK = "inductor_passes_stand_in"
#: By which torch's partitioner decides.
_TAGS = ("recompute", "ac_graph_id", "partitioner_tag")


def insert(graph: torch.fx.Graph) -> int:
    """Put a node where other ranks pad what they gather; O(nodes + edges).

    Returns:
        How many.
    """
    if not any(_torch.op_name(node.target) == "aten::slice" for node in graph.nodes if node.op == "call_function"):
        return 0
    view = GraphView(graph)
    uneven = [c for c in shards(view).uneven if c.kind is CollectiveKind.ALL_GATHER]
    added = 0
    place = {node: number for number, node in enumerate(view.nodes)}
    for number, collective in enumerate(sorted(uneven, key=lambda c: place[c.start])):
        start = collective.start
        for source in collective.inputs:
            if is_padded(view, source):
                continue
            with graph.inserting_before(start):
                # The partitioner has rules by operator, too. A name of its own: others keep their numbers.
                pad = torch.ops.aten.constant_pad_nd.default
                node = graph.create_node("call_function", pad, (source, [0, 0]), name=f"{_MARK}_{number}")
            node.meta.update({key: source.meta[key] for key in ("val", "tensor_meta") if key in source.meta})
            # A pad is computed again where its gather is, and belongs to the same graph.
            node.meta.update({key: start.meta[key] for key in _TAGS if key in start.meta})
            node.meta[_MARK] = True
            start.replace_input_with(source, node)
            added += 1
    return added


def erase(graphs: Iterable[torch.fx.Graph]) -> None:
    """Take the nodes away again. Where one was to be saved, what it stands for is."""
    for graph in graphs:
        for node in list(graph.nodes):
            if node.op == "call_function" and _MARK in node.meta:
                source = node.all_input_nodes[0]
                node.replace_all_uses_with(source)
                graph.erase_node(node)
