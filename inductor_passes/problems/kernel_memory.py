"""Storages of a list of scheduler nodes: which buffers are one memory, who allocates it, and how long it is needed.

A buffer that shares memory with another one (a mutation, an alias) belongs to its storage, and so does a result that
a kernel writes over its dead operand in every order. What a collective reads and writes is needed until its wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inductor_passes import _torch
from inductor_passes.schedule.problem import INPUT, Storage


def donated_inputs(backward: bool) -> dict[str, int]:
    """Inputs of the graph being lowered that are freed after their last use, with their bytes.

    A backward owns its saved activations; parameters, inputs and incoming gradients belong to the caller.
    """
    if not backward:
        return {}
    kept = ("primals_", "tangents_", "bwd_seed")
    return {name: size for name, size in _torch.lowered_inputs().items() if not name.startswith(kept)}


def kernel_storages(
    nodes: Sequence[Any], producer: Mapping[str, int], waits_of: Mapping[int, Sequence[int]], backward: bool
) -> list[Storage]:
    """The storages of scheduler nodes in a legal order; near linear in buffers and reads.

    Args:
        producer: name of a buffer -> number of the node that defines it.
        waits_of: number of a start -> numbers of its waits.
        backward: whether inputs other than parameters and gradients are freed after their last use.
    """
    found = _Storages(nodes, producer)
    for i, node in enumerate(nodes):
        found.define(i, node)
    for start, waits in waits_of.items():
        found.hold(nodes[start], waits)
    pinned = found.pinned(donated_inputs(backward))
    for i, node in enumerate(nodes):
        found.overwrite(i, node, pinned)
    return found.listed(pinned)


class _Storages:
    def __init__(self, nodes: Sequence[Any], producer: Mapping[str, int]) -> None:
        self._nodes = nodes
        self._producer = producer
        self._root: dict[str, str] = {}
        self._inputs = _torch.lowered_inputs()
        self._size = dict(self._inputs)
        self._alloc = dict.fromkeys(self._inputs, INPUT)
        self._readers: dict[str, set[int]] = {name: set() for name in self._inputs}

    def _find(self, name: str) -> str:
        """The buffer whose storage ``name`` lives in."""
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
            known = [self._find(s) for s in shared if self._find(s) in self._size]
            if known and known[0] != name:
                self._root[name] = known[0]
                # One node that shares several memories keeps each of them alive.
                for one in known:
                    self._readers[one].add(i)
            else:
                self._size[name], self._alloc[name] = size, self._producer.get(allocated_with, i)
                self._readers.setdefault(name, set()).add(i)
        self._read(_torch.snode_reads(node), [i])

    def hold(self, start: Any, waits: Sequence[int]) -> None:
        """Keep what a collective reads and writes until its waits."""
        self._read([*_torch.snode_data_reads(start), *_torch.snode_output_names(start)], waits)

    def _read(self, names: Sequence[str], readers: Sequence[int]) -> None:
        for name in {self._find(name) for name in names}:
            if name in self._size:
                self._readers[name].update(readers)

    def pinned(self, freed: Mapping[str, int]) -> set[str]:
        """Storages that nobody frees: results, and inputs that are not ``freed``."""
        pinned = {self._find(name) for name in _torch.lowered_outputs()}
        pinned.update(name for name in self._inputs if name not in freed)
        return pinned

    def overwrite(self, i: int, node: Any, pinned: set[str]) -> None:
        """Join results of node ``i`` with the operands that it writes them over, where that holds in every order."""
        for before, after in _torch.snode_overwrites(node):
            source, target = self._find(before), self._find(after)
            if source in pinned or source == target or self._alloc.get(target) != i:
                continue
            if self._size.get(source) != self._size[target]:
                continue
            if all(r == i or _torch.snode_follows(node, self._nodes[r]) for r in self._readers[source]):
                # Whatever the order, the kernel is the last reader and its result takes over the memory.
                self._root[target] = source
                self._readers[source] |= self._readers.pop(target)
                if target in pinned:
                    pinned.add(source)
                del self._size[target]

    def listed(self, pinned: set[str]) -> list[Storage]:
        """All storages that take memory."""
        return [
            Storage(size, alloc, tuple(sorted(self._readers[name] - {alloc})), name in pinned, name)
            for name, size in self._size.items()
            if size
            for alloc in [self._alloc[name]]
        ]
