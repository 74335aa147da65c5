"""The steps of every FX graph, from Inductor's hook to a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch.fx

from inductor_passes import _torch, agreement, verify
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import (
    again,
    agreeing,
    alike,
    dynamic_plans,
    first_saved,
    following,
    garbage,
    gloo,
    identity,
    in_tree,
    joint,
    measuring,
    naming,
    nothing,
    ranges,
    regions,
    unfit,
    variants,
    written,
)
from inductor_passes.engine.barrier import guarded
from inductor_passes.engine.compilation import Compilation, Known, new_report, phase_of
from inductor_passes.engine.complain import warn_of_graph, warn_once
from inductor_passes.engine.kept import Kept, kept
from inductor_passes.engine.publish import publish_fx
from inductor_passes.ir.view import GraphView
from inductor_passes.pin import pins
from inductor_passes.report import GraphReport
from inductor_passes.rewrites import audit
from inductor_passes.rewriting import cpu_calls
from inductor_passes.rewriting.messages import all_carry_parameters, messages
from inductor_passes.rewriting.step_facts import facts_of
from inductor_passes.trace.artifacts import graphs_wanted
from inductor_passes.trace.nothing import planned
from inductor_passes.verify import rank_check

#: Where a graph module carries its compilation from the FX passes to the scheduler hook.
META_KEY = "inductor_passes"

_UNKEPT = "keeping the graph failed"
_NOT_ALIKE = "the ranks are not known to have the same graph"


@garbage.paused()
def compile_graph(graph: torch.fx.Graph, is_inference: bool, settings: PassConfig) -> Compilation | None:
    """Run all passes on one graph, in place; returns what happened, None for a graph that we leave alone.

    Raises:
        ConfigError: Inductor's own communication passes are on and ``in_tree_passes`` is ``error``.
        VerificationError: with ``verify="strict"``, when a pass failed or broke a rule.
        LargeRedistributionError: an operator redistributes more than ``redistribute="error-above:..."`` allows.
        PlanFileError: the pinned plan cannot be read, does not fit the graph or is not allowed.
        RanksDifferError: with ``rank_check="error"``, when another rank has other collectives.
    """
    view = GraphView(graph)
    communicates = bool(view.collectives or view.transfers)
    if not communicates or in_tree.left_to_inductor(settings):
        nothing.left_alone(graph, is_inference, settings, communicates)
        return None
    planned()
    naming.note(graph, settings)
    names = naming.names(graph, settings)
    graph_before = _readable(graph)
    profile = identity.load_profile(settings)
    phase, step = phase_of(graph, is_inference), facts_of(graph)
    if phase != "backward":
        dynamic_plans.divide(graph, settings, inference=phase == "inference")
    report = new_report(graph, phase, settings, profile)
    if step is not None:
        report.passes.extend(one for one in (step.recompute, step.keep) if one is not None)
    if phase != "backward":
        report.passes.extend(joint.REPORTS.take())
    collectives = pins.described(view)
    agreed = agreeing.reach(view, settings, profile, phase, step)
    job = alike.Job(graph, settings, profile, Known(phase, agreed=agreed.agreed, step=step), agreed, report.passes)
    pinned = _pins(report, collectives, names, settings) if agreed.agreed else None
    idle = ""
    with guarded("counting what the entries of compress fit", "nobody is told", settings):
        idle = unfit.note(view, settings, phase)
    about = variants.About(report.compile_id, phase, identity.cache_key(agreeing.deciding(settings), profile) or "")
    came_as = _kept(graph, view, settings, profile, (collectives, names))
    compilation = _decide(job, view, about, pinned, came_as)
    compilation.participants = _participants(agreed, settings)
    if phase != "backward" and (text := dynamic_plans.statement(graph)):
        agreeing.leave(graph, text)
    if phase == "forward":
        with guarded("writing down what the first variant saves", "a warm cache does not know it", settings):
            if text := first_saved.statement(settings):
                agreeing.leave(graph, text)
    report = compilation.report
    report.notes.extend(() if step is None else step.notes)
    report.notes.extend([idle] if idle else ())
    naming.enter(report, graph, names, settings)
    with guarded("making gathers safe on gloo", "they stay as they are", settings):
        if said := gloo.respell(graph, settings):
            report.notes.append(said)
    with guarded("having copies lowered to calls of torch", "they go through Python", settings):
        if settings.codegen == "inductor":
            cpu_calls.lower(graph)
    with guarded("measuring narrowed messages", "their errors are not measured", settings):
        if said := measuring.insert(graph, compilation):
            report.notes.append(said)
    compilation.graph_before, compilation.graph_after = graph_before, _readable(graph)
    with guarded("writing down the plan", "the report has none", settings):
        report.plan = written.plan_of(compilation, collectives, names)
    note_pins(compilation)
    audit.close(report, settings)
    _look_at(graph, compilation)
    _hand_on(graph, compilation)
    return compilation


def _kept(
    graph: torch.fx.Graph,
    view: GraphView,
    settings: PassConfig,
    profile: CostProfile,
    described: tuple[Mapping[str, str], Mapping[str, tuple[str, ...]]],
) -> Kept | str:
    """The graph as it came, where it may be planned again while it runs; else why not, or ""."""
    if not settings.tune or settings.tune_swap != "on":
        return ""
    found: Kept | str = _UNKEPT
    with guarded("keeping a graph to plan it again", "it keeps its first plan", settings):
        found = kept(graph, view, settings, profile, described, again.compile_again)
    return found


def _decide(
    job: alike.Job, view: GraphView, about: variants.About, pinned: pins.Pins | None, came_as: Kept | str = ""
) -> Compilation:
    """Run the passes, as an earlier variant or as the first rank where one has to; remember what is sent then.

    Args:
        view: of the job's graph.
        about: which variant of which function it is.
        came_as: the graph before anything is changed, see :func:`_kept`; goes on with the compilation.
    """
    graph, agreed = job.graph, job.agreed
    came, any_order = messages(view), all_carry_parameters(view)
    kinds = following.kinds_of(came, any_order)
    # Under "trust" nobody was asked, and nobody knows who is here.
    first = agreed.agreed and not agreed.again and about.number == 0
    together = agreed.agreed and not agreed.again and bool(agreed.participants)
    earlier, compilation = variants.earlier(about, kinds, together=together, graph=agreed.digest), None
    if first and earlier is not None:
        # Another function that happens to send as much: where ranks agree, it need not be followed.
        earlier = earlier.within(all_carry_parameters(view))
    if not agreed.agreed:
        compilation = alike.run_as_led(job) if earlier is None else alike.run_as_before(job, earlier)
    # Code from a cache is then right only where this process knows of it.
    conforms = compilation is not None
    if compilation is None:
        agreeing.attach(graph, agreed)
        # Whether graphs of a function fit together is looked at where there are two with the same collectives.
        asked = agreeing.report_of(agreed if earlier is None else replace(agreed, mixed=False))
        if asked is not None:
            job.begun.append(asked)
        costs = None if pinned is None or pinned.given_up else pinned.graph.profile
        job = replace(job, known=replace(job.known, pins=pinned), costs=costs)
        # What was tried and taken back may have put equal nodes in place of those that the view holds.
        untouched = agreed.agreed and earlier is None
        compilation = alike.run_alike(job, view if untouched else None, earlier, first=first)
    if len(agreed.participants) != 1 and not agreement.nobody_to_ask():
        alike.warn_of_limit(about)
        after = GraphView(graph)
        sent, rewritten = messages(after), alike.rewritten(compilation)
        buckets = following.places(view.collectives, compilation.buckets)
        variant = following.Variant(
            *(came, sent, buckets, rewritten, job.known.phase, agreed.digest, tuple(sorted(any_order))),
            left_out=compilation.left_out,
        )
        alone = _led_by(earlier, kinds) if conforms else frozenset[str]()
        refuse, keep = variants.statements(about, variant, alone=alone, agreed=agreed.agreed)
        agreeing.leave(graph, refuse, first=True)
        agreeing.leave(graph, keep)
        variants.note(about, kinds)
        if not conforms or earlier is None or {*kinds} - alone:
            variants.remember(about, variant)
        if isinstance(came_as, Kept):
            # Whether another graph that sends the same may still be called is looked at when it is planned again.
            kept_graph, came_as = came_as, _NOT_ALIKE
            if agreed.agreed and compilation.known.agreed:
                came_as = _UNKEPT
                with guarded("keeping a graph to plan it again", "it keeps its first plan", job.settings):
                    came_as = kept_graph.of(compilation, about, variant, after)
        compilation.kept = came_as
    return compilation


def _led_by(earlier: following.Earlier | None, kinds: Mapping[str, following.Kind]) -> frozenset[str]:
    """Groups in which a graph sends what another one sends; the first rank's graph decides all of them."""
    return frozenset(kinds) if earlier is None else frozenset().union(*(part.groups for part in earlier.parts))


def _participants(agreed: agreement.Agreement, settings: PassConfig) -> tuple[int, ...]:
    """Ranks that compile the same graph; where nobody is asked because all do ("trust"), all ranks."""
    if settings.rank_timeout_s is None:
        return tuple(range(_torch.rank_and_world_size()[1]))
    return agreed.participants if agreed.agreed else ()


def _look_at(graph: torch.fx.Graph, compilation: Compilation) -> None:
    """Compare the finished graph with other ranks', if that is wished, and say in the report what holds for it."""
    settings, report = compilation.config, compilation.report
    if settings.rank_check != "off":
        compilation.rank_steps = rank_check.check(graph, report.phase, settings)
    with guarded("stating what was verified", "the report does not say", settings):
        report.notes += verify.statement(graph, compared=settings.rank_check != "off")
    with guarded("looking for what a graph does not see", "the report does not say", settings):
        report.notes += regions.notes(graph)
    with guarded("saying for which sizes the plan holds", "the report does not say", settings):
        report.notes += [*ranges.notes(graph), *dynamic_plans.notes(graph)]


def _readable(graph: torch.fx.Graph) -> str:
    """The graph as text when somebody debugs, else ""."""
    return str(graph) if graphs_wanted() else ""


def _pins(
    report: GraphReport, collectives: Mapping[str, str], names: Mapping[str, tuple[str, ...]], settings: PassConfig
) -> pins.Pins | None:
    """The plan that a file pins for the graph."""
    plans = identity.load_plan(settings)
    if plans is None:
        return None
    replan = settings.plan_mismatch == "replan"
    return pins.find(plans, report.phase, report.graph_index, collectives, names, rank=report.rank, replan=replan)


def note_pins(compilation: Compilation) -> None:
    """Say in the report whether the pinned plan was used."""
    found, notes = compilation.pins, compilation.report.notes
    if found is None:
        if compilation.config.plan:
            notes.append(f"{compilation.config.plan} says nothing about this graph: planned as usual")
    elif found.given_up:
        notes.append(f"pinned plan given up: {found.given_up}")
        warn_of_graph(f"inductor_passes: planning anew, {found.given_up}")
    else:
        costs = found.graph.profile
        by = f", decided by its costs: {costs.name} {costs.hash()}" if costs is not None else ""
        notes.append(f"pinned by {found.path} ({found.digest}){by}")


def _hand_on(graph: torch.fx.Graph, compilation: Compilation) -> None:
    """Leave the compilation for the scheduler hook, or publish it where that will not run."""
    settings, module = compilation.config, graph.owning_module
    if will_order_kernels(settings) and settings.codegen == "inductor" and module is not None:
        module.meta[META_KEY] = compilation
        return
    if settings.codegen == "inductor" and settings.replay == "on":
        note = "Inductor's deterministic mode skips its reordering hook: planned on FX only"
        compilation.report.notes.append(note)
        warn_once(f"inductor_passes: {note}")
    if settings.tune:
        why = "the order of kernels is not planned (replay, codegen, deterministic mode)"
        compilation.report.notes.append(f"tune: not timed, {why}")
    with guarded("publishing a report", "there is none", settings):
        publish_fx(compilation)


def handed_on() -> Compilation | None:
    """What the FX passes left for the graph that Inductor is lowering; None when they left it alone.

    Taken, not looked at: nothing of ours keeps a graph alive once it is compiled.
    """
    module = _torch.current_graph_module()
    return module.meta.pop(META_KEY, None) if module is not None else None


def will_order_kernels(settings: PassConfig) -> bool:
    """Whether the scheduler hook will run for the graph being compiled."""
    return settings.replay == "on" and not _torch.inductor_option("deterministic", False)
