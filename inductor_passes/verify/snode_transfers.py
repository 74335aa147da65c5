"""Waits of scheduler nodes against the FX graph: none comes in front of a start that the graph has in front of it.

Checked in graphs with messages between two ranks only, where a wait that moved up can make two ranks wait for each
other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role
from inductor_passes.report import Finding
from inductor_passes.verify.facts import communication
from inductor_passes.verify.snode_order import SnodeOrder


def early_waits(order: SnodeOrder) -> Iterator[Finding]:
    """A finding for every wait in front of a start that is in front of it in the FX graph; O(nodes)."""
    starts = [i for i, kind in enumerate(order.kinds) if kind == "start"]
    if not any(communication.is_transfer(_torch.op_name(_torch.snode_op(order.nodes[i]))) for i in starts):
        return
    calls = {i: _call(order, i) for i, kind in enumerate(order.kinds) if kind in ("start", "wait")}
    known = [call for call in calls.values() if call is not None]
    place = {node: k for k, node in enumerate(known[0].graph.nodes)} if known else {}
    ahead: tuple[int, int] | None = None
    for i in reversed(calls):
        call = calls[i]
        if call is None or call not in place:
            continue
        if order.kinds[i] == "start":
            ahead = min(ahead or (place[call], i), (place[call], i))
        elif ahead is not None and ahead[0] < place[call]:
            name = order.names[ahead[1]]
            message = f"the wait {order.names[i]} comes in front of {name}, which the graph issues before it"
            yield order.finding("transfer-wait", i, message, name)


def _call(order: SnodeOrder, i: int) -> torch.fx.Node | None:
    """The FX node behind a start or a wait."""
    found = _torch.snode_call(order.nodes[i])
    if found is None and (origin := order.origin(i)) is not None and order.facts(origin).role is Role.START:
        return origin
    return found
