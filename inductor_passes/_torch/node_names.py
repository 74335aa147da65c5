"""The names that a torch.fx graph has given away.

A graph never gives a name away twice, and keeps counting where nodes are erased again. So the name of a node would tell
what was tried before it was made. Where everything that was tried is undone its names are undone with it: names follow
from what stayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx


@dataclass(frozen=True)
class NodeNames:
    """Names that a graph has given away, and up to which number by the word before it."""

    used: frozenset[str]
    counts: dict[str, int]


def node_names(graph: torch.fx.Graph) -> NodeNames | None:
    """The names as they are now, O(nodes); None where this torch keeps them in another way."""
    space = _space(graph)
    return None if space is None else NodeNames(frozenset(space._used_names), dict(space._base_count))


def set_node_names(graph: torch.fx.Graph, names: NodeNames | None) -> None:
    """Put back what :func:`node_names` gave, for a graph whose nodes are the ones that it had, or a copy of these."""
    space = _space(graph)
    if space is None or names is None:
        return
    space._used_names = set(names.used)
    space._base_count = dict(names.counts)


def _space(graph: torch.fx.Graph) -> Any:
    space = getattr(graph, "_graph_namespace", None)
    used, counts = (getattr(space, name, None) for name in ("_used_names", "_base_count"))
    known = isinstance(used, set) and isinstance(counts, dict)
    return space if known else None
