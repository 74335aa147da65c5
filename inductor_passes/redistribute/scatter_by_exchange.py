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
is as large as what is sent, instead of one piece of it: where the memory budget does not hold all, the ones that save
most are taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.fx

from inductor_passes.bucket.emit import Emitter
from inductor_passes.budget import exceeds, graph_peak_bytes, may_be_asked
from inductor_passes.ir import ops
from inductor_passes.ir.view import Collective
from inductor_passes.pipeline import Context
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.verify.certificate import Certificate

from .emitting import exchanged
from .packing import static_shape
from .rewriting import Exactness, check_exactness

aten = torch.ops.aten
#: Below this share of the reduction's time on the link the measurement's noise would decide.
LEAST_GAIN = 0.1
#: Graphs that are tried where the budget does not hold all.
MAX_TRIES = 24
_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ScatterByExchange:
    """The pass; see the module's docstring.

    Attributes:
        exactness: as of ``RewriteCollectives``.
    """

    exactness: Exactness = "exact"
    name: str = "exchange"
    group_order: ClassVar[Literal["kept", "any"]] = "kept"

    def __post_init__(self) -> None:
        check_exactness(self.exactness)

    def run(self, graph: torch.fx.Graph, context: Context) -> PassReport:
        """Replace what pays; one decision per reduce_scatter for which the exchange would be faster."""
        report = PassReport(self.name)
        view = context.view(graph)
        candidates = []
        for collective in view.collectives:
            gain = _gain_ns(collective, context)
            if gain is None or collective.in_place or any(s.writers for s in view.storages.of(collective.start)):
                continue
            why = self._refusal(collective, graph, context)
            if why is None:
                candidates.append((gain, collective))
            else:
                report.decisions.append(_decision(collective, Verdict.REFUSED, *why))
        candidates.sort(key=lambda entry: -entry[0])
        taken = self._within_budget(graph, context, [c for _, c in candidates]) if candidates else set()
        for gain, collective in candidates:
            if collective in taken:
                report.decisions.append(_decision(collective, Verdict.APPLIED, Reason.PROFITABLE, gain_ns=gain))
            else:
                budget = Reason.MEMORY_BUDGET, 'memory_budget="unlimited"', "what arrives is as large as what is sent"
                report.decisions.append(_decision(collective, Verdict.REFUSED, *budget))
        report.changed = bool(taken)
        return report

    def _refusal(
        self, collective: Collective, graph: torch.fx.Graph, context: Context
    ) -> tuple[Reason, str, str] | None:
        """Reason, setting that would change it, and detail."""
        if self.exactness == "off":
            return Reason.DISABLED, 'redistribute="exact"', ""
        floating = any(dtype.is_floating_point or dtype.is_complex for dtype in collective.dtypes)
        if collective.group.size > 2 and floating and self.exactness != "reassociate":
            return Reason.NUMERICS, 'redistribute="reassociate"', "sums in another order"
        if not may_be_asked(graph, context):
            return Reason.RANKS_DIFFER, 'memory_budget="unlimited"', ""
        return None

    def _within_budget(self, graph: torch.fx.Graph, context: Context, wanted: list[Collective]) -> set[Collective]:
        """Replaces those that the budget holds together: all, else halves of them, the ones that save most first."""
        before = graph_peak_bytes(graph, context)
        undo = context.snapshot
        assert undo is not None
        accepted: list[Collective] = []
        certificates: list[Certificate] = []
        tries = [wanted]
        for _ in range(MAX_TRIES):
            if not tries:
                break
            more = tries.pop()
            added = _replace(graph, more)
            if not exceeds(graph, context, before):
                accepted += more
                certificates += added
                continue
            undo.restore()
            certificates = _replace(graph, accepted)
            half = len(more) // 2
            tries += [more[half:], more[:half]] if half else []
        context.forget_view()
        context.certificates.extend(certificates)
        return set(accepted)


def _gain_ns(collective: Collective, context: Context) -> int | None:
    """Time that the exchange saves on the link, less its sum's; None when that is not enough."""
    simple = len(collective.inputs) == 1 and len(collective.waits) == 1 and len(collective.start.users) == 1
    if collective.kind != "reduce_scatter" or not simple or collective.reduce_op not in ("sum", "avg"):
        return None
    shape, group = static_shape(collective.inputs[0]), collective.group
    given, kept = collective.input_bytes, collective.output_bytes
    if shape is None or not given or not kept or group.size < 2 or not shape or shape[0] % group.size:
        return None
    profile = context.profile
    before, origin = profile.communication_estimate("reduce_scatter", given, kept, group.ranks)
    after, other = profile.communication_estimate("all_to_all", given, given, group.ranks)
    if not {origin, other} <= {"measured", "scaled"}:
        # One measured and one from a datasheet say nothing about each other.
        return None
    after += profile.compute_ns(0, given + kept, "float32")
    return before - after if before - after > LEAST_GAIN * before else None


def _replace(graph: torch.fx.Graph, collectives: list[Collective]) -> list[Certificate]:
    """Rewrites reduce_scatters in place, found by name: nodes of a restored graph are new ones."""
    named = {node.name: node for node in graph.nodes}
    return [_replace_one(graph, c, named[c.start.name], named[c.waits[0].name]) for c in collectives]


def _replace_one(
    graph: torch.fx.Graph, collective: Collective, start: torch.fx.Node, wait: torch.fx.Node
) -> Certificate:
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
            term = use.call(aten.slice.Tensor, received, 0, rank * rows, (rank + 1) * rows)
            if dtype in _NARROW:
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
