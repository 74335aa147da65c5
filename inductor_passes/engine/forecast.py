"""How a step will plan with the buckets that it will get, asked before its graphs are final."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from inductor_passes.bucket.choose import PARTITIONS, choose
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.bucket.lines import Lines, of_graph
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.judge import limit_bytes
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import FxProblem
from inductor_passes.rewriting.step_facts import StepFacts
from inductor_passes.schedule.least_memory import least_peak
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.tables import tables
from inductor_passes.step.keep import Planned
from inductor_passes.step.merging import Mergeable, Merging, Travels

#: Tasks of a graph up to which buckets are chosen as the bucket pass chooses them.
_EXACT_TASKS = 1200


def lines_of(
    views: tuple[GraphView, GraphView], both: tuple[FxProblem, FxProblem], settings: PassConfig, profile: CostProfile
) -> tuple[Lines, Lines] | None:
    """What may travel together in forward and in backward; None where bucketing is off."""
    if settings.bucket == "off":
        return None
    exact, calls = settings.numerics == "exact", settings.codegen == "inductor"
    forward, backward = (
        of_graph(view, one, profile, exact=exact, call_copies=calls) for view, one in zip(views, both)
    )
    return forward, backward


def mergeable(lines: tuple[Lines, Lines] | None) -> tuple[Mergeable, Mergeable]:
    """The same without a graph."""
    if lines is None:
        return Mergeable(), Mergeable()
    forward, backward = (
        Mergeable(
            tuple(
                Travels(c.collective.start.name, c.input_bytes, c.output_bytes, one.names[c.key]) for c in one.found
            ),
            one.lines,
        )
        for one in lines
    )
    return forward, backward


@dataclass(frozen=True)
class Forecast(Planned):
    """Plans for states of a step; see ``step.keep.Planned``.

    Attributes:
        views: of forward and backward as they came.
        both: their problems.
        lines: see :func:`lines_of`.
        merging: buckets of both.
        step_peak_bytes: what the budget is relative to.
    """

    views: tuple[GraphView, GraphView]
    both: tuple[FxProblem, FxProblem]
    lines: tuple[Lines, Lines]
    merging: Merging
    settings: PassConfig
    step_peak_bytes: int

    @property
    def competes(self) -> bool:
        """Whether merged messages save time that anybody would notice, and so want memory."""
        return self.merging.sizes > 0

    def plans(self, problems: tuple[Problem, Problem], limit: int | None) -> tuple[Plan, Plan]:
        """The plans of a state: problems with the tasks of the step's own, some of which send nothing any more."""
        limits = [None if limit is None else self._limit(problem) for problem in problems]
        forward, backward = (self._plan(k, problems[k], limits[k]) for k in (0, 1))
        return forward, backward

    def _limit(self, problem: Problem) -> int | None:
        """The cap that a graph gets for itself."""
        own = peak_bytes(problem)
        return limit_bytes(least_peak(tables(problem)), StepFacts(own, self.step_peak_bytes), self.settings)

    @cached_property
    def _dependencies(self) -> tuple[Dependencies, Dependencies]:
        forward, backward = (Dependencies(view, one.kept) for view, one in zip(self.views, self.both))
        return forward, backward

    def _plan(self, graph: int, problem: Problem, limit: int | None) -> Plan:
        if len(problem) > _EXACT_TASKS or not self.competes:
            ways = (problem, *self.merging.merged_in(graph, problem))
            plans = [plan(one, limit, effort=0, thorough=False) for one in ways]
            return min(plans, key=lambda p: p.value)
        lines = self.lines[graph]
        sent = {task.name for task in problem.tasks if task.kind is Kind.START}
        found = [c for c in lines.found if c.collective.start.name in sent]
        dependencies = self._dependencies[graph]
        return choose(problem, found, dependencies, lines.costs, PARTITIONS, limit, settle=False).plan
