"""The verifier's own view of a graph: roles and effects of nodes, blocks of memory, collectives with their waits.

A wait belongs to the collective that last wrote to the memory that it waits for. A wait for memory that has been waited
for already belongs to none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.groups import Group, resolve
from inductor_passes.ir.ops import Role
from inductor_passes.verify.facts import communication
from inductor_passes.verify.facts.higher_order import Inside
from inductor_passes.verify.facts.known import Known
from inductor_passes.verify.facts.nodes import Reader
from inductor_passes.verify.facts.operators import by_name, nodes_in
from inductor_passes.verify.facts.places import NodeFacts
from inductor_passes.verify.facts.storages import Block

#: How deep bodies may lie in bodies.
_MAX_DEPTH = 32
_NO_TIME = (Role.INPUT, Role.OUTPUT, Role.WAIT)


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective: its start and what it says.

    Attributes:
        index: position among the graph's collectives.
        start: the node that issues it.
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``.
        group: communicator.
        reduce_op: ``sum``, ``avg`` ...; "" for data movement.
        inputs: tensor nodes that it sends, the ``out`` buffer excluded.
        waits: its waits, in graph order.
        input_bytes / output_bytes: payload by hint, None without a hint.
        dtypes: of the inputs.
        in_place: it writes to memory that existed before (in-place or out variant).
    """

    index: int
    start: torch.fx.Node
    kind: str
    group: Group
    reduce_op: str
    inputs: tuple[torch.fx.Node, ...]
    waits: tuple[torch.fx.Node, ...]
    input_bytes: int | None
    output_bytes: int | None
    dtypes: tuple[torch.dtype, ...]
    in_place: bool


class View:
    """What the verifier reads from a graph; O(nodes + edges) to build.

    Attributes:
        nodes, position: in graph order.
        roles, facts: of every node.
        storages: blocks of memory.
        collectives, by_start, collectives_of_wait: see :class:`Collective`.
        transfer_waits: the waits of every transfer.
        known, values: facts about single nodes.
    """

    def __init__(self, graph: torch.fx.Graph, bodies: _Bodies | None = None, known: Known | None = None) -> None:
        self.graph = graph
        self.nodes: list[torch.fx.Node] = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        reader = Reader((bodies or _Bodies()).look_inside, known)
        for node in self.nodes:
            reader.read(node)
        self.facts: dict[torch.fx.Node, NodeFacts] = reader.facts
        self.roles: dict[torch.fx.Node, Role] = {node: facts.role for node, facts in self.facts.items()}
        self.storages = reader.storages
        self.known, self.values = reader.known, reader.values
        self.transfer_waits: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self.collectives: list[Collective] = []
        self.by_start: dict[torch.fx.Node, Collective] = {}
        self.collectives_of_wait: dict[torch.fx.Node, tuple[Collective, ...]] = {}
        self._match_waits()

    def reads(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Operands whose memory a node touches; a view touches none, unless it may copy or depends on when."""
        facts = self.facts[node]
        if facts.role in _NO_TIME:
            return []
        if facts.role is not Role.FREE or facts.copies:
            return node.all_input_nodes
        return [n for n in node.all_input_nodes if any(block.reshaped for block in self.storages.of(n))]

    def ends(self, node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
        """The waits at which a collective or a transfer is done; () for any other node."""
        if self.facts[node].role is Role.START:
            return self.by_start[node].waits
        return tuple(self.transfer_waits.get(node, ()))

    def _match_waits(self) -> None:
        issued: dict[Block, torch.fx.Node] = {}
        waits: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        of_wait: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        landed: dict[torch.fx.Node, int] = {}
        for node in self.nodes:
            role = self.roles[node]
            if role is Role.START or _is_transfer(node):
                waits[node] = []
                issued.update(dict.fromkeys(self.storages.of(node), node))
                if role is not Role.START:
                    self.transfer_waits[node] = waits[node]
            elif role is Role.WAIT:
                awaited = {
                    issued[block]: None
                    for operand in node.all_input_nodes
                    for block in self.storages.of(operand)
                    if block in issued and self.position[issued[block]] > landed.get(operand, -1)
                }
                of_wait[node] = list(awaited)
                for start in awaited:
                    waits[start].append(node)
                landed[node] = self.position[node]
            elif role is Role.FREE and (times := [landed[n] for n in node.all_input_nodes if n in landed]):
                # What is taken out of a waited value, or viewed in it, was waited for when that was.
                landed[node] = max(times)
        starts = [node for node in waits if self.roles[node] is Role.START]
        self.collectives = [describe(i, node, tuple(waits[node])) for i, node in enumerate(starts)]
        self.by_start = {collective.start: collective for collective in self.collectives}
        for wait, nodes in of_wait.items():
            if found := tuple(self.by_start[node] for node in nodes if node in self.by_start):
                self.collectives_of_wait[wait] = found


def alone(node: torch.fx.Node) -> NodeFacts:
    """Facts about a node by itself: its role and channel, without its neighbours' places."""
    return Reader(_Bodies().look_inside).read(node)


class _Bodies:
    """Looks into the graphs that higher-order operators run; each is looked into once."""

    def __init__(self, depth: int = 0, known: dict[int, Inside] | None = None) -> None:
        self._depth = depth
        self._known: dict[int, Inside] = {} if known is None else known

    def look_inside(self, bodies: list[torch.fx.GraphModule] | None) -> Inside:
        """What happens in any of some graphs; None stands for one that cannot be looked into."""
        if bodies is None or self._depth >= _MAX_DEPTH:
            return _opaque()
        whole = Inside()
        for body in bodies:
            one = self._known.get(id(body))
            if one is None:
                # What contains itself cannot be looked into to the end.
                self._known[id(body)] = _opaque()
                one = self._known[id(body)] = self._inside_of(body.graph)
            whole.opaque |= one.opaque
            whole.writes |= one.writes
            whole.returns |= one.returns
            whole.channels |= one.channels
        return whole

    def _inside_of(self, graph: torch.fx.Graph) -> Inside:
        seen: set[torch.fx.Node] = set()
        for node in graph.nodes:
            if any(operand not in seen for operand in node.all_input_nodes):
                return _opaque()
            seen.add(node)
        view = View(graph, _Bodies(self._depth + 1, self._known))
        given = {b for node in view.nodes if view.roles[node] is Role.INPUT for b in view.storages.of(node)}
        outputs = [n for node in view.nodes if node.op == "output" for n in node.all_input_nodes]
        return Inside(
            opaque=any(role in (Role.START, Role.WAIT, Role.FENCE) for role in view.roles.values()),
            channels={facts.channel for facts in view.facts.values()} - {""},
            writes=any(block.writers for block in given),
            returns=any(block in given for node in outputs for block in view.storages.of(node)),
        )


def _opaque() -> Inside:
    return Inside(opaque=True, writes=True, returns=True)


def _is_transfer(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and communication.is_transfer(_torch.op_name(node.target))


def is_collective(node: torch.fx.Node) -> bool:
    """Whether a node starts a collective."""
    return node.op == "call_function" and communication.form_of(_torch.op_name(node.target)) is not None


def describe(index: int, start: torch.fx.Node, waits: tuple[torch.fx.Node, ...]) -> Collective:
    """The :class:`Collective` that a node starts."""
    form = communication.form_of(_torch.op_name(start.target))
    assert form is not None
    arguments = by_name(start.target, start.args, start.kwargs)
    inputs = tuple(nodes_in(next(iter(arguments.values()), None)))
    values = [n.meta.get("val") for n in inputs]
    result = start.meta.get("val")
    reduce_op = _torch.reduce_op_name(_behind(arguments.get("reduce_op", "")))
    return Collective(
        index=index,
        start=start,
        kind=form.kind,
        group=resolve(_behind(arguments.get("group_name", arguments.get("group", "")))),
        # A factor that cannot be read is like no other one, and has the same name on all ranks.
        reduce_op=reduce_op.replace("?", start.name),
        inputs=inputs,
        waits=waits,
        input_bytes=_total(values),
        output_bytes=_total(result if isinstance(result, (list, tuple)) else [result]),
        dtypes=tuple(v.dtype for v in values if isinstance(v, torch.Tensor)),
        in_place=form.in_place or form.out,
    )


def _behind(argument: object) -> object:
    """The value of an argument that may be a node: torch passes groups and reduce ops as objects that nodes make."""
    return argument.meta.get("val", argument.name) if isinstance(argument, torch.fx.Node) else argument


def _total(values: list[object] | tuple[object, ...]) -> int | None:
    total = 0
    for value in values:
        size = _torch.tensor_bytes(value) if isinstance(value, torch.Tensor) else None
        if size is None:
            return None
        total += size
    return total
