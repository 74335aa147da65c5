"""A user's durations of FX nodes, for kernels that stand for several of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx

from inductor_passes import _torch
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.view import GraphView


class Estimates:
    """What an estimator says of fused kernels.

    An answer replaces the node's own share of the kernel's built-in duration. A node that several kernels compute
    counts in equal parts.

    Args:
        estimator: ns of an FX node, or None.
        kernels: the fused scheduler nodes of a graph.
    """

    def __init__(
        self, estimator: Callable[[torch.fx.Node], float | None], kernels: Sequence[Any], profile: CostProfile
    ) -> None:
        origins = [origin for kernel in kernels for origin in _torch.snode_origins(kernel)]
        self._kernels = Counter(origins)
        self._own = {origin: own for origin in self._kernels if (own := estimator(origin)) is not None}
        graphs = dict.fromkeys(origin.graph for origin in self._own)
        self._costs = {graph: ComputeCosts(GraphView(graph), profile) for graph in graphs}

    def duration_ns(self, kernel: Any, built_in_ns: int) -> int:
        """Of a kernel that takes ``built_in_ns`` by the profile alone."""
        answered = [origin for origin in _torch.snode_origins(kernel) if origin in self._own]
        if not answered:
            return built_in_ns
        own = sum(max(0.0, self._own[o]) / self._kernels[o] for o in answered)
        shares = sum(self._costs[o.graph].duration_ns(o) / self._kernels[o] for o in answered)
        return round(own + max(0.0, built_in_ns - shares))
