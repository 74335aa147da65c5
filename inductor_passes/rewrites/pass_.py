"""All rewrites to a fixpoint, the one that saves most time first.

Every root that a rewrite matches enters a queue with its estimated gain (link time and copies, from the cost profile).
The best one is matched again, since what was applied meanwhile may have changed its surroundings, applied, and the
collectives that this made or moved next to each other are asked again. When the queue is empty every root is asked once
more, until a round applies nothing. Ties go to the order of the catalogue, then of the graph, so all ranks do the same.

Coalesced collectives are taken apart first and put together again where nothing came of it (``coalesced``).

Rounds and applications are bounded; every rewrite lowers the estimated time or keeps it and lowers the number of
collectives or of bytes copied, so the bound is a guard and not part of the method.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.ops import source_line
from inductor_passes.ir.view import behind
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.rewrites import audit
from inductor_passes.rewrites.catalogue import REWRITES
from inductor_passes.rewrites.coalesced import Taken
from inductor_passes.rewrites.work import Exactness, Match, Refusal, Rewrite, Work, check_exactness
from inductor_passes.rewriting.contract import NOT_AGREED, Facts, GroupOrder, Outcome
from inductor_passes.verify.values import Numerics

MAX_ROUNDS = 8
#: The part of the pass that may be left out, besides single rewrites: those that keep a tensor alive for longer.
EXTENDING = "extending"
#: How often it is tried which coalesced collectives to take apart; the last time none is.
MAX_ATTEMPTS = 4


@dataclass(frozen=True)
class RewriteCollectives:
    """The pass.

    Attributes:
        exactness: which rewrites may be applied, see ``docs/redistribute.md``; ``off`` decides but applies nothing.
        only: names of rewrites to run, e.g. ``("R1",)``; () for all, and a list of all redistributions for the report.
        may_extend: whether a rewrite may keep a tensor alive for longer.
        not_these: names of rewrites that are not applied because the graph plans faster without them.
        apart: names of the coalesced collectives to take apart; None: all that can be.
        attempt / told: how often the pass has been run on this graph, and what it decided then.
    """

    exactness: Exactness = "exact"
    only: tuple[str, ...] = ()
    may_extend: bool = True
    not_these: frozenset[str] = frozenset()
    apart: frozenset[str] | None = None
    attempt: int = 0
    told: tuple[Decision, ...] = ()
    name: str = "redistribute"
    group_order: ClassVar[GroupOrder] = "any"

    @property
    def numerics(self) -> Numerics:
        """What the verifier takes for an equal value."""
        return "reassociate" if self.exactness == "reassociate" else "exact"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)
        known = [rewrite.name for rewrite in REWRITES]
        for name in (*self.only, *sorted(self.not_these)):
            if name not in known:
                raise ValueError(f"there is no rewrite {name!r}; expected some of {', '.join(known)}")

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """What runs."""
        return tuple(r for r in REWRITES if not self.only or r.name in self.only)

    @property
    def left_out(self) -> tuple[str, ...]:
        """See ``contract.InParts``: rewrites by name, and those that keep a tensor alive for longer."""
        names = [rewrite.name for rewrite in REWRITES if rewrite.name in self.not_these]
        return (*names, *(() if self.may_extend else (EXTENDING,)))

    def without(self, parts: Collection[str]) -> RewriteCollectives:
        """See ``contract.InParts``."""
        names = frozenset(parts) - {EXTENDING}
        if unknown := sorted(names - {rewrite.name for rewrite in REWRITES}):
            known = ", ".join([*(rewrite.name for rewrite in REWRITES), EXTENDING])
            raise ValueError(f"{self.name} has no part {unknown[0]!r}; expected some of {known}")
        return replace(
            self,
            may_extend=self.may_extend and EXTENDING not in parts,
            not_these=self.not_these | names,
            apart=None,
            attempt=0,
            told=(),
        )

    def run(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        """Apply rewrites until none matches."""
        found = [] if self.only else audit.listed(facts.view)
        taken = Taken(facts)
        apart = self._apart(taken, facts)
        splits = taken.apart(graph, apart) if self.exactness != "off" and facts.agreed else []
        work = Work(graph, facts.of(graph) if splits else facts, self.exactness, splits)
        run = _Run(work, self.rewrites, self.exactness, self._may_extend(facts), self.not_these)
        run.to_fixpoint()
        ending = taken.together(work, splits, run.families, list(run.refused.items()))
        told = (*self.told, *ending.refused)
        report = PassReport(self.name)
        if {d.node for d in ending.paid} != apart:
            # Only those are taken apart for which that pays, and the last time none is.
            names = frozenset(d.node for d in ending.paid) if self.attempt < MAX_ATTEMPTS - 2 else frozenset()
            return Outcome(report, again=replace(self, apart=names, attempt=self.attempt + 1, told=told))
        certificates = tuple(work.applications.certificates())
        report.changed = bool(certificates)
        # What another rewrite made away with is no candidate any more.
        refused = [d for (_, root), d in run.refused.items() if work.alive(root)]
        once = {(d.subject, d.node, d.detail): d for d in told}
        report.decisions = [*run.applied, *ending.paid, *refused, *once.values()]
        report.metrics = {
            "applied": len(run.applied) + len(ending.paid),
            "rounds": run.rounds,
            "visits": work.visits,
        }
        after = facts.of(graph) if certificates else facts
        redistributions = tuple(audit.settled(found, report.decisions, certificates, after.view))
        return Outcome(
            report,
            certificates,
            redistributions=redistributions,
            after=after,
            otherwise=self.without((EXTENDING,)) if run.extended else None,
            smaller=self._smaller(run.applied),
        )

    def _smaller(self, applied: Sequence[Decision]) -> tuple[RewriteCollectives, ...]:
        """The pass without one of the rewrites that it applied, the one that should save least first."""
        gains: dict[str, int] = {}
        for one in applied:
            gains[one.subject] = gains.get(one.subject, 0) + one.gain_ns
        return tuple(self.without((name,)) for name in sorted(gains, key=gains.__getitem__)) if len(gains) > 1 else ()

    def _apart(self, taken: Taken, facts: Facts) -> frozenset[str]:
        """Names of the coalesced collectives to take apart."""
        if self.exactness == "off" or not facts.agreed:
            return frozenset()
        return taken.candidates if self.apart is None else self.apart

    def _may_extend(self, facts: Facts) -> bool:
        """Whether a tensor may be kept alive for longer: all ranks have to get one answer from the memory cap."""
        return self.may_extend and (facts.limit_bytes is None or facts.ranks_agree)


@dataclass
class _Run:
    work: Work
    rewrites: tuple[Rewrite, ...]
    exactness: Exactness
    may_extend: bool = True
    not_these: frozenset[str] = frozenset()
    applied: list[Decision] = field(default_factory=list)
    refused: dict[tuple[str, torch.fx.Node], Decision] = field(default_factory=dict)
    queue: list[tuple[int, int, int, torch.fx.Node]] = field(default_factory=list)
    extended: bool = False
    rounds: int = 0
    families: list[tuple[frozenset[str], int]] = field(default_factory=list)
    _entered: int = 0

    def to_fixpoint(self) -> None:
        allowance = 16 + 4 * sum(1 for _ in self.work.graph.nodes)
        while self.rounds < MAX_ROUNDS:
            self.rounds += 1
            done = len(self.applied)
            for number, rewrite in enumerate(self.rewrites):
                for root in list(rewrite.roots(self.work)):
                    self._ask(number, root)
            while self.queue and len(self.applied) < allowance:
                self._apply_best()
            if len(self.applied) == done:
                return

    def _ask(self, number: int, root: torch.fx.Node) -> Match | None:
        match = self._matched(number, root)
        if match is not None:
            heapq.heappush(self.queue, (-match.gain_ns, number, self._entered, root))
            self._entered += 1
        return match

    def _matched(self, number: int, root: torch.fx.Node) -> Match | None:
        rewrite = self.rewrites[number]
        self.work.visits += 1
        key = (rewrite.name, root)
        self.refused.pop(key, None)
        try:
            match = rewrite.match(self.work, root)
            if match is None:
                return None
            if self.work.empty_pieces and not rewrite.local:
                raise Refusal(Reason.UNSUPPORTED, "a rank may hold an empty piece, and would decide otherwise")
            if not self.work.facts.agreed and not rewrite.local:
                raise Refusal(Reason.RANKS_DIFFER, NOT_AGREED)
            if self.exactness == "off":
                raise Refusal(Reason.DISABLED, match.detail, 'redistribute="exact"')
            if match.gain_ns < 0:
                raise Refusal(Reason.NOT_PROFITABLE, f"{match.loss} by {-match.gain_ns} ns")
            if rewrite.name in self.not_these:
                raise Refusal(Reason.SLOWER, f"the whole graph plans faster without {rewrite.name}")
            if match.extends and not self.may_extend:
                raise Refusal(Reason.MEMORY_BUDGET, "keeps a tensor alive for longer", 'memory_budget="unlimited"')
        except Refusal as refusal:
            self.refused[key] = _decision(
                rewrite, root, Verdict.REFUSED, refusal.reason, refusal.detail, 0, refusal.setting
            )
            return None
        return match

    def _apply_best(self) -> None:
        gain, number, _, root = heapq.heappop(self.queue)
        if not self.work.alive(root):
            return
        match = self._matched(number, root)
        if match is None:
            return
        if -match.gain_ns > gain:
            heapq.heappush(self.queue, (-match.gain_ns, number, self._entered, root))
            self._entered += 1
            return
        # The decision is written first: afterwards the root may be gone.
        rewrite = self.rewrites[number]
        self.applied.append(
            _decision(rewrite, root, Verdict.APPLIED, Reason.PROFITABLE, match.detail, match.gain_ns)
        )
        self.work.touched.clear()
        match.apply()
        if self.work.touched:
            self.families.append((frozenset(self.work.touched), match.gain_ns))
        self.extended |= match.extends
        for fresh in self.work.fresh:
            for other, _ in enumerate(self.rewrites):
                if self.work.alive(fresh):
                    self._ask(other, fresh)


def _decision(
    rewrite: Rewrite,
    root: torch.fx.Node,
    verdict: Verdict,
    reason: Reason,
    detail: str,
    gain_ns: int,
    setting: str = "",
) -> Decision:
    group = _torch.op_arguments(root).get("group_name") if _torch.is_op(root.target) else None
    return Decision(
        subject=rewrite.name,
        node=root.name,
        verdict=verdict,
        reason=reason,
        detail=detail,
        source=source_line(root),
        group=resolve(behind(group)).name if group else "",
        gain_ns=gain_ns,
        setting=setting,
    )
