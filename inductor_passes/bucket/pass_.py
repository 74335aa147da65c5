"""Fewer, larger collectives where latency costs more than the copies.

before::

    AG0 W0 mm AG1 W1 mm AG2 W2 mm

after::

    AG0' W0' mm mm AG2 W2 mm          (AG0' carries what AG0 and AG1 did)

Partitions come from functions of candidates, dependencies and costs; the planner judges them (``choose``), with the
copies charged and the budget kept, before the graph is touched. All-to-alls are trusted to be of equal size on all
ranks when their splits are equal on this one; see ``uneven_all_to_all``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch.fx

from inductor_passes.bucket.candidates import SUBJECT, Candidate, GroupKey, candidates, refusal
from inductor_passes.bucket.choose import PARTITIONS, Choice, Proposal, choose, proposal
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.bucket.handed import handed
from inductor_passes.bucket.lines import coalesces
from inductor_passes.bucket.question import Partition
from inductor_passes.bucket.room import Capped, Room
from inductor_passes.bucket.same_sums import same_sums
from inductor_passes.ir import results
from inductor_passes.ir.canonical import UNEQUAL
from inductor_passes.ir.ops import source_line
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.pin.pins import GivenUp, Pins
from inductor_passes.problems.fx import NoHintError
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.rewriting.contract import NOT_AGREED, Facts, GroupOrder, Outcome, Solved
from inductor_passes.rewriting.members import KINDS
from inductor_passes.rewriting.merge import Form, MergedCollective, MergeError, merge
from inductor_passes.rewriting.step_facts import facts_of
from inductor_passes.verify import Certificate, Claim


@dataclass(frozen=True)
class BucketPass:
    """See the module's docstring.

    Attributes:
        kinds: which collectives are bucketed.
        form: ``auto`` avoids the copies where the group's backend can, ``packed`` and ``coalesced`` insist.
        partitions: propose buckets; the best proposal by the planner's evaluation is taken.
        uneven_all_to_all: bucket all_to_alls with unequal splits too. Their sizes differ between ranks: only for a
            partition that does not look at them.
        effort: of the planner that judges, see ``schedule.plan.plan``.
        exact: copies that Inductor's code would read in a sum, and add in another order, are made apart.
        call_copies: copies on a CPU that Inductor would make a loop of its own for are calls, see ``merge``.
        given_up: why buckets that a plan file pins are not made, "" to make them.
        dropped: proposals that the merged graph did not keep.
    """

    kinds: tuple[str, ...] = KINDS
    form: Literal["auto", "packed", "coalesced"] = "auto"
    partitions: tuple[Partition, ...] = PARTITIONS
    uneven_all_to_all: bool = False
    effort: int = 0
    exact: bool = True
    call_copies: bool = False
    given_up: str = ""
    dropped: tuple[Proposal, ...] = ()
    name: str = "bucket"
    #: What was not merged keeps its order unless a merge forces another, then the same one on every rank.
    group_order: ClassVar[GroupOrder] = "any"

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"kinds is {self.kinds!r}; {unknown} are not among {', '.join(KINDS)}")
        if self.form not in ("auto", "packed", "coalesced"):
            raise ValueError(f'form is {self.form!r}; expected "auto" or "packed" or "coalesced"')

    def run(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        """Merge what pays; the graph is unchanged when nothing does."""
        given_up = self.given_up
        if not given_up and facts.pins is not None and facts.pins.buckets is not None:
            try:
                return self._pinned(graph, facts, facts.pins)
            except GivenUp as error:
                given_up = str(error)
        return replace(self._chosen(graph, facts), given_up=given_up)

    def _chosen(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        view, limit = facts.view, facts.limit_bytes
        found, decisions = candidates(
            view, uneven_all_to_all=self.uneven_all_to_all, apart=facts.apart, uneven=facts.shards.uneven
        )
        off = [c for c in found if c.collective.kind not in self.kinds]
        decisions += [refusal(c.collective, Reason.DISABLED, "kind switched off") for c in off]
        found = [c for c in found if c.collective.kind in self.kinds]
        if not found:
            return Outcome(PassReport(self.name, decisions=decisions))
        try:
            fx = facts.problem
        except NoHintError as error:
            return self._nothing(view, Reason.NO_HINT, str(error))
        if not facts.ranks_agree:
            return self._nothing(view, Reason.RANKS_DIFFER, UNEQUAL if facts.agreed else NOT_AGREED)
        coalesced = frozenset(name for name in {c.key.group for c in found} if self._coalesces(name))
        costs = BucketCosts(
            view,
            facts.profile,
            coalesced,
            facts.shards.owner,
            compute=fx.costs,
            uneven=bool(facts.shards.uneven),
            exact=self.exact,
            call_copies=self.call_copies,
        )
        dependencies = Dependencies(view, fx.kept)
        generated = _generated(facts)
        step = facts_of(graph)
        proposed = () if step is None else step.proposed
        partitions = self.partitions
        if proposed:
            partitions = (*partitions, functools.partial(handed, proposed=proposed))
        if (before := facts.sums) is not None:
            partitions = tuple(functools.partial(same_sums, partition=one, before=before) for one in partitions)
        choice = choose(
            fx.problem,
            found,
            dependencies,
            costs,
            partitions,
            limit,
            effort=self.effort,
            start=facts.solved,
            generated=generated,
            dropped=self.dropped,
            beat_ns=facts.beat_ns,
        )
        other = None if generated is None else generated.room()
        room = None if limit is None else Room(fx.problem, limit, other)
        report = PassReport(self.name, decisions=decisions + _decisions(found, choice, dependencies, costs, room))
        report.metrics = _metrics(choice, len(view.collectives))
        report.metrics["lower_bound_any_buckets_ns"] = choice.bound_ns
        solved = Solved(choice.problem, choice.plan, choice.searched)
        if not choice.buckets:
            return Outcome(report, solved=solved)
        forms: list[Form] = ["coalesced" if b[0].key.group in coalesced else "packed" for b in choice.buckets]
        groups = [sorted((c.collective for c in b), key=lambda c: c.index) for b in choice.buckets]
        merged = self._merge(graph, facts, groups, forms)
        report.changed = True
        # What is planned here is a forecast: where the merged graph keeps less of it, the other proposals are left.
        otherwise = replace(self, dropped=(*self.dropped, proposal(choice.buckets)))
        return replace(_merged(report, merged), before=choice.before, solved=solved, otherwise=otherwise)

    def _nothing(self, view: GraphView, reason: Reason, detail: str) -> Outcome:
        return Outcome(PassReport(self.name, decisions=[refusal(c, reason, detail) for c in view.collectives]))

    def _pinned(self, graph: torch.fx.Graph, facts: Facts, pins: Pins) -> Outcome:
        """Merge what the pinned plan says, members in its order: the graph may have them in another one.

        Raises:
            GivenUp, PlanFileError: it cannot be done; the graph is unchanged.
        """
        view = facts.view
        by_name = {c.start.name: c for c in view.collectives}
        groups = []
        for number, bucket in enumerate(pins.buckets or ()):
            unknown = [name for name in bucket if name not in by_name]
            if unknown:
                pins.refuse(f"`buckets[{number}]` names {', '.join(unknown)}, which the graph does not have")
            groups.append([by_name[name] for name in bucket])
        forms: list[Form] = ["coalesced" if self._coalesces(g[0].group.name) else "packed" for g in groups]
        origins = [(c.start.name, source_line(c.start), c.group.name) for c in view.collectives]
        try:
            merged = self._merge(graph, facts, groups, forms) if groups else []
        except MergeError as error:
            pins.refuse(f"`buckets` is not allowed: {error}")
        together = {name for m in merged for name in m.members}
        decisions = [
            Decision(
                SUBJECT,
                name,
                Verdict.APPLIED if name in together else Verdict.REFUSED,
                Reason.PLAN_PINNED,
                source=source,
                group=group,
            )
            for name, source, group in origins
        ]
        outcome = _merged(PassReport(self.name, changed=bool(merged), decisions=decisions), merged)
        return replace(outcome, forced=True, pinned="buckets")

    def _merge(
        self, graph: torch.fx.Graph, facts: Facts, groups: Sequence[Sequence[Collective]], forms: Sequence[Form]
    ) -> list[MergedCollective]:
        mine = results.of_user(graph, facts.phase)
        view, exact, calls = facts.view, self.exact, self.call_copies
        return merge(graph, view, groups, forms=forms, keep_sums=exact, call_copies=calls, results=mine)

    def _coalesces(self, group: str) -> bool:
        if self.form != "auto":
            return self.form == "coalesced"
        return coalesces(group)


def _generated(facts: Facts) -> Capped | None:
    """The memory of the code that will be generated, where that has a cap of its own."""
    limit, problem = facts.cap.generated_limit_bytes, facts.problem.generated
    return Capped(problem, limit) if limit is not None and problem is not None else None


def _merged(report: PassReport, merged: Sequence[MergedCollective]) -> Outcome:
    return Outcome(
        report,
        certificates=tuple(Certificate(SUBJECT, m.removed, m.added, m.results, claim=Claim.MERGE) for m in merged),
        buckets=tuple(m.members for m in merged),
        carriers=tuple(m.start for m in merged),
    )


def _metrics(choice: Choice, collectives: int) -> dict[str, float]:
    after = collectives - sum(len(bucket) - 1 for bucket in choice.buckets)
    metrics: dict[str, float] = {"collectives_before": collectives, "collectives_after": after}
    for name, one in (("before", choice.before), ("after", choice.after)):
        if one is not None:
            metrics |= {f"makespan_{name}_ns": one.makespan_ns, f"peak_{name}_bytes": one.peak_bytes}
    return metrics


def _decisions(
    found: Sequence[Candidate], choice: Choice, dependencies: Dependencies, costs: BucketCosts, room: Room | None
) -> list[Decision]:
    """One decision per candidate."""
    buckets = choice.buckets or choice.tried
    bucket_of = {member: number for number, bucket in enumerate(buckets) for member in bucket}
    gains = [costs.gain_ns([costs.load([member]) for member in bucket]) for bucket in buckets]
    at = {}
    by_key: dict[GroupKey, list[Candidate]] = {}
    for candidate in found:
        same = by_key.setdefault(candidate.key, [])
        at[candidate] = len(same)
        same.append(candidate)
    decisions = []
    for candidate in found:
        number = bucket_of.get(candidate)
        if number is None:
            others, here = by_key[candidate.key], at[candidate]
            neighbours = [*others[max(0, here - 1) : here], *others[here + 1 : here + 2]]
            decisions.append(_single(candidate, neighbours, dependencies, costs, room))
            continue
        if choice.objection is not None:
            setting = "memory_budget" if choice.objection is Reason.OVER_BUDGET else ""
            decisions.append(refusal(candidate.collective, choice.objection, _comparison(choice), setting=setting))
            continue
        bucket, gain = buckets[number], gains[number]
        labels = f"{bucket[0].collective.label} to {bucket[-1].collective.label}"
        decisions.append(
            Decision(
                SUBJECT,
                candidate.collective.start.name,
                Verdict.APPLIED,
                Reason.PROFITABLE,
                f"one of {len(bucket)}, {labels}; the bucket saves {gain} ns on all lanes, copies included",
                source=source_line(candidate.collective.start),
                group=candidate.key.group,
                gain_ns=gain // len(bucket),
            )
        )
    return decisions


def _comparison(choice: Choice) -> str:
    before, after = choice.before, choice.after
    assert after is not None
    return (
        f"planned step {before.makespan_ns} -> {after.makespan_ns} ns, "
        f"peak {before.peak_bytes} -> {after.peak_bytes} bytes, budget {before.budget_bytes}"
    )


def _single(
    candidate: Candidate,
    neighbours: Sequence[Candidate],
    dependencies: Dependencies,
    costs: BucketCosts,
    room: Room | None,
) -> Decision:
    """Why a candidate stayed alone: its neighbours in graph order depend on it, or merging does not pay."""
    free = [n for n in neighbours if dependencies.conflict([n.collective], candidate.collective) is None]
    if not free:
        names = " and ".join(n.collective.label for n in neighbours)
        return refusal(candidate.collective, Reason.DATA_DEPENDENCY, f"between it and {names}")
    gain = max(costs.gain_ns([costs.load([n]), costs.load([candidate])]) for n in free)
    if gain > 0 and room is not None:
        pairs = [([n, candidate], costs.extra_bytes(costs.load([n, candidate]))) for n in free]
        short = [(extra, max(0, room.free_bytes(room.span(pair)))) for pair, extra in pairs]
        if all(extra > left for extra, left in short):
            extra, left = short[0]
            detail = f"with {free[0].collective.label} it takes {extra} bytes more, the budget leaves {left} there"
            return refusal(candidate.collective, Reason.MEMORY_BUDGET, detail, gain_ns=gain, setting="memory_budget")
    detail = f"with {free[0].collective.label} it would save {gain} ns on all lanes, copies included"
    return refusal(candidate.collective, Reason.NOT_PROFITABLE, detail, gain_ns=gain)
