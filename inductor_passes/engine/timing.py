"""Writes the statement with which generated code times its first steps (setting ``tune``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inductor_passes import _torch, agreement
from inductor_passes.engine.compilation import Compilation
from inductor_passes.engine.kept import Kept
from inductor_passes.problems.kernels import SchedulerProblem
from inductor_passes.tuning import again, measuring, plan


def add_clock(nodes: Sequence[Any], order: Sequence[int], built: SchedulerProblem, compilation: Compilation) -> None:
    """Write it into the code that is being generated; a note in the report says where that cannot be.

    Args:
        nodes: in planned order.
        order: their numbers in the problem.
    """
    report, device = compilation.report, _torch.lowered_device()
    if agreement.is_explained():
        report.notes.append("tune: not timed, explain() runs no step")
        return
    if device != "cpu" and _torch.inductor_option("triton.cudagraphs", False):
        report.notes.append("tune: not timed, CUDA graphs replay the kernels without the code that calls them")
        return
    by_name = {task.name: number for number, task in enumerate(built.problem.tasks)}
    outputs = [(_torch.snode_kind(node), tuple(_torch.snode_output_names(node))) for node in nodes]
    placed = plan.carried_out(_torch.generated_calls(), outputs)
    calls = [plan.Call(one.name, tuple(order[p] for p in one.tasks), one.generated) for one in placed]
    collectives = [
        plan.Collective(by_name[one.name], one.name, one.label, one.kind, one.size_bytes, one.ranks)
        for one in report.collectives
        if one.name in by_name
    ]
    planned = plan.Planned.of(_about(compilation, device), calls, collectives, built.problem, order)
    if not _torch.add_closing_statement(measuring.statement(planned)):
        report.notes.append("tune: not timed, this kind of generated code has no place for it")
    elif planned.about.swap and not compilation.again:
        again.keep(plan.packed(planned), _kept(compilation))


def _kept(compilation: Compilation) -> Kept | str:
    """The graph, with how Inductor lowers it right now."""
    found: Kept | str = compilation.kept
    if isinstance(found, str):
        return found or "nothing was kept of it"
    lowering = _torch.lowering_now()
    if isinstance(lowering, str):
        return lowering
    found.lowering, found.participants = lowering, compilation.participants
    return found


def _about(compilation: Compilation, device: str) -> plan.About:
    report, config, profile = compilation.report, compilation.config, compilation.profile
    return plan.About(
        phase=report.phase,
        graph_index=report.graph_index,
        digest=report.digest,
        steps=config.tune,
        device=device,
        participants=compilation.participants,
        timeout_s=10.0 if config.rank_timeout_s is None else config.rank_timeout_s,
        profile_path=config.cost_profile,
        profile_hash=profile.hash(),
        measured_costs=profile.measured,
        kernel_ns=profile.kernel_ns if profile.kernel_ns >= 0 else float(profile.spec.kernel_ns.value),
        tune_file=config.tune_file,
        swap=config.tune_swap == "on",
    )
