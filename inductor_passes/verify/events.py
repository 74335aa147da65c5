"""What a graph does that other ranks notice, in program order. On this the ranks must agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import groups, ops
from inductor_passes.ir.ops import Role
from inductor_passes.verify.facts import communication
from inductor_passes.verify.facts.view import View
from inductor_passes.verify.tensors import Tensor, Tensors


class Action(str, Enum):
    """What happens at an event."""

    START = "start"
    WAIT = "wait"
    BLOCKING = "blocking"
    """a collective that returns when it is done"""
    SEND = "send"
    RECEIVE = "recv"
    FENCE = "fence"
    """a host synchronisation, or an op that we do not know"""


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        name: the node; point-to-point operations of one batch share it.
        group: communicator, "" for fences and waits.
        ranks: its global ranks in group order, empty when unknown.
        what: everything that all ranks of the group must say alike: kind, reduce op, dtypes, sizes, source rank; for a
            transfer its dtype and size; for a fence the op.
        splits: input and output split sizes of an all-to-all, which differ between ranks.
        starts: for a wait, the names of the starts that it completes.
        tensor: of a collective: which tensor it moves.
        peer / tag: of a transfer; peer is a global rank.
    """

    name: str
    action: Action
    group: str = ""
    ranks: tuple[int, ...] = ()
    what: str = ""
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    starts: tuple[str, ...] = ()
    peer: int = -1
    tag: int = 0
    source: str = ""
    tensor: Tensor = Tensor()

    def __str__(self) -> str:
        where = f" on group {self.group}" if self.group else ""
        peer = f" peer {self.peer} tag {self.tag}" if self.peer >= 0 else ""
        return f"{self.action.value} {self.what}{self._moved()}{peer}{where}".replace("  ", " ").strip()

    def line(self) -> str:
        """The event as other ranks should see it too: groups by shape instead of by name, no node names; pieces are
        compared apart.
        """
        shape = groups.Group(self.group, self.ranks)
        progression = shape.start_stride
        group = f"{shape.size} ranks" + (f" stride {progression[1]}" if progression else "")
        return f"{self.action.value} {self.what}{self._moved()}" + (f" over {group}" if self.group else "")

    def _moved(self) -> str:
        return f" of {self.tensor.name}" if self.tensor.name else ""


def events(view: View) -> tuple[Event, ...]:
    """Starts, waits, transfers, blocking collectives and fences of a graph, in order."""
    found: list[Event] = []
    tensors = Tensors(view.nodes, view.roles)
    transfers: dict[torch.fx.Node, list[str]] = {}
    for transfer, waits in view.transfer_waits.items():
        for wait in waits:
            transfers.setdefault(wait, []).append(transfer.name)
    for node in view.nodes:
        role = view.roles[node]
        if role is Role.START:
            found.append(_start(view, node, tensors))
        elif role is Role.WAIT:
            starts = [c.start.name for c in view.collectives_of_wait.get(node, ())]
            starts += transfers.get(node, ())
            found.append(Event(node.name, Action.WAIT, what="wait", starts=tuple(starts)))
        elif role is Role.FENCE:
            found.extend(_fence(node, tensors))
    return tuple(found)


def digest(events_: Iterable[Event]) -> str:
    """SHA-256 (16 hex digits) of what ranks must agree on: equal on ranks that run matching programs."""
    lines = [e.line() for e in events_ if e.action is not Action.WAIT]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]


def _start(view: View, node: torch.fx.Node, tensors: Tensors) -> Event:
    c = view.by_start[node]
    arguments = _torch.op_arguments(node)
    parts = [c.kind, ",".join(str(d).removeprefix("torch.") for d in c.dtypes)]
    splits = None
    if c.kind == "all_to_all":
        splits = (_sizes(arguments.get("input_split_sizes")), _sizes(arguments.get("output_split_sizes")))
    else:
        parts.append(f"{c.input_bytes}->{c.output_bytes} B")
    parts.extend(str(x) for x in (c.reduce_op, f"src={arguments['src']}" if "src" in arguments else "") if x)
    return Event(
        node.name,
        Action.START,
        group=c.group.name,
        ranks=c.group.ranks,
        what=" ".join(parts),
        splits=splits,
        source=ops.source_line(node),
        tensor=tensors.read_by(c.inputs),
    )


def _sizes(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, (list, tuple)) else ()
    hints = [_torch.size_hint(v.meta.get("val") if isinstance(v, torch.fx.Node) else v) for v in values]
    return tuple(-1 if h is None else h for h in hints)


def _value(node: object) -> str:
    """dtype and elements of a transferred tensor, by hint."""
    tensor = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if tensor is None:
        return ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {_torch.tensor_bytes(tensor)} B"


def _fence(node: torch.fx.Node, tensors: Tensors) -> list[Event]:
    name = _torch.op_name(node.target) if node.op == "call_function" else ""
    source = ops.source_line(node)
    if name.startswith(communication.NAMESPACE) or communication.blocks(name):
        arguments = _torch.op_arguments(node)
        group = groups.resolve(arguments.get("group_name", ""))
        if name.endswith(("::isend", "::irecv")):
            send = name.endswith("isend")
            return [
                Event(
                    node.name,
                    Action.SEND if send else Action.RECEIVE,
                    group=group.name,
                    ranks=group.ranks,
                    what=_value(arguments["tensor"]),
                    peer=int(arguments["dst" if send else "src"]),
                    tag=int(arguments.get("tag", 0)),
                    source=source,
                )
            ]
        if name.endswith("::batch_p2p_ops"):
            rows = zip(arguments["op_list"], arguments["peer_list"], arguments["tag_list"], arguments["tensors"])
            return [
                Event(
                    node.name,
                    Action.SEND if "send" in str(op) else Action.RECEIVE,
                    group=group.name,
                    ranks=group.ranks,
                    what=_value(tensor),
                    peer=int(peer),
                    tag=int(tag),
                    source=source,
                )
                for op, peer, tag, tensor in rows
            ]
        if communication.blocks(name):
            keys = ("gather_dim", "shard_dim", "reduce_op", "parts", "two_shot")
            settings = [str(arguments[key]) for key in keys if key in arguments]
            first = arguments.get("input", next(iter(node.all_input_nodes), None))
            what = " ".join([name.split("::")[-1], *settings, _value(first)])
            return [
                Event(
                    node.name,
                    Action.BLOCKING,
                    group=group.name,
                    ranks=group.ranks,
                    what=what,
                    source=source,
                    tensor=tensors.read_by(node.all_input_nodes),
                )
            ]
    return [Event(node.name, Action.FENCE, what=name or str(node.target), source=source)]
