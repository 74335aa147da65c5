"""The rewrites that need to see forward and backward at once, before AOTAutograd cuts them apart.

What forward saves for backward is a result of the forward graph: a rewrite that leaves saved activations in another
order of rows (R9) must change their readers in backward too, and only the joint graph has both.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch.fx

from inductor_passes import _torch, garbage, identity
from inductor_passes.config import PassConfig
from inductor_passes.ir.view import GraphView
from inductor_passes.pipeline import Context, has_collectives, new_report, run_passes
from inductor_passes.redistribute.driver import RewriteCollectives
from inductor_passes.report import PassReport

#: Rewrites that profit from seeing both directions.
ONLY = ("R9",)
#: Reports that wait for their forward graph; older ones belong to compilations that failed.
_MAX_WAITING = 64
_waiting: OrderedDict[str, list[PassReport]] = OrderedDict()
_lock = threading.Lock()


def wanted(settings: PassConfig) -> bool:
    """Whether any setting switches a joint rewrite on."""
    return settings.tier == "reassociate" and not settings.uses_async_tp


class JointPass(identity.Configured, _torch.graph_pass_base()):  # type: ignore[misc]
    """Our rewrites as a joint-graph pass of Inductor; the report goes with that of the forward graph."""

    label = "joint"

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Rewrite and verify one joint graph in place."""
        for one in self.others:
            one(graph)
        run(graph, self.settings)


@garbage.paused()
def run(graph: torch.fx.Graph, settings: PassConfig) -> None:
    """Rewrite one joint graph; what happened waits for :func:`taken`."""
    view = GraphView(graph)
    if not wanted(settings) or not has_collectives(view):
        return
    profile = identity.load_profile(settings)
    context = Context(settings, profile, new_report(graph, False, settings, profile), backward=False, _view=view)
    run_passes(graph, [RewriteCollectives("reassociate", ONLY, name="redistribute (joint)")], context)
    with _lock:
        _waiting[_torch.compile_id()] = context.report.passes
        while len(_waiting) > _MAX_WAITING:
            _waiting.popitem(last=False)


def taken(compile_id: str) -> list[PassReport]:
    """The reports of a compilation's joint graph, once."""
    with _lock:
        return _waiting.pop(compile_id, [])
