"""Where a finished compilation goes: the trace, listeners, plan and problem files."""

from __future__ import annotations

from inductor_passes import _torch
from inductor_passes.engine.barrier import guarded
from inductor_passes.engine.compilation import Compilation
from inductor_passes.ir.parameters import reported
from inductor_passes.ir.view import GraphView
from inductor_passes.report import GraphReport
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import Timeline, simulate
from inductor_passes.step.stored import StoredStep
from inductor_passes.trace.artifacts import emit
from inductor_passes.trace.collector import deliver, what_if_wanted
from inductor_passes.trace.files import AskedFile, plan_of
from inductor_passes.trace.payload import dumps
from inductor_passes.trace.verdict import explain


def somebody_looks() -> bool:
    """Whether to plan again for what-if gains: costs several plans, so only when a trace or a listener wants them."""
    return _torch.trace_enabled() or what_if_wanted()


def publish(
    report: GraphReport,
    problem: Problem | None = None,
    order: tuple[int, ...] | None = None,
    before: Timeline | None = None,
    after: Timeline | None = None,
    graphs: tuple[str, str] = ("", ""),
) -> None:
    """Write a finished report into the trace, hand it to listeners, and write the plan file.

    ``graphs`` are the readable graphs before and after the FX passes.
    """
    with guarded("writing the plan", "there is no file"):
        if (plan := plan_of(report)) is not None:
            plan.write()
    deliver(report)
    emit(
        report,
        problem=problem,
        order_before=None if problem is None else problem.input_order,
        order_after=order,
        timeline_before=before,
        timeline_after=after,
        graph_before=graphs[0],
        graph_after=graphs[1],
    )


def publish_fx(compilation: Compilation) -> None:
    """Publish what the FX passes did, for graphs whose order is not planned on fused kernels."""
    report, scheduled = compilation.report, compilation.scheduled
    if scheduled is None:
        publish(report, graphs=compilation.graphs)
        return
    problem, result = scheduled.fx.problem, scheduled.plan
    before, after = simulate(problem), simulate(problem, result.order)
    report.digest = problem.digest(result.order)
    if compilation.pins is not None and not compilation.pins.given_up:
        report.digest = compilation.pins.combined(report.digest)
    collectives = GraphView(scheduled.fx.graph).collectives
    groups = {c.group.name: c.group.ranks for c in collectives}
    report.collectives = explain(
        problem,
        result.order,
        before,
        after,
        result.budget_bytes,
        ranks=groups,
        buckets=compilation.carriers,
        parameters={c.start.name: reported([c.start]) for c in collectives},
        what_if=somebody_looks(),
        setting=compilation.config.budget,
    )
    publish(report, problem, result.order, before, after, compilation.graphs)


def step_of(step: StoredStep, directory: str) -> AskedFile:
    """A whole step for ``inductor-passes simulate``, with what could be computed again and kept."""
    digests = "_".join(problem.digest() for problem in (step.step.forward, step.step.backward))
    name = f"rank{_torch.rank_and_world_size()[0]}_step_{digests}.json"
    return AskedFile("dump_problem", directory, name, dumps(step.to_json(), indent=None))
