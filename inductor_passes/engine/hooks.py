"""The objects that Inductor calls: a graph pass after its own rewrites, and a hook at the end of its scheduling.

Both are part of Inductor's cache key by what they depend on (``identity``), and both run behind the barrier.
"""

from __future__ import annotations

from typing import Any

import torch.fx

from inductor_passes import _torch
from inductor_passes.engine import agreeing, garbage, identity, in_tree, nothing
from inductor_passes.engine.barrier import MEANT, guarded, unharmed
from inductor_passes.engine.compilation import Compilation
from inductor_passes.engine.complain import complain
from inductor_passes.engine.graph import compile_graph, handed_on, will_order_kernels
from inductor_passes.engine.kernels import order_kernels
from inductor_passes.engine.publish import publish_fx
from inductor_passes.report import PassReport, Reason
from inductor_passes.trace import spans


class GraphPass(identity.Configured, _torch.graph_pass_base()):  # type: ignore[misc]
    """Our passes as one post-grad graph pass of Inductor, for forward, backward and inference graphs.

    Runs the user's own passes first, where this torch takes only one pass.
    """

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Rewrite, reorder and verify one graph in place."""
        for one in self.others:
            one(graph)

        def plan() -> None:
            inference = "_inference_" in _torch.aot_graph_name() if is_inference is None else is_inference
            compile_graph(graph, inference, self.settings)

        unharmed(graph, "planning a graph", plan, lambda: self.settings)

    def uuid(self) -> Any:
        """Cache key; None keeps Inductor from caching."""
        cached = False
        with guarded("looking at how a graph will be cached", "it is not", lambda: self.settings):
            settings = self.settings
            if settings.in_tree_passes == "warn":
                # On a warm cache no pass runs: only here can it be said that Inductor's own passes have the graph.
                in_tree.left_to_inductor(settings)
            cached = agreeing.can_state(settings)
        return super().uuid() if cached else None


class SchedulerHook(identity.Configured):
    """Our hook at the end of Inductor's scheduling; pickles to its cache key and nothing else."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The nodes in the planned order; as they came for graphs that our graph pass left alone."""
        with guarded("planning the kernels", "Inductor's order stays", lambda: self.settings):
            agreeing.state()
            nothing.state()
            compilation = handed_on()
            if compilation is not None and will_order_kernels(self.settings):
                return _ordered(nodes, compilation)
        return nodes

    def __deepcopy__(self, memo: dict[int, Any]) -> SchedulerHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_hook_from_key, (self.uuid(),))


def _hook_from_key(key: str | None) -> SchedulerHook:
    """A pickled hook is a cache key; the settings behind it stay in the process that made it."""
    del key
    return SchedulerHook()


@garbage.paused()
def _ordered(nodes: list[Any], compilation: Compilation) -> list[Any]:
    report = PassReport("replay")
    compilation.report.passes.append(report)
    try:
        with spans.span("replay"):
            return order_kernels(nodes, compilation, report)
    except MEANT:
        raise
    except Exception as error:
        report.changed = False
        report.rolled_back, report.detail = Reason.EXCEPTION, f"{type(error).__name__}: {error}"
        complain("the order of the kernels was undone", report, compilation.config, error)
        publish_fx(compilation)
        return nodes
