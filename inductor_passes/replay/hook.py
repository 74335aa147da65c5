"""Inductor's last scheduling hook: plan on the fused kernels, check, reorder, and watch the code come out.

The order of collectives was decided on FX and is kept by Inductor's own dependencies; here starts and waits find their
place among the real kernels under the memory budget. What leaves this hook is what is generated: no pass of Inductor
moves it again, and the emitted statements are compared with the plan for every graph.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from inductor_passes import _torch, garbage, verify
from inductor_passes.config import PassConfig
from inductor_passes.ir.view import GraphView
from inductor_passes.pin import file as plan_file
from inductor_passes.pin.kernels import kernel_names
from inductor_passes.pipeline import Context, VerificationError, complain, schedule_report, warn_once
from inductor_passes.replay import order_check
from inductor_passes.replay.problem import SchedulerProblem, build, donated_inputs
from inductor_passes.report import Decision, Finding, GraphReport, PassReport, Reason, Verdict
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.simulate import Timeline, simulate
from inductor_passes.trace import cached, spans
from inductor_passes.trace.artifacts import emit
from inductor_passes.trace.collector import deliver, listening
from inductor_passes.trace.verdict import explain

log = logging.getLogger("inductor_passes")

#: Where a graph module carries the report from the FX passes to this hook.
META_KEY = "inductor_passes"


@garbage.paused()
def replay(nodes: list[Any], context: Context) -> list[Any]:
    """Plan the fused nodes of the graph being lowered; returns them in the planned order (or as they came)."""
    report = PassReport("replay")
    context.report.passes.append(report)
    try:
        with spans.span("replay"):
            return _replay(nodes, context, report)
    except (VerificationError, plan_file.PlanFileError):
        raise
    except Exception as error:
        log.debug("replay failed", exc_info=True)
        report.changed = False
        report.rolled_back, report.detail = Reason.EXCEPTION, f"{type(error).__name__}: {error}"
        complain("replay was undone", report, context.config, error)
        finish_without_replay(context)
        return nodes


def _replay(nodes: list[Any], context: Context, report: PassReport) -> list[Any]:
    began = time.perf_counter_ns()
    built = build(
        nodes,
        context.profile,
        backward=context.backward,
        name=f"{context.report.phase}_{context.report.graph_index}",
        estimator=context.config.estimator,
    )
    before = simulate(built.problem)
    limit = context.fused_limit_bytes(before.peak_bytes)
    names = kernel_names(nodes)
    pinned = _pinned(built, names, limit, context)
    result = plan(built.problem, limit) if pinned is None else pinned
    order = [nodes[i] for i in result.order]
    report.changed = result.method != "input"
    if report.changed:
        findings = _check(order, nodes, limit, before, context)
        if findings:
            report.findings = findings
            report.rolled_back = Reason.VERIFIER
            report.detail = f"{findings[0].rule}: {findings[0].message}"
            report.changed = False
            complain("replay was undone", report, context.config, None)
            result = _input_plan(built, result, before)
            order = list(nodes)
    after = simulate(built.problem, result.order)
    _record(built, result, before, after, limit, context, report)
    context.report.plan |= {
        "kernels": [names[i] for i in result.order],
        "predicted": {"step_ns": after.makespan_ns, "peak_bytes": after.peak_bytes},
    }
    _dump(built, context)
    report.duration_ns = time.perf_counter_ns() - began

    def generated(statements: list[tuple[str, tuple[str, ...]]]) -> str:
        context.report.order_check = order_check.compare(order, statements)
        if not context.report.order_check.startswith((order_check.CONFIRMED, order_check.UNCHECKED)):
            warn_once(f"inductor_passes: the generated code is not in the planned order: {context.report.order_check}")
        _torch.add_module_statement(cached.statement(context.report, built.problem, result.order, context.rank_steps))
        publish(context.report, built, result, before, after)
        return f"inductor_passes: order {context.report.digest}, {context.report.order_check}"

    if not _torch.when_generated(generated):
        context.report.order_check = f"{order_check.UNCHECKED}: this kind of generated code has no place to look"
        publish(context.report, built, result, before, after)
    return order


def _pinned(built: SchedulerProblem, names: list[str], limit: int | None, context: Context) -> Plan | None:
    pins = context.pins
    if pins is None or pins.given_up:
        return None
    found = pins.kernel_plan(built.problem, names, limit)
    if pins.given_up:
        context.report.notes.append(f"pinned order of kernels given up: {pins.given_up}")
        warn_once(f"inductor_passes: planning kernels anew, {pins.given_up}")
    return found


def _check(order: list[Any], nodes: list[Any], limit: int | None, before: Timeline, context: Context) -> list[Finding]:
    """What the verifier holds against the order; memory by its own replay, relative to its own idea of the input."""
    donated = donated_inputs(context.backward)
    allowed = None
    if limit is not None:
        allowed = verify.snodes_peak_bytes(nodes, donated) + max(0, limit - before.peak_bytes)
    return verify.check_snodes(order, nodes, memory_budget=allowed, donated=donated)


def _input_plan(built: SchedulerProblem, result: Plan, before: Timeline) -> Plan:
    """The plan that leaves everything as it is."""
    bound = result.lower_bound_ns
    return Plan(
        order=built.problem.input_order,
        makespan_ns=before.makespan_ns,
        peak_bytes=before.peak_bytes,
        lower_bound_ns=bound,
        gap=before.makespan_ns / bound - 1 if bound else 0.0,
        method="input",
        input_makespan_ns=before.makespan_ns,
        input_peak_bytes=before.peak_bytes,
        budget_bytes=result.budget_bytes,
        feasible=result.feasible,
    )


def _record(
    built: SchedulerProblem,
    result: Plan,
    before: Timeline,
    after: Timeline,
    limit: int | None,
    context: Context,
    report: PassReport,
) -> None:
    graph = context.report
    graph.schedules.append(schedule_report("scheduler", built.problem, result, before, after))
    graph.digest = graph.schedules[-1].digest
    if context.pins is not None and not context.pins.given_up:
        graph.digest = context.pins.combined(graph.digest)
    groups = {c.group.name: c.group.ranks for c in built.collectives.values()}
    graph.collectives = explain(
        built.problem, result.order, before, after, limit, ranks=groups, what_if=_somebody_looks()
    )
    applied = report.changed
    gain = before.makespan_ns - after.makespan_ns
    report.decisions = [
        Decision(
            "replay",
            built.problem.tasks[start].name,
            Verdict.APPLIED if applied else Verdict.REFUSED,
            Reason.PLAN_PINNED
            if context.pins is not None and not context.pins.given_up and result.feasible
            else Reason.PROFITABLE
            if applied
            else Reason.ALREADY_OPTIMAL if result.feasible else Reason.OVER_BUDGET,
            result.method,
            source=built.problem.tasks[start].source,
            group=collective.group.name,
            gain_ns=gain,
        )
        for start, collective in built.collectives.items()
    ]


def _dump(built: SchedulerProblem, context: Context) -> None:
    if not context.config.dump_problem:
        return
    directory = Path(context.config.dump_problem)
    name = f"rank{context.report.rank}_{built.problem.name}_{built.problem.digest()}.json"
    try:
        from inductor_passes.trace.payload import dumps

        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(dumps(built.problem.to_json(), indent=None))
    except OSError as error:
        warn_once(f"inductor_passes: cannot write the problem to dump_problem={directory}: {error}")


def _write_plan(report: GraphReport) -> None:
    """The graph's plan as a file, by rank 0: what it decided on FX is what all ranks decided."""
    directory = report.config.get("dump_plan")
    if not directory or report.rank or not report.plan:
        return
    try:
        graph = plan_file.GraphPlan.from_json(report.plan, report.phase)
        folder = Path(str(directory))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{graph.title}.json").write_text(plan_file.text_of([graph]), encoding="utf-8")
    except (OSError, plan_file.PlanFileError) as error:
        warn_once(f"inductor_passes: cannot write the plan to dump_plan={directory}: {error}")


def publish(
    report: GraphReport, built: SchedulerProblem, result: Plan, before: Timeline, after: Timeline
) -> None:
    """Write the finished report into the trace."""
    _write_plan(report)
    deliver(report)
    emit(
        report,
        problem=built.problem,
        order_before=built.problem.input_order,
        order_after=result.order,
        timeline_before=before,
        timeline_after=after,
    )


def finish_without_replay(context: Context) -> None:
    """Publish what the FX passes did, for graphs whose order is not planned on scheduler nodes."""
    report = context.report
    _write_plan(report)
    deliver(report)
    if context.fx is None or context.plan is None:
        emit(report, problem=None, order_before=None, order_after=None)
        return
    problem, result = context.fx.problem, context.plan
    before, after = simulate(problem), simulate(problem, result.order)
    report.digest = problem.digest(result.order)
    if context.pins is not None and not context.pins.given_up:
        report.digest = context.pins.combined(report.digest)
    groups = {c.group.name: c.group.ranks for c in GraphView(context.fx.graph).collectives}
    report.collectives = explain(
        problem, result.order, before, after, result.budget_bytes, ranks=groups, what_if=_somebody_looks()
    )
    emit(
        report,
        problem=problem,
        order_before=problem.input_order,
        order_after=result.order,
        timeline_before=before,
        timeline_after=after,
    )


def _somebody_looks() -> bool:
    """Whether to plan again for what-if gains: costs several plans, so only when a trace or a listener wants them."""
    return _torch.trace_enabled() or listening()


def context_of_current_graph() -> Context | None:
    """What the FX passes left for the graph that Inductor is lowering; None when they left it alone.

    Taken, not looked at: nothing of ours keeps a graph alive once it is compiled.
    """
    module = _torch.current_graph_module()
    return module.meta.pop(META_KEY, None) if module is not None else None


def has_replay(config: PassConfig) -> bool:
    """Whether this hook will run for the graph being compiled."""
    return config.replay == "on" and not _torch.inductor_option("deterministic", False)
