"""The verifier's entry point: every rule over one FX graph, optionally against a reference and a memory budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

import torch.fx

from inductor_passes.ir.parameters import names_by_node
from inductor_passes.report import Finding
from inductor_passes.verify import graph as rules
from inductor_passes.verify import levels, memory, values
from inductor_passes.verify.certificate import Certificate
from inductor_passes.verify.facts.higher_order import attribute
from inductor_passes.verify.facts.known import Known
from inductor_passes.verify.facts.view import View
from inductor_passes.verify.reference import GroupOrder, compare, inside
from inductor_passes.verify.snapshot import ReferenceSnapshot, finding_key, take
from inductor_passes.verify.values import Numerics, Replicated

#: How deep bodies may lie in bodies.
_MAX_DEPTH = 32


@dataclasses.dataclass(frozen=True)
class _Look:
    """A graph with its own findings, and those of the graphs that it runs, by attribute."""

    view: View | None
    findings: list[Finding]
    bodies: Mapping[str, _Look]

    def taken(self, peak_bytes: int | None, for_ranks: bool = False) -> ReferenceSnapshot:
        """What the graph is; its view is there."""
        assert self.view is not None
        bodies = {name: body.taken(None) for name, body in self.bodies.items() if body.view is not None}
        return take(self.view, self.findings, peak_bytes, bodies, for_ranks=for_ranks)


def _look(graph: torch.fx.Graph, depth: int = 0, known: Known | None = None) -> _Look:
    """Rules that need no reference. Without a legal topology nothing else is defined: no view."""
    found = rules.topology(graph)
    if found:
        return _Look(None, found, {})
    view = View(graph, known=known)
    bodies = _bodies(graph, depth)
    found = [*rules.waits_and_flight(view), *rules.overwritten_results(view), *rules.metadata(view)]
    for name, body in bodies.items():
        found.extend(inside(name, f) for f in body.findings)
    return _Look(view, found, bodies)


def _bodies(graph: torch.fx.Graph, depth: int) -> dict[str, _Look]:
    """The graphs that higher-order ops run, each looked at once."""
    found: dict[str, _Look] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and str(node.target) not in found:
            body = attribute(node)
            if isinstance(body, torch.fx.GraphModule) and depth < _MAX_DEPTH:
                found[str(node.target)] = _look(body.graph, depth + 1)
    return found


def snapshot(
    graph: torch.fx.Graph,
    *,
    donated: Collection[str] = (),
    for_ranks: bool = True,
    known: Known | None = None,
) -> ReferenceSnapshot:
    """Plain data about a graph, to hold a later version of it against; O(nodes + edges).

    Args:
        donated: names of graph inputs that are freed after their last use; matters for ``peak_bytes`` only.
        for_ranks: whether to keep what :func:`check_ranks` and :func:`digest` compare; half of the time it takes.
        known: what earlier looks at the graph found out about its nodes; filled.

    Raises:
        ValueError: the graph is illegal: it uses a value before it is defined, or nothing can be made of its arguments.
    """
    try:
        look = _look(graph, known=known)
        if look.view is not None:
            return look.taken(memory.peak_of(look.view, donated), for_ranks)
        why = look.findings[0].message
    except Exception as error:  # arguments that no operator takes fail in as many ways as there are operators
        raise ValueError(f"inductor_passes: no snapshot of an illegal graph: {_said(error)}") from error
    raise ValueError(f"inductor_passes: no snapshot of an illegal graph: {why}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclasses.dataclass(frozen=True)
class Checked:
    """What the verifier found.

    Attributes:
        findings: empty when the graph is legal.
        snapshot: of the graph, to hold the next version of it against; None where nothing could be made of it, or there
            was no reference.
    """

    findings: list[Finding]
    snapshot: ReferenceSnapshot | None = None


def check(
    graph: torch.fx.Graph,
    *,
    reference: ReferenceSnapshot | torch.fx.Graph | None = None,
    memory_budget: int | None = None,
    donated: Collection[str] = (),
    certificates: Sequence[Certificate] = (),
    group_order: GroupOrder = "kept",
    numerics: Numerics = "exact",
    known: Known | None = None,
    replicas: Replicated = "proven",
    rounding: Fraction | None = None,
    ranks_per_host: int | None = None,
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
        numerics: what counts as the same value, see :func:`inductor_passes.verify.values.changed_values`.
        known: what earlier looks at the graph found out about its nodes; filled.
        replicas: ``"implied"``: what the reference combines with a value that is equal on a group's ranks is equal too.
        rounding: how far an element that was sent in a narrower type may be from what it was, relative to the largest
            element of its block; None: nothing may be sent so. Certificates name what was.
        ranks_per_host: global ranks ``h * n`` to ``h * n + n - 1`` share host ``h``. Without it no certificate may say
            that something is narrow between hosts only.

    Raises:
        ValueError: ``group_order``, ``numerics`` or ``replicas`` is something else.
    """
    if group_order not in ("kept", "any"):
        raise ValueError(f'inductor_passes: group_order={group_order!r} is not allowed; expected "kept" or "any"')
    if numerics not in ("exact", "reassociate"):
        raise ValueError(f'inductor_passes: numerics={numerics!r} is not allowed; expected "exact" or "reassociate"')
    if replicas not in ("proven", "implied"):
        raise ValueError(f'inductor_passes: replicas={replicas!r} is not allowed; expected "proven" or "implied"')
    try:
        before = snapshot(reference) if isinstance(reference, torch.fx.Graph) else reference
    except ValueError as error:
        return [Finding("reference", "", f"there is nothing to hold the graph against: {error}")]
    asked = Asked(memory_budget, donated, certificates, group_order, numerics, replicas, rounding, ranks_per_host)
    return checked(graph, before, asked, known).findings


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a graph is held to, see :func:`check`."""

    memory_budget: int | None = None
    donated: Collection[str] = ()
    certificates: Sequence[Certificate] = ()
    group_order: GroupOrder = "kept"
    numerics: Numerics = "exact"
    replicas: Replicated = "proven"
    rounding: Fraction | None = None
    ranks_per_host: int | None = None


def checked(
    graph: torch.fx.Graph, before: ReferenceSnapshot | None, asked: Asked, known: Known | None = None
) -> Checked:
    """:func:`check` for who goes on with the graph: its snapshot comes with the findings."""
    try:
        found = _checked(graph, before, asked, known)
        named = _named(found.findings, graph, before) if found.findings else []
        return dataclasses.replace(found, findings=named)
    except Exception as error:  # as in snapshot()
        return Checked([Finding("unreadable", "", f"nothing can be made of the graph: {_said(error)}")])


def _checked(graph: torch.fx.Graph, before: ReferenceSnapshot | None, asked: Asked, known: Known | None) -> Checked:
    look = _look(graph, known=known)
    found = look.findings
    if look.view is None:
        return Checked(found)
    if before is None:
        # A legal graph that Inductor breaks by itself; held against what made it of one that Inductor does not.
        found = [f for f in found if f.rule != rules.OVERWRITTEN]
    if asked.memory_budget is not None:
        found = [*found, *_budget(memory.peak_of(look.view, asked.donated), asked.memory_budget)]
    if before is None:
        return Checked(found)
    found = [f for f in found if finding_key(f) not in before.findings]
    after = look.taken(None)
    found.extend(compare(before, after, asked.certificates, asked.group_order))
    found.extend(levels.compared(before, after, asked.certificates, asked.ranks_per_host))
    found.extend(
        values.compared(
            before.program, after.program, asked.certificates, asked.numerics, asked.replicas, asked.rounding
        )
    )
    return Checked(found, after)


def _named(found: list[Finding], graph: torch.fx.Graph, before: ReferenceSnapshot | None) -> list[Finding]:
    """The findings with the names of the parameters that they are about."""
    names = {**({} if before is None else before.parameters), **names_by_node(graph)}
    return [
        dataclasses.replace(f, parameters=tuple(dict.fromkeys((*names.get(f.node, ()), *names.get(f.other, ())))))
        for f in found
    ]


def _budget(peak: int | None, budget: int) -> list[Finding]:
    if peak is None:
        return [Finding("memory", "", f"sizes have no hints: the budget of {budget} bytes cannot be shown to hold")]
    if peak > budget:
        return [Finding("memory", "", f"peak is {peak} bytes, budget {budget} bytes")]
    return []
