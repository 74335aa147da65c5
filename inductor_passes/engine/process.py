"""Puts our passes into Inductor's process-wide configuration, and takes them out again.

With ``INDUCTOR_PASSES=1`` every process that imports Inductor's configuration gets our objects, and most of these
processes never compile a graph. So the objects are light placeholders of our hooks: the passes are imported when
Inductor first calls one. Each placeholder behaves as its hook, also in cache keys.

``switch`` imports this module, by name, once Inductor's configuration is imported. It is one module and not several,
because importing it imports that configuration, and ``switch`` cannot act before this module has registered its
functions.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Sequence
from typing import Any

import torch.fx

from inductor_passes import _torch, switch
from inductor_passes.engine.options import Hooks, with_ours
from inductor_passes.engine.ours import Ours

log = logging.getLogger("inductor_passes")


@functools.cache
def _import_hooks() -> types.SimpleNamespace | None:
    """Our hooks by name; None when they cannot be imported: torch goes on as it would without us."""
    try:
        from inductor_passes.engine.hooks import (
            DynamoPass,
            FusionHook,
            GraphPass,
            JointPass,
            SchedulerHook,
            StepPartitioner,
            import_passes,
        )

        import_passes()
    except Exception as error:
        log.debug("importing our passes failed", exc_info=True)
        log.warning("inductor_passes stays off, its passes cannot be imported: %s: %s", type(error).__name__, error)
        return None
    return types.SimpleNamespace(
        graph=GraphPass,
        dynamo=DynamoPass,
        joint=JointPass,
        partitioner=lambda settings, others: StepPartitioner(settings, *others),
        scheduler=SchedulerHook,
        fusion=FusionHook,
    )


class _Later(Ours):
    """Stands for the hook ``kind``, whose settings are those of the process in each compilation."""

    kind = ""

    @functools.cached_property
    def _real(self) -> Any:
        """What this one stands for; None when our passes cannot be imported."""
        hooks = _import_hooks()
        return None if hooks is None else getattr(hooks, self.kind)(None, self.others)

    def uuid(self) -> Any:
        """Cache key of the hook; None keeps Inductor from caching."""
        return None if self._real is None else self._real.uuid()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> Any:
        return (type(self), (self.others,)) if self._real is None else (_itself, (self._real,))


def _itself(hook: Any) -> Any:
    """What a pickled stand-in is: the hook that it stands for."""
    return hook


class _LaterPass(_Later, _torch.graph_pass_base()):  # type: ignore[misc]
    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Rewrite one graph in place."""
        if self._real is not None:
            self._real(graph, is_inference)
            return
        for one in self.others:
            one(graph)


class LaterGraphPass(_LaterPass):
    """Stands for ``hooks.GraphPass``."""

    kind = "graph"


class LaterDynamoPass(_LaterPass):
    """Stands for ``hooks.DynamoPass``."""

    kind = "dynamo"


class LaterJointPass(_LaterPass):
    """Stands for ``hooks.JointPass``."""

    kind = "joint"


class LaterPartitioner(_Later, _torch.partitioner_base()):  # type: ignore[misc]
    """Stands for ``hooks.StepPartitioner``."""

    kind = "partitioner"

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """Forward and backward graph of a joint one."""
        split = self._real or next(iter(self.others), None) or _torch.default_partitioner()
        return split(gm, joint_inputs, **kwargs)


class LaterSchedulerHook(_Later):
    """Stands for ``hooks.SchedulerHook``."""

    kind = "scheduler"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The nodes in the planned order."""
        return nodes if self._real is None else self._real(nodes)  # type: ignore[no-any-return]


class LaterFusionHook(_Later, _torch.scheduler_pass_base()):  # type: ignore[misc]
    """Stands for ``hooks.FusionHook``."""

    kind = "fusion"

    @property
    def keeps_waits(self) -> bool:
        """See ``hooks.FusionHook``."""
        return self._real is not None

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The nodes, with waits kept behind messages."""
        if self._real is not None:
            return self._real(nodes)  # type: ignore[no-any-return]
        for one in self.others:
            nodes = one(nodes)
        return nodes


_HOOKS = Hooks(LaterGraphPass, LaterDynamoPass, LaterJointPass, LaterPartitioner, LaterSchedulerHook, LaterFusionHook)

#: Option -> its value before :func:`install`.
_before: dict[str, Any] = {}


def install() -> None:
    """Put our passes into Inductor's process-wide configuration; later ``torch.compile`` calls pick them up."""
    ours = with_ours({}, _torch.inductor_option, _HOOKS)
    _before.update({name: _torch.inductor_option(name) for name in ours})
    for name, value in ours.items():
        _torch.set_inductor_option(name, value)


def remove() -> None:
    """Undo :func:`install`."""
    for name, value in _before.items():
        _torch.set_inductor_option(name, value)
    _before.clear()


switch.register(install, remove)
