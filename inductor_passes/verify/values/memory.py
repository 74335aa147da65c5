"""Which values share memory that the graph writes to, and who wrote it last before it is read.

Almost no memory of a functional graph is written to. Where it is, a value is what its definition says only until the
first write. The verifier's facts say whose memory a value is and who writes to it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import torch.fx

from inductor_passes.verify.facts.storages import Block
from inductor_passes.verify.facts.view import View


class Root(NamedTuple):
    """A block of memory: the name of the node that brings it to life, and its number among the blocks of that node."""

    producer: str
    number: int


class Memory:
    """The writes of one graph; O(nodes), and O(1) where nothing is written to.

    Attributes:
        any: whether something is written to.
    """

    def __init__(self, view: View) -> None:
        self._roots: dict[str, list[Root]] = {}
        self._writers: dict[Root, list[tuple[int, str]]] = {}
        self._written: dict[str, frozenset[str]] = {}
        for block, root in _written_blocks(view):
            writers = dict.fromkeys(block.writers)
            self._writers[root] = sorted((view.position[writer], writer.name) for writer in writers)
            for writer in writers:
                names = frozenset(operand.name for operand in view.facts[writer].writes)
                self._written[writer.name] = names
            for member in block.members:
                self._roots.setdefault(member.name, []).append(root)
        self.any = bool(self._writers)

    def written(self, name: str) -> frozenset[str]:
        """Names of the operands that a node writes to."""
        return self._written.get(name, frozenset())

    def is_written(self, name: str) -> bool:
        """Whether anything ever writes to the memory of a result."""
        return name in self._roots

    def version(self, name: str, before: int | None) -> frozenset[tuple[Root, str]]:
        """(root, last writer) of all memory behind a result that was written to before a position; None: none was."""
        roots = self._roots.get(name)
        if before is None or not roots:
            return frozenset()
        found = []
        for root in roots:
            writers = self._writers[root]
            if count := bisect_left(writers, (before, "")):
                found.append((root, writers[count - 1][1]))
        return frozenset(found)


def _written_blocks(view: View) -> list[tuple[Block, Root]]:
    """Those that somebody writes to after their birth."""
    numbers: dict[torch.fx.Node, int] = {}
    found = []
    for block in view.storages.all:
        number = numbers[block.producer] = numbers.get(block.producer, -1) + 1
        if block.writers:
            found.append((block, Root(block.producer.name, number)))
    return found
