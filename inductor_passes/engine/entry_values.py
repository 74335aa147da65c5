"""Saves for backward what an input held when forward began, where forward writes to that input.

torch's partitioners may save an input whose value backward computes something from, a buffer that forward updates
(``self.ema.mul_(0.9).add_(0.1)``, then ``y * (self.scale + self.ema)``), although the write to it is in the same graph.
Backward then reads what was written, and gradients are wrong without a word: in torch 2.11 to 2.13, with ``aot_eager``
and Inductor. In the joint graph an input stands for its value at the beginning, so a copy made there is right.
"""

from __future__ import annotations

import torch.fx

from inductor_passes.engine.backup import Backup
from inductor_passes.ir import memory

aten = torch.ops.aten


def copy_what_is_overwritten(forward: torch.fx.GraphModule, outputs: int) -> int:
    """Save copies in the place of inputs, and of views of them, that forward writes to; how many were made.

    After an error the graph is as it was.

    Args:
        outputs: how many results of ``forward`` are not saved values.
    """
    graph = forward.graph
    written = _first_writes(graph)
    if not written:
        return 0
    result = graph.output_node()
    values = list(result.args[0])  # type: ignore[arg-type]
    places = {node: place for place, node in enumerate(graph.nodes)}
    roots = {
        node: root
        for node in dict.fromkeys(values[outputs:])
        if isinstance(node, torch.fx.Node) and places[node] < written.get(root := _root(node), -1)
    }
    if not roots:
        return 0
    backup = Backup(graph)
    begin = next(node for node in graph.nodes if node.op != "placeholder")
    try:
        copies = {}
        for node in roots:
            with graph.inserting_before(begin if node.op == "placeholder" else node.next):
                copies[node] = copy = graph.call_function(aten.clone.default, (node,))
            copy.meta = {**node.meta, "val": node.meta["val"].clone()}
        saved = [copies.get(value, value) for value in values[outputs:]]
        result.args = (type(result.args[0])([*values[:outputs], *saved]),)  # type: ignore[call-arg, arg-type]
    except Exception:
        backup.restore()
        raise
    finally:
        forward.recompile()
    return len(roots)


def _root(node: torch.fx.Node) -> torch.fx.Node:
    """Of which value a node is a view."""
    while node.op == "call_function" and memory.is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _first_writes(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """Inputs that the graph writes to -> the place of the first node that does."""
    found: dict[torch.fx.Node, int] = {}
    for place, node in enumerate(graph.nodes):
        # What an unknown operator writes to is unknown; a copy of all that it reads would cost more than it is worth.
        for target in () if memory.is_unknown(node) else memory.mutated_inputs(node):
            if (root := _root(target)).op == "placeholder":
                found.setdefault(root, place)
    return found
