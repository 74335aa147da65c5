"""Identical gathers become one: the same tensor gathered twice over one group travels once.

before::

    s0 = all_gather(x); w0 = wait(s0); s1 = all_gather(x); w1 = wait(s1); f(w0); g(w1)

after::

    s0 = all_gather(x); w0 = wait(s0); f(w0); g(w0)

Correct because gathering is a function of its operand, and nobody writes to the operand or to either result. Where the
second wait comes first, the wait that stays moves there, unless a fence is in between.
"""

from __future__ import annotations

import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp.region import unsupported
from inductor_passes.ir import ops
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Decision, Reason, Verdict


def merge_identical(graph: torch.fx.Graph, view: GraphView) -> tuple[list[Decision], list[tuple[str, str]]]:
    """Merge in place.

    Returns:
        One decision per gather that went away; and (old, new) names: whose wait went, and the wait that is read now.
    """
    first: dict[tuple[object, ...], torch.fx.Node] = {}
    position = dict(view.position)
    fences = [position[n] for n, role in view.roles.items() if role is Role.FENCE]
    decisions: list[Decision] = []
    replaced: list[tuple[str, str]] = []
    for collective in view.collectives:
        if collective.kind != "all_gather" or unsupported(collective, view) is not None:
            continue
        operand = collective.inputs[0]
        if any(s.writers for s in view.storages.of(operand)):
            continue
        arguments = _torch.op_arguments(collective.start)
        key = (operand, collective.group.name, str(arguments.get("group_size")))
        wait = collective.waits[0]
        if key not in first:
            first[key] = wait
            continue
        late = position[first[key]] > position[wait]
        if late and any(position[wait] < at < position[first[key]] for at in fences):
            continue
        decisions.append(
            Decision(
                "async_tp/merge",
                collective.start.name,
                Verdict.APPLIED,
                Reason.PROFITABLE,
                f"{collective.label} gathers what {first[key].name} holds already",
                source=ops.source_line(collective.start),
                group=collective.group.name,
            )
        )
        if late:
            wait.prepend(first[key])
            position[first[key]] = position[wait]
        replaced.append((wait.name, first[key].name))
        wait.replace_all_uses_with(first[key])
        graph.erase_node(wait)
        graph.erase_node(collective.start)
    return decisions, replaced
