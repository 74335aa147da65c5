"""Messages between two ranks against the order that they had: no rank can hang that did not hang before.

Other ranks run other graphs, so what is checked is one rank's: the starts of a queue keep their order, and no wait
comes in front of a start that it was behind. Queues: where a backend begins every message at its issue, a rank's
sends, its receives and its collectives have one each; otherwise everything is in one. Where ranks agree
(``group_order="any"``) collectives may change places between two transfers or their waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.ops import Role
from inductor_passes.report import Finding
from inductor_passes.verify.facts import communication
from inductor_passes.verify.facts.operators import by_name, nodes_in
from inductor_passes.verify.facts.view import View

#: Effect channel of a message that is waited for in its graph. Any other one is a fence.
CHANNEL = "transfer"


@dataclass(frozen=True)
class TransferRecord:
    """One message or batch of messages.

    Attributes:
        immediate: it begins when it is issued, whatever was issued before.
        sends / receives: which it does.
        waits: names of its waits.
    """

    immediate: bool
    sends: bool
    receives: bool
    waits: tuple[str, ...]

    def queues(self, one: bool) -> tuple[str, ...]:
        """The queues that it is in; with ``one`` there is one for everything."""
        own = (("sends", self.sends), ("receives", self.receives))
        return ("all",) if one else tuple(name for name, used in own if used)


def records(view: View) -> dict[str, TransferRecord]:
    """The transfers of a graph that are wholly waited for, in order."""
    return {
        node.name: _record(node, waits) for node, waits in view.transfer_waits.items() if waits and _lands(view, node)
    }


def _lands(view: View, node: torch.fx.Node) -> bool:
    """Whether every result is waited for."""
    waited = {operand for wait in view.transfer_waits[node] for operand in wait.all_input_nodes}
    return {b for operand in waited for b in view.storages.of(operand)}.issuperset(view.storages.of(node))


def _record(node: torch.fx.Node, waits: list[torch.fx.Node]) -> TransferRecord:
    arguments = by_name(node.target, node.args, node.kwargs)
    group = arguments.get("group_name", "")
    if isinstance(group, torch.fx.Node):
        group = group.meta.get("val", group.name)
    values = [n.meta.get("val") for n in nodes_in([*node.args, *node.kwargs.values()])]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    received = [buffer is not None for buffer in communication.received(_torch.op_name(node.target), arguments)]
    name = resolve(group).name
    return TransferRecord(
        immediate=bool(tensors) and all(_torch.sends_at_once(name, tensor.device) for tensor in tensors),
        sends=not all(received),
        receives=any(received),
        waits=tuple(wait.name for wait in waits),
    )


@dataclass(slots=True)
class _Front:
    """The start of a queue that comes latest now, of all so far and of those in front of the last transfer or its wait.

    Each is its position and its name.
    """

    latest: tuple[int, str] = (-1, "")
    settled: tuple[int, str] = (-1, "")


@dataclass(slots=True)
class _Fronts:
    of: dict[str, _Front] = field(default_factory=dict)

    def issue(self, queue: str, at: int, name: str) -> None:
        front = self.of[queue]
        front.latest = max(front.latest, (at, name))

    def settle(self) -> None:
        for front in self.of.values():
            front.settled = front.latest

    def limit(self, queues: tuple[str, ...], settled: bool) -> tuple[int, str]:
        found = [self.of.setdefault(queue, _Front()) for queue in queues]
        return max(((f.settled if settled else f.latest) for f in found), default=(-1, ""))


def compared(
    roles: Mapping[str, Role],
    messages: Mapping[str, TransferRecord],
    waits: Collection[str],
    place: Mapping[str, int],
    *,
    agreed: bool,
) -> Iterator[Finding]:
    """Starts and waits that are where they may not be; O(nodes).

    Args:
        roles: of the nodes of the graph as it was, in order.
        messages: its transfers.
        waits: names of the waits of its collectives.
        place: the position of each of its nodes that are still there.
        agreed: whether the ranks of the collectives' groups did the same.
    """
    one = not all(record.immediate for record in messages.values())
    transfer_waits = {wait for record in messages.values() for wait in record.waits}
    fronts = _Fronts()
    for name, role in roles.items() if messages else ():
        if name not in place:
            continue
        transfer, at = messages.get(name), place[name]
        if transfer is not None or role is Role.START:
            own = transfer.queues(one) if transfer is not None else ("all" if one else "collectives",)
            limit = fronts.limit(own, settled=agreed and transfer is None)
            if at < limit[0]:
                message = f"{name} is issued in front of {limit[1]}, which was issued first"
                yield Finding("transfer-order", name, message, limit[1])
            for queue in own:
                fronts.issue(queue, at, name)
        elif name in transfer_waits or name in waits:
            limit = fronts.limit(tuple(fronts.of), settled=agreed and name not in transfer_waits)
            if at < limit[0]:
                message = f"the wait {name} comes in front of {limit[1]}, which was issued before it"
                yield Finding("transfer-wait", name, message, limit[1])
        if transfer is not None or name in transfer_waits:
            fronts.settle()
