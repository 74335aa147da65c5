"""Kernels of one part of async TP: Inductor's fusion must not make one kernel of several parts.

Parts share what does not depend on them (a norm's weight, a table of angles), so Inductor fuses what they do alike
(seen in torch 2.13 on a CPU). Such a kernel waits for the transfers of all parts, and nothing is left to run beside
them. A matmul or a start between two kernels keeps them apart: one makes what it reads, and the other one gets a
dependency on it. The *steps* of a part are its matmuls and its starts.

- What parts compute for the same step runs in the order of these steps: each behind that of the part before it. Only
  that step: a part may wait for something (weights) while the others go on.
- A kernel is behind the last start of every other part that is in front of it in the FX graph.
"""

from __future__ import annotations

import bisect
import graphlib
from collections.abc import Sequence
from typing import Any

from inductor_passes import _torch
from inductor_passes.ir.parts import part_of

Pair = tuple[int, int]


def apart(nodes: Sequence[Any], behind: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(start, kernel) for nodes of Inductor's scheduler before fusion; [] without parts. O(edges + nodes * starts).

    Args:
        behind: (before, after) that are kept, too. Where no order has all of it, parts are not kept apart.
    """
    found = _Parts(nodes)
    if not found.starts:
        return []
    pairs = [(nodes[start], nodes[i]) for i in found.kernels for start in found.in_front_of(i)]
    return pairs if _have_an_order(nodes, [*behind, *pairs]) else []


class _Parts:
    """The kernels of parts by number, and the starts of each part in the order of the FX graph.

    Attributes:
        kernels: number -> (what was cut, number of the part).
        starts: what was cut -> part -> (place, number) of its starts, by rising place.
        steps: the same of its matmuls and starts.
    """

    def __init__(self, nodes: Sequence[Any]) -> None:
        self.nodes = nodes
        parts = {i: found for i, node in enumerate(nodes) if (found := _part(node)) is not None}
        self.places = _places(nodes, parts)
        self.kernels = {i: part for i, part in parts.items() if _torch.snode_kind(nodes[i]) == "fused"}
        self.starts: dict[str, dict[int, list[Pair]]] = {}
        self.steps: dict[str, dict[int, list[Pair]]] = {}
        for i in sorted(parts, key=self.places.__getitem__):
            cut, part = parts[i]
            kind = _torch.snode_kind(nodes[i])
            if kind == "start":
                self.starts.setdefault(cut, {}).setdefault(part, []).append((self.places[i], i))
            if kind in ("start", "extern"):
                self.steps.setdefault(cut, {}).setdefault(part, []).append((self.places[i], i))

    def in_front_of(self, i: int) -> list[int]:
        """The starts and matmuls of other parts that a kernel comes behind."""
        cut, part = self.kernels[i]
        found = []
        for other, starts in self.starts.get(cut, {}).items():
            count = bisect.bisect(starts, (self.places[i], -1))
            if other != part and count:
                found.append(starts[count - 1][1])
        before = self._before(self.steps.get(cut, {}), part, i)
        if before is not None:
            found.append(before)
        # What Inductor computes late, where it is read, stands later in the graph than what it is part of.
        return [step for step in dict.fromkeys(found) if not _torch.snode_needs(self.nodes[step], self.nodes[i])]

    def _before(self, steps: dict[int, list[Pair]], part: int, i: int) -> int | None:
        """Of the first step that needs a kernel: the same step of the part before; None where none needs it."""
        own, kernel = steps.get(part, []), self.nodes[i]
        stage = next((k for k, (_, step) in enumerate(own) if _torch.snode_needs(self.nodes[step], kernel)), None)
        if stage is None:
            return None
        others = [one[stage] for one in steps.values() if len(one) > stage and one[stage] < own[stage]]
        return max(others)[1] if others else None


def _part(node: Any) -> tuple[str, int] | None:
    """The one part that a scheduler node belongs to; None where it is of none or of several."""
    found = {part for origin in _torch.snode_origins(node) if (part := part_of(origin)) is not None}
    return found.pop() if len(found) == 1 else None


def _places(nodes: Sequence[Any], parts: dict[int, tuple[str, int]]) -> dict[int, int]:
    """Where the nodes of parts are in the FX graph: by the last one that a kernel computes."""
    origins = {i: _torch.snode_origins(nodes[i]) for i in parts}
    if not origins:
        return {}
    graph = next(iter(origins.values()))[0].graph
    position = {node: place for place, node in enumerate(graph.nodes)}
    return {i: max(position.get(origin, -1) for origin in found) for i, found in origins.items()}


def _have_an_order(nodes: Sequence[Any], pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether all nodes can run with these pairs (before, after), too."""
    made = {name: i for i, node in enumerate(nodes) for name in _torch.snode_output_names(node)}
    needs = {
        i: {made[name] for name, _ in _torch.snode_dependencies(node) if made.get(name, i) != i}
        for i, node in enumerate(nodes)
    }
    number = {id(node): i for i, node in enumerate(nodes)}
    for before, after in pairs:
        needs[number[id(after)]].add(number[id(before)])
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError:
        return False
    return True
