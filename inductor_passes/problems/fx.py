"""From an FX graph to a scheduling problem.

One task per node that takes time or memory. A node without cost (view, getitem, size arithmetic) that depends on a
single task belongs to that task and moves with it; one that depends on inputs only stays in front. What only prepares a
collective's input or trims its result belongs to the collective (see ``canonical``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir import ops, transfers
from inductor_passes.ir.canonical import COPIES, Shards, shards
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.problems.builder import Builder, NoHintError
from inductor_passes.problems.graph_memory import GraphMemory, is_backward, kept_by_caller
from inductor_passes.problems.inside import inside_blocks
from inductor_passes.problems.transfers import COLLECTIVES, Event, kept_order
from inductor_passes.problems.workspaces import workspaces
from inductor_passes.schedule.problem import Problem, Storage

__all__ = ["FxProblem", "NoHintError", "build", "is_backward", "kept_by_caller"]


@dataclass(frozen=True)
class FxProblem:
    """A problem with its way back to the graph.

    Attributes:
        problem: for the planner.
        members: for every task its nodes in graph order (empty for the further waits of a node that waits for several
            collectives).
        prefix: nodes that stay in front of every task, in graph order (inputs and what follows from them for free).
        suffix: the output node.
        ranks_agree: all ranks solve this problem alike, see ``canonical.Shards``.
        memory: for :attr:`generated`.
        costs: of its compute.
        homes: of :attr:`generated`, filled with it: name of a value whose memory lies in another value's -> the other;
            of a value that every reader computes, however many there are -> "".
        uneven: some shards are of unequal size, which every rank sees: what pads and trims them is the rank's own.
        kept: starts and waits (before, after) that stay in order for what other ranks may do, see ``transfers``. The
            view's ``ordering_edges`` are about this rank's data and memory, and say nothing of it.
    """

    problem: Problem
    members: tuple[tuple[torch.fx.Node, ...], ...]
    prefix: tuple[torch.fx.Node, ...]
    suffix: tuple[torch.fx.Node, ...]
    ranks_agree: bool = True
    memory: Callable[[], tuple[Storage, ...]] | None = None
    kept: tuple[tuple[torch.fx.Node, torch.fx.Node], ...] = ()
    costs: ComputeCosts | None = None
    uneven: bool = False
    homes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def generated(self) -> Problem | None:
        """The same tasks with the storages of Inductor's code, see :class:`Generated`.

        How a shard of unequal size is padded is the rank's own, and belongs to its collective: all ranks see the same.
        None for a problem that was made otherwise. Worked out when it is first asked for, which has to be before the
        graph is changed.
        """
        return None if self.memory is None else dataclasses.replace(self.problem, storages=self.memory())

    @property
    def graph(self) -> torch.fx.Graph:
        """The graph that the problem was built from."""
        return self.suffix[0].graph

    def node_order(self, order: Iterable[int]) -> list[torch.fx.Node]:
        """All nodes of the graph in the order of a plan."""
        nodes = list(self.prefix)
        for task in order:
            nodes.extend(self.members[task])
        nodes.extend(self.suffix)
        return nodes


def build(
    view: GraphView,
    profile: CostProfile,
    *,
    name: str = "",
    estimator: Callable[[torch.fx.Node], float | None] | None = None,
    agreed: bool = True,
    known: Shards | None = None,
) -> FxProblem:
    """The scheduling problem of a graph; O(nodes + edges).

    Args:
        agreed: whether all ranks compile this graph; otherwise collectives keep the order in which they came.
        known: shards of the graph, when somebody has looked already.

    Raises:
        NoHintError: a collective or a storage has a symbolic size without a hint.
    """
    return _Reader(view, known or shards(view), profile, name, estimator, agreed).read()


class _Reader:
    """Puts the nodes of a graph into tasks."""

    def __init__(
        self,
        view: GraphView,
        found: Shards,
        profile: CostProfile,
        name: str,
        estimator: Callable[[torch.fx.Node], float | None] | None,
        agreed: bool,
    ) -> None:
        self.view = view
        self.costs = ComputeCosts(view, profile, estimator)
        self.shards = found
        self.ranks_agree = agreed and self.shards.ranks_agree
        self.owner = self.shards.owner
        self.builder = Builder(profile, estimator, name=name, hold_unknown=True)
        self.homes: dict[str, str] = {}
        self.task_of: dict[torch.fx.Node, int] = {}
        #: Of a node that waits for several collectives the first of its tasks.
        self.first_wait: dict[torch.fx.Node, int] = {}
        self.members: list[list[torch.fx.Node]] = []
        self.prefix: list[torch.fx.Node] = []
        self.suffix: list[torch.fx.Node] = []
        self.kept: list[tuple[torch.fx.Node, torch.fx.Node]] = []

    def read(self) -> FxProblem:
        waiting: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in self.view.nodes:
            owner = self.owner.get(node)
            if owner is not None and self.view.role(owner) is Role.START:
                waiting.setdefault(owner, []).append(node)
                continue
            self._place(node, waiting.get(node, []))
        self._ordering()
        memory = self._memory()
        members = tuple(tuple(m) for m in self.members)
        prefix, suffix = tuple(self.prefix), tuple(self.suffix)
        return FxProblem(
            self.builder.problem(),
            members,
            prefix,
            suffix,
            self.ranks_agree,
            memory,
            tuple(self.kept),
            self.costs,
            bool(self.shards.uneven),
            self.homes,
        )

    def _place(self, node: torch.fx.Node, preparation: list[torch.fx.Node]) -> None:
        role = self.view.role(node)
        if role is Role.INPUT:
            self.prefix.append(node)
            return
        if role is Role.OUTPUT:
            self.suffix.append(node)
            return
        preds = {self.task_of[i] for n in (node, *preparation) for i in n.all_input_nodes if i in self.task_of}
        if node in self.owner and self.owner[node] in self.task_of:
            home = self.task_of[self.owner[node]]
            if preds <= {home}:
                self._attach(node, home)
                return
        if role is Role.FREE and len(preds) <= 1 and node not in self.view.late_views:
            if preds:
                self._attach(node, next(iter(preds)))
            else:
                self.prefix.append(node)
            return
        if role is Role.START:
            # Padding costs nothing here: not every rank has something to pad.
            copied = any(_torch.op_name(n.target) in COPIES for n in preparation)
            start = self.builder.start(node.name, self.view.by_start[node], preds, copied=copied)
            self._enter(start, [*preparation, node])
        elif node in self.view.transfers:
            queue = transfers.queues(node)[0]
            self._enter(self.builder.start(node.name, self.view.transfers[node], preds, queue=queue), [node])
        elif role is Role.WAIT and self._awaited(node):
            self._wait(node, preds)
        else:
            # What belongs to several waits has a size that is the rank's own: it costs nothing, on all ranks.
            task = self.builder.compute(
                node.name,
                0 if node in self.owner else self.costs.duration_ns(node),
                preds,
                label=ops.label(node),
                source=ops.source_line(node),
                fence=role in (Role.FENCE, Role.WAIT),
            )
            self._enter(task, [node])

    def _attach(self, node: torch.fx.Node, task: int) -> None:
        self.members[task].append(node)
        self.task_of[node] = task

    def _enter(self, task: int, members: list[torch.fx.Node]) -> None:
        """Note what a new task stands for."""
        self.members.append(members)
        for member in members:
            self.task_of[member] = task

    def _wait(self, node: torch.fx.Node, preds: set[int]) -> None:
        """One task per collective that the node waits for, in a row; the node belongs to the last."""
        *before, last = (self.task_of[collective.start] for collective in self._awaited(node))
        self.first_wait[node] = len(self.builder.tasks)
        previous: set[int] = set()
        for position, start in enumerate(before):
            needs = {start} | previous
            task = self.builder.wait(f"{node.name}.{position}", start, needs, source=ops.source_line(node))
            self._enter(task, [])
            previous = {task}
        needs = {last} | preds | previous
        self._enter(self.builder.wait(node.name, last, needs, source=ops.source_line(node)), [node])

    def _awaited(self, node: torch.fx.Node) -> tuple[Collective, ...]:
        """The collectives and transfers that a node waits for."""
        return (*self.view.collectives_of_wait.get(node, ()), *self.view.transfers_of_wait.get(node, ()))

    def _ordering(self) -> None:
        for before, after in self.view.ordering_edges(move_transfers=True):
            b, a = self.task_of.get(before), self.task_of.get(after)
            # A preparation that sits inside its start may come later than it did: the start is what counts.
            if b is not None and a is not None and b < a:
                self.builder.require(b, a)
        if self.view.transfers or not self.ranks_agree:
            # Whatever durations and peaks each rank sees, all issue their collectives in the order that came in.
            events = dict(self._events())
            node_of = {event.task: node for node, event in events.items()}
            for b, a in kept_order(events.values(), agreed=self.ranks_agree):
                self.builder.require(b, a)
                self.kept.append((node_of[b], node_of[a]))
        sends = {self.task_of[node] for node, found in self.view.transfers.items() if found.input_bytes}
        self.builder.keep_sends_early(sends)

    def _events(self) -> Iterator[tuple[torch.fx.Node, Event]]:
        """The graph's starts and waits, in order."""
        alone = all(transfers.ONE not in transfers.queues(node) for node in self.view.transfers)
        for node in self.view.nodes:
            if self.view.role(node) is Role.START:
                yield node, Event(self.task_of[node], (COLLECTIVES if alone else transfers.ONE,))
            elif node in self.view.transfers:
                queues = transfers.queues(node) if alone else (transfers.ONE,)
                yield node, Event(self.task_of[node], queues, transfer=True)
            elif self.view.role(node) is Role.WAIT and self._awaited(node):
                yield node, Event(self.first_wait[node], transfer=node in self.view.transfers_of_wait)

    def _memory(self) -> Callable[[], tuple[Storage, ...]]:
        """Enter the memory of the graph; a function for that of generated code."""
        places = {node: k for members in self.members if len(members) > 1 for k, node in enumerate(members)}
        memory = GraphMemory(self.view, self.shards, self.builder, self.task_of, places)
        insides = inside_blocks(self.view.nodes, self.task_of, places)
        self.builder.add_memory([*memory.blocks(), *insides])
        padded = memory.padded()
        self.builder.add_memory(padded)
        held = workspaces({self.task_of[c.start]: c for c in self.view.collectives}, self.builder)
        self.builder.add_memory(held)
        beside = [*insides, *padded, *held]
        return lambda: tuple(self.builder.storages([*memory.generated(self.homes), *beside]))
