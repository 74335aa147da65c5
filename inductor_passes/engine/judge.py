"""Whether the outcome of a pass may be kept, and the memory cap that all passes share.

The cap is computed once, from the original graph. After each pass it is checked in the order in which the pass left the
graph, or in the order that the planner finds for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

import torch.fx

from inductor_passes import verify
from inductor_passes.config import PassConfig
from inductor_passes.engine.compilation import Compilation
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import NoHintError, kept_by_caller
from inductor_passes.report import Decision, Finding, PassReport, Reason, Verdict
from inductor_passes.rewriting.contract import NOT_AGREED, Cap, Facts, Look, Outcome, Pass, Scheduled, Solved
from inductor_passes.rewriting.step_facts import StepFacts
from inductor_passes.schedule.carry import carried
from inductor_passes.schedule.plan import plan

#: Objections that another result of the same pass may not meet.
BY_COST = (Reason.OVER_BUDGET, Reason.SLOWER)


@dataclass(frozen=True)
class Judgement:
    """What the pipeline makes of an outcome.

    Attributes:
        facts: about the graph as the pass left it.
        objection: why the outcome is dropped; None: it is kept.
        detail: numbers or names for people.
        findings: of the verifier.
        reference: of the graph as the pass left it, for the next pass; None where it is not known.
    """

    facts: Facts
    objection: Reason | None = None
    detail: str = ""
    findings: tuple[Finding, ...] = ()
    reference: verify.ReferenceSnapshot | None = None


def of_step(peak_bytes: int, step: StepFacts | None, config: PassConfig, own_least_bytes: int | None = None) -> int:
    """What a budget is relative to, given the graph's own peak: forward may use what backward's peak leaves.

    What fusion saves is known of one graph only, so "0" stays with each graph's own peak, unless that includes
    parameters kept for backward: these come out of the step's budget. Where a step has to need less than it did, fusion
    that needs more does not raise what it may need.

    Args:
        own_least_bytes: of the graph on FX in the order of least memory that is known, in the memory in which the
            step's peak is. Where a step has to need less than it did, that is what the graph is compared by: its own
            order may need as much as the step did.
    """
    if step is None or not step.own_peak_bytes:
        return peak_bytes
    scaled = peak_bytes * step.step_peak_bytes // step.own_peak_bytes
    if config.budget.shrinks:
        return min(peak_bytes * step.step_peak_bytes // (own_least_bytes or step.own_peak_bytes), step.step_peak_bytes)
    return min(peak_bytes, scaled) if config.budget.fraction == 0 else scaled


def limit_bytes(
    least_peak_bytes: int, step: StepFacts | None, config: PassConfig, own_least_bytes: int | None = None
) -> int | None:
    """The cap of a graph that needs ``least_peak_bytes``.

    A budget below the step's peak asks what a step computes again. Where that did not reach the budget, both graphs may
    need what was reached. Where it was not chosen (inference, a step whose memory is not known), a graph keeps to the
    least that it needs.

    Args:
        own_least_bytes: see :func:`of_step`.
    """
    limit = config.budget.limit_bytes(of_step(least_peak_bytes, step, config, own_least_bytes))
    if limit is None or not config.budget.shrinks:
        return limit
    reached = 0 if step is None else step.reached_bytes
    if own_least_bytes and least_peak_bytes < own_least_bytes:
        # What was reached is an estimate too: kernels that need less than expected are held to so much less.
        reached = reached * least_peak_bytes // own_least_bytes
    return max(limit, least_peak_bytes, reached)


def cap(look: Look, step: StepFacts | None, verified_peak_bytes: int | None = None) -> Cap:
    """The cap of a graph, from a look at it as it came in and the step that it belongs to.

    Args:
        verified_peak_bytes: the graph's peak by the verifier.
    """
    try:
        peak = look.peak_bytes
        if look.config.budget.unlimited:
            return Cap(peak, peak, None, verified_peak_bytes)
        least, generated = look.least_peak_bytes, look.generated_least_peak_bytes
    except NoHintError:
        return Cap()

    limits = graph_limits(least, generated, step, look.config)
    return Cap(peak, least, limits[0], verified_peak_bytes, generated, limits[1], look.config.budget.shrinks)


def graph_limits(
    least_peak_bytes: int, generated_bytes: int | None, step: StepFacts | None, config: PassConfig
) -> tuple[int | None, int | None]:
    """The caps of a graph on FX: of what every value takes, and of what Inductor's code takes.

    A budget below the step's peak is about the memory of the code, where that is known. On FX a graph may then need as
    much more than its least as its code may.

    Args:
        least_peak_bytes: of the graph in the order of least memory that is known.
        generated_bytes: the same for Inductor's code; None where that is not known.
    """
    if generated_bytes is None:
        return limit_bytes(least_peak_bytes, step, config, least_peak_bytes), None
    generated = limit_bytes(generated_bytes, step, config, generated_bytes)
    if config.budget.shrinks:
        return None if generated is None else least_peak_bytes + max(0, generated - generated_bytes), generated
    return limit_bytes(least_peak_bytes, step, config, least_peak_bytes), generated


def freed_inputs(graph: torch.fx.Graph, phase: str) -> tuple[str, ...]:
    """Names of the graph's inputs that are freed after their last use."""
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    return tuple(node.name for node in inputs if not kept_by_caller(node, phase == "backward"))


def fused_limit_bytes(compilation: Compilation, least_peak_bytes: int) -> int | None:
    """The cap for fused kernels that need ``least_peak_bytes``.

    It is relative to that less the share by which the FX passes raised what the graph needs: merged messages do.
    """
    cap, after = compilation.cap, compilation.least_peak_bytes
    if cap.least_peak_bytes is not None and after is not None and after > cap.least_peak_bytes:
        least_peak_bytes = least_peak_bytes * cap.least_peak_bytes // after
    own_least = cap.generated_least_peak_bytes or cap.least_peak_bytes
    return limit_bytes(least_peak_bytes, compilation.known.step, compilation.config, own_least)


def look_before(facts: Facts) -> None:
    """Work out now what is asked about the graph afterwards: a pass changes it in place."""
    with contextlib.suppress(NoHintError):
        _ = facts.ranks_agree
        if facts.limit_bytes is not None:
            _ = facts.peak_bytes


def over_cap(facts: Facts) -> str:
    """How far the graph, in its order, is above the cap; "" when it is not, or no higher than what came in."""
    try:
        if facts.limit_bytes is None or not facts.ranks_agree:
            return ""
        allowed = max(facts.limit_bytes, facts.cap.input_peak_bytes or 0)
        return _over(facts, facts.peak_bytes) if facts.peak_bytes > allowed else ""
    except NoHintError:
        return ""


def slower(before: Facts, outcome: Outcome | None, scheduled: Scheduled | None) -> str:
    """How much slower the graph plans since a pass; "" when it is not, or that is not known."""
    if outcome is None or outcome.scheduled is not None or scheduled is None or not before.ranks_agree:
        return ""
    if outcome.pinned or outcome.forced:
        return ""  # what the user asked for is not compared
    known = outcome.before or (None if before.solved is None else before.solved.plan)
    if known is None or not known.feasible:
        return ""
    now = scheduled.plan
    if now.feasible and now.makespan_ns <= known.makespan_ns:
        return ""
    return f"the whole graph: {known.makespan_ns} -> {now.makespan_ns} ns"


def judge(
    graph: torch.fx.Graph,
    one: Pass,
    outcome: Outcome,
    facts: Facts,
    reference: verify.ReferenceSnapshot,
    known: verify.Known | None = None,
) -> Judgement:
    """Hold the graph that a pass left against the graph that it got.

    Args:
        graph: as the pass left it.
        facts: what the pass got.
        reference: the graph that the pass got, for the verifier.
        known: what the verifier has found out about the graph's nodes; filled.
    """
    if not outcome.report.changed:
        return Judgement(dataclasses.replace(facts, solved=outcome.solved or facts.solved))
    narrowing = facts.config.narrowing
    asked = verify.Asked(
        memory_budget=_verified_limit(outcome, facts),
        donated=freed_inputs(graph, facts.phase),
        certificates=outcome.certificates,
        group_order=one.group_order if facts.agreed else "kept",
        numerics=getattr(one, "numerics", "exact"),
        replicas=facts.config.replicas,
        rounding=None if narrowing.is_off else narrowing.error,
        ranks_per_host=facts.profile.ranks_per_host,
    )
    checked = verify.checked(graph, reference, asked, known)
    findings = checked.findings
    after = outcome.after or facts.of(graph)
    if findings:
        detail = str(findings[0])
        rules = {finding.rule for finding in findings}
        # Nothing is shown to be wrong: the verifier counts more bytes than the planner, or does not understand a value.
        mild = {frozenset({"memory"}): Reason.OVER_BUDGET, frozenset({"value-unproven"}): Reason.UNPROVEN}
        return Judgement(after, mild.get(frozenset(rules), Reason.VERIFIER), detail, tuple(findings))
    local = _communication(facts.view) == _communication(after.view)
    if not facts.agreed and not local:
        return Judgement(after, Reason.RANKS_DIFFER, NOT_AGREED)
    return dataclasses.replace(_within_cap(outcome, facts, after, local), reference=checked.snapshot)


def _verified_limit(outcome: Outcome, facts: Facts) -> int | None:
    """Where an order was decided the cap has to hold, by the verifier's own count too.

    Not where shards are of unequal size: it counts those of this rank, and the ranks have to decide alike.
    """
    if outcome.scheduled is None or not facts.ranks_agree or facts.shards.uneven:
        return None
    return facts.cap.verified_limit_bytes


def _communication(view: GraphView) -> list[tuple[object, ...]]:
    """Everything that other ranks notice of a graph's collectives, in order."""
    return [
        (c.start.name, c.kind, c.group, c.reduce_op, c.dtypes, c.input_bytes, c.output_bytes) for c in view.collectives
    ]


def _within_cap(outcome: Outcome, before: Facts, after: Facts, local: bool) -> Judgement:
    """The graph fits the cap and is no slower, as far as that is asked."""
    try:
        if not before.ranks_agree and not local:
            # Peaks and durations are not the same on all ranks: nothing that they notice may depend on them.
            return Judgement(after)
        fits = after.limit_bytes is None or after.peak_bytes <= max(after.limit_bytes, before.peak_bytes)
        if outcome.scheduled is not None:
            return Judgement(after) if fits else Judgement(after, Reason.OVER_BUDGET, _over(after, after.peak_bytes))
        if fits and outcome.before is None:
            return Judgement(after)
        solved = _solved(outcome, after)
    except NoHintError:
        return Judgement(after)
    if solved is None:
        return Judgement(after, Reason.OVER_BUDGET, _over(after, after.peak_bytes))
    after, found = dataclasses.replace(after, solved=solved), solved.plan
    allowed = before.solved.plan if outcome.before is None and before.solved is not None else outcome.before
    if not found.feasible and (allowed is None or allowed.feasible or found.peak_bytes > allowed.peak_bytes):
        return Judgement(after, Reason.OVER_BUDGET, _over(after, found.peak_bytes))
    if outcome.before is not None and found.makespan_ns >= outcome.before.makespan_ns:
        detail = f"the whole graph: {outcome.before.makespan_ns} -> {found.makespan_ns} ns"
        return Judgement(after, Reason.SLOWER, detail)
    return Judgement(after)


def _solved(outcome: Outcome, after: Facts) -> Solved | None:
    """How the graph plans under the cap; None where its order will not be changed any more."""
    if after.config.schedule == "off" and outcome.before is None:
        return None
    problem = after.problem.problem
    if (forecast := outcome.solved) is not None:
        if forecast.problem.digest() == problem.digest():
            return dataclasses.replace(forecast, problem=problem)
        if (moved := carried(forecast.plan, forecast.problem, problem)) is not None:
            return Solved(problem, moved)
    return Solved(problem, plan(problem, after.limit_bytes, effort=0))


def _over(facts: Facts, peak_bytes: int) -> str:
    return f"peak {peak_bytes} bytes, the cap is {facts.limit_bytes} bytes"


def refused(outcome: Outcome, judgement: Judgement) -> PassReport:
    """The report of a pass that was dropped: what it had applied is refused for the judgement's reason."""
    report, reason = outcome.report, judgement.objection
    assert reason is not None
    report.rolled_back, report.detail, report.findings = reason, judgement.detail, list(judgement.findings)
    settings = {Reason.OVER_BUDGET: 'memory_budget="unlimited"', Reason.SLOWER: outcome.insist}
    setting = settings.get(reason, "")
    report.decisions = [_undone(d, reason, judgement.detail, setting) for d in report.decisions]
    return report


def _undone(decision: Decision, reason: Reason, detail: str, setting: str) -> Decision:
    if decision.verdict is not Verdict.APPLIED:
        return decision
    return dataclasses.replace(
        decision, verdict=Verdict.REFUSED, reason=reason, detail=detail, gain_ns=0, setting=setting
    )
