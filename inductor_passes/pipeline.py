"""Ordered passes over one graph: run, verify, keep or restore, report.

A pass mutates the graph. The pipeline takes a snapshot before it and verifies after it; on any finding, on any
exception and on a result that the simulator calls slower or above the budget, the graph is put back as it was, the
reason is recorded and warned about once, and compilation goes on (with ``verify="strict"`` it raises instead).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Literal, Protocol

import torch
import torch.fx

from inductor_passes import _torch, verify
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView
from inductor_passes.pin.file import PlanFileError
from inductor_passes.pin.pins import Pins
from inductor_passes.reorder.problem import FxProblem, build, is_backward
from inductor_passes.report import GraphReport, PassReport, Reason, ScheduleReport
from inductor_passes.schedule.plan import Plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import Timeline
from inductor_passes.step.facts import StepFacts
from inductor_passes.trace import spans
from inductor_passes.trace.artifacts import emit_failure

log = logging.getLogger("inductor_passes")
_warned: set[str] = set()


class VerificationError(RuntimeError):
    """``verify="strict"`` and a pass produced something that is not allowed, or failed."""


def warn_once(message: str) -> None:
    """A warning that appears once per process, however many graphs repeat its cause."""
    if message not in _warned:
        _warned.add(message)
        log.warning("%s", message)


@dataclass
class Context:
    """What passes share while one graph is compiled.

    Attributes:
        config, profile: settings and costs; equal on all ranks.
        report: of this graph; passes append nothing themselves, the pipeline does.
        plan / fx: the last FX plan and its problem, for the trace.
        rank_steps: what ``rank_check`` compared, by process group; empty when it is off.
        snapshot: the graph before the pass that is running, for a pass that tries twice.
        pins: the plan that is pinned for this graph, None when there is none.
        buckets: start nodes that the bucketing pass merged.
        solved: a problem that a pass has planned to judge the graph that it left, with the plan.
        step: what is known about the training step that the graph belongs to, None for inference.
    """

    config: PassConfig
    profile: CostProfile
    report: GraphReport
    backward: bool
    plan: Plan | None = None
    fx: FxProblem | None = None
    certificates: list[verify.Certificate] = field(default_factory=list)
    input_peak_bytes: int | None = None
    snapshot: Snapshot | None = None
    rank_steps: dict[str, list[str]] = field(default_factory=dict)
    pins: Pins | None = None
    buckets: list[list[str]] = field(default_factory=list)
    step: StepFacts | None = None
    solved: tuple[Problem, Plan] | None = None
    _view: GraphView | None = None
    _problem: tuple[GraphView, FxProblem] | None = None

    def view(self, graph: torch.fx.Graph) -> GraphView:
        """A view of the graph as it is, shared by passes for as long as none of them changes it."""
        if self._view is None or self._view.graph is not graph:
            self._view = GraphView(graph)
        return self._view

    def problem(self, graph: torch.fx.Graph) -> FxProblem:
        """The scheduling problem of the graph as it is, shared like its view.

        Raises:
            NoHintError: a size has no hint.
        """
        view = self.view(graph)
        if self._problem is None or self._problem[0] is not view:
            self._problem = view, build(view, self.profile, name=self.report.phase, estimator=self.config.estimator)
        return self._problem[1]

    def forget_view(self) -> None:
        """The graph has changed: the next pass looks anew."""
        self._view = self._problem = None

    def limit_bytes(self, peak_bytes: int) -> int | None:
        """The cap on an FX graph's peak. Every pass asks with the peak of the graph it got; the first one counts."""
        if self.input_peak_bytes is None:
            self.input_peak_bytes = peak_bytes
        return self.config.budget.limit_bytes(self._of_step(self.input_peak_bytes))

    def fused_limit_bytes(self, peak_bytes: int) -> int | None:
        """The cap for fused kernels that peak at ``peak_bytes`` in the order in which they came."""
        return self.config.budget.limit_bytes(self._of_step(self._without_rewrites(peak_bytes)))

    def _without_rewrites(self, peak_bytes: int) -> int:
        """A peak among fused kernels, less the share by which the FX passes raised it: what a budget is relative to."""
        planned = self.report.schedules[-1].peak_after_bytes if self.report.schedules else 0
        if not planned or self.input_peak_bytes is None or planned <= self.input_peak_bytes:
            return peak_bytes
        return peak_bytes * self.input_peak_bytes // planned

    def _of_step(self, peak_bytes: int) -> int:
        """The step's peak, given that of this graph: forward may use what backward's peak leaves.

        What fusion saves is known of one graph only, so "0" stays with each graph's own peak, unless that includes
        parameters kept for backward: these come out of the step's budget.
        """
        step = self.step
        if step is None or not step.own_peak_bytes:
            return peak_bytes
        of_step = peak_bytes * step.step_peak_bytes // step.own_peak_bytes
        return min(peak_bytes, of_step) if self.config.budget.fraction == 0 else of_step


class Pass(Protocol):
    """A graph pass: a frozen dataclass whose fields are its options.

    ``group_order`` is ``any`` for a pass that may change the order of collectives within a process group (the same way
    on every rank, see ``reorder.canonical``), else ``kept``: the verifier holds it to that.
    """

    group_order: ClassVar[Literal["kept", "any"]]

    @property
    def name(self) -> str:
        """Name in reports."""

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Change the graph; one decision per candidate. May raise: the pipeline restores the graph."""


class Snapshot:
    """A graph as it was, restorable in place; O(nodes)."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._nodes = list(graph.nodes)
        self._names = [n.name for n in self._nodes]
        self._arguments = [(n.op, n.target, n.args, n.kwargs, dict(n.meta)) for n in self._nodes]
        self.reference = verify.snapshot(graph)

    def restore(self) -> None:
        """Put nodes, their order, arguments and meta back; nodes that came in since are erased."""
        graph = self._graph
        before = set(self._nodes)
        alive = set(graph.nodes)
        if before <= alive:
            for node, (_, target, args, kwargs, meta) in zip(self._nodes, self._arguments):
                node.target, node.args, node.kwargs, node.meta = target, args, kwargs, meta
            for node in reversed([n for n in graph.nodes if n not in before]):
                graph.erase_node(node)
            arrange(graph, self._nodes)
            return
        # Nodes were erased: they cannot come back to life, so equal ones take their place.
        for node in reversed(list(graph.nodes)):
            node.args, node.kwargs = (), {}
        for node in list(graph.nodes):
            graph.erase_node(node)
        fresh: dict[torch.fx.Node, torch.fx.Node] = {}
        for node, name, (op, target, args, kwargs, meta) in zip(self._nodes, self._names, self._arguments):
            new = graph.create_node(
                op,
                target,
                torch.fx.node.map_arg(args, fresh.__getitem__),
                torch.fx.node.map_arg(kwargs, fresh.__getitem__),
            )
            # The graph still reserves the name for the erased node: nobody else can have taken it.
            new.name = name
            new.meta = meta
            fresh[node] = new


def arrange(graph: torch.fx.Graph, order: list[torch.fx.Node]) -> None:
    """Put a graph's nodes into the given order (a permutation of them); O(nodes)."""
    # The node in front is moved first: everything else then follows its predecessor.
    first = next(iter(graph.nodes))
    if order and first is not order[0]:
        first.prepend(order[0])
    for before, node in pairwise(order):
        before.append(node)


def new_report(graph: torch.fx.Graph, is_inference: bool, config: PassConfig, profile: CostProfile) -> GraphReport:
    """An empty report that says which graph it is about."""
    backward = is_backward(graph)
    rank, world = _torch.rank_and_world_size()
    name = _torch.aot_graph_name()
    index = name.rsplit("_", 1)[-1] if name else ""
    return GraphReport(
        phase="inference" if is_inference else "backward" if backward else "forward",
        graph_index=int(index) if index.isdigit() else 0,
        compile_id=_torch.compile_id(),
        rank=rank,
        world_size=world,
        torch_version=torch.__version__,
        config=config.to_json(),
        nodes=len(graph.nodes),
        cost_profile=f"{profile.name} {profile.hash()}",
    )


def run_passes(graph: torch.fx.Graph, passes: list[Pass], context: Context) -> None:
    """Run passes in order, each one verified; appends one report per pass to ``context.report``."""
    snapshot: Snapshot | None = None
    for one in passes:
        with spans.span(one.name):
            # A pass that changed nothing leaves the snapshot before it good for the next one.
            snapshot = context.snapshot = snapshot or Snapshot(graph)
            report = _run_one(graph, one, context, snapshot)
            context.report.passes.append(report)
            if report.changed or report.rolled_back is not None:
                snapshot = None
                context.forget_view()
    # Whoever keeps the context for later does not keep the graph as it was.
    context.snapshot = context.solved = None
    context.forget_view()


def _run_one(graph: torch.fx.Graph, one: Pass, context: Context, snapshot: Snapshot) -> PassReport:
    began = time.perf_counter_ns()
    certificates = len(context.certificates)
    plan, fx = context.plan, context.fx
    error: BaseException | None = None
    try:
        report = one.run(graph, context)
        if report.changed and report.rolled_back is None:
            findings = verify.check(
                graph,
                reference=snapshot.reference,
                certificates=context.certificates[certificates:],
                group_order=one.group_order,
            )
            if findings:
                report.findings.extend(findings)
                report.rolled_back = Reason.VERIFIER
                report.detail = f"{findings[0].rule}: {findings[0].message}"
    except PlanFileError:
        raise
    except Exception as raised:
        error = raised
        log.debug("pass %s failed", one.name, exc_info=True)
        report = PassReport(
            one.name, rolled_back=Reason.EXCEPTION, detail=f"{type(raised).__name__}: {raised}"
        )
    if report.rolled_back is not None:
        emit_failure(context.report, report, lambda: str(graph))
        snapshot.restore()
        context.plan, context.fx = plan, fx
        del context.certificates[certificates:]
        if report.rolled_back in (Reason.VERIFIER, Reason.EXCEPTION):
            complain(f"pass {one.name!r} was undone in the {context.report.phase} graph", report, context.config, error)
    report.duration_ns = time.perf_counter_ns() - began
    return report


def complain(what: str, report: PassReport, config: PassConfig, error: BaseException | None) -> None:
    """Warn once about something undone, or raise under ``verify="strict"``."""
    message = f"inductor_passes: {what}: {report.rolled_back.value if report.rolled_back else ''} ({report.detail})"
    if config.verify == "strict" or (config.plan and config.plan_mismatch == "error"):
        # A graph without a pass's result is not the graph that a pinned plan was made for.
        raise VerificationError(message) from error
    warn_once(f"{message}; the graph is as it was and compilation goes on")


def schedule_report(level: str, problem: Problem, plan: Plan, before: Timeline, after: Timeline) -> ScheduleReport:
    """The record of one planned schedule; ``level`` is ``fx`` or ``scheduler``."""
    return ScheduleReport(
        level=level,
        tasks=len(problem),
        makespan_before_ns=before.makespan_ns,
        makespan_after_ns=after.makespan_ns,
        compute_ns=after.compute_ns,
        communication_ns=after.communication_ns,
        lower_bound_ns=plan.lower_bound_ns,
        gap=plan.gap,
        exposed_before_ns=before.total_exposed_ns,
        exposed_after_ns=after.total_exposed_ns,
        peak_before_bytes=before.peak_bytes,
        peak_after_bytes=after.peak_bytes,
        budget_bytes=plan.budget_bytes,
        digest=problem.digest(plan.order),
        schedule_before=problem.schedule_text(),
        schedule_after=problem.schedule_text(plan.order),
        method=plan.method,
    )


def has_collectives(view: GraphView) -> bool:
    """Whether there is anything to do for us in a graph."""
    return any(role is Role.START for role in view.roles.values())
