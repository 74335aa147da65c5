"""The rewrites that need to see forward and backward at once, before AOTAutograd cuts them apart.

What forward saves for backward is a result of the forward graph: a rewrite that leaves saved activations in another
order of rows (R9) must change their readers in backward too, and only the joint graph has both.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch.fx

from inductor_passes import _torch, config, identity
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
    return settings.tier == "reassociate" and settings.async_tp == "off"


class JointPass(_torch.graph_pass_base()):  # type: ignore[misc]
    """Our rewrites as a joint-graph pass of Inductor; the report goes with that of the forward graph."""

    def __init__(self, settings: PassConfig | None = None, before: Sequence[Any] = ()) -> None:
        self._settings = settings
        #: The user's own passes, where this torch takes only one pass.
        self.before = tuple(before)

    @property
    def settings(self) -> PassConfig:
        """What this pass runs with."""
        return self._settings or config.current()

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Rewrite and verify one joint graph in place."""
        for one in self.before:
            one(graph)
        run(graph, self.settings)

    def uuid(self) -> Any:
        """Cache key; None keeps Inductor from caching."""
        own = identity.cache_key(self.settings, identity.load_profile(self.settings))
        others = [_torch.pass_uuid(one) for one in self.before]
        return None if own is None or None in others else (own, "joint", *others)


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
