"""What was decided on a graph, in the form of a plan file."""

from __future__ import annotations

from collections.abc import Mapping

from inductor_passes.engine.compilation import Compilation
from inductor_passes.pin.file import GraphPlan
from inductor_passes.report import Verdict
from inductor_passes.rewriting.step_facts import StepFacts


def plan_of(
    compilation: Compilation, collectives: Mapping[str, str], names: Mapping[str, tuple[str, ...]]
) -> dict[str, object]:
    """What was decided on FX."""
    report, scheduled = compilation.report, compilation.scheduled
    order = None
    if scheduled is not None:
        order = tuple(scheduled.fx.problem.tasks[i].name for i in scheduled.plan.order)
    return GraphPlan(
        phase=report.phase,
        graph_index=report.graph_index,
        compile_id=report.compile_id,
        rank=report.rank,
        world_size=report.world_size,
        collectives=collectives,
        parameters={start: names[start] for start in collectives if start in names},
        left_out=compilation.left_out,
        buckets=tuple(compilation.buckets),
        kept=_kept(compilation.known.step),
        order=order,
        memory_budget=compilation.larger_budget or None,
    ).to_json()


def _kept(step: StepFacts | None) -> tuple[str, ...] | None:
    """Gathers whose results backward reuses; None where that was not ours to choose."""
    choice = None if step is None else step.keep
    if choice is None or choice.rolled_back is not None:
        return None
    return tuple(sorted(d.node for d in choice.decisions if d.verdict is Verdict.APPLIED))
