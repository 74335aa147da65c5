"""Storages of a list of scheduler nodes: which buffers are one memory, who allocates it, and how long it is needed.

A buffer that shares memory with another one (a mutation, an alias) belongs to its storage, and so does a result that
a kernel writes over its dead operand in every order. What a collective reads and writes is needed until its wait.

A concatenation has no kernel. Its parts are computed where they belong in its memory, which is allocated with the first
part. That part brings the storage to life, so the others stay behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inductor_passes import _torch
from inductor_passes.ir.ops import SAVED_BLOCK
from inductor_passes.problems.builder import CALLERS, OF_CALLER, Block, Builder
from inductor_passes.schedule.problem import INPUT


def donated_inputs(backward: bool) -> dict[str, int]:
    """Inputs of the graph being lowered that are freed after their last use, with their bytes.

    A backward owns its saved activations. Parameters, inputs, views of them, and incoming gradients belong to the
    caller. Of inputs that are one block (:func:`saved_together`) each has the block's bytes.
    """
    if not backward:
        return {}
    module = _torch.current_graph_module()
    inputs = [] if module is None else module.graph.find_nodes(op="placeholder")
    views = {str(node.target) for node in inputs if OF_CALLER in node.meta}
    found = _torch.lowered_inputs().items()
    whole = _whole_sizes()
    return {
        name: whole.get(name, size) for name, size in found if not name.startswith(CALLERS) and name not in views
    }


def _whole_sizes() -> dict[str, int]:
    """Inputs of the graph being lowered that are part of a block -> the block's bytes."""
    module = _torch.current_graph_module()
    inputs = [] if module is None else module.graph.find_nodes(op="placeholder")
    return {str(node.target): node.meta[SAVED_BLOCK][1] for node in inputs if SAVED_BLOCK in node.meta}


def saved_together(backward: bool) -> dict[str, str]:
    """Inputs of the graph being lowered that are memory of another input -> that one."""
    module = _torch.current_graph_module()
    inputs = [] if module is None or not backward else module.graph.find_nodes(op="placeholder")
    first: dict[str, str] = {}
    found = {}
    for node in inputs:
        if SAVED_BLOCK in node.meta:
            name = str(node.target)
            one = first.setdefault(node.meta[SAVED_BLOCK][0], name)
            if one != name:
                found[name] = one
    return found


@dataclass(frozen=True)
class Overwrite:
    """A buffer that a kernel writes over an operand.

    Attributes:
        before, after: names of the operand and of the result.
        behind: other nodes that read the operand and do not come before the kernel in every order.
    """

    before: str
    after: str
    behind: frozenset[int] = frozenset()


def overwritten(nodes: Sequence[Any], *, in_this_order: bool) -> list[tuple[Overwrite, ...]]:
    """Per node what it writes over its operands; linear in nodes and reads.

    Args:
        in_this_order: also what it writes so in the order of ``nodes`` only.
    """
    if not in_this_order:
        return [tuple([Overwrite(*pair) for pair in _torch.snode_overwrites(node)]) for node in nodes]
    readers: dict[str, set[int]] = {}
    done: set[str] = set()
    found = []
    for i, node in enumerate(nodes):
        mine = []
        for before, after in _torch.snode_overwrites(node, done):
            others = (r for r in readers.get(before, ()) if not _torch.snode_follows(node, nodes[r]))
            mine.append(Overwrite(before, after, frozenset(others)))
        found.append(tuple(mine))
        done.update(_torch.snode_operations(node))
        for name in _torch.snode_reads(node):
            readers.setdefault(name, set()).add(i)
    return found


def rely_on_order(nodes: Sequence[Any]) -> bool:
    """Whether a kernel writes over an operand in the order of ``nodes`` that it might not write over in another one."""
    return any(one.behind for mine in overwritten(nodes, in_this_order=True) for one in mine)


def kernel_blocks(
    nodes: Sequence[Any],
    producer: Mapping[str, int],
    builder: Builder,
    backward: bool,
    overwrites: Sequence[Sequence[Overwrite]],
) -> list[Block]:
    """The memory of scheduler nodes in a legal order; near linear in buffers and reads.

    Args:
        producer: name of a buffer -> number of the node that defines it, which is that of its task in ``builder``.
        backward: whether inputs other than parameters and gradients are freed after their last use.
        overwrites: per node, see :func:`overwritten`; what is to be behind others is so in ``builder``.
    """
    freed = donated_inputs(backward)
    found = _Buffers(nodes, producer)
    found.join(saved_together(backward))
    for i, node in enumerate(nodes):
        found.define(i, node)
    for start in builder.waits_of:
        found.hold(nodes[start], builder.in_flight(start))
    found.pin(freed)
    for i, node in enumerate(nodes):
        for one in overwrites[i]:
            found.overwrite(i, node, one)
    return list(found.blocks.values())


class _Buffers:
    """Blocks by the name of the buffer that each began with."""

    def __init__(self, nodes: Sequence[Any], producer: Mapping[str, int]) -> None:
        self._nodes = nodes
        self._producer = producer
        self._root: dict[str, str] = {}
        #: Wholes that are defined after their parts.
        self._early: set[str] = set()
        self.blocks = {name: Block(name, size, INPUT) for name, size in _torch.lowered_inputs().items()}

    def join(self, together: Mapping[str, str]) -> None:
        """Make one block of inputs that are memory of another one."""
        sizes = _whole_sizes() if together else {}
        for name, first in together.items():
            if name in self.blocks and first in self.blocks:
                del self.blocks[name]
                self._root[name] = first
                self.blocks[first].size_bytes = sizes[first]

    def _find(self, name: str) -> str:
        """The buffer whose block ``name`` lives in."""
        path = []
        while name in self._root:
            path.append(name)
            name = self._root[name]
        for step in path:
            self._root[step] = name
        return name

    def define(self, i: int, node: Any) -> None:
        """Enter what node ``i`` defines and reads."""
        for name, size, shared, allocated_with in _torch.snode_buffers(node):
            for whole in shared:
                if self._producer.get(whole, i) > i and whole not in self._root:
                    self._early.add(whole)
                    self.blocks.setdefault(whole, Block(whole, 0, i))
            known = [self._find(s) for s in shared if self._find(s) in self.blocks]
            if known and known[0] != name:
                self._root[name] = known[0]
                # One node that shares several memories keeps each of them alive.
                for one in known:
                    self.blocks[one].users.add(i)
                if name in self._early:
                    # A part that has parts of its own: the first of those allocates the whole.
                    inner, outer = self.blocks.pop(name), self.blocks[known[0]]
                    outer.users |= inner.users
                    outer.producer = min(outer.producer, inner.producer)
            elif name in self._early:
                self.blocks[name].size_bytes = size
                self.blocks[name].users.add(i)
            else:
                users = self.blocks[name].users if name in self.blocks else set()
                self.blocks[name] = Block(name, size, self._producer.get(allocated_with, i), users | {i})
        self._use(_torch.snode_reads(node), [i])

    def hold(self, start: Any, tasks: Sequence[int]) -> None:
        """Keep what a collective reads and writes for ``tasks``."""
        self._use([*_torch.snode_data_reads(start), *_torch.snode_output_names(start)], tasks)

    def _use(self, names: Sequence[str], tasks: Sequence[int]) -> None:
        for name in names:
            if (block := self.blocks.get(self._find(name))) is not None:
                block.users.update(tasks)

    def pin(self, freed: Collection[str]) -> None:
        """Mark what nobody frees: results, and inputs that are not ``freed``."""
        results = {self._find(name) for name in _torch.lowered_outputs()}
        for name, block in self.blocks.items():
            block.pinned = name in results or (block.producer == INPUT and name not in freed)

    def overwrite(self, i: int, node: Any, one: Overwrite) -> None:
        """Join a result of node ``i`` with the operand that it writes it over, where that holds in every order."""
        source, target = self.blocks.get(self._find(one.before)), self.blocks.get(self._find(one.after))
        if source is None or target is None or source is target or source.pinned or target.producer != i:
            return
        if source.size_bytes != target.size_bytes:
            return
        if all(r == i or r in one.behind or _torch.snode_follows(node, self._nodes[r]) for r in source.users):
            # Whatever the order, the kernel is the last reader and its result takes over the memory.
            self._root[target.name] = source.name
            source.users |= target.users
            source.pinned = target.pinned
            del self.blocks[target.name]
