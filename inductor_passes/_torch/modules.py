"""Graph modules whose Python code is generated when it is first asked for, as torch makes them while it compiles."""

from __future__ import annotations

import torch
import torch.fx


def graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A graph as a module with ``root``'s attributes.

    While torch compiles, nobody runs most graphs as Python. Where this torch cannot put the code off it is generated at
    once.
    """
    try:
        from torch.fx._lazy_graph_module import _make_graph_module
    except ImportError:
        return torch.fx.GraphModule(root, graph)
    return _make_graph_module(root, graph)
