"""The objects that Inductor calls: graph passes, a partitioner, and hooks before fusion and at the end of scheduling.

They are part of Inductor's cache key by what they depend on (``identity``), and they run behind the barrier. What does
the work is imported when Inductor calls one: a process that only makes options, or finds its graphs in a cache, imports
no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx

import inductor_passes._torch.gather_op
import inductor_passes._torch.measure_op
import inductor_passes._torch.pick_op  # noqa: F401  code from a cache calls the operators
from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.engine import garbage, identity, in_tree
from inductor_passes.engine.barrier import guarded, unharmed
from inductor_passes.engine.complain import complain, take_said
from inductor_passes.records.errors import MeantError
from inductor_passes.report import PassReport, Reason

Split = tuple[torch.fx.GraphModule, torch.fx.GraphModule]


def import_passes() -> None:
    """Import what the hooks import when they are called; raises whatever keeps it from being imported."""
    from inductor_passes.engine import graph, joint, kernels, nothing, partitioner, publish  # noqa: F401


class GraphPass(identity.Configured, _torch.graph_pass_base()):  # type: ignore[misc]
    """Our passes as one post-grad graph pass of Inductor, for forward, backward and inference graphs.

    Runs the user's own passes first, where this torch takes only one pass.
    """

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Rewrite, reorder and verify one graph in place."""
        for one in self.others:
            one(graph)

        def plan() -> None:
            from inductor_passes.engine.graph import compile_graph

            inference = "_inference_" in _torch.aot_graph_name() if is_inference is None else is_inference
            compile_graph(graph, inference, self.settings)

        unharmed(graph, "planning a graph", plan, lambda: self.settings)

    def uuid(self) -> Any:
        """Cache key; None keeps Inductor from caching."""
        cached = False
        with guarded("looking at how a graph will be cached", "it is not", lambda: self.settings):
            # Code from a cache calls the passes' operators, and no pass is imported then. All ask for a key.
            import inductor_passes.async_tp.kernel_ops
            import inductor_passes.async_tp.ops
            import inductor_passes.rewriting.cpu_calls  # noqa: F401
            from inductor_passes.engine import agreeing

            settings = self.settings
            if settings.in_tree_passes == "warn":
                # On a warm cache no pass runs: only here can it be said that Inductor's own passes have the graph.
                in_tree.left_to_inductor(settings)
            cached = agreeing.can_state(settings)
        return super().uuid() if cached else None


def joint_wanted(settings: PassConfig) -> bool:
    """Whether any setting switches a joint rewrite on."""
    return settings.tier == "reassociate"


class JointPass(identity.Configured, _torch.graph_pass_base()):  # type: ignore[misc]
    """Our rewrites as a joint-graph pass of Inductor; the report goes with that of the forward graph."""

    label = "joint"

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Rewrite and verify one joint graph in place."""
        for one in self.others:
            one(graph)

        def rewrite() -> None:
            if joint_wanted(self.settings):
                from inductor_passes.engine import dynamic_plans, joint

                inference = not any("tangents" in node.name for node in graph.find_nodes(op="placeholder"))
                dynamic_plans.divide(graph, self.settings, inference=inference)
                joint.run(graph, self.settings)

        unharmed(graph, "rewriting a joint graph", rewrite, lambda: self.settings)


class DynamoPass(identity.Configured, _torch.graph_pass_base()):  # type: ignore[misc]
    """Notes the layouts of redistributions in Dynamo's graph, which nothing but them is changed in."""

    label = "layouts"

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Annotate one graph in place."""
        # A compilation begins: what was said in an earlier one of this name never reached its code.
        take_said()
        for one in self.others:
            one(graph)

        def note() -> None:
            from inductor_passes.redistribute.noted import note_layouts

            note_layouts(graph)

        unharmed(graph, "noting layouts", note, lambda: self.settings)


class StepPartitioner(identity.Configured, _torch.partitioner_base()):  # type: ignore[misc]
    """A partitioner around Inductor's or the user's own, see ``engine.partitioner``."""

    label = "step"

    def __init__(self, settings: PassConfig | None = None, inner: Any = None) -> None:
        super().__init__(settings, () if inner is None else (inner,))

    @property
    def inner(self) -> Any:
        """The user's own partitioner, None for Inductor's."""
        return self.others[0] if self.others else None

    def uuid(self) -> Any:
        """Cache key; None keeps Inductor from caching.

        A further variant saves and gathers what the function's first graph does: after another first graph, its code is
        other code.
        """
        key, theirs, saved = super().uuid(), None, None
        with guarded("reading what the first variant gathers", "it is cached as a first one", lambda: self.settings):
            from inductor_passes.engine import first_saved, saved_alike

            theirs, saved = saved_alike.wanted(self.settings), first_saved.known(self.settings)
        if key is None or theirs is None:
            return key
        return (key, *sorted(theirs.items()), "" if saved is None else saved.text())

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Split:
        """Forward and backward graph of a joint one."""
        from inductor_passes.engine.partitioner import Separation

        return Separation(lambda: self.settings, self.inner).run(gm, joint_inputs, kwargs)


def split_with(settings: PassConfig) -> Callable[..., Split]:
    """The partitioner for a compiler that takes a function."""
    partitioner = StepPartitioner(settings)

    def partition(gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Split:
        return partitioner(gm, joint_inputs, **kwargs)

    return partition


class FusionHook(identity.Configured, _torch.scheduler_pass_base()):  # type: ignore[misc]
    """Keeps what Inductor's fusion must not mix up: waits behind messages, draws and effects in order, parts apart.

    Runs the user's own pass first. Without it Inductor may move or fuse a wait in front of a send that the other rank
    needs before it answers, draws come in an order that depends on the memory budget, and one kernel for all parts of
    async TP waits for the transfers of all.
    """

    label = "fusion"
    #: Orders that rely on it are planned where this is true, see ``_torch.keeps_waits``.
    keeps_waits = True

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The nodes before fusion, with dependencies that keep these orders."""
        for one in self.others:
            nodes = one(nodes)
        what = "keeping waits, draws, effects and parts in order"
        with guarded(what, "Inductor may move them", lambda: self.settings):
            in_tree.warn_if_switched_off()
            from inductor_passes.problems.kernel_waits import held

            nodes = held(nodes)
        return nodes

    def __deepcopy__(self, memo: dict[int, Any]) -> FusionHook:
        return self


class SchedulerHook(identity.Configured):
    """Our hook at the end of Inductor's scheduling; pickles to its cache key and nothing else."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The nodes in the planned order; as they came for graphs that our graph pass left alone."""
        with guarded("planning the kernels", "Inductor's order stays", lambda: self.settings):
            from inductor_passes.engine import agreeing, nothing
            from inductor_passes.engine.graph import handed_on, will_order_kernels

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
def _ordered(nodes: list[Any], compilation: Any) -> list[Any]:
    from inductor_passes.engine.kernels import order_kernels
    from inductor_passes.engine.publish import publish_fx
    from inductor_passes.trace import spans

    report = PassReport("replay")
    compilation.report.passes.append(report)
    try:
        with spans.span("replay"):
            return order_kernels(nodes, compilation, report)
    except MeantError:
        raise
    except Exception as error:
        report.changed = False
        report.rolled_back, report.detail = Reason.EXCEPTION, f"{type(error).__name__}: {error}"
        complain("the order of the kernels was undone", report, compilation.config, error)
        publish_fx(compilation)
        return nodes
