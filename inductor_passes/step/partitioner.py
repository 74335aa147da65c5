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

from inductor_passes import _torch, garbage, identity
from inductor_passes.config import PassConfig
from inductor_passes.ir.view import GraphView
from inductor_passes.pin import pins
from inductor_passes.pin.file import PlanFileError
from inductor_passes.pipeline import VerificationError, has_collectives, warn_once
from inductor_passes.reorder.problem import FxProblem, NoHintError, build
from inductor_passes.report import PassReport, Reason
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.step import keep
from inductor_passes.step.facts import StepFacts

log = logging.getLogger("inductor_passes")
Split = tuple[torch.fx.GraphModule, torch.fx.GraphModule]


class StepPartitioner(identity.Configured, _torch.partitioner_base()):  # type: ignore[misc]
    """See the module's docstring."""

    label = "step"

    def __init__(self, settings: PassConfig | None = None, inner: Any = None) -> None:
        super().__init__(settings, () if inner is None else (inner,))

    @property
    def inner(self) -> Any:
        """The user's own partitioner, None for Inductor's."""
        return self.others[0] if self.others else None

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Split:
        """Forward and backward graph of a joint one."""
        split = self.inner or _torch.default_partitioner()
        marked = keep.marked(gm.graph)
        if not marked:
            both = split(gm, joint_inputs, **kwargs)
            self._attach(both, None, None)
            return both
        again = split(copy.deepcopy(gm), joint_inputs, **kwargs)
        report, step_peak = self._decide(marked, again)
        # Where nothing is kept the graphs of the copy are those that are wanted.
        both = split(gm, joint_inputs, **kwargs) if report is not None and report.changed else again
        self._attach(both, report, step_peak)
        return both

    @garbage.paused()
    def _decide(self, marked: Sequence[torch.fx.Node], again: Split) -> tuple[PassReport | None, int | None]:
        """Choose, and change the tags of the joint graph's nodes ``marked`` accordingly.

        Args:
            again: the graphs when everything is gathered again.

        Returns:
            The report and the higher peak of ``again``, None each where nothing is known.
        """
        settings = self.settings
        try:
            profile = identity.load_profile(settings)
            views = GraphView(again[0].graph), GraphView(again[1].graph)
            forward, backward = _problems(views, settings)
            step_peak = max(peak_bytes(fx.problem) for fx in (forward, backward))
            found = keep.candidates(*views, profile)
            if not found:
                return None, step_peak
            if not (forward.ranks_agree and backward.ranks_agree):
                return keep.refused(found), None
            choice = self._pinned(forward, backward, found, step_peak) or keep.choose(
                forward.problem, backward.problem, found, settings.budget, step_peak
            )
        except PlanFileError:
            raise
        except NoHintError as error:
            return PassReport(keep.NAME, rolled_back=Reason.NO_HINT, detail=str(error)), None
        except Exception as error:
            self._complain("choosing what to keep for backward", error, "everything is gathered again")
            detail = f"{type(error).__name__}: {error}"
            return PassReport(keep.NAME, rolled_back=Reason.EXCEPTION, detail=detail), None
        keep.keep(marked, choice.kept)
        return choice.report, step_peak

    def _pinned(
        self, forward: FxProblem, backward: FxProblem, found: Sequence[keep.Gathered], step_peak: int
    ) -> keep.Choice | None:
        """What the plan file says, None when it says nothing or was given up."""
        settings = self.settings
        plans = identity.load_plan(settings)
        if plans is None:
            return None
        name = _torch.aot_graph_name().rsplit("_", 1)[-1]
        pin = pins.find_kept(
            plans,
            int(name) if name.isdigit() else None,
            sorted(g.start for g in found),
            replan=settings.plan_mismatch == "replan",
        )
        if pin is None or pin.given_up:
            return None
        limit = settings.budget.limit_bytes(step_peak)
        choice = keep.pinned(forward.problem, backward.problem, found, pin.graph.kept or (), limit)
        if isinstance(choice, str):
            pin.refuse(choice)
            return None
        return choice

    @garbage.paused()
    def _attach(self, both: Split, report: PassReport | None, step_peak: int | None) -> None:
        """Tell both graphs what the step takes, where that matters to them."""
        budget = self.settings.budget
        if report is None and (budget.unlimited or budget.fraction == 0):
            return
        peaks = [0, 0]
        try:
            views = GraphView(both[0].graph), GraphView(both[1].graph)
            if any(has_collectives(v) for v in views):
                found = _problems(views, self.settings)
                if all(fx.ranks_agree for fx in found):
                    peaks = [peak_bytes(fx.problem) for fx in found]
                else:
                    step_peak = None
        except NoHintError:
            pass
        except Exception as error:
            self._complain("looking at the memory of the step", error, "forward and backward are budgeted one by one")
        for module, peak, told in zip(both, peaks, (report, None)):
            StepFacts(peak, max(peaks) if step_peak is None else step_peak, told).attach(module)

    def _complain(self, what: str, error: Exception, instead: str) -> None:
        log.debug("%s failed", what, exc_info=True)
        message = f"inductor_passes: {what} failed: {type(error).__name__}: {error}"
        if self.settings.verify == "strict":
            raise VerificationError(message) from error
        warn_once(f"{message}; {instead}")


def _problems(views: tuple[GraphView, GraphView], settings: PassConfig) -> tuple[FxProblem, FxProblem]:
    profile = identity.load_profile(settings)
    forward, backward = (build(view, profile, estimator=settings.estimator) for view in views)
    return forward, backward


def split_with(settings: PassConfig) -> Callable[..., Split]:
    """The same for a compiler that takes a function."""
    partitioner = StepPartitioner(settings)

    def partition(gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Split:
        return partitioner(gm, joint_inputs, **kwargs)

    return partition
