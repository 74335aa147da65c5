"""Storages of an FX graph's tasks: sizes that all ranks agree on, who allocates them, and how long they are needed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.canonical import PADS, Shards
from inductor_passes.ir.ops import Role
from inductor_passes.ir.storages import FxStorage
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.schedule.problem import INPUT, Storage


class NoHintError(ValueError):
    """A symbolic size has no hint, so durations and memory are unknown."""


def is_backward(graph: torch.fx.Graph) -> bool:
    """Whether AOTAutograd made this graph as a backward: it takes tangents."""
    return any(n.op == "placeholder" and str(n.target).startswith("tangents_") for n in graph.nodes)


def kept_by_caller(node: torch.fx.Node, backward: bool) -> bool:
    """Whether an input stays alive however early the graph is done with it.

    The caller holds the inputs of a forward. A backward owns its saved activations (AOTAutograd hands them over and
    lets go), not the parameters and inputs that it saved by reference (``primals_*``) nor the incoming gradients.
    """
    target = str(node.target)
    return node.op == "get_attr" or not backward or target.startswith(("primals_", "tangents_", "bwd_seed"))


def _is_unread(storage: FxStorage) -> bool:
    return all(user.op == "output" for member in storage.members for user in member.users)


class GraphMemory:
    """The storages of a graph whose nodes have been put into tasks.

    Args:
        task_of: node -> number of its task.
        tasks: names of the tasks; ``members`` their nodes.
        waits_of: number of a start -> numbers of its waits.
    """

    def __init__(
        self,
        view: GraphView,
        shards: Shards,
        task_of: Mapping[torch.fx.Node, int],
        tasks: Sequence[str],
        members: Sequence[Sequence[torch.fx.Node]],
        waits_of: Mapping[int, Sequence[int]],
    ) -> None:
        self._view = view
        self._shards = shards
        self._owner = shards.owner
        self._task_of = task_of
        self._tasks = tasks
        self._members = members
        self._waits_of = waits_of
        self._backward = is_backward(view.graph)
        self._outputs = {n for node in view.nodes if node.op == "output" for n in node.all_input_nodes}
        #: what lives and dies within a task, and what a task makes that outlives it
        self._inside: dict[int, list[tuple[FxStorage, int]]] = {}
        self._made: dict[int, list[tuple[torch.fx.Node, int]]] = {}

    def storages(self) -> list[Storage]:
        """Everything that takes memory.

        Raises:
            NoHintError: a symbolic size has no hint.
        """
        found = [one for storage in self._view.storages.all if (one := self._storage(storage)) is not None]
        return [*found, *self._working(), *self._padded()]

    def _storage(self, storage: FxStorage) -> Storage | None:
        """What the planner knows of a storage; None for what takes no memory, or none outside of its task."""
        producer_role = self._view.role(storage.producer)
        if self._pads_some_ranks(storage.producer):
            return None
        size = self._canonical_size(storage)
        if size is None:
            raise NoHintError(f"{storage.producer.name} has a symbolic size without a hint")
        if size == 0 or (self._shards.uneven and producer_role is Role.INPUT and _is_unread(storage)):
            # A shard that is handed through says nothing about the order, and is not of one size on all ranks.
            return None
        producer = INPUT if producer_role is Role.INPUT else self._task_of.get(storage.producer, INPUT)
        pinned = any(m in self._outputs for m in storage.members) or (
            producer_role is Role.INPUT and kept_by_caller(storage.producer, self._backward)
        )
        readers = self._readers(storage) - {producer}
        if not readers and not pinned and producer != INPUT and len(self._members[producer]) > 1:
            self._inside.setdefault(producer, []).append((storage, size))
            return None
        self._made.setdefault(producer, []).append((storage.producer, size))
        return Storage(size, producer, tuple(sorted(readers)), pinned, storage.producer.name)

    def _readers(self, storage: FxStorage) -> set[int]:
        """Tasks that touch a storage, and the waits of collectives and transfers among them."""
        readers: set[int] = set()
        for member in storage.members:
            for user in (member, *member.users):
                task = self._task_of.get(user)
                if task is not None:
                    readers.add(task)
                    if self._shards.uneven or self._view.role(user) is Role.START:
                        # What only prepares the message is not read any more while it travels. Where shards are
                        # uneven, ranks prepare theirs in different ways: all are charged for the longest.
                        readers.update(self._waits_of.get(task, ()))
                    # What is sent is read until the send has been waited for.
                    readers.update(self._task_of[w] for w in self._view.transfer_waits.get(user, ()))
        return readers

    def _working(self) -> list[Storage]:
        """Per task of several nodes the memory that it takes while it runs."""
        sizes = {task: self._working_bytes(task, one, self._made.get(task, [])) for task, one in self._inside.items()}
        return [Storage(size, task, (), False, f"{self._tasks[task]}.working") for task, size in sizes.items() if size]

    def _padded(self) -> list[Storage]:
        """The padded copies that every rank is charged for where shards are uneven."""
        out = []
        for collective in self._view.collectives:
            padded = collective in self._shards.uneven and collective.kind is CollectiveKind.ALL_GATHER
            if padded and not self._is_packed(collective):
                start, size = self._task_of[collective.start], collective.input_bytes or 0
                waits = tuple(self._waits_of.get(start, ()))
                out.append(Storage(size, start, waits, False, f"{collective.start.name}.padded"))
        return out

    def _working_bytes(
        self, task: int, inside: list[tuple[FxStorage, int]], made: list[tuple[torch.fx.Node, int]]
    ) -> int:
        """What a task of several nodes takes at its peak beyond what outlives it.

        Args:
            inside: storages that live and die within the task, with their sizes.
            made: producers of the storages that outlive it, with their sizes.
        """
        position = {node: k for k, node in enumerate(self._members[task])}
        change = [0] * (len(position) + 1)
        for storage, size in inside:
            touched = {user for member in storage.members for user in (member, *member.users)}
            # A view touches no memory: one that nobody reads keeps none alive. Uneven ranks differ in views.
            reads = (n for n in touched if self._shards.uneven or self._view.role(n) is not Role.FREE)
            ends = [position[n] for n in reads if n in position]
            change[position[storage.producer]] += size
            change[max(ends, default=position[storage.producer]) + 1] -= size
        for node, size in made:
            change[position[node]] += size
        kept = sum(size for _, size in made)
        return max(0, max(itertools.accumulate(change)) - kept)

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
            uneven = any(c in self._shards.uneven for c in collectives)
            return sum(c.output_bytes or 0 for c in collectives) if uneven else storage.size_bytes
        if self._view.role(storage.producer) is Role.INPUT:
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
