"""Asks the other ranks about a graph, and writes the statement with which generated code from a cache asks again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch, agreement
from inductor_passes.agreement import Agreement
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import identity, ranges
from inductor_passes.engine.barrier import guarded
from inductor_passes.engine.complain import warn_once
from inductor_passes.engine.waiting import Waiting
from inductor_passes.groups import availability
from inductor_passes.ir import results
from inductor_passes.ir.groups import Group
from inductor_passes.ir.view import GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import PassReport
from inductor_passes.rewriting.step_facts import StepFacts

NAME = "agreement"
#: Where a graph module carries statements for the generated code.
META_KEY = "inductor_passes_agreement"
#: Settings that name files of one rank, say what is written where, or are compared by their content.
_OWN = (
    *("cost_profile", "plan", "dump_plan", "dump_problem", "estimator", "rank_check", "rank_agreement"),
    *("tune", "tune_file", "tune_swap"),
)
#: Of these, what says what is done: a rank that has other ones does something else.
_DECIDE = ("plan", "estimator")
#: Verdicts on graphs that are not compiled themselves.
_waiting: Waiting[Agreement] = Waiting()


#: Of what is waited for longer because ranks do not need equally long for a graph, in seconds.
_STEP_S = 10


def reach(
    view: GraphView, settings: PassConfig, profile: CostProfile, phase: str, step: StepFacts | None = None
) -> Agreement:
    """Whether the ranks that a graph's collectives concern all compile it.

    Waits for at most ``rank_agreement``; for the first graph of a function, which all ranks compile, longer by the time
    that the compilation has taken so far, in whole steps of ten seconds, rounded up: others may need twice as long.

    Args:
        view: the graph before anything is changed.
        phase: ``forward``, ``backward``, ``inference``, ``joint`` ...
        step: what else is known about it.
    """
    timeout_s = settings.rank_timeout_s
    if timeout_s is None:
        return Agreement(True, "", "", ())
    if agreement.opens_a_function(_torch.compile_id()):
        timeout_s += _longer_s(int(_torch.compiling_for_s() * 1e9))
    found = Agreement(False, "asking the other ranks failed", "", ())
    with guarded("asking the other ranks", "collectives stay as they are", settings):
        descriptions = _torch.group_descriptions()

        def describe(group: Group) -> str:
            layout = profile.layout(group.ranks) if group.ranks else None
            return f"{descriptions.get(group.name, '')} {layout}"

        found = agreement.reach(
            view,
            {
                **facts_of(settings, profile, phase, _told(step, view)),
                **_sizes(view, settings),
                # Of these some get memory of their own when messages are merged.
                "results of the user": str(len(results.of_user(view.graph, phase))),
            },
            timeout_s=timeout_s,
            name=phase,
            describe_group=describe,
            # What is made of numbers that ranks did not compare is not implied to be equal. Positions should be.
            made_alike=settings.replicas == "implied",
        )
    return found


def _sizes(view: GraphView, settings: PassConfig) -> dict[str, str]:
    """What a plan is for, where that is not all that the program's own guards admit."""
    return {"sizes": "; ".join(ranges.notes(view.graph))} if settings.dynamic_plans > 1 else {}


def _told(step: StepFacts | None, view: GraphView) -> str:
    """What the partitioner told, without names: nodes are not called the same on all ranks."""
    if step is None:
        return ""
    place = {c.start.name: k for k, c in enumerate(view.collectives)}
    proposed = [[place[name] for name in bucket if name in place] for bucket in step.proposed]
    return f"{step.own_peak_bytes} {step.step_peak_bytes} {step.reached_bytes} {proposed}"


def facts_of(settings: PassConfig, profile: CostProfile, phase: str, step: str) -> Mapping[str, str]:
    """What decisions depend on besides the graph.

    Args:
        step: see :func:`_told`.
    """
    plans = identity.load_plan(settings)
    known = availability.established()
    return {
        # A rank whose joint graph is its final one has two questions, as the others have.
        "phase": phase,
        "source": identity.source_hash(),
        "torch": torch.__version__,
        # One line each: the sentence about a difference names the setting.
        **{f"setting {name}": json.dumps(value) for name, value in settings.to_json().items() if name not in _OWN},
        "estimator": str(getattr(settings.estimator, "inductor_passes_uuid", "") if settings.estimator else None),
        "cost profile": f"{profile.device} {profile.hash()}",
        "plan": plans.digest if plans is not None else "",
        "step": step,
        "groups": json.dumps(sorted({json.dumps(one, sort_keys=True) for one in known.values()})),
    }


def deciding(settings: PassConfig) -> PassConfig:
    """The settings without those that name files, or say what is written, timed or waited for.

    Under "trust" nobody is asked, which decides. A cost profile counts by its content.
    """
    plain = PassConfig()
    own = {name: getattr(plain, name) for name in _OWN if name not in _DECIDE}
    if settings.rank_timeout_s is None:
        own["rank_agreement"] = settings.rank_agreement
    return replace(settings, **own)


def confirm(
    before: Agreement,
    graph: torch.fx.Graph,
    done: Sequence[PassReport],
    settings: PassConfig,
    took_ns: int,
    attempt: str = "",
) -> Agreement:
    """Whether all ranks that agreed on a graph did the same to it.

    Args:
        attempt: which one it is, where there are several: an answer stands for all that is asked with equal words.
        done: what passes did that does not show in kinds, sizes and order of collectives.
        took_ns: how long that took here. Others may need as long again.
    """
    found = Agreement(False, "asking the other ranks failed", "", ())
    with guarded("asking what the other ranks did", "collectives stay as they are", settings):
        # Why it was undone says nothing of what the graph is now: ranks may miss a proof at different places.
        lines = [f"pass {p.name}: changed {p.changed and p.rolled_back is None}" for p in done]
        lines += [attempt] if attempt else []
        for one in GraphView(graph).collectives:
            # Ranks may exchange pieces of unequal size.
            size = "" if one.kind is CollectiveKind.ALL_TO_ALL else f" of {one.input_bytes} bytes"
            lines.append(f"{one.kind.name}{size} between {one.group.size} ranks")
        found = agreement.confirm(before, lines, _longer_s(took_ns))
    if before.agreed and not found.agreed:
        warn_once(f"inductor_passes: ranks did not all do the same to a graph, its collectives stay: {found.why}")
    return found


def _longer_s(took_ns: int) -> int:
    """In whole steps: the time is part of the generated code, which should not change from run to run."""
    return _STEP_S * math.ceil(took_ns / 1e9 / _STEP_S)


def compare_messages(
    before: Agreement, sent: Sequence[str], settings: PassConfig, profile: CostProfile, phase: str
) -> Agreement:
    """Whether ranks whose graphs differ have the same collectives.

    Args:
        before: their verdict on the graphs.
        sent: what has to be equal, see ``following.kinds_of``.
    """
    found = Agreement(False, "asking the other ranks failed", "", ())
    with guarded("comparing collectives with the other ranks", "collectives stay as they are", settings):
        facts = [f"fact {key}: {value}" for key, value in facts_of(settings, profile, phase, "").items()]
        found = agreement.compare(before, [*facts, _torch.compile_id(), *sent])
    return found


def confirm_messages(before: Agreement, sent: Sequence[str], settings: PassConfig, took_ns: int) -> Agreement:
    """Whether all ranks that agreed on what to send have a graph that sends it.

    Args:
        sent: what the graph sends, empty where it could not be done.
        took_ns: how long that took here.
    """
    found = Agreement(False, "asking the other ranks failed", "", ())
    with guarded("asking what the other ranks send", "collectives stay as they are", settings):
        found = agreement.confirm(before, sent, _longer_s(took_ns))
    return found


def report_of(found: Agreement) -> PassReport | None:
    """For the graph's report; None where nobody had to be asked. Warns once where ranks are not known to agree."""
    if not found.agreed:
        warn_once(f"inductor_passes: {found.note}")
    if found.agreed and not found.operations:
        return None
    metrics: dict[str, int | float] = {
        "agreed": int(found.agreed),
        "participants": len(found.participants),
        "operations": found.operations,
        "described_ns": found.described_ns,
        "waited_ns": found.waited_ns,
    }
    return PassReport(NAME, detail=found.note, metrics=metrics, duration_ns=found.described_ns + found.waited_ns)


def remember(found: Agreement) -> None:
    """Keep the verdict on a graph that is not compiled itself for the graphs that are made of it."""
    if found.claim is not None:
        _waiting.put(found)


def attach(graph: torch.fx.Graph, found: Agreement) -> None:
    """Leave with a graph what its generated code has to ask when it comes out of a cache."""
    leave(graph, *filter(None, map(agreement.statement, (*_waiting.take(), found))))


def attach_for_either(graph: torch.fx.Graph, found: Agreement) -> None:
    """The same for code that is right whether or not the ranks agree."""
    attach(graph, found if found.claim is None else replace(found, claim=replace(found.claim, agreed=None)))


def leave(graph: torch.fx.Graph, *statements: str, first: bool = False) -> None:
    """Leave statements with a graph, for its generated code; they run in this order.

    Args:
        first: before those that were left so far, else behind them.
    """
    module: Any = graph.owning_module
    if module is not None:
        before = module.meta.get(META_KEY, ())
        module.meta[META_KEY] = tuple(dict.fromkeys((*statements, *before) if first else (*before, *statements)))


def state() -> None:
    """Write what was left with the graph that is being lowered into its generated code."""
    module = _torch.current_graph_module()
    for text in () if module is None else module.meta.pop(META_KEY, ()):
        _torch.add_module_statement(text)


def can_state(settings: PassConfig) -> bool:
    """Whether generated code has a place for these statements; else it must not be cached."""
    if settings.rank_timeout_s is None or _torch.rank_and_world_size()[1] == 1:
        return True
    return not _torch.inductor_option("deterministic", False) and not _torch.inductor_option("cpp_wrapper", False)
