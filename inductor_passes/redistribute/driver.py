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
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch.fx

from inductor_passes import _torch
from inductor_passes.budget import exceeds, gathers_twice, graph_peak_bytes, may_be_asked
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.ops import source_line
from inductor_passes.ir.view import GraphView, behind
from inductor_passes.pipeline import Context
from inductor_passes.report import Decision, PassReport, Reason, Verdict

from . import audit
from .coalesced import Taken
from .rewrites import REWRITES
from .rewriting import Exactness, Match, Refusal, Rewrite, Work, check_exactness

MAX_ROUNDS = 8
#: How often it is tried which coalesced collectives to take apart; the last time none is.
MAX_ATTEMPTS = 4


@dataclass(frozen=True)
class RewriteCollectives:
    """The pass.

    Attributes:
        exactness: which rewrites may be applied, see ``docs/redistribute.md``; ``off`` decides but applies nothing.
        only: names of rewrites to run, e.g. ``("R1",)``; () for all, and a list of all redistributions for the report.
    """

    exactness: Exactness = "exact"
    only: tuple[str, ...] = ()
    name: str = "redistribute"
    group_order: ClassVar[Literal["kept", "any"]] = "any"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)
        known = [rewrite.name for rewrite in REWRITES]
        for name in self.only:
            if name not in known:
                raise ValueError(f"there is no rewrite {name!r}; expected some of {', '.join(known)}")

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """What runs."""
        return tuple(r for r in REWRITES if not self.only or r.name in self.only)

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Apply rewrites until none matches. What lengthens lifetimes is undone when the memory budget says so."""
        found = [] if self.only else audit.listed(context.view(graph))
        # Only what lengthens lifetimes is held to the budget, and only then is the peak worth its price.
        duplicates = gathers_twice(context.view(graph))
        before = graph_peak_bytes(graph, context) if duplicates else None
        may_extend = not duplicates or may_be_asked(graph, context)
        taken = Taken(graph, context)
        run = self._settled(taken, may_extend)
        if run.extended and context.snapshot is not None and exceeds(graph, context, before):
            taken.undo()
            run = self._settled(taken, may_extend=False)
        certificates = run.work.applications.certificates()
        context.certificates.extend(certificates)
        report = PassReport(self.name, changed=bool(certificates))
        # What another rewrite made away with is no candidate any more.
        refused = [d for (_, root), d in run.refused.items() if run.work.alive(root)]
        report.decisions = [*run.applied, *refused, *taken.refused]
        report.metrics = {"applied": len(run.applied), "rounds": run.rounds, "visits": run.work.visits}
        if found:
            after = GraphView(graph) if certificates else context.view(graph)
            context.report.redistributions = audit.settled(found, report.decisions, certificates, after)
        return report

    def _settled(self, taken: Taken, may_extend: bool) -> _Run:
        """A run to the fixpoint in which only those coalesced collectives were taken apart for which that pays."""
        apart = taken.candidates() if self.exactness != "off" else frozenset()
        for attempt in range(MAX_ATTEMPTS):
            splits = taken.apart(apart) if self.exactness != "off" else []
            work = Work(taken.graph, taken.context, self.exactness, splits)
            run = _Run(work, self.rewrites, self.exactness, may_extend)
            run.to_fixpoint()
            decisions = taken.together(work, splits, run.families, list(run.refused.items()))
            if {d.node for d in decisions} == apart:
                run.applied += decisions
                break
            taken.undo()
            apart = frozenset(d.node for d in decisions) if attempt < MAX_ATTEMPTS - 2 else frozenset()
        return run


@dataclass
class _Run:
    work: Work
    rewrites: tuple[Rewrite, ...]
    exactness: Exactness
    may_extend: bool = True
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
            if self.exactness == "off":
                raise Refusal(Reason.DISABLED, match.detail, 'redistribute="exact"')
            if match.gain_ns < 0:
                raise Refusal(Reason.NOT_PROFITABLE, f"{match.loss} by {-match.gain_ns} ns")
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
