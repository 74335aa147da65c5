"""What the partitioner knows about a training step and the two graphs' compilations have to know.

Travels in ``GraphModule.meta`` as plain data, so it is part of the key under which Inductor caches a graph.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch.fx

from inductor_passes.ir.storages import Storages
from inductor_passes.reorder.problem import kept_by_caller

META_KEY = "inductor_passes_step"


@dataclass(frozen=True)
class StepFacts:
    """About one of the two graphs of a step.

    Attributes:
        own_peak_bytes: of the graph as it came out of the partitioner, in its input order.
        step_peak_bytes: the higher one of the two graphs' peaks, all parameters gathered again in backward.
        keep: the report of the choice which gathered parameters backward reuses, {} when there was none to make;
            see ``step.keep``.
    """

    own_peak_bytes: int
    step_peak_bytes: int
    keep: dict[str, Any]

    def attach(self, module: torch.fx.GraphModule) -> None:
        """Leave this with the graph."""
        module.meta[META_KEY] = asdict(self)


def facts_of(graph: torch.fx.Graph) -> StepFacts | None:
    """What the partitioner left with a graph; None for graphs that it did not see (inference)."""
    module = graph.owning_module
    found = None if module is None else module.meta.get(META_KEY)
    return None if found is None else StepFacts(**found)


def input_peak(graph: torch.fx.Graph, backward: bool) -> int | None:
    """Peak bytes of a graph in its order, with what the caller holds; None when a size has no hint. O(nodes + edges).

    Lifetimes as in ``reorder.problem``, without what only orders change: a collective's operands are counted until
    their last reader.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    (output,) = graph.find_nodes(op="output")
    kept = set(output.all_input_nodes)
    change = [0] * (len(position) + 1)
    for storage in Storages(graph).all:
        if storage.size_bytes is None:
            return None
        given = storage.producer.op in ("placeholder", "get_attr")
        change[0 if given else position[storage.producer]] += storage.size_bytes
        if given and kept_by_caller(storage.producer, backward):
            continue
        if kept.isdisjoint(storage.members):
            users = (u for member in storage.members for u in (member, *member.users))
            change[max(position[u] for u in users) + 1] -= storage.size_bytes
    live = peak = 0
    for one in change:
        live += one
        peak = max(peak, live)
    return peak

