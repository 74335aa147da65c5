"""An order of Inductor's scheduler nodes against the order that it was made from; O(nodes + dependencies).

Inductor does not check the order that its last hook returns. So this module does: the same nodes, and every dependency
that Inductor keeps (artificial ones included). From buffers, without these dependencies, it derives again the rules
that hold on FX: no read of a result before its wait, no write to a buffer in flight, waits complete, order per process
group, no collective across a fence, random draws and asserts in order, memory within budget; and where ranks send
messages to each other, no wait in front of a start that the FX graph has in front of it.

Buffers that share memory (mutations, aliases) are followed to the buffer that owns it, the *root*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inductor_passes import _torch
from inductor_passes.report import Finding
from inductor_passes.verify.flight import flight
from inductor_passes.verify.reference import GroupOrder
from inductor_passes.verify.snode_order import SnodeOrder
from inductor_passes.verify.snode_transfers import early_waits


def check_snodes(
    nodes: Sequence[Any],
    reference_order: Sequence[Any],
    *,
    memory_budget: int | None = None,
    donated: Mapping[str, int] | None = None,
    together: Mapping[str, str] | None = None,
    group_order: GroupOrder = "kept",
) -> list[Finding]:
    """Everything the verifier holds against an order of scheduler nodes; empty when it is legal.

    Args:
        nodes: the order to check.
        reference_order: the same nodes as Inductor had them.
        memory_budget: cap in bytes on :func:`snodes_peak_bytes`; None: no cap. Needs the graph being lowered.
        donated: graph inputs that are freed after their last use, with their bytes.
        together: inputs that are memory of another one -> that one.
        group_order: as in :func:`~inductor_passes.verify.check`.
    """
    found = _permutation(nodes, reference_order)
    if found:
        return found
    after, before = SnodeOrder(nodes), SnodeOrder(reference_order)
    found = [*after.dependencies(), *flight(after), *early_waits(after)]
    known = {(f.rule, f.node, f.other) for f in (*flight(before), *early_waits(before))} if found else set()
    found = [f for f in found if (f.rule, f.node, f.other) not in known]
    found.extend(_sequences(before, after, group_order))
    found.extend(_fences(before, after))
    if memory_budget is not None:
        peak = after.peak_bytes(donated or {}, together)
        if peak > memory_budget:
            found.append(Finding("memory", "", f"peak is {peak} bytes, budget {memory_budget} bytes"))
    return found


def snodes_peak_bytes(
    nodes: Sequence[Any], donated: Mapping[str, int] | None = None, together: Mapping[str, str] | None = None
) -> int:
    """Peak bytes of what scheduler nodes allocate and of the ``donated`` inputs; inside of Inductor's lowering only.

    ``donated`` maps graph inputs that are freed after their last use to their bytes; other inputs are not counted.
    ``together`` maps inputs that are memory of another one to that one.
    """
    return SnodeOrder(nodes).peak_bytes(donated or {}, together)


def _permutation(nodes: Sequence[Any], reference: Sequence[Any]) -> list[Finding]:
    names = [_torch.snode_name(n) for n in nodes]
    expected = {_torch.snode_name(n) for n in reference}
    found = []
    seen: set[str] = set()
    for name in names:
        if name in seen:
            found.append(Finding("duplicated", name, f"{name} is scheduled twice"))
        elif name not in expected:
            found.append(Finding("added", name, f"{name} was not in the reference"))
        seen.add(name)
    found.extend(Finding("lost", n, f"{n} is not scheduled") for n in sorted(expected - seen))
    return found


#: Of :meth:`SnodeOrder.sequences`; the others are process groups.
_RULES = {
    "random": "rng-order",
    "random and fence": "rng-order",
    "assert": "side-effect-order",
    "fence": "fence-order",
}


def _sequences(before: SnodeOrder, after: SnodeOrder, group_order: GroupOrder) -> Iterator[Finding]:
    now = after.sequences()
    for what, positions in before.sequences().items():
        if what.startswith("group ") and group_order == "any":
            continue
        expected = [before.names[i] for i in positions]
        for name, i in zip(expected, now.get(what, ())):
            if after.names[i] != name:
                rule = _RULES.get(what, "group-order")
                yield after.finding(rule, i, f"{what}: {after.names[i]} comes where {name} was", name)
                break


def _fences(before: SnodeOrder, after: SnodeOrder) -> Iterator[Finding]:
    was = before.segments()
    for name, fence in after.segments().items():
        if was.get(name, fence) != fence:
            crossed = fence or was[name]
            yield Finding("fence", name, f"{name} moved across the fence {crossed}", crossed)
