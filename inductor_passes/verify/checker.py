"""The verifier's front door: every rule over one FX graph, optionally against a reference and a memory budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch.fx

from inductor_passes.ir.view import GraphView
from inductor_passes.report import Finding
from inductor_passes.verify import graph as rules
from inductor_passes.verify import memory
from inductor_passes.verify.certificate import Certificate
from inductor_passes.verify.reference import GroupOrder, compare
from inductor_passes.verify.snapshot import ReferenceSnapshot, finding_key, take


def _own_findings(graph: torch.fx.Graph) -> tuple[GraphView | None, list[Finding]]:
    """Rules that need no reference. Without a legal topology nothing else is defined: no view."""
    found = rules.topology(graph)
    if found:
        return None, found
    view = GraphView(graph)
    found = [*rules.waits_and_flight(view), *rules.metadata(view), *_bodies(graph)]
    return view, found


def _bodies(graph: torch.fx.Graph) -> list[Finding]:
    """Findings inside the graphs that higher-order ops run, each checked once, named ``attribute/node``."""
    found: list[Finding] = []
    seen: set[str] = set()
    for node in graph.nodes:
        if node.op != "get_attr" or str(node.target) in seen:
            continue
        seen.add(str(node.target))
        body: object = graph.owning_module
        for part in str(node.target).split("."):
            body = getattr(body, part, None)
        if isinstance(body, torch.fx.GraphModule):
            for f in _own_findings(body.graph)[1]:
                other = f"{node.target}/{f.other}" if f.other else ""
                found.append(dataclasses.replace(f, node=f"{node.target}/{f.node}", other=other))
    return found


def snapshot(graph: torch.fx.Graph, *, donated: Collection[str] = ()) -> ReferenceSnapshot:
    """Plain data about a graph, to hold a later version of it against; O(nodes + edges).

    Args:
        donated: names of graph inputs that are freed after their last use; matters for ``peak_bytes`` only.

    Raises:
        ValueError: the graph uses a value before it is defined.
    """
    view, found = _own_findings(graph)
    if view is None:
        raise ValueError(f"inductor_passes: no snapshot of an illegal graph: {found[0].message}")
    return take(view, found, memory.peak_of(view, donated))


def check(
    graph: torch.fx.Graph,
    *,
    reference: ReferenceSnapshot | torch.fx.Graph | None = None,
    memory_budget: int | None = None,
    donated: Collection[str] = (),
    certificates: Sequence[Certificate] = (),
    group_order: GroupOrder = "kept",
) -> list[Finding]:
    """Everything the verifier holds against a graph; empty when it is legal. O(nodes + edges); reads only.

    Args:
        reference: the graph that this one was made from, or its :func:`snapshot`. With it, also what was lost,
            duplicated, changed or reordered is found; and findings about single nodes that the reference had itself
            are not repeated.
        memory_budget: cap on the peak in bytes (:func:`~inductor_passes.verify.peak_bytes`); None: no cap.
        donated: names of graph inputs that are freed after their last use.
        certificates: what rewrites say that they did since the reference.
        group_order: ``"kept"``: another order of starts within a process group than the reference's is a finding;
            ``"any"``: it is not, because the ranks compare plans.

    Raises:
        ValueError: the reference itself uses a value before it is defined, or ``group_order`` is something else.
    """
    if group_order not in ("kept", "any"):
        raise ValueError(f'inductor_passes: group_order={group_order!r} is not allowed; expected "kept" or "any"')
    before = snapshot(reference) if isinstance(reference, torch.fx.Graph) else reference
    view, found = _own_findings(graph)
    if view is None:
        return found
    peak = memory.peak_of(view, donated)
    if memory_budget is not None:
        found.extend(_budget(peak, memory_budget))
    if before is not None:
        after = take(view, found, peak)
        found = [f for f in found if finding_key(f) not in before.findings]
        found.extend(compare(before, after, certificates, group_order))
    return found


def _budget(peak: int | None, budget: int) -> list[Finding]:
    if peak is None:
        return [Finding("memory", "", f"sizes have no hints: the budget of {budget} bytes cannot be shown to hold")]
    if peak > budget:
        return [Finding("memory", "", f"peak is {peak} bytes, budget {budget} bytes")]
    return []
