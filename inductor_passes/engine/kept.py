"""A graph as it came to the passes, kept so that it can be planned again while its code runs (``tune_swap``)."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import following, variants
from inductor_passes.engine.compilation import Compilation, Known
from inductor_passes.engine.sums import arithmetic
from inductor_passes.ir.view import GraphView
from inductor_passes.report import GraphReport
from inductor_passes.tuning.again import New


def text_of(graph: torch.fx.Graph) -> list[str]:
    """What of a graph decides what is computed: a line per node."""
    return [f"{n.name} {n.op} {n.target} {n.args} {n.kwargs} {_form(n.meta.get('val'))}" for n in graph.nodes]


def _form(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return str([_form(one) for one in value])
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def with_costs(report: GraphReport, profile: CostProfile) -> dict[str, Any]:
    """A graph's plan, in the form of a plan file that is followed whatever the cost profile.

    What passes rewrite depends on costs, so each plan brings its own.
    """
    return {**report.plan, "costs": profile.to_json()}


@dataclass
class Kept:
    """What planning a graph again needs.

    Attributes:
        module: a copy of the graph, of which constants alone are shared.
        lines: see :func:`text_of`.
        output: notes of torch about what the graph returns.
        collectives, names: as a plan file describes them.
        groups: their process groups, in order.
        profile: by whose costs the first plan was made.
        participants: ranks that compile the graph.
        report: of the first plan.
        known: what is known from outside of the graph.
        arithmetic: what decides the last bits of the first plan's sums.
        about, came, variant: which variant of its function it is, with which collectives it came, what it sends.
        lowering: how Inductor was asked to lower it.
        life: the default process group that it was compiled in, None where there was none.
        compiler: plans and compiles.
    """

    module: torch.fx.GraphModule
    settings: PassConfig
    lines: list[str]
    output: Mapping[str, Any]
    collectives: Mapping[str, str]
    names: Mapping[str, tuple[str, ...]]
    groups: tuple[str, ...]
    compiler: Callable[[Kept, CostProfile], New]
    profile: CostProfile
    participants: tuple[int, ...] = ()
    report: GraphReport | None = None
    known: Known = field(default_factory=Known)
    arithmetic: Counter[str] = field(default_factory=Counter)
    about: variants.About | None = None
    variant: following.Variant | None = None
    lowering: _torch.Lowering | None = None
    life: weakref.ref[Any] | None = None

    @property
    def plan(self) -> dict[str, Any]:
        """The first plan, in the form of a plan file."""
        assert self.report is not None
        return with_costs(self.report, self.profile)

    def of(
        self, compilation: Compilation, about: variants.About, variant: following.Variant, view: GraphView
    ) -> Kept | str:
        """With what the first compilation made of it; else why it cannot be planned again.

        Args:
            view: of the graph as the passes left it.
        """
        if compilation.narrowed:
            return "its messages are narrowed"
        self.about, self.variant = about, variant
        self.report, self.known = compilation.report, compilation.known
        self.arithmetic = arithmetic(view, self.settings.tier)
        return self

    def compile(self, profile: CostProfile) -> New:
        """See :class:`inductor_passes.tuning.again.Kept`."""
        return self.compiler(self, profile)

    def conflict(self) -> str:
        """See :class:`inductor_passes.tuning.again.Kept`."""
        assert self.about is not None and self.variant is not None
        every, before = variants.graphs_of(self.about, self.variant.kinds)
        if every > 1 and before == every - 1:
            return "a graph of before torch._dynamo.reset() may still be called, and sends the same messages"
        if every > 1:
            return "another graph sends the same messages, and ranks may run the two at the same time"
        return ""

    def lives(self) -> bool:
        """Whether the default process group is the one that the graph was compiled in."""
        return self.life is None or self.life() is _default_group()

    def place(self) -> str:
        """See :class:`inductor_passes.tuning.again.Kept`."""
        return _torch.sent_so_far(self.groups)


def _default_group() -> Any:
    found = _torch.default_store()
    return None if found is None else found[0]


def kept(
    graph: torch.fx.Graph,
    view: GraphView,
    settings: PassConfig,
    profile: CostProfile,
    described: tuple[Mapping[str, str], Mapping[str, tuple[str, ...]]],
    compiler: Callable[[Kept, CostProfile], New],
) -> Kept | str:
    """A graph before any pass has changed it; else why it cannot be planned again.

    Args:
        described: collectives and their parameters, as a plan file has them.
    """
    if settings.plan:
        return "its plan is pinned"
    if view.transfers:
        return "it has messages between two ranks"
    module = _torch.copied_module(graph)
    if isinstance(module, str):
        return module
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    groups = tuple(dict.fromkeys(one.group.name for one in view.collectives))
    group = _default_group()
    life = None if group is None else weakref.ref(group)
    return Kept(module, settings, text_of(graph), dict(output.meta), *described, groups, compiler, profile, life=life)
