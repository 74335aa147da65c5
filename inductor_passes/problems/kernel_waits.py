"""Orders of a graph that communicates which Inductor would not keep: they become dependencies before it fuses.

Waits that must not come in front of starts, where there are messages between two ranks. Inductor keeps starts in the
order of the FX graph. It knows nothing about waits and starts: its pass for peak memory moves the wait of a receive in
front of the send that follows it, and its fusion makes one kernel of what is sent and of what needs that wait (both
seen in torch 2.13). If two ranks do that, each waits for a message that the other one sends after its wait. So every
wait gets a dependency on the starts that it is behind in the FX graph.

Random draws, and calls of operators with unknown effects. Inductor's pass for peak memory moves them (torch 2.13 keeps
those of ``fallback_random``), and it finds another order for another memory budget. One model would draw other numbers
with each. So each of them gets a dependency on the one before it.

Kernels of parts that are computed beside each other's transfers, see :mod:`~inductor_passes.problems.kernel_parts`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import ops
from inductor_passes.operators import TRANSFERS
from inductor_passes.problems.kernel_calls import in_order
from inductor_passes.problems.kernel_parts import apart


def is_message(node: Any) -> bool:
    """Whether a scheduler node starts a message between two ranks."""
    return _torch.snode_kind(node) == "start" and _torch.op_name(_torch.snode_op(node)) in TRANSFERS


def last_starts(nodes: Sequence[Any]) -> dict[int, int]:
    """Number of a wait -> that of the last start that it has to stay behind; {} in a graph without messages.

    A wait that cannot be found in the FX graph stays behind what it is behind.
    """
    if not any(map(is_message, nodes)):
        return {}
    kinds = [_torch.snode_kind(node) for node in nodes]
    starts = [i for i, kind in enumerate(kinds) if kind == "start"]
    calls = {i: _call(nodes[i]) for i, kind in enumerate(kinds) if kind in ("start", "wait")}
    graph = next((call.graph for call in calls.values() if call is not None), None)
    position = {} if graph is None else {node: k for k, node in enumerate(graph.nodes)}
    # Starts are in one order: one that is not found lies behind the one before it.
    places: list[int] = []
    for i in starts:
        places.append(max(position.get(calls[i], -1), places[-1] if places else -1))
    found: dict[int, int] = {}
    for i in (i for i, kind in enumerate(kinds) if kind == "wait"):
        place = position.get(calls[i])
        count = bisect.bisect(starts, i) if place is None else bisect.bisect(places, place)
        if count:
            found[i] = starts[count - 1]
    return found


def held(nodes: list[Any]) -> list[Any]:
    """The nodes before fusion: waits stay behind starts, draws and effects in order, parts apart.

    A graph that does not communicate is left to Inductor.
    """
    if not any(_torch.snode_kind(node) == "start" for node in nodes):
        return nodes
    behind = [(nodes[start], nodes[wait]) for wait, start in last_starts(nodes).items()] + in_order(nodes)
    behind += apart(nodes, behind)
    return _torch.snodes_kept_behind(nodes, behind) if behind else nodes


def _call(node: Any) -> torch.fx.Node | None:
    """The FX node that a start or a wait is; one that Inductor did in place is another operator there."""
    found = _torch.snode_call(node)
    if found is None and _torch.snode_kind(node) == "start":
        starts = [origin for origin in _torch.snode_origins(node) if ops.role(origin) is ops.Role.START]
        return starts[0] if len(starts) == 1 else None
    return found
