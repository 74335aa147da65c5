"""One graph's fused kernels: planned, checked, put into order, and compared with the generated code.

The order of collectives was decided on FX, and Inductor's own dependencies keep it. Here starts and waits get their
places among the fused kernels, under the memory cap. Inductor generates code in the order that this hook returns. The
generated statements of every graph are compared with the plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from inductor_passes import _torch, verify
from inductor_passes.engine import judge, naming, timing
from inductor_passes.engine.barrier import guarded
from inductor_passes.engine.compilation import Compilation
from inductor_passes.engine.complain import complain, take_said, warn_of_graph
from inductor_passes.engine.publish import publish, somebody_looks
from inductor_passes.ir.parameters import reported
from inductor_passes.pin.pins import Pins
from inductor_passes.problems.kernel_memory import donated_inputs, rely_on_order, saved_together
from inductor_passes.problems.kernels import build
from inductor_passes.problems.record import plan_digest, schedule_report
from inductor_passes.replay import order_check
from inductor_passes.replay.ordering import Ordered, order
from inductor_passes.report import Finding, PassReport, Reason
from inductor_passes.schedule.curve import with_curve
from inductor_passes.schedule.simulate import simulate
from inductor_passes.trace import cached
from inductor_passes.trace.files import AskedFile, problem_of
from inductor_passes.trace.units import size
from inductor_passes.trace.verdict import explain

#: A budget that is exceeded by less than one part in so many of the peak is not worth a note.
ABOVE = 50


def order_kernels(nodes: list[Any], compilation: Compilation, report: PassReport) -> list[Any]:
    """Inductor's fused nodes in the planned order; as they came when the verifier has a finding.

    Args:
        report: of this step, to be filled.
    """
    began = time.perf_counter_ns()
    config, graph = compilation.config, compilation.report
    ordered, findings = _order(nodes, compilation, keep_overwrites=False)
    if (ordered.above_bytes or _of_memory(findings)) and rely_on_order(nodes):
        # Where every order counts, a kernel may not rely on the one that lets it write over its operand.
        kept, its_findings = _order(nodes, compilation, keep_overwrites=True)
        if (bool(its_findings), kept.above_bytes) < (bool(findings), ordered.above_bytes):
            ordered, findings = kept, its_findings
    built, before, limit = ordered.built, ordered.before, ordered.plan.budget_bytes
    pins = _pins(compilation)
    if pins is not None and (foreign := pins.foreign(ordered.names)):
        graph.notes.append(f"kernels planned here, {pins.path}: {foreign}")
    if ordered.given_up:
        graph.notes.append(f"pinned order of kernels given up: {ordered.given_up}")
        warn_of_graph(f"inductor_passes: planning kernels anew, {ordered.given_up}")
    if ordered.above_bytes * ABOVE > before.peak_bytes:
        graph.notes.append(f"the kernels need {ordered.above_bytes} bytes more than the memory budget allows")
    report.changed = ordered.changed
    if findings:
        ordered = _undone(ordered, findings, compilation, report)
    graph.notes += _raised(ordered.least_bytes, compilation)
    _say_missed(ordered.after.peak_bytes, compilation)
    _record(ordered, limit, compilation, report)
    files = list[AskedFile]()
    if config.dump_problem and not compilation.again:
        step = compilation.known.step
        curve = () if step is None else step.curve
        files += () if step is None else step.files
        files.append(problem_of(with_curve(built.problem, curve), graph.rank, config.dump_problem))
        files[-1].write()
    report.duration_ns = time.perf_counter_ns() - began
    planned = [nodes[i] for i in ordered.plan.order]
    _watch(planned, ordered, compilation, files)
    return planned


def _raised(least_bytes: int, compilation: Compilation) -> list[str]:
    """That fusion raised what the memory budget is relative to, as a note; [] where it did not.

    Args:
        least_bytes: what the kernels need in the order of least memory that is known.
    """
    limit = compilation.cap.generated_limit_bytes or compilation.cap.limit_bytes
    if limit is None or (least_bytes - limit) * ABOVE <= limit:
        return []
    return [
        f"Inductor's fused kernels need at least {least_bytes} bytes, what was expected of them was held to {limit}: "
        "fusion keeps more alive, which a memory budget does not prevent; measure the peak"
        + (', and try bucket="off"' if compilation.config.bucket != "off" else "")
    ]


def _say_missed(peak_bytes: int, compilation: Compilation) -> None:
    """Warn where a budget below the step's peak was taken for possible, and fused kernels do not keep it."""
    budget, step = compilation.config.budget, compilation.known.step
    if not budget.shrinks or step is None or not step.step_peak_bytes or step.reached_bytes or compilation.again:
        return
    allowed = budget.limit_bytes(step.step_peak_bytes)
    if allowed is not None and (peak_bytes - allowed) * ABOVE > allowed:
        asked, phase = compilation.config.memory_budget, compilation.report.phase
        warn_of_graph(
            f"inductor_passes: memory_budget={asked!r} allows a graph {size(allowed)}, and the kernels of {phase} need "
            f"{size(peak_bytes)}: Inductor fuses them otherwise than expected"
        )


def _pins(compilation: Compilation) -> Pins | None:
    pins = compilation.pins
    return None if pins is None or pins.given_up else pins


def _order(
    nodes: list[Any], compilation: Compilation, *, keep_overwrites: bool
) -> tuple[Ordered, list[Finding]]:
    """An order, and what the verifier has against it.

    Args:
        keep_overwrites: see :func:`build`.
    """
    config, graph = compilation.config, compilation.report
    built = build(
        nodes,
        compilation.profile,
        backward=compilation.backward,
        name=f"{graph.phase}_{graph.graph_index}",
        estimator=config.estimator,
        keep_overwrites=keep_overwrites,
    )
    allowed = partial(judge.fused_limit_bytes, compilation)
    ordered = order(built, simulate(built.problem), allowed, _pins(compilation), config.effort)
    return ordered, _findings(ordered, nodes, compilation) if ordered.changed else []


def _findings(ordered: Ordered, nodes: list[Any], compilation: Compilation) -> list[Finding]:
    """What the verifier has against an order."""
    donated, together = donated_inputs(compilation.backward), saved_together(compilation.backward)
    limit, allowed = ordered.plan.budget_bytes, None
    if limit is not None:
        # Memory by the verifier's own replay, relative to its own idea of Inductor's order.
        allowed = verify.snodes_peak_bytes(nodes, donated, together) + max(0, limit - ordered.before.peak_bytes)
        if compilation.cap.absolute:
            allowed = max(allowed, limit)
    planned = [nodes[i] for i in ordered.plan.order]
    return verify.check_snodes(planned, nodes, memory_budget=allowed, donated=donated, together=together)


def _of_memory(findings: list[Finding]) -> bool:
    """Whether an order is not shown to be wrong: the verifier counts more bytes than the planner, and that is all."""
    return {finding.rule for finding in findings} == {"memory"}


def _undone(ordered: Ordered, findings: list[Finding], compilation: Compilation, report: PassReport) -> Ordered:
    """Inductor's order in the place of one that the verifier has something against."""
    report.changed, report.findings, report.detail = False, findings, str(findings[0])
    if _of_memory(findings):
        report.rolled_back = Reason.OVER_BUDGET
    else:
        report.rolled_back = Reason.VERIFIER
        complain("the order of the kernels was undone", report, compilation.config, None)
    return ordered.left_alone()


def _record(ordered: Ordered, limit: int | None, compilation: Compilation, report: PassReport) -> None:
    graph, built, after = compilation.report, ordered.built, ordered.after
    graph.schedules.append(schedule_report("scheduler", built.problem, ordered.plan, ordered.before, after))
    fx = compilation.scheduled
    graph.digest = plan_digest(
        None if fx is None else fx.fx, () if fx is None else fx.plan.order, built.problem, ordered.plan.order
    )
    if compilation.pins is not None and not compilation.pins.given_up and not ordered.given_up:
        graph.digest = compilation.pins.combined(graph.digest)
    groups = {c.group.name: c.group.ranks for c in built.collectives.values()}
    tasks, carriers = built.problem.tasks, compilation.carriers
    graph.collectives = explain(
        built.problem,
        ordered.plan.order,
        ordered.before,
        after,
        limit,
        ranks=groups,
        buckets={tasks[i].name: carriers.get(c.start.name, ()) for i, c in built.collectives.items()},
        parameters={tasks[i].name: reported([c.start]) for i, c in built.collectives.items()},
        what_if=somebody_looks() and not compilation.again,
        setting=compilation.config.budget,
    )
    report.decisions = ordered.decisions()
    names = {c.name: tuple(dict.fromkeys(p.name for p in c.parameters)) for c in graph.collectives}
    report.decisions = naming.decided([report], names)[0].decisions
    graph.plan |= {
        "kernels": [ordered.names[i] for i in ordered.plan.order],
        "predicted": {"step_ns": after.makespan_ns, "peak_bytes": after.peak_bytes},
    }


def _watch(planned: list[Any], ordered: Ordered, compilation: Compilation, files: Sequence[AskedFile]) -> None:
    """Compare the statements with the plan while the code is generated, and publish the report then."""
    graph, problem = compilation.report, ordered.built.problem

    def finish() -> None:
        if compilation.again:
            return
        publish(graph, problem, ordered.plan.order, ordered.before, ordered.after, compilation.graphs)

    def generated(statements: Iterator[tuple[str, tuple[str, ...]]]) -> str:
        with guarded("comparing the generated code with the plan", "it is not compared"):
            graph.order_check = order_check.compare(planned, list(statements))
            if not graph.order_check.startswith((order_check.CONFIRMED, order_check.UNCHECKED)):
                warn_of_graph(f"inductor_passes: the generated code is not in the planned order: {graph.order_check}")
        if not compilation.again:
            with guarded("storing the report in the generated code", "a warm cache has no report"):
                told = take_said()
                _torch.add_module_statement(
                    cached.statement(graph, problem, ordered.plan.order, compilation.rank_steps, files, told)
                )
        if compilation.config.tune:
            with guarded("timing the first steps", "they are not timed"):
                timing.add_clock(planned, ordered.plan.order, ordered.built, compilation)
        with guarded("publishing a report", "there is none"):
            finish()
        return f"inductor_passes: order {graph.digest}, {graph.order_check}"

    if not _torch.when_generated(generated):
        graph.order_check = f"{order_check.UNCHECKED}: this kind of generated code has no place to look"
        if compilation.config.tune:
            graph.notes.append("tune: not timed, this kind of generated code has no place for it")
        finish()
