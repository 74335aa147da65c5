"""Storages of an FX graph's tasks: sizes that all ranks agree on, who allocates them, and how long they are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.canonical import COPIES, PADS, Shards
from inductor_passes.ir.ops import SAVED_BLOCK, Role, role
from inductor_passes.ir.storages import FxStorage, Storages
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.problems.builder import CALLERS, OF_CALLER, Block, Builder, NoHintError
from inductor_passes.problems.generated import Generated
from inductor_passes.schedule.problem import INPUT


def is_backward(graph: torch.fx.Graph) -> bool:
    """Whether AOTAutograd made this graph as a backward: it takes tangents."""
    return any(n.op == "placeholder" and str(n.target).startswith("tangents_") for n in graph.nodes)


def kept_by_caller(node: torch.fx.Node, backward: bool) -> bool:
    """Whether an input stays alive however early the graph is done with it.

    The caller holds the inputs of a forward. A backward owns its saved activations (AOTAutograd hands them over and
    lets go), not the parameters and inputs that it saved by reference (``primals_*``), or views of them, nor the
    incoming gradients.
    """
    if node.op == "get_attr" or not backward:
        return True
    return str(node.target).startswith(CALLERS) or OF_CALLER in node.meta


def mark_views_of_inputs(forward: torch.fx.Graph, backward: torch.fx.Graph) -> None:
    """Note in a backward's graph which of its inputs are views of forward's inputs: only forward's graph shows it."""
    saved = {node.name: node for node in forward.output_node().all_input_nodes}
    for node in backward.find_nodes(op="placeholder"):
        source = saved.get(str(node.target))
        while source is not None and source.op == "call_function":
            source = source.all_input_nodes[0] if role(source) is Role.FREE and source.all_input_nodes else None
        if source is not None:
            node.meta[OF_CALLER] = True


def mark_saved_blocks(forward: torch.fx.Graph, backward: torch.fx.Graph) -> None:
    """Note in a backward's graph which of its inputs are one block of memory: only forward's graph shows it.

    That is so for several saved views of one value, or of an input of forward. Values that may be memory of several
    blocks are left apart, and so are shards: those of other ranks may have another size, which what sends them shows.
    """
    storages = Storages(forward)
    saved = {node.name: node for node in forward.output_node().all_input_nodes}
    together: dict[FxStorage, list[torch.fx.Node]] = {}
    for node in backward.find_nodes(op="placeholder"):
        blocks = storages.of(saved[str(node.target)]) if str(node.target) in saved else ()
        if len(blocks) == 1:
            together.setdefault(blocks[0], []).append(node)
    for block, nodes in together.items():
        if len(nodes) > 1 and block.size_bytes and not (kept_by_caller(nodes[0], True) and _is_sent(block)):
            for node in nodes:
                node.meta[SAVED_BLOCK] = (nodes[0].name, block.size_bytes)


def _is_sent(block: FxStorage) -> bool:
    """Whether a block is what is sent, perhaps padded or converted before."""
    todo, seen = list(block.members), set(block.members)
    while todo:
        for user in todo.pop().users:
            if role(user) is Role.START:
                return True
            if user not in seen and (role(user) is Role.FREE or _torch.op_name(user.target) in PADS | COPIES):
                seen.add(user)
                todo.append(user)
    return False


def _is_unread(storage: FxStorage) -> bool:
    return all(user.op == "output" for member in storage.members for user in member.users)


def _received_bytes(node: torch.fx.Node, wait: torch.fx.Node) -> int | None:
    """Bytes of what was received for a node that trims it: all of it, or its piece of a message that several share.

    Pieces of a message are of the padded size, which all ranks see. What is cut off of a piece only some of them see.
    None where the wait gives no tensor.
    """
    received = wait.meta.get("val")
    if not isinstance(received, torch.Tensor):
        return None
    came_from: dict[torch.fx.Node, torch.fx.Node] = {}
    todo = [node]
    while todo and wait not in came_from and node is not wait:
        one = todo.pop()
        for source in one.all_input_nodes:
            if source not in came_from:
                came_from[source] = one
                todo.append(source)
    one = wait
    while one in came_from and one is not node:
        after = came_from[one]
        value = after.meta.get("val")
        if isinstance(value, torch.Tensor) and _is_taken_apart(one):
            return _torch.tensor_bytes(value)
        one = after
    return _torch.tensor_bytes(received)


def _is_taken_apart(node: torch.fx.Node) -> bool:
    """Whether several slices of a node, all of them read, are the whole of it: none of them is a trimmed shard."""
    whole = node.meta.get("val")
    pieces = [user for user in node.users if _torch.op_name(user.target) == "aten::slice" and user.users]
    values = [piece.meta.get("val") for piece in pieces]
    if len(pieces) < 2 or len(pieces) < len(node.users) or not isinstance(whole, torch.Tensor):
        return False
    # A shard that is cut off twice, at the same place, may be half of what was received.
    if len({str(piece.args[1:3]) for piece in pieces}) < len(pieces):
        return False
    sizes = [_torch.tensor_bytes(v) if isinstance(v, torch.Tensor) else None for v in values]
    return None not in sizes and sum(s for s in sizes if s is not None) == _torch.tensor_bytes(whole)


class GraphMemory:
    """The memory of a graph whose nodes have been put into tasks.

    Args:
        task_of: node -> number of its task.
        places: node of a task of several nodes -> its place among them.
    """

    def __init__(
        self,
        view: GraphView,
        shards: Shards,
        builder: Builder,
        task_of: Mapping[torch.fx.Node, int],
        places: Mapping[torch.fx.Node, int],
    ) -> None:
        self._view = view
        self._shards = shards
        self._owner = shards.owner
        self._builder = builder
        self._task_of = task_of
        self._places = places
        self._backward = is_backward(view.graph)
        self._outputs = {n for node in view.nodes if node.op == "output" for n in node.all_input_nodes}

    def blocks(self) -> list[Block]:
        """Everything that takes memory, but for :meth:`padded`.

        Raises:
            NoHintError: a symbolic size has no hint.
        """
        return [one for storage in self._view.storages.all if (one := self._block(storage)) is not None]

    def generated(self, homes: dict[str, str]) -> list[Block]:
        """The same where Inductor makes kernels of the graph, see :class:`Generated`.

        Args:
            homes: filled: name of a block that lies in another one -> the other one's; of a value that every reader
                computes, however many there are -> "".
        """
        freed = set[torch.fx.Node]()
        if _torch.writes_over_saved():
            inputs = (n for n in self._view.nodes if n.op == "placeholder" and SAVED_BLOCK not in n.meta)
            freed = {n for n in inputs if not kept_by_caller(n, self._backward)}
        generated = Generated(self._view, self._owner, freed)
        found: dict[FxStorage, Block] = {}
        parts: list[tuple[FxStorage, Block]] = []
        for storage in self._view.storages.all:
            if self._view.role(storage.producer) is Role.COMPUTE and not generated.is_stored(storage):
                if not generated.is_stored_if_shared(storage):
                    homes[storage.producer.name] = ""
                continue
            block = self._block(storage, generated.computed_at)
            if block is None:
                continue
            if (whole := generated.whole(storage)) is not None:
                parts.append((whole, block))
                homes[block.name] = generated.first(whole).producer.name
                continue
            first = found.setdefault(generated.first(storage), block)
            if first is not block:
                homes[block.name] = first.name
            first.users |= block.users
            first.pinned |= block.pinned
        for whole, part in parts:
            # What is computed where it belongs brings the whole to life.
            if (block := found.get(generated.first(whole))) is not None:
                block.users |= {*part.users, part.producer, block.producer}
                block.producer, block.span = min(block.producer, part.producer), None
        return list(found.values())

    def padded(self) -> list[Block]:
        """The padded copies that every rank is charged for where shards are uneven."""
        out = []
        for collective in self._view.collectives:
            padded = collective in self._shards.uneven and collective.kind is CollectiveKind.ALL_GATHER
            if padded and not self._is_packed(collective):
                start, size = self._task_of[collective.start], collective.input_bytes or 0
                users = set(self._builder.in_flight(start))
                out.append(Block(f"{collective.start.name}.padded", size, start, users))
        return out

    def _block(
        self, storage: FxStorage, computed_at: Callable[[torch.fx.Node], Collection[torch.fx.Node]] | None = None
    ) -> Block | None:
        """What the planner knows of a storage; None for what takes no memory.

        Args:
            computed_at: the nodes whose kernels compute another one's result, and read its operands.
        """
        made_by = storage.producer
        is_input = self._view.role(made_by) is Role.INPUT
        if self._pads_some_ranks(made_by):
            return None
        size = self._canonical_size(storage)
        if size is None:
            raise NoHintError(f"{made_by.name} has a symbolic size without a hint")
        if size == 0 or (self._shards.uneven and is_input and _is_unread(storage)):
            # A shard that is handed through says nothing about the order, and is not of one size on all ranks.
            return None
        producer = INPUT if is_input else self._task_of.get(made_by, INPUT)
        pinned = any(m in self._outputs for m in storage.members) or (
            is_input and kept_by_caller(made_by, self._backward)
        )
        block = Block(made_by.name, size, producer, pinned=pinned)
        first = last = self._places.get(made_by, 0)
        uneven, roles, users = bool(self._shards.uneven), self._view.roles, block.users
        for member in storage.members:
            for user in (member, *member.users):
                for task in self._tasks(user, computed_at):
                    if uneven or roles[user] is Role.START:
                        # What only prepares the message is not read any more while it travels. Where shards are
                        # uneven, ranks prepare theirs in different ways: all are charged for the longest.
                        users.update(self._builder.in_flight(task))
                    else:
                        users.add(task)
                    if self._view.transfer_waits:
                        # What is sent is read until the send has been waited for.
                        users.update(self._task_of[wait] for wait in self._view.transfer_waits.get(user, ()))
                    # A view touches no memory: one that nobody reads keeps none alive. Uneven ranks differ in views.
                    if task == producer and (uneven or roles[user] is not Role.FREE):
                        last = max(last, self._places.get(user, 0))
        if made_by in self._places:
            block.span = first, last
        return block

    def _tasks(
        self, user: torch.fx.Node, computed_at: Callable[[torch.fx.Node], Collection[torch.fx.Node]] | None
    ) -> list[int]:
        """The tasks in which a node, or each kernel that computes its result, uses its operands."""
        nodes = (user,) if computed_at is None else computed_at(user)
        return [self._task_of[node] for node in nodes if node in self._task_of]

    def _pads_some_ranks(self, node: torch.fx.Node) -> bool:
        """Whether a node pads or trims the shard of a rank that has a smaller one, at no cost of its own.

        Every rank is charged for what is padded alone. What is padded while it is packed is written there at once.
        """
        owner = self._owner.get(node)
        if owner is None or _torch.op_name(node.target) not in PADS:
            return False
        start = self._view.by_start.get(owner)
        if start is not None:
            return start in self._shards.uneven or self._is_packed(start)
        return any(collective in self._shards.uneven for collective in self._view.collectives_of_wait.get(owner, ()))

    def _is_packed(self, collective: Collective) -> bool:
        """Whether the message is put together from several shards."""
        (node, *others) = collective.inputs
        while self._view.role(node) is Role.FREE and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        return not others and _torch.op_name(node.target) == "aten::cat"

    def _canonical_size(self, storage: FxStorage) -> int | None:
        """Size of a storage, where it may differ between ranks the size that is the same on all."""
        owner = self._owner.get(storage.producer)
        if owner is not None and self._view.role(owner) is Role.START:
            return self._prepared_bytes(storage)
        if owner is not None:
            collectives = self._view.collectives_of_wait.get(owner, ())
            uneven = any(c in self._shards.uneven or c in self._shards.padded for c in collectives)
            if not uneven:
                return storage.size_bytes
            piece = _received_bytes(storage.producer, owner)
            return sum(c.output_bytes or 0 for c in collectives) if piece is None else piece
        if self._view.role(storage.producer) is Role.INPUT and SAVED_BLOCK not in storage.producer.meta:
            starts = {
                user if self._view.role(user) is Role.START else self._owner.get(user)
                for user in storage.producer.users
                if user.op != "output"
            }
            if starts and all(start in self._view.by_start for start in starts):
                return self._prepared_bytes(storage)
        return storage.size_bytes

    def _prepared_bytes(self, storage: FxStorage) -> int | None:
        """Bytes of a value that is prepared for a collective, counted at the (padded) size that enters the message.

        Padding is all that makes shards of unequal size equal, so the last padding on the way to the collective, or to
        the packing of its message, says how many elements the value has on the largest rank.
        """
        value = storage.producer.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return storage.size_bytes
        node, padded = storage.producer, None
        while (user := next((u for u in node.users if u.op != "output"), None)) in self._owner:
            if user is None or len(user.all_input_nodes) > 1:
                break
            if _torch.op_name(user.target) in PADS:
                padded = user.meta.get("val")
            node = user
        if not isinstance(padded, torch.Tensor):
            return storage.size_bytes
        total = _torch.tensor_bytes(padded)
        return None if total is None else total // padded.element_size() * value.element_size()
