"""Saves for backward what an input held when forward began, where forward writes to that input.

torch's partitioners may save an input whose value backward computes something from, a buffer that forward updates
(``self.ema.mul_(0.9).add_(0.1)``, then ``y * (self.scale + self.ema)``), although the write to it is in the same graph.
Backward then reads what was written, and gradients are wrong without a word, with ``aot_eager`` and Inductor. In the
joint graph a value stands for what it is where it is computed, so a copy made there is right.
"""

from __future__ import annotations

import torch.fx

from inductor_passes.engine.backup import Backup
from inductor_passes.ir import memory
from inductor_passes.ir.storages import Storages


def copy_what_is_overwritten(forward: torch.fx.GraphModule, outputs: int) -> int:
    """Save copies in the place of inputs, and of views of them, that forward writes to; how many were made.

    After an error the graph is as it was. What an operator that is not known may write to is left alone.

    Args:
        outputs: how many results of ``forward`` are not saved values.
    """
    graph = forward.graph
    result = graph.output_node()
    values = list(result.args[0])  # type: ignore[arg-type]
    places = {node: place for place, node in enumerate(graph.nodes)}
    overwritten: set[torch.fx.Node] = set()
    for storage in Storages(graph).all:
        writers = [places[node] for node in storage.writers if not memory.is_unknown(node)]
        if writers and storage.producer.op == "placeholder":
            overwritten.update(node for node in storage.members if places[node] < min(writers))
    copied = [node for node in dict.fromkeys(values[outputs:]) if node in overwritten]
    if not copied:
        return 0
    backup = Backup(graph)
    begin = next(node for node in graph.nodes if node.op != "placeholder")
    try:
        copies = {}
        for node in copied:
            with graph.inserting_before(begin if node.op == "placeholder" else node.next):
                copies[node] = copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = {**node.meta, "val": node.meta["val"].clone()}
        saved = [copies.get(value, value) for value in values[outputs:]]
        result.args = (type(result.args[0])([*values[:outputs], *saved]),)  # type: ignore[call-arg, arg-type]
    except Exception:
        backup.restore()
        raise
    finally:
        forward.recompile()
    return len(copied)
