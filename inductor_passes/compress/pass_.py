"""The pass: narrower messages where the planned step gains by them.

before::

    AG0 W0 mm RS0 W1

after::

    narrow AG0' W0' widen mm narrow A2A0 W1' widen add

Runs behind async TP, which wants collectives next to matmuls, and in front of bucketing: narrowed messages are messages
of bytes, which merge like any others. ``candidates`` says what may be narrowed, ``choose`` what is, ``emit`` how.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.fx

from inductor_passes import _torch
from inductor_passes.compress.candidates import Candidate, admitted, candidate
from inductor_passes.compress.choose import Choice, choose
from inductor_passes.compress.emit import SUBJECT, exact, replace
from inductor_passes.compress.refused import RefusedError
from inductor_passes.ir.ops import source_line
from inductor_passes.ir.parameters import carried, names_of
from inductor_passes.ir.view import Collective
from inductor_passes.operators import SENT
from inductor_passes.problems.fx import NoHintError
from inductor_passes.report import Decision, NarrowedReport, PassReport, Reason, Verdict
from inductor_passes.rewriting.contract import Facts, GroupOrder, Outcome, Sent
from inductor_passes.settings.narrowing import BETWEEN, Narrowing


@dataclass(frozen=True)
class CompressPass:
    """See the module's docstring.

    Attributes:
        settings: what may be narrowed, and to what.
    """

    settings: Narrowing
    name: str = SUBJECT
    #: An all_reduce becomes an exchange and a gather, on every rank at the same place.
    group_order: ClassVar[GroupOrder] = "kept"

    def run(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        """Narrow what pays; one decision per collective."""
        sent = _sent(graph, facts.view.collectives)
        kept = sent if self.settings.feedback else {}
        complaints = _inadmissible(self.settings) if facts.view.collectives else ()
        remembers = bool(_calls(graph))
        found: list[Candidate] = []
        decisions: list[Decision] = []
        try:
            for collective in facts.view.collectives:
                try:
                    found.append(candidate(collective, facts, self.settings, collective.start.name in kept))
                except RefusedError as why:
                    decisions.append(_refused(collective, why))
            if not found:
                return _nothing(graph, PassReport(self.name, decisions=decisions), complaints)
            choice = choose(facts.problem.problem, found, facts.limit_bytes)
        except NoHintError as error:
            unknown = RefusedError(Reason.NO_HINT, str(error))
            decisions = [_refused(c, unknown) for c in facts.view.collectives]
            report = PassReport(self.name, decisions=decisions)
            return Outcome(report, notes=_none_of(decisions), complaints=complaints)
        for one in found:
            decisions.append(_taken(one) if one in choice.taken else _refused(one.collective, _left(one, choice)))
        report = PassReport(self.name, changed=bool(choice.taken), decisions=decisions, metrics=_metrics(choice))
        if not choice.taken:
            return _nothing(graph, report, complaints)
        replaced = [
            replace(graph, one.collective, one.form, one.way, kept.get(one.collective.start.name))
            for one in choice.taken
        ]
        certificates = (*(one.certificate for one in replaced), *(exact(graph, node) for node in _calls(graph)))
        narrowed = tuple(Sent(_report(one), made.roundings) for one, made in zip(choice.taken, replaced))
        notes = (_note(choice, self.settings),)
        if self.settings.feedback and not remembers and any(_carries_gradients(one) for one in choice.taken):
            complaints = (*complaints, _FORGOTTEN)
        if any(one.forced for one in choice.taken):
            return Outcome(report, certificates, narrowed=narrowed, forced=True, notes=notes, complaints=complaints)
        return Outcome(
            report, certificates, narrowed=narrowed, before=choice.before, notes=notes, complaints=complaints
        )


def _report(one: Candidate) -> NarrowedReport:
    was, now, form = one.was, one.now, one.form
    return NarrowedReport(
        one.collective.start.name,
        one.collective.label,
        str(one.collective.kind),
        form.name,
        form.block,
        was.sent_bytes,
        now.sent_bytes,
        was.link_ns,
        now.link_ns,
        float(form.error),
        source=source_line(one.collective.start),
        parameters=names_of([one.collective.start]),
    )


def _calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The calls of ``sent``, in graph order."""
    return [node for node in graph.nodes if _torch.op_name(node.target) == SENT]


def _sent(graph: torch.fx.Graph, collectives: Sequence[Collective]) -> dict[str, torch.fx.Node]:
    """By the name of its start: the call of ``sent`` of what a collective carries, where it is the only one behind it.

    What several collectives carry may arrive in several forms.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    calls, found = _calls(graph), {}
    for collective in collectives:
        if len(collective.inputs) != 1:
            continue
        (source,) = collective.inputs
        own = [node for node in calls if node.args[0] is source]
        alone = sum(source in other.inputs for other in collectives) == 1
        if len(own) == 1 and alone and place[own[0]] > place[collective.start]:
            found[collective.start.name] = own[0]
    return found


def _nothing(graph: torch.fx.Graph, report: PassReport, complaints: tuple[str, ...]) -> Outcome:
    """Nothing is narrowed, so nothing is lost that could be kept."""
    certificates, notes = tuple(exact(graph, node) for node in _calls(graph)), _none_of(report.decisions)
    if not certificates:
        return Outcome(report, notes=notes, complaints=complaints)
    report.changed = True
    return Outcome(report, certificates, forced=True, notes=notes, complaints=complaints)


def _none_of(decisions: Sequence[Decision]) -> tuple[str, ...]:
    """Why nothing is narrowed, for whoever reads nothing else; nothing to say of what the settings leave out."""
    asked = [one for one in decisions if one.reason is not Reason.DISABLED]
    if not asked:
        return ()
    counts = Counter(one.reason for one in asked)
    said = [f"{count} {reason.value} ({_first(asked, reason)})" for reason, count in counts.most_common()]
    return (f"compress: 0 of {len(asked)} message{'s' * (len(asked) > 1)} narrowed: {', '.join(said)}",)


def _first(decisions: Sequence[Decision], reason: Reason) -> str:
    one = next(decision for decision in decisions if decision.reason is reason)
    return f"{one.node}: {one.detail}" + (f"; {one.setting} changes it" if one.setting else "")


def _inadmissible(settings: Narrowing) -> tuple[str, ...]:
    """What is asked for and what no message can get, because it errs more than ``compress_error`` admits."""
    found = []
    for name in dict.fromkeys(mode.partition(BETWEEN)[0] for _, mode in settings.rules if mode != "off"):
        try:
            admitted(name, settings)
        except RefusedError as why:
            limit = f"compress_error admits {float(settings.error):g}"
            found.append(f'compress: "{name}" narrows nothing: {why.detail}, and {limit}; {why.setting} admits it')
    return tuple(found)


def _carries_gradients(one: Candidate) -> bool:
    """A parameter's, of data parallelism: what ``add_feedback`` gives memory to."""
    return one.collective.kind.reduces and any(each.managed for each in carried(one.collective.start))


_FORGOTTEN = (
    'compress_feedback="on" keeps nothing of what narrowed gradients lose: no parameter of this graph has memory for '
    "it; call inductor_passes.add_feedback(model) before the first step"
)


def _note(choice: Choice, settings: Narrowing) -> str:
    """What was narrowed, for whoever reads nothing else."""
    count, taken = len(choice.taken), choice.taken
    names = ", ".join(sorted({one.form.name for one in taken}))
    was, now = (sum(price.sent_bytes for price in prices) for prices in zip(*((one.was, one.now) for one in taken)))
    error = max(float(one.form.error) for one in taken)
    levels = sum(one.way is not None for one in taken)
    apart = f" ({levels} between hosts only)" if levels else ""
    return (
        f"compress: {count} collective{'s' * (count > 1)} sent as {names}{apart}, {was} -> {now} bytes per rank; "
        f"each rounding moves an element by at most {error:g} of the largest one in its block{_kept(taken, settings)}"
    )


def _kept(taken: Sequence[Candidate], settings: Narrowing) -> str:
    """What becomes of the errors."""
    count = sum(one.kept for one in taken)
    # What gathers of weights lose is never kept, so that none of them is needs no advice.
    if not settings.feedback or not (count or any(one.collective.kind.reduces for one in taken)):
        return ""
    return f"; {count} of them with error feedback" + ("" if count else ": see inductor_passes.add_feedback")


def _left(one: Candidate, choice: Choice) -> RefusedError:
    """Why a candidate that would save time on its own lanes is left alone."""
    if all(taken.forced for taken in choice.taken):
        said = f"the planned step would be {choice.before.makespan_ns} -> {choice.all_ns} ns"
        return RefusedError(Reason.NOT_PROFITABLE, said, gain_ns=one.gain_ns)
    return RefusedError(Reason.HIDDEN, "the planned step is no longer without it: compute hides it as it is")


def _taken(one: Candidate) -> Decision:
    was, now, form = one.was, one.now, one.form
    scales = f" in blocks of {form.block}" if form.share else ""
    detail = (
        f"{one.collective.label} as {form.name}{scales}{_where(one)}: "
        f"{was.sent_bytes} -> {now.sent_bytes} bytes sent{' between hosts' if one.way else ''}, "
        f"each rounding within {float(form.error):g} of a block's largest element; "
        f"link {was.link_ns} -> {now.link_ns} ns, {one.compute_ns} ns of compute"
    )
    kept = "; what it loses is added to the next one" if one.kept else ""
    reason = Reason.ASKED if one.forced else Reason.PROFITABLE
    return _decision(one.collective, Verdict.APPLIED, reason, detail + kept, gain_ns=one.gain_ns)


def _where(one: Candidate) -> str:
    if one.way is None:
        return ""
    inside, hosts = one.way.levels.inside.size, one.way.levels.between.size
    return f" between {hosts} hosts, wide inside each one ({inside} ranks)"


def _refused(collective: Collective, why: RefusedError) -> Decision:
    return _decision(collective, Verdict.REFUSED, why.reason, why.detail, why.setting, why.gain_ns)


def _decision(
    collective: Collective, verdict: Verdict, reason: Reason, detail: str, setting: str = "", gain_ns: int = 0
) -> Decision:
    return Decision(
        SUBJECT,
        collective.start.name,
        verdict,
        reason,
        detail,
        source_line(collective.start),
        collective.group.name,
        gain_ns,
        setting,
        names_of([collective.start]),
    )


def _metrics(choice: Choice) -> dict[str, float]:
    return {
        "narrowed": len(choice.taken),
        "bytes_before": sum(one.was.sent_bytes for one in choice.taken),
        "bytes_after": sum(one.now.sent_bytes for one in choice.taken),
        "link_before_ns": sum(one.was.link_ns for one in choice.taken),
        "link_after_ns": sum(one.now.link_ns for one in choice.taken),
        "makespan_before_ns": choice.before.makespan_ns,
        "makespan_after_ns": choice.after_ns,
    }
