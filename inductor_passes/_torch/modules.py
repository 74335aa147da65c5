"""Graph modules whose Python code is generated when it is first asked for, as torch makes them while it compiles."""

from __future__ import annotations

import contextlib
from typing import Any

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


def code_on_demand() -> contextlib.AbstractContextManager[Any]:
    """What makes modules generate their code on demand, as ``torch.compile`` and Inductor do for their own."""
    try:
        from torch._dynamo import config
        from torch.fx._lazy_graph_module import _use_lazy_graph_module
    except ImportError:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = _use_lazy_graph_module(config.use_lazy_graph_module)
    return context
