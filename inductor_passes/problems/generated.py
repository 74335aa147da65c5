"""What Inductor's kernels make of the values of an FX graph, as far as the graph alone shows it.

Inductor computes a pointwise result that has one pointwise reader where it is read: the result takes no memory, and its
operands are needed until then. A kernel may store its result over an operand that nobody else reads. Both depend on
fusion, which is decided later: this is a second opinion about memory besides that of :class:`GraphMemory`, in which
every value takes memory, not a replacement.

Source: ``GraphLowering.run_node`` in torch/_inductor/graph.py (what is realized),
``SchedulerNode.decide_inplace_update`` in torch/_inductor/scheduler.py (what is stored over an operand).
"""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role
from inductor_passes.ir.storages import FxStorage
from inductor_passes.ir.view import GraphView

#: Inductor writes a result to memory when the code that computes it reads more values than this
#: (``torch._inductor.config.realize_acc_reads_threshold``).
MOST_READS = 8
#: Views under which an element keeps its place in memory.
_SAME_PLACES = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::unsqueeze"})


class Generated:
    """Where values are computed and stored; O(nodes + edges).

    Args:
        apart: nodes that belong to a collective: kernels do not take them in.
    """

    def __init__(self, view: GraphView, apart: Container[torch.fx.Node]) -> None:
        self._view = view
        self._apart = apart
        self._returned = {n for node in view.nodes if node.op == "output" for n in node.all_input_nodes}
        self._computed_at: dict[torch.fx.Node, torch.fx.Node] = {}
        self._first: dict[FxStorage, FxStorage] = {}
        reads: dict[torch.fx.Node, tuple[torch.fx.Node, ...]] = {}
        for node in view.nodes:
            if self._is_pointwise(node):
                reads[node] = self._read(node, reads)
                self._compute_later(node, len(reads[node]))
        for node, read in reads.items():
            if node not in self._computed_at:
                self._store(node, read)

    def computed_at(self, node: torch.fx.Node) -> torch.fx.Node:
        """The node whose kernel computes a node's result: the node itself, or a later pointwise one."""
        while (later := self._computed_at.get(node)) is not None:
            node = later
        return node

    def first(self, storage: FxStorage) -> FxStorage:
        """What this storage is stored over, in a row the first; the storage itself where that is nothing."""
        return self._first.get(storage, storage)

    def _is_pointwise(self, node: torch.fx.Node) -> bool:
        """Whether a node only computes a new tensor of its own, element by element."""
        if self._view.role(node) is not Role.COMPUTE or node in self._apart or not _torch.is_pointwise(node.target):
            return False
        own = self._view.storages.of(node)
        return len(own) == 1 and own[0].producer is node and not own[0].writers

    def _read(
        self, node: torch.fx.Node, reads: dict[torch.fx.Node, tuple[torch.fx.Node, ...]]
    ) -> tuple[torch.fx.Node, ...]:
        """What the code of a pointwise node reads from memory."""
        found: dict[torch.fx.Node, None] = {}
        for operand in node.all_input_nodes:
            found.update(dict.fromkeys(reads[operand] if operand in self._computed_at else (operand,)))
        return tuple(found)

    def _compute_later(self, node: torch.fx.Node, read: int) -> None:
        (storage,) = self._view.storages.of(node)
        if len(node.users) > 1 or len(storage.members) > 1 or node in self._returned or read > MOST_READS:
            return
        for reader in node.users:
            if self._is_pointwise(reader):
                self._computed_at[node] = reader

    def _store(self, node: torch.fx.Node, read: tuple[torch.fx.Node, ...]) -> None:
        """Find an operand that the kernel of a pointwise node may store its result over."""
        (result,) = self._view.storages.of(node)
        for operand in read:
            over = self._view.storages.of(operand)
            if len(over) == 1 and self._is_stored_over(over[0], result, node):
                self._first[result] = self.first(over[0])
                return

    def _is_stored_over(self, over: FxStorage, result: FxStorage, reader: torch.fx.Node) -> bool:
        fits = over.size_bytes == result.size_bytes and not over.writers
        if not fits or self._view.role(over.producer) is not Role.COMPUTE or not _same_elements(over, result):
            return False
        return all(
            self.computed_at(user) is reader
            for member in over.members
            for user in member.users
            if user not in over.members
        )


def _same_elements(over: FxStorage, result: FxStorage) -> bool:
    """Whether an element of the result has the place of the element of the operand that it is computed from."""
    values = [member.meta.get("val") for member in (*over.members, result.producer)]
    if not all(isinstance(value, torch.Tensor) and value.is_contiguous() for value in values):
        return False
    if len({value.dtype for value in values}) > 1 or len({value.device for value in values}) > 1:
        return False
    return all(_torch.op_name(member.target) in _SAME_PLACES for member in over.members[1:])
