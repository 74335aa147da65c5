"""Stable local repair of a graph's order after collectives were merged.

Merged collectives break the order of the list of nodes: a merged start needs inputs that come after the first use of
its result. The repair walks the old order and emits every node after what it needs (a depth-first topological sort):
nodes keep their order except those that a merged collective needs early, which are pulled up right before the node
that asks. A merged start comes as late as its last member stood, a merged wait as late as the last member's wait,
each earlier only when something needs it. O(nodes + edges).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch.fx

from inductor_passes.ir.view import GraphView


class CycleError(ValueError):
    """The merges depend on each other in a circle; the message names a node on it."""


@dataclass(eq=False)
class Stage:
    """A place in the new order where new nodes are made: a merged collective's start or its wait.

    ``replaces`` are the old nodes that it stands for.
    """

    name: str
    replaces: tuple[torch.fx.Node, ...]


Step: TypeAlias = torch.fx.Node | Stage


def repaired_order(view: GraphView, stages: Sequence[Stage]) -> list[Step]:
    """The nodes of ``view`` without the replaced ones, with every stage at its place.

    Collectives that were not merged keep their order within their process group where that is possible.

    Raises:
        CycleError: no legal order exists.
    """
    stage_of = {node: stage for stage in stages for node in stage.replaces}
    try:
        return _sorted(view, stage_of, _lane_order(view, stage_of))
    except CycleError:
        return _sorted(view, stage_of, [])


def ordered(view: GraphView, extra: Iterable[tuple[torch.fx.Node, torch.fx.Node]]) -> list[torch.fx.Node]:
    """The nodes of ``view`` in their order, changed only as far as further pairs (before, after) ask for it.

    Raises:
        CycleError: no legal order exists.
    """
    return [step for step in _sorted(view, {}, extra) if isinstance(step, torch.fx.Node)]


def _lane_order(view: GraphView, stage_of: Mapping[torch.fx.Node, Stage]) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    last: dict[str, torch.fx.Node] = {}
    edges = []
    for collective in view.collectives:
        if collective.start in stage_of:
            continue
        if collective.group.name in last:
            edges.append((last[collective.group.name], collective.start))
        last[collective.group.name] = collective.start
    return edges


def _sorted(
    view: GraphView, stage_of: Mapping[torch.fx.Node, Stage], extra: Iterable[tuple[torch.fx.Node, torch.fx.Node]]
) -> list[Step]:
    pending = Counter(stage_of.values())
    needs = _needs(view, stage_of, extra)
    result: list[Step] = []
    state: dict[Step, bool] = {}  # False: being emitted, True: emitted

    def emit(step: Step) -> None:
        stack = [(step, iter(needs.get(step, ())))]
        state[step] = False
        while stack:
            current, remaining = stack[-1]
            for before in remaining:
                known = state.get(before)
                if known is None:
                    state[before] = False
                    stack.append((before, iter(needs.get(before, ()))))
                    break
                if known is False:
                    raise CycleError(f"merged collectives depend on each other in a circle through {before.name}")
            else:
                state[current] = True
                result.append(current)
                stack.pop()

    for node in view.nodes:
        step: Step = node
        if node in stage_of:
            step = stage_of[node]
            pending[step] -= 1
            if pending[step]:
                continue
        if step not in state:
            emit(step)
    return result


def _needs(
    view: GraphView, stage_of: Mapping[torch.fx.Node, Stage], extra: Iterable[tuple[torch.fx.Node, torch.fx.Node]]
) -> dict[Step, list[Step]]:
    """What comes before each node and stage, in old order, so that pulling up keeps the order of what is pulled."""
    needs: dict[Step, list[Step]] = {}

    def add(before: torch.fx.Node, after: torch.fx.Node) -> None:
        first: Step = stage_of.get(before, before)
        second: Step = stage_of.get(after, after)
        if first is not second:
            needs.setdefault(second, []).append(first)

    for node in view.nodes:
        for source in node.all_input_nodes:
            add(source, node)
    for before, after in chain(view.ordering_edges(), extra):
        add(before, after)
    place: dict[Step, int] = {
        stage: max(view.position[node] for node in stage.replaces) for stage in {*stage_of.values()}
    }
    for step, befores in needs.items():
        if len(befores) > 1:
            needs[step] = sorted(dict.fromkeys(befores), key=lambda b: _place(view, place, b))
    return needs


def _place(view: GraphView, stages: Mapping[Step, int], step: Step) -> int:
    return view.position[step] if isinstance(step, torch.fx.Node) else stages[step]
