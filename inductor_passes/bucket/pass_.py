"""Fewer, larger collectives where latency costs more than the copies.

before::

    AG0 W0 mm AG1 W1 mm AG2 W2 mm

after::

    AG0' W0' mm mm AG2 W2 mm          (AG0' carries what AG0 and AG1 did)

The partition comes from a function of candidates, dependencies and costs. The result is judged by the planner: both
graphs are planned under the same memory budget with the copies charged, and the merges are undone when the merged
graph's best order is slower or no longer fits. All-to-alls are trusted to be of equal size on all ranks when their
splits are equal on this one; see ``uneven_all_to_all``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.fx

from inductor_passes import _torch
from inductor_passes.bucket.candidates import SUBJECT, Candidate, GroupKey, candidates, refusal
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.bucket.greedy import Partition, greedy
from inductor_passes.bucket.members import KINDS
from inductor_passes.bucket.rewrite import Form, MergedCollective, merge
from inductor_passes.ir.ops import source_line
from inductor_passes.ir.view import GraphView
from inductor_passes.pipeline import Context
from inductor_passes.reorder.canonical import preparations
from inductor_passes.reorder.problem import NoHintError, build
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import simulate
from inductor_passes.verify import Certificate, Claim

#: Backends that carry out a coalesced collective as one operation on the members' own memory.
COALESCING_BACKENDS = ("nccl", "xccl")


@dataclass(frozen=True)
class BucketPass:
    """See the module's docstring.

    Attributes:
        kinds: which collectives are bucketed.
        form: ``auto`` avoids the copies where the group's backend can, ``packed`` and ``coalesced`` insist.
        partition: chooses the buckets.
        uneven_all_to_all: bucket all_to_alls with unequal splits too. Their sizes differ between ranks: only for a
            partition that does not look at them.
        effort: of the planner that judges, see ``schedule.plan``.
    """

    kinds: tuple[str, ...] = KINDS
    form: Literal["auto", "packed", "coalesced"] = "auto"
    partition: Partition = greedy
    uneven_all_to_all: bool = False
    effort: int = 0
    name: str = "bucket"
    #: What was not merged keeps its order unless a merge forces another, then the same one on every rank.
    group_order: ClassVar[Literal["kept", "any"]] = "any"

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"kinds is {self.kinds!r}; {unknown} are not among {', '.join(KINDS)}")
        if self.form not in ("auto", "packed", "coalesced"):
            raise ValueError(f'form is {self.form!r}; expected "auto" or "packed" or "coalesced"')

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Merge what pays; ``rolled_back`` asks the caller to restore the graph."""
        view = GraphView(graph)
        report = PassReport(self.name)
        found, report.decisions = candidates(view, uneven_all_to_all=self.uneven_all_to_all)
        off = [c for c in found if c.collective.kind not in self.kinds]
        report.decisions += [refusal(c.collective, Reason.DISABLED, "kind switched off") for c in off]
        found = [c for c in found if c.collective.kind in self.kinds]
        if not found:
            return report
        coalesced = frozenset(name for name in {c.key.group for c in found} if self._coalesces(name))
        try:
            before = build(view, context.profile, name=self.name, estimator=context.config.estimator).problem
        except NoHintError as error:
            report.decisions = [refusal(c, Reason.NO_HINT, str(error)) for c in view.collectives]
            return report
        peak = simulate(before).peak_bytes
        limit = context.config.budget.limit_bytes(peak)
        costs = BucketCosts(view, context.profile, coalesced, None if limit is None else max(0, limit - peak))
        dependencies = Dependencies(view)
        buckets = self.partition(found, dependencies, costs)
        report.decisions += _decisions(found, buckets, dependencies, costs)
        if not buckets:
            return report
        forms: list[Form] = ["coalesced" if b[0].key.group in coalesced else "packed" for b in buckets]
        merged = merge(graph, view, [[c.collective for c in b] for b in buckets], forms=forms)
        report.changed = True
        now = GraphView(graph)
        after = build(now, context.profile, name=self.name, estimator=context.config.estimator).problem
        self._judge(report, before, comparable(before, after, _unseen_copies(now, merged, buckets, costs)), limit)
        if report.rolled_back is None:
            context.certificates.extend(Certificate(SUBJECT, m.removed, m.added, claim=Claim.MERGE) for m in merged)
        report.metrics |= {
            "collectives_before": len(view.collectives),
            "collectives_after": len(view.collectives) - sum(len(m.members) - 1 for m in merged),
        }
        return report

    def _coalesces(self, group: str) -> bool:
        if self.form != "auto":
            return self.form == "coalesced"
        return _torch.group_backend(group) in COALESCING_BACKENDS

    def _judge(self, report: PassReport, before: Problem, after: Problem, limit: int | None) -> None:
        plans = [plan(problem, limit, effort=self.effort) for problem in (before, after)]
        report.metrics |= {
            "makespan_before_ns": plans[0].makespan_ns,
            "makespan_after_ns": plans[1].makespan_ns,
            "peak_before_bytes": plans[0].peak_bytes,
            "peak_after_bytes": plans[1].peak_bytes,
        }
        reason = _objection(*plans)
        if reason is not None:
            report.rolled_back = reason
            report.detail = (
                f"planned step {plans[0].makespan_ns} -> {plans[1].makespan_ns} ns, "
                f"peak {plans[0].peak_bytes} -> {plans[1].peak_bytes} bytes, budget {limit}"
            )
            report.decisions = [
                dataclasses.replace(d, verdict=Verdict.REFUSED, reason=reason, detail=report.detail)
                if d.verdict is Verdict.APPLIED
                else d
                for d in report.decisions
            ]


def _objection(before: Plan, after: Plan) -> Reason | None:
    """Why the merged graph must not be kept, None when it may."""
    if before.feasible and not after.feasible:
        return Reason.OVER_BUDGET
    if not before.feasible and after.peak_bytes > before.peak_bytes:
        return Reason.OVER_BUDGET
    return Reason.SLOWER if after.makespan_ns > before.makespan_ns else None


def comparable(before: Problem, after: Problem, extra: Mapping[str, int]) -> Problem:
    """``after`` with the copies that it does not see, in ns per start, and with the sizes that ``before`` gives
    storages of both: what prepares a member is as large as the member, not as the message."""
    tasks = tuple(
        dataclasses.replace(t, issue_ns=t.issue_ns + extra[t.name]) if t.name in extra else t for t in after.tasks
    )
    sizes = {s.name: s.size_bytes for s in before.storages}
    storages = tuple(dataclasses.replace(s, size_bytes=sizes.get(s.name, s.size_bytes)) for s in after.storages)
    return dataclasses.replace(after, tasks=tasks, storages=storages)


def _unseen_copies(
    view: GraphView, merged: Sequence[MergedCollective], buckets: Sequence[Sequence[Candidate]], costs: BucketCosts
) -> dict[str, int]:
    """Copies into messages that the problem counts as preparation of a start, which is free: start -> ns."""
    free = preparations(view)
    start_of = {collective.start.name: collective for collective in view.collectives}
    return {
        one.start: costs.pack_ns(bucket)
        for one, bucket in zip(merged, buckets)
        if one.form == "packed" and any(node in free for node in start_of[one.start].inputs)
    }


def _decisions(
    found: Sequence[Candidate], buckets: Sequence[Sequence[Candidate]], dependencies: Dependencies, costs: BucketCosts
) -> list[Decision]:
    """One decision per candidate."""
    bucket_of = {member: bucket for bucket in buckets for member in bucket}
    by_key: dict[GroupKey, list[Candidate]] = {}
    for candidate in found:
        by_key.setdefault(candidate.key, []).append(candidate)
    decisions = []
    for candidate in found:
        bucket = bucket_of.get(candidate)
        if bucket is None:
            decisions.append(_single(candidate, by_key[candidate.key], dependencies, costs))
            continue
        gain = costs.gain_ns([[member] for member in bucket])
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


def _single(
    candidate: Candidate, others: Sequence[Candidate], dependencies: Dependencies, costs: BucketCosts
) -> Decision:
    """Why a candidate stayed alone: its neighbours in graph order depend on it, or merging does not pay."""
    at = others.index(candidate)
    neighbours = [*others[max(0, at - 1) : at], *others[at + 1 : at + 2]]
    free = [n for n in neighbours if dependencies.conflict([n.collective], candidate.collective) is None]
    if not free:
        names = " and ".join(n.collective.label for n in neighbours)
        return refusal(candidate.collective, Reason.DATA_DEPENDENCY, f"between it and {names}")
    gain = max(costs.gain_ns([[n], [candidate]]) for n in free)
    if gain > 0 and costs.room_bytes is not None:
        least = min(costs.extra_bytes([n, candidate]) for n in free)
        if least > costs.room_bytes:
            detail = (
                f"with {free[0].collective.label} it takes {least} bytes more, the budget leaves {costs.room_bytes}"
            )
            return refusal(candidate.collective, Reason.MEMORY_BUDGET, detail, gain_ns=gain, setting="memory_budget")
    detail = f"with {free[0].collective.label} it would save {gain} ns on all lanes, copies included"
    return refusal(candidate.collective, Reason.NOT_PROFITABLE, detail, gain_ns=gain)
