"""Saves for backward what an input held when forward began, where forward writes to that input.

torch's partitioners may save an input whose value backward computes something from, a buffer that forward updates
(``self.ema.mul_(0.9).add_(0.1)``, then ``y * (self.scale + self.ema)``), although the write to it is in the same graph.
Backward then reads what was written, and gradients are wrong without a word, with ``aot_eager`` and Inductor. In the
joint graph a value stands for what it is where it is computed, so a copy made there is right.

Backward may write to such an input, too (statistics of gradients). Its write has to reach the input itself: what only
writes keeps it, and what reads gets the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx

from inductor_passes.engine.backup import Backup
from inductor_passes.ir import memory
from inductor_passes.ir.storages import Storages


def copy_what_is_overwritten(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, outputs: int) -> int:
    """Save copies of inputs, and of views of them, that forward writes to and backward reads; how many were made.

    They take the places of what is saved. Where backward writes to it, they are saved besides.

    After an error the graphs are as they were. What an operator that is not known may write to is left alone.

    Args:
        outputs: how many results of ``forward`` are not saved values.
    """
    result = forward.graph.output_node()
    values: list[torch.fx.Node] = list(result.args[0])  # type: ignore[arg-type]
    overwritten = _overwritten(forward.graph)
    copied = [node for node in dict.fromkeys(values[outputs:]) if node in overwritten]
    if not copied:
        return 0
    uses = _uses(backward.graph, copied)
    copied = [node for node in copied if uses[node] is None or uses[node]]
    if not copied:
        return 0
    backups = [Backup(one.graph) for one in (forward, backward)]
    try:
        copies = _copies(forward.graph, copied)
        besides = {node for node in copied if uses[node] is not None}
        saved = []
        for value in values[outputs:]:
            saved += [value, copies[value]] if value in besides else [copies.get(value, value)]
        result.args = (type(result.args[0])([*values[:outputs], *saved]),)  # type: ignore[call-arg, arg-type]
        for node in copied:
            if node in besides:
                _read_another(backward.graph, node.name, copies[node], uses[node] or ())
    except Exception:
        for backup in backups:
            backup.restore()
        raise
    finally:
        forward.recompile()
        backward.recompile()
    return len(copied)


def _overwritten(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Inputs, and views of inputs, that are written to later."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    found: set[torch.fx.Node] = set()
    for storage in Storages(graph).all:
        writers = [places[node] for node in storage.writers if not memory.is_unknown(node)]
        if writers and storage.producer.op == "placeholder":
            found.update(node for node in storage.members if places[node] < min(writers))
    return found


def _uses(
    backward: torch.fx.Graph, saved: Sequence[torch.fx.Node]
) -> dict[torch.fx.Node, list[torch.fx.Node] | None]:
    """Who reads each saved value in backward, where backward writes to it as well; None where it does not.

    Nobody where a write has another form than the one that backward graphs have: such a value is left alone.
    """
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    writers = {node: storage.writers for storage in Storages(backward).all for node in storage.members}
    found: dict[torch.fx.Node, list[torch.fx.Node] | None] = {}
    for node in saved:
        mine = inputs.get(node.name)
        if mine is None or not writers.get(mine):
            found[node] = None
        elif all(_only_writes(writer, mine) for writer in writers[mine]):
            found[node] = [user for user in mine.users if not _only_writes(user, mine)]
        else:
            found[node] = []
    return found


def _only_writes(user: torch.fx.Node, to: torch.fx.Node) -> bool:
    """Whether ``user`` puts new content into ``to`` and reads nothing of it; backward writes to inputs in this form."""
    return user.target is torch.ops.aten.copy_.default and user.args[0] is to and to not in user.args[1:]


def _copies(graph: torch.fx.Graph, nodes: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, torch.fx.Node]:
    begin = next(node for node in graph.nodes if node.op != "placeholder")
    found = {}
    for node in nodes:
        with graph.inserting_before(begin if node.op == "placeholder" else node.next):
            found[node] = copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {**node.meta, "val": node.meta["val"].clone()}
    return found


def _read_another(
    backward: torch.fx.Graph, name: str, copy: torch.fx.Node, readers: Sequence[torch.fx.Node]
) -> None:
    """Let ``readers`` read ``copy``, saved behind the value of that name, in its place."""
    mine = next(node for node in backward.find_nodes(op="placeholder") if node.name == name)
    with backward.inserting_after(mine):
        another = backward.placeholder(copy.name)
    another.meta = dict(copy.meta)
    for reader in readers:
        reader.replace_input_with(mine, another)
