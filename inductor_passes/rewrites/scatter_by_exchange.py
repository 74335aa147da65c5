"""A reduce_scatter as an exchange and a local sum, on links where the library sends more than it has to.

before::

    y = wait(reduce_scatter(x, op, a))

after::

    r = wait(all_to_all(x, a)); y = r[0] + r[1] + ...       (pieces of all ranks, in rank order)

A reduce_scatter over ``n`` ranks has to send ``(n - 1) / n`` of its input per rank, and so does the exchange. Libraries
that reduce to every rank and keep a piece send twice that (gloo, as measured between two hosts), so a measured cost
profile says which is faster; datasheet defaults never prefer the exchange. Runs behind bucketing, which merges
reductions, and in front of scheduling.

Sums of two terms are the same bits in every order; with more ranks rank order is another order than the library's, so
that takes ``redistribute="reassociate"``. Types narrower than float32 are summed in it and rounded once. What arrives
is as large as what is sent, instead of one piece of it, unless the library copies that much anyway: where the memory
budget does not hold all, the ones that save most are taken.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.fx

from inductor_passes.ir import ops
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.rewrites.packing import static_shape
from inductor_passes.rewrites.work import Exactness, check_exactness
from inductor_passes.rewriting.contract import NOT_AGREED, Facts, GroupOrder, Outcome
from inductor_passes.rewriting.emit import NARROW, Emitter
from inductor_passes.rewriting.exchange import exchanged
from inductor_passes.schedule.memory import RangeMax, profile
from inductor_passes.verify.certificate import Certificate
from inductor_passes.verify.values import Numerics

aten = torch.ops.aten
#: Below this share of the reduction's time on the link the measurement's noise would decide.
LEAST_GAIN = 0.1
#: The part of the pass that may be left out: exchanges for which there is no room where they are.
TOO_LARGE = "large"


@dataclass(frozen=True)
class ScatterByExchange:
    """The pass; see the module's docstring.

    Attributes:
        exactness: as of ``RewriteCollectives``.
        fitting: only those for which there is room where they are; what to run when all together are above the cap.
    """

    exactness: Exactness = "exact"
    fitting: bool = False
    name: str = "exchange"
    group_order: ClassVar[GroupOrder] = "kept"

    @property
    def numerics(self) -> Numerics:
        """What the verifier takes for an equal value."""
        return "reassociate" if self.exactness == "reassociate" else "exact"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)

    @property
    def left_out(self) -> tuple[str, ...]:
        """See ``contract.InParts``: the exchanges for which there is no room."""
        return (TOO_LARGE,) if self.fitting else ()

    def without(self, parts: Collection[str]) -> ScatterByExchange:
        """See ``contract.InParts``."""
        if unknown := sorted(set(parts) - {TOO_LARGE}):
            raise ValueError(f"{self.name} has no part {unknown[0]!r}; expected {TOO_LARGE}")
        return replace(self, fitting=self.fitting or bool(parts))

    def may_shorten(self, facts: Facts) -> bool:
        """Only a measured profile can say that an exchange is faster."""
        return facts.profile.measured

    def run(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        """Replace what pays; one decision per reduce_scatter for which the exchange would be faster."""
        decisions: list[Decision] = []
        candidates: list[tuple[int, Collective]] = []
        for collective in facts.view.collectives:
            gain = _gain_ns(collective, facts)
            if gain is None or collective.in_place or any(s.writers for s in facts.view.storages.of(collective.start)):
                continue
            why = self._refusal(collective, facts)
            if why is None:
                candidates.append((gain, collective))
            else:
                decisions.append(_decision(collective, Verdict.REFUSED, *why))
        candidates.sort(key=lambda entry: -entry[0])
        wanted = [c for _, c in candidates]
        taken = _fitting(facts, wanted) if self.fitting else wanted
        for gain, collective in candidates:
            if collective in taken:
                decisions.append(_decision(collective, Verdict.APPLIED, Reason.PROFITABLE, gain_ns=gain))
            else:
                budget = Reason.MEMORY_BUDGET, 'memory_budget="unlimited"', "what arrives is as large as what is sent"
                decisions.append(_decision(collective, Verdict.REFUSED, *budget))
        certificates = tuple(_replace(graph, collective) for collective in taken)
        report = PassReport(self.name, changed=bool(taken), decisions=decisions)
        return Outcome(report, certificates, otherwise=None if self.fitting else self.without((TOO_LARGE,)))

    def _refusal(self, collective: Collective, facts: Facts) -> tuple[Reason, str, str] | None:
        """Reason, setting that would change it, and detail."""
        if self.exactness == "off":
            return Reason.DISABLED, 'redistribute="exact"', ""
        if not facts.agreed:
            return Reason.RANKS_DIFFER, "", NOT_AGREED
        if collective.start.name in facts.apart:
            return Reason.UNSUPPORTED, "", "one of the parts of a collective that was cut to overlap"
        floating = any(dtype.is_floating_point or dtype.is_complex for dtype in collective.dtypes)
        if collective.group.size > 2 and floating and self.exactness != "reassociate":
            return Reason.NUMERICS, 'redistribute="reassociate"', "sums in another order"
        if facts.limit_bytes is not None and not facts.ranks_agree:
            return Reason.RANKS_DIFFER, 'memory_budget="unlimited"', ""
        return None


def _fitting(facts: Facts, wanted: list[Collective]) -> list[Collective]:
    """Those for which there is room between start and wait in the graph's order, the first of ``wanted`` first."""
    if facts.limit_bytes is None:
        return wanted
    fx = facts.problem
    task = {node: i for i, members in enumerate(fx.members) for node in members}
    room = RangeMax(profile(fx.problem))
    held = {s.producer: s.size_bytes for s in fx.problem.storages if s.workspace}
    taken = []
    for collective in wanted:
        first, last = task[collective.start], max(task[wait] for wait in collective.waits)
        # The pieces of all ranks arrive, where a library that reduces a copy had that (gloo). Their sum takes what the
        # reduction's result took.
        extra = max(0, (collective.input_bytes or 0) - held.get(first, 0))
        if room.max(first, last + 1) + extra <= facts.limit_bytes:
            room.add(first, last + 1, extra)
            taken.append(collective)
    return taken


def _gain_ns(collective: Collective, facts: Facts) -> int | None:
    """Time that the exchange saves on the link, less its sum's; None when that is not enough."""
    simple = len(collective.inputs) == 1 and len(collective.waits) == 1 and len(collective.start.users) == 1
    if collective.kind != CollectiveKind.REDUCE_SCATTER or not simple or collective.reduce_op not in ("sum", "avg"):
        return None
    shape, group = static_shape(collective.inputs[0]), collective.group
    given, kept = collective.input_bytes, collective.output_bytes
    if shape is None or not given or not kept or group.size < 2 or not shape or shape[0] % group.size:
        return None
    costs = facts.profile
    before, origin = costs.communication_estimate(CollectiveKind.REDUCE_SCATTER, given, kept, group.ranks)
    after, other = costs.communication_estimate(CollectiveKind.ALL_TO_ALL, given, given, group.ranks)
    if not {origin, other} <= {"measured", "scaled"}:
        # One measured and one from a datasheet say nothing about each other.
        return None
    after += costs.compute_ns(0, given + kept, "float32")
    return before - after if before - after > LEAST_GAIN * before else None


def _replace(graph: torch.fx.Graph, collective: Collective) -> Certificate:
    """Rewrite one reduce_scatter in place."""
    start, wait = collective.start, collective.waits[0]
    ranks, source = collective.group.size, start.all_input_nodes[0]
    rows = source.meta["val"].shape[0] // ranks
    dtype: torch.dtype = wait.meta["val"].dtype
    issue, use = Emitter(graph, start), Emitter(graph, wait)
    with issue.standing_for(start):
        received = exchanged(issue, source, [rows] * ranks, [rows] * ranks, collective.group.name)
    # The exchange is waited for where the reduction was.
    wait.append(received)
    use.cursor = received
    with use.standing_for(wait):
        total: torch.fx.Node | None = None
        for rank in range(ranks):
            term = use.cut(received, 0, rank * rows, (rank + 1) * rows)
            if dtype in NARROW:
                term = use.call(torch.ops.prims.convert_element_type.default, term, torch.float32)
            total = term if total is None else use.call(aten.add.Tensor, total, term)
        assert total is not None
        if collective.reduce_op == "avg":
            total = use.call(aten.div.Tensor, total, ranks)
        if total.meta["val"].dtype != dtype:
            total = use.call(torch.ops.prims.convert_element_type.default, total, dtype)
    wait.replace_all_uses_with(total)
    names = wait.name, start.name
    graph.erase_node(wait)
    graph.erase_node(start)
    made = tuple(node.name for node in (*issue.made, *use.made))
    return Certificate("exchange", removed=names, added=made, replaced=((names[0], total.name),))


def _decision(
    collective: Collective, verdict: Verdict, reason: Reason, setting: str = "", detail: str = "", gain_ns: int = 0
) -> Decision:
    shown = f"{collective.label}: an exchange and a sum" + (f"; {detail}" if detail else "")
    source = ops.source_line(collective.start)
    return Decision(
        "exchange", collective.start.name, verdict, reason, shown, source, collective.group.name, gain_ns, setting
    )
