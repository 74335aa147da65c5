"""Messages between two ranks: what each is, and which of them are issued in one order.

Torch traces ``isend``, ``irecv`` and ``batch_isend_irecv`` into functional operators that start a message and return
what has to be waited for. To every pass a transfer is a fence. Only what orders whole graphs (``problems``) moves what
is around it, by rules that hold whatever the other ranks do: see ``problems/transfers.py``.

A blocking ``send`` or ``recv`` is in no graph that torch traces. Whatever else sends is an operator that we do not
know, and a fence for everything.
"""

from __future__ import annotations

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.memory import nodes_in, received_into
from inductor_passes.operators import CollectiveKind

#: Queues of messages that begin when they are issued, and the one queue of all others.
SENDS, RECEIVES, ONE = "send", "recv", "p2p"


def sent_bytes(node: torch.fx.Node) -> tuple[int | None, int | None]:
    """(bytes sent, bytes received) by one transfer, None without a hint."""
    totals: list[int | None] = [0, 0]
    arguments = _torch.op_arguments(node)
    tensors = nodes_in(arguments["tensors"] if "tensors" in arguments else arguments["tensor"])
    for tensor, buffer in zip(tensors, received_into(node)):
        value, way = tensor.meta.get("val"), int(buffer is not None)
        size, so_far = _torch.tensor_bytes(value) if isinstance(value, torch.Tensor) else None, totals[way]
        totals[way] = None if size is None or so_far is None else so_far + size
    return totals[0], totals[1]


def kind_of(node: torch.fx.Node) -> CollectiveKind:
    """A batch that does both counts as what it sends more of."""
    sent, received = sent_bytes(node)
    return CollectiveKind.SEND if (sent or 0) > (received or 0) else CollectiveKind.RECV


def queues(node: torch.fx.Node) -> tuple[str, ...]:
    """The queues of a rank that a transfer is in: transfers of one queue are issued in the order of the program."""
    group = resolve(group_argument(node))
    arguments = _torch.op_arguments(node)
    tensors = nodes_in(arguments["tensors"] if "tensors" in arguments else arguments["tensor"])
    values = [tensor.meta.get("val") for tensor in tensors]
    at_once = all(isinstance(v, torch.Tensor) and _torch.sends_at_once(group.name, v.device) for v in values)
    if not at_once or not _torch.keeps_waits():
        return (ONE,)
    received = [buffer is not None for buffer in received_into(node)]
    return tuple(queue for queue, used in ((SENDS, not all(received)), (RECEIVES, any(received))) if used)


def group_argument(node: torch.fx.Node) -> object:
    """What a transfer names its group by: a name or a process group."""
    argument = _torch.op_arguments(node).get("group_name", "")
    return argument.meta.get("val", argument.name) if isinstance(argument, torch.fx.Node) else argument
