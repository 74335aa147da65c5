"""The opposite of a bucket: a coalesced collective becomes one collective per tensor.

before::

    s = all_gather_coalesced([x, y]); a = wait(s[0]); b = wait(s[1])

after::

    s = all_gather(x); t = all_gather(y); a = wait(s); b = wait(t)

What looks at collectives one by one (rewrites, matmuls in parts) does not see members of a coalesced one. Whether it
pays is for the caller to say, who puts together again what nothing came of: ``rewrite.merge`` with the coalesced form.
Correct because a coalesced operator is defined as its members' operators, issued at once. A wait for a list becomes a
wait per tensor. O(members).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import is_wait
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import COALESCED, FUNCTIONAL, SINGLE
from inductor_passes.rewriting.emit import Emitter

_SINGLE = {f"{FUNCTIONAL}::{name}": SINGLE[kind] for kind, name in COALESCED.items()}


@dataclass(frozen=True)
class Split:
    """One collective that was taken apart.

    Attributes:
        name: of its start.
        starts: what its members are now, in order.
        removed / added: names of erased and of new nodes.
        replaced: (old, new) names: who read the old node reads the new one.
    """

    name: str
    starts: tuple[torch.fx.Node, ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]


def splittable(view: GraphView) -> list[Collective]:
    """The functional coalesced collectives whose results are all waited for, read in no other way and not written to.

    A member that somebody writes to is compared by its memory, which a single collective would not have.
    """
    return [c for c in view.collectives if _torch.op_name(c.start.target) in _SINGLE and _untouched(view, c)]


def _untouched(view: GraphView, collective: Collective) -> bool:
    results = _results(collective)
    return results is not None and not any(s.writers for result in results for s in view.storages.of(result))


def _results(collective: Collective) -> list[torch.fx.Node] | None:
    """The result in flight per member; None when some result is used in a way that we do not know."""
    found: dict[int, torch.fx.Node] = {}
    for user in collective.start.users:
        index = user.args[1] if user.target is operator.getitem else None
        if not isinstance(index, int) or index in found or not user.users or not all(map(is_wait, user.users)):
            return None
        found[index] = user
    count = len(collective.inputs)
    if sorted(found) != list(range(count)):
        return None
    lists = {w for w in collective.waits if isinstance(w.meta.get("val"), (list, tuple))}
    picked = all(user.target is operator.getitem for wait in lists for user in wait.users)
    return [found[i] for i in range(count)] if picked else None


def split(graph: torch.fx.Graph, collective: Collective) -> Split:
    """Take one of :func:`splittable` apart, in place."""
    start = collective.start
    results = _results(collective)
    if results is None:
        raise ValueError(f"{start.name} cannot be taken apart")
    arguments = _torch.op_arguments(start)
    rest = list(arguments.values())[1:]
    op = _torch.collective_op(_SINGLE[_torch.op_name(start.target)])
    emit = Emitter(graph, start)
    replaced: list[tuple[str, str]] = []
    starts = []
    for operand, result in zip(collective.inputs, results):
        with emit.standing_for(start):
            single = emit.call(op, operand, *rest)
        _keep_origin(start, single)
        result.replace_all_uses_with(single)
        replaced.append((result.name, single.name))
        starts.append(single)
    removed = [*(r.name for r in results), start.name]
    for node in (*results, start):
        graph.erase_node(node)
    added = [s.name for s in starts]
    for wait in collective.waits:
        if isinstance(wait.meta.get("val"), (list, tuple)):
            more, gone, pairs = _waits_apart(graph, wait)
            added += more
            removed += gone
            replaced += pairs
    return Split(start.name, tuple(starts), tuple(removed), tuple(added), tuple(replaced))


def _keep_origin(old: torch.fx.Node, new: torch.fx.Node) -> None:
    """A member was traced from the call that the whole was traced from."""
    for key in ("source_fn_stack", "fwd_source_fn_stack", "from_node"):
        if key in old.meta:
            new.meta[key] = old.meta[key]


def waits_for_lists(view: GraphView) -> list[torch.fx.Node]:
    """Waits for several collectives at once of which the results are picked one by one."""
    return [
        wait
        for wait in view.collectives_of_wait
        if isinstance(wait.meta.get("val"), (list, tuple))
        and wait.users
        and all(user.target is operator.getitem and isinstance(user.args[1], int) for user in wait.users)
    ]


def split_wait(graph: torch.fx.Graph, wait: torch.fx.Node) -> Split:
    """Take one of :func:`waits_for_lists` apart, in place."""
    name = wait.name
    added, removed, replaced = _waits_apart(graph, wait)
    return Split(name, (), tuple(removed), tuple(added), tuple(replaced))


def _waits_apart(
    graph: torch.fx.Graph, wait: torch.fx.Node
) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    tensors: Sequence[torch.fx.Node] = next(iter(_torch.op_arguments(wait).values()))
    emit = Emitter(graph, wait)
    with emit.standing_for(wait):
        singles = [emit.call(_torch.collective_op("wait_tensor"), tensor) for tensor in tensors]
    replaced = []
    picked = list(wait.users)
    for user in picked:
        index = user.args[1]
        assert isinstance(index, int)
        single = singles[index]
        user.replace_all_uses_with(single)
        replaced.append((user.name, single.name))
    removed = [*(user.name for user in picked), wait.name]
    for node in (*picked, wait):
        graph.erase_node(node)
    return [s.name for s in singles], removed, replaced
