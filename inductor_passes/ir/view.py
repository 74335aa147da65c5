"""One read-only look at an FX graph: roles, collectives with their waits, storages, ordering constraints."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import ops, transfers
from inductor_passes.ir.groups import Group, resolve
from inductor_passes.ir.ops import Role
from inductor_passes.ir.storages import FxStorage, Storages
from inductor_passes.operators import CollectiveKind

#: What writes each operand where it belongs in the result, as soon as that operand is there.
_JOINS = frozenset({torch.ops.aten.cat.default})


@dataclass(frozen=True, eq=False)
class Collective:
    """An asynchronous collective: a start and everything that belongs to it.

    Attributes:
        index: position among the graph's collectives; ``label`` is its short name, e.g. ``AG3``.
        start: the node that issues it.
        kind: what it does.
        group: communicator.
        reduce_op: ``sum``, ``avg`` ...; "" for data movement.
        inputs: tensor nodes that it reads, the ``out`` buffer excluded.
        waits: its wait nodes in graph order; a coalesced collective has one per output, and a wait may be repeated.
        input_bytes / output_bytes: payload by hint, None without a hint.
        dtypes: of the inputs.
        in_place: it writes to memory that existed before (in-place or out variant).
        group_argument: what the start names its group by: a name, or a node or an object that is a process group.
        member_bytes: of each input, by hint; 0 without one.
    """

    index: int
    label: str
    start: torch.fx.Node
    kind: CollectiveKind
    group: Group
    reduce_op: str
    inputs: tuple[torch.fx.Node, ...]
    waits: tuple[torch.fx.Node, ...]
    input_bytes: int | None
    output_bytes: int | None
    dtypes: tuple[torch.dtype, ...]
    in_place: bool
    group_argument: object = ""
    member_bytes: tuple[int, ...] = ()


class GraphView:
    """Everything that passes read from a graph; built in O(nodes + edges), not kept across passes.

    Transfers (messages between two ranks) are fences by role and no ``collectives``. ``transfer_waits`` holds the waits
    of each; ``transfers`` those that are wholly waited for, which ``problems`` may put onto lanes.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.nodes: list[torch.fx.Node] = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.roles = {node: ops.role(node) for node in self.nodes}
        self.storages = Storages(graph)
        self._bind_to_time()
        self.collectives: list[Collective] = []
        self.by_start: dict[torch.fx.Node, Collective] = {}
        self.collectives_of_wait: dict[torch.fx.Node, tuple[Collective, ...]] = {}
        self.transfer_waits: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self.transfers: dict[torch.fx.Node, Collective] = {}
        self.transfers_of_wait: dict[torch.fx.Node, tuple[Collective, ...]] = {}
        self._find_collectives()
        self._find_transfers()

    def role(self, node: torch.fx.Node) -> Role:
        """The node's part in a schedule."""
        return self.roles[node]

    def _bind_to_time(self) -> None:
        """Views that touch memory which somebody writes to are no views that can be taken at any time.

        What may copy (``reshape``) reads there, and the shape of what is changed in place (``t_``) depends on when.
        """
        for storage in self.storages.all:
            reshaped = any(_torch.changes_metadata(writer.target) for writer in storage.writers)
            for member in storage.members if storage.writers else ():
                if self.roles[member] is Role.FREE and ops.is_view(member) and (reshaped or ops.may_copy(member)):
                    self.roles[member] = Role.COMPUTE

    def _find_collectives(self) -> None:
        origin: dict[torch.fx.Node, torch.fx.Node] = {}
        arriving: dict[FxStorage, torch.fx.Node] = {}
        waits: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in self.nodes:
            role = self.roles[node]
            if role is Role.COMPUTE and not ops.is_view(node):
                continue
            if role is Role.START:
                origin[node] = node
                waits[node] = []
                for storage in self.storages.of(node):
                    arriving.pop(storage, None)
            elif role is Role.FREE or ops.is_view(node):
                # getitem of a coalesced collective, or a view of a result in flight
                sources = [origin[i] for i in node.all_input_nodes if i in origin]
                if sources:
                    origin[node] = sources[0]
            elif ops.is_transfer(node):
                self.transfer_waits[node] = []
                arriving.update((storage, node) for storage in self.storages.of(node))
            elif role is Role.WAIT:
                for transfer in {arriving[s]: None for s in self.storages.of(node) if s in arriving}:
                    self.transfer_waits[transfer].append(node)
                for source in node.all_input_nodes:
                    if source in origin and node not in waits[origin[source]]:
                        waits[origin[source]].append(node)
        of_wait: dict[torch.fx.Node, list[Collective]] = {}
        for index, (start, its_waits) in enumerate(waits.items()):
            collective = collective_of(index, start, tuple(its_waits))
            self.collectives.append(collective)
            self.by_start[start] = collective
            for wait in its_waits:
                of_wait.setdefault(wait, []).append(collective)
        self.collectives_of_wait = {wait: tuple(found) for wait, found in of_wait.items()}

    def _find_transfers(self) -> None:
        """Transfers whose results are all waited for in this graph; any other one is a fence and nothing else."""
        landed = {wait: set(self.storages.of(wait)) for waits in self.transfer_waits.values() for wait in waits}
        of_wait: dict[torch.fx.Node, list[Collective]] = {}
        for node, waits in self.transfer_waits.items():
            left = set(self.storages.of(node)).difference(*(landed[wait] for wait in waits))
            if left or not waits:
                continue
            found = transfer_of(len(self.transfers), node, tuple(waits))
            self.transfers[node] = found
            for wait in waits:
                of_wait.setdefault(wait, []).append(found)
        self.transfers_of_wait = {wait: tuple(found) for wait, found in of_wait.items()}

    def ordering_edges(self, *, move_transfers: bool = False) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        """Pairs (before, after) that data flow does not show: memory hazards and effects, O(nodes + edges).

        Args:
            move_transfers: leave out the order of ``transfers``, for a caller that keeps rules of its own about them.

        - around every write to a storage: earlier readers and writers before it, later ones after it; a read by a
          collective or a transfer lasts until its waits, and its result is written until its wait;
        - around what Inductor may do in place, as if it were a write, towards collectives;
        - what Inductor writes to memory for one reader is not computed anew for another one in front of all such;
        - random operators keep their order, but for attention that drops nothing out; so do asserts, and fences among
          each other (what crosses a fence is the schedule's business). What a fence does is not known: it may draw as
          well, so draws do not cross it.
        """
        edges: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        last: dict[str, torch.fx.Node] = {}
        for node in self.nodes:
            channel = ops.order_channel(node, self.roles[node])
            if channel and not (move_transfers and node in self.transfers):
                edges.extend((last[before], node) for before in ops.NOT_CROSSED[channel] if before in last)
                last[channel] = node
        for storage in self.storages.all:
            if storage.writers:
                edges.extend(self._hazards(storage.members, set(storage.writers)))
        edges.extend(self._possible_hazards())
        edges.extend(self._written_to_memory())
        return edges

    def _written_to_memory(self) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        """Keeps pointwise readers of a pointwise result behind a reader for which Inductor writes it to memory.

        Inductor computes a pointwise result anew in every pointwise reader, up to the first reader in graph order that
        needs it in memory. A reader that is moved in front of that one keeps the result's operands until it has run.
        Where several readers need the value in memory, any of them will do; the one with the longest way to the end of
        the graph is the last that an order would hold back (the gradient of an input, not that of a weight). What is
        joined with others is written where it belongs, and is complete when the last of them is: nobody waits for it.
        """
        edges: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        ways: dict[torch.fx.Node, int] = {}
        for storage in self.storages.all:
            if self.roles[storage.producer] is not Role.COMPUTE or not _torch.is_pointwise(storage.producer.target):
                continue
            readers = [n for n in self._readers(storage) if self.roles[n] is Role.COMPUTE and n.target not in _JOINS]
            if len(readers) < 2:
                continue
            readers.sort(key=self.position.__getitem__)
            writing: torch.fx.Node | None = None
            for reader in readers:
                if _torch.is_pointwise(reader.target):
                    edges.extend([(writing, reader)] if writing else [])
                elif writing is None:
                    writing = reader
                else:
                    ways = ways or self._ways_to_the_end()
                    writing = reader if ways[reader] > ways[writing] else writing
        return edges

    def _ways_to_the_end(self) -> dict[torch.fx.Node, int]:
        """Per node, over how many users the longest way from it leads."""
        ways: dict[torch.fx.Node, int] = {}
        for node in reversed(self.nodes):
            ways[node] = 1 + max((ways[user] for user in node.users), default=0)
        return ways

    def _possible_hazards(self) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        """Keeps nodes that Inductor may do in place off memory that is needed otherwise.

        Inductor looks for later uses only. It does not know that an earlier collective still reads. And an input that
        something is copied to in the end may be taken for the result, which is then lost: any later use prevents that.
        It never takes a view of an input.
        """
        edges: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        for node in self.nodes:
            for operand in ops.possibly_mutated_inputs(node):
                for storage in self.storages.of(operand):
                    if storage.writers and operand.op in ("placeholder", "get_attr"):
                        edges.extend((node, user) for user in self._readers(storage))
                    starts = {
                        user: None
                        for member in storage.members
                        for user in member.users
                        if user is not node and (self.roles[user] is Role.START or user in self.transfer_waits)
                    }
                    for start in starts:
                        if self.position[start] < self.position[node]:
                            waits = self._ends(start)
                            edges.extend((wait, node) for wait in waits)
                            if any(self.position[wait] > self.position[node] for wait in waits):
                                # Only a later use keeps Inductor from doing it in place: one has to stay later.
                                edges.append((node, self._last_use(storage)))
                        else:
                            edges.append((node, start))
        edges.extend((node, view) for view, nodes in self.late_views.items() for node in nodes)
        return [(a, b) for a, b in edges if self.position[a] < self.position[b]]

    @cached_property
    def late_views(self) -> dict[torch.fx.Node, list[torch.fx.Node]]:
        """Views that stay behind nodes which Inductor may do in place on an input that is written to, with these nodes.

        To Inductor a view is a use where it stands, wherever it is read.
        """
        found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in self.nodes:
            for operand in ops.possibly_mutated_inputs(node):
                if operand.op in ("placeholder", "get_attr") and any(s.writers for s in self.storages.of(operand)):
                    for user in operand.users:
                        if self.roles[user] is Role.FREE and self.position[node] < self.position[user]:
                            found.setdefault(user, []).append(node)
        return found

    def _ends(self, node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
        """The waits of a collective or a transfer; () for any other node."""
        if self.roles[node] is Role.START:
            return self.by_start[node].waits
        return tuple(self.transfer_waits.get(node, ()))

    def _last_use(self, storage: FxStorage) -> torch.fx.Node:
        """The last node that reads or writes the storage."""
        users = [user for member in storage.members for user in member.users if self.roles[user] is not Role.FREE]
        return max(users, key=self.position.__getitem__)

    def _readers(self, storage: FxStorage) -> list[torch.fx.Node]:
        """Nodes that read the storage's memory, but for what copies to it in the end."""
        users = {user: None for member in storage.members for user in member.users}
        timeless = (Role.FREE, Role.OUTPUT)
        return [user for user in users if self.roles[user] not in timeless and user not in storage.writers]

    def _hazards(
        self, members: list[torch.fx.Node], writers: set[torch.fx.Node]
    ) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        accesses: dict[torch.fx.Node, None] = {}
        for member in members:
            accesses[member] = None
            for user in member.users:
                accesses[user] = None
        # A view touches no memory; what reads through it is among the members' users.
        timeless = (Role.OUTPUT, Role.FREE)
        accesses = {node: None for node in accesses if self.roles[node] not in timeless}
        ordered = sorted(accesses, key=self.position.__getitem__)
        edges: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        last_writes: tuple[torch.fx.Node, ...] = ()
        reads: list[torch.fx.Node] = []
        for node in ordered:
            ends = self._ends(node)
            edges.extend((w, node) for w in last_writes if self.position[w] < self.position[node])
            if node in writers:
                edges.extend((read, node) for read in reads if self.position[read] < self.position[node])
                reads = []
                # A collective that writes in place has written when its waits are over.
                last_writes = (node, *ends)
            reads.append(node)
            reads.extend(ends)
        return edges


def collective_of(index: int, start: torch.fx.Node, waits: tuple[torch.fx.Node, ...]) -> Collective:
    """The :class:`Collective` that a start node issues; ``index`` numbers it in its graph."""
    kind = ops.COLLECTIVES[_torch.op_name(start.target)]
    arguments = _torch.op_arguments(start)
    data = next(iter(arguments.values()))
    inputs = tuple(data) if isinstance(data, (list, tuple)) else (data,)
    argument = arguments.get("group_name", arguments.get("group", ""))
    values = [n.meta.get("val") for n in inputs]
    output = start.meta.get("val")
    outputs = output if isinstance(output, (list, tuple)) else [output]
    return Collective(
        index=index,
        label=f"{kind.label}{index}",
        start=start,
        kind=kind,
        group=resolve(behind(argument)),
        # A factor that cannot be read is like no other one, and has the same name on all ranks.
        reduce_op=_torch.reduce_op_name(behind(arguments.get("reduce_op", ""))).replace("?", start.name),
        inputs=inputs,
        waits=waits,
        input_bytes=_total(values),
        output_bytes=_total(outputs),
        dtypes=tuple(v.dtype for v in values if isinstance(v, torch.Tensor)),
        in_place=bool(_torch.mutated_argument_names(start.target)),
        group_argument=argument,
        member_bytes=tuple(_total([value]) or 0 for value in values),
    )


def transfer_of(index: int, node: torch.fx.Node, waits: tuple[torch.fx.Node, ...]) -> Collective:
    """What a transfer does, in the words of a collective of its group; ``index`` numbers it among the transfers."""
    kind = transfers.kind_of(node)
    argument = transfers.group_argument(node)
    values = [n.meta.get("val") for n in node.all_input_nodes]
    sent, received = transfers.sent_bytes(node)
    return Collective(
        index=index,
        label=f"{kind.label}{index}",
        start=node,
        kind=kind,
        group=resolve(argument),
        reduce_op="",
        inputs=tuple(node.all_input_nodes),
        waits=waits,
        input_bytes=sent,
        output_bytes=received,
        dtypes=tuple(v.dtype for v in values if isinstance(v, torch.Tensor)),
        in_place=bool(received),
        group_argument=argument,
    )


def behind(argument: object) -> object:
    """The value of an argument that may be a node: torch passes groups and reduce ops as objects that nodes make."""
    return argument.meta.get("val", argument.name) if isinstance(argument, torch.fx.Node) else argument


def _total(values: list[object] | tuple[object, ...]) -> int | None:
    total = 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            return None
        size = _torch.tensor_bytes(value)
        if size is None:
            return None
        total += size
    return total
