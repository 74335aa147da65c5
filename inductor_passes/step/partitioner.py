"""Our place between forward and backward: a partitioner around Inductor's (or the user's own).

It decides which gathered parameters are kept for backward, where ``simple_fsdp(reshard_after_forward="auto")`` leaves
that to us, and tells both graphs how much memory the step as a whole takes. What is saved otherwise is the business of
the partitioner underneath.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx

from inductor_passes import _torch, config, identity
from inductor_passes.config import PassConfig
from inductor_passes.ir.view import GraphView
from inductor_passes.pipeline import VerificationError, warn_once
from inductor_passes.reorder.problem import NoHintError
from inductor_passes.report import PassReport, Reason
from inductor_passes.step import keep
from inductor_passes.step.facts import StepFacts, input_peak

log = logging.getLogger("inductor_passes")
Split = tuple[torch.fx.GraphModule, torch.fx.GraphModule]


class StepPartitioner(_torch.partitioner_base()):  # type: ignore[misc]
    """See the module's docstring.

    Without settings of its own it uses those of the process at the time of each compilation.
    """

    def __init__(self, settings: PassConfig | None = None, inner: Any = None) -> None:
        self._settings = settings
        #: The user's own partitioner, None for Inductor's.
        self.inner = inner

    @property
    def settings(self) -> PassConfig:
        """What this partitioner runs with."""
        return self._settings or config.current()

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Split:
        """Forward and backward graph of a joint one."""
        split = self.inner or _torch.default_partitioner()
        marked = keep.marked(gm.graph)
        report: PassReport | None = None
        step_peak: int | None = None
        if marked:
            forward, backward = split(copy.deepcopy(gm), joint_inputs, **kwargs)
            step_peak = _step_peak(forward, backward)
            report = self._decide(gm, marked, forward, backward, step_peak)
            if report is None or not report.changed:
                # Splitting is deterministic, but the graphs of the copy are as good and already there.
                return _attach(forward, backward, step_peak, report)
        forward, backward = split(gm, joint_inputs, **kwargs)
        return _attach(forward, backward, step_peak, report)

    def uuid(self) -> Any:
        """Cache key; None keeps Inductor from caching."""
        own = identity.cache_key(self.settings, identity.load_profile(self.settings))
        if self.inner is None:
            return None if own is None else (own, "step")
        other = self.inner.uuid()
        return None if own is None or other is None else (own, "step", other)

    def _decide(
        self,
        gm: torch.fx.GraphModule,
        marked: Sequence[torch.fx.Node],
        forward: torch.fx.GraphModule,
        backward: torch.fx.GraphModule,
        step_peak: int | None,
    ) -> PassReport | None:
        """Choose, and change the tags of the joint graph accordingly."""
        settings = self.settings
        try:
            profile = identity.load_profile(settings)
            views = GraphView(forward.graph), GraphView(backward.graph)
            found = keep.candidates(*views, profile)
            if not found or step_peak is None:
                return None
            both = keep.problems(*views, profile, settings.estimator)
            choice = keep.choose(*both, found, settings.budget, step_peak)
        except NoHintError as error:
            return PassReport(keep.NAME, rolled_back=Reason.NO_HINT, detail=str(error))
        except Exception as error:
            log.debug("choosing what to keep failed", exc_info=True)
            text = f"{type(error).__name__}: {error}"
            message = f"inductor_passes: choosing what to keep for backward failed: {text}"
            if settings.verify == "strict":
                raise VerificationError(message) from error
            warn_once(f"{message}; everything is gathered again")
            return PassReport(keep.NAME, rolled_back=Reason.EXCEPTION, detail=text)
        keep.keep(marked, choice.kept)
        return choice.report


def _step_peak(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> int | None:
    peaks = input_peak(forward.graph, False), input_peak(backward.graph, True)
    return None if None in peaks else max(p for p in peaks if p is not None)


def _attach(
    forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, step_peak: int | None, report: PassReport | None
) -> Split:
    peaks = [input_peak(forward.graph, False), input_peak(backward.graph, True)]
    known = [p for p in peaks if p is not None]
    if len(known) == 2:
        told = report.to_json() if report is not None else {}
        for module, peak, text in zip((forward, backward), known, (told, {})):
            StepFacts(peak, max(known) if step_peak is None else step_peak, text).attach(module)
    return forward, backward


def split_with(settings: PassConfig) -> Callable[..., Split]:
    """The same for a compiler that takes a function."""
    partitioner = StepPartitioner(settings)

    def partition(gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Split:
        return partitioner(gm, joint_inputs, **kwargs)

    return partition
