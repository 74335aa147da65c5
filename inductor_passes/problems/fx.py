"""From an FX graph to a scheduling problem.

One task per node that takes time or memory. A node without cost (view, getitem, size arithmetic) that depends on a
single task belongs to that task and moves with it; one that depends on inputs only stays in front. What only prepares a
collective's input or trims its result belongs to the collective (see ``canonical``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir import ops
from inductor_passes.ir.canonical import COPIES, shards
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.problems.graph_memory import GraphMemory, NoHintError, is_backward, kept_by_caller
from inductor_passes.schedule.problem import Kind, Lane, Problem, Task

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
    """

    problem: Problem
    members: tuple[tuple[torch.fx.Node, ...], ...]
    prefix: tuple[torch.fx.Node, ...]
    suffix: tuple[torch.fx.Node, ...]
    ranks_agree: bool = True

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
) -> FxProblem:
    """The scheduling problem of a graph; O(nodes + edges).

    Args:
        agreed: whether all ranks compile this graph; otherwise collectives keep the order in which they came.

    Raises:
        NoHintError: a collective or a storage has a symbolic size without a hint.
    """
    return _Builder(view, profile, name, estimator, agreed).build()


class _Builder:
    def __init__(
        self,
        view: GraphView,
        profile: CostProfile,
        name: str,
        estimator: Callable[[torch.fx.Node], float | None] | None,
        agreed: bool,
    ) -> None:
        self.view = view
        self.profile = profile
        self.name = name
        self.costs = ComputeCosts(view, profile, estimator)
        self.estimator = estimator
        self.shards = shards(view)
        self.ranks_agree = agreed and self.shards.ranks_agree
        self.owner = self.shards.owner
        self.attached = [n for n in view.nodes if n in self.owner]
        self.task_of: dict[torch.fx.Node, int] = {}
        self.tasks: list[Task] = []
        self.members: list[list[torch.fx.Node]] = []
        self.preds: list[set[int]] = []
        self.prefix: list[torch.fx.Node] = []
        self.suffix: list[torch.fx.Node] = []
        self.lanes: dict[str, int] = {}
        self.lane_list: list[Lane] = []
        self.waits_of: dict[int, list[int]] = {}

    def build(self) -> FxProblem:
        waiting: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in self.view.nodes:
            owner = self.owner.get(node)
            if owner is not None and self.view.role(owner) is Role.START:
                waiting.setdefault(owner, []).append(node)
                continue
            self._place(node, waiting.get(node, []))
        self._ordering()
        problem = Problem(
            tasks=tuple(self.tasks),
            preds=tuple(tuple(sorted(p)) for p in self.preds),
            lanes=tuple(self.lane_list),
            storages=tuple(self._memory().storages()),
            name=self.name,
        )
        members = tuple(tuple(m) for m in self.members)
        return FxProblem(problem, members, tuple(self.prefix), tuple(self.suffix), self.ranks_agree)

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
        if role is Role.FREE and len(preds) <= 1:
            if preds:
                self._attach(node, next(iter(preds)))
            else:
                self.prefix.append(node)
            return
        if role is Role.START:
            self._add_start(self.view.by_start[node], preparation, preds)
        elif role is Role.WAIT and self.view.collectives_of_wait.get(node):
            self._add_wait(node, preds)
        else:
            fence = role in (Role.FENCE, Role.WAIT)
            duration = self.costs.duration_ns(node)
            label = ops.label(node)
            self._add(Task(node.name, Kind.COMPUTE, duration, label=label, source=ops.source_line(node), fence=fence),
                      [node], preds)

    def _attach(self, node: torch.fx.Node, task: int) -> None:
        self.members[task].append(node)
        self.task_of[node] = task

    def _add(self, task: Task, members: list[torch.fx.Node], preds: set[int]) -> int:
        index = len(self.tasks)
        self.tasks.append(task)
        self.members.append(members)
        self.preds.append(preds)
        for member in members:
            self.task_of[member] = index
        return index

    def _lane(self, collective: Collective) -> int:
        group = collective.group
        if group.name not in self.lanes:
            self.lanes[group.name] = len(self.lane_list)
            known = bool(group.ranks)
            link = self.profile.link(group.ranks) if known else f"unknown:{group.name}"
            self.lane_list.append(Lane(group.name, link, fixed_order=not known))
        return self.lanes[group.name]

    def _add_start(self, collective: Collective, preparation: list[torch.fx.Node], preds: set[int]) -> None:
        if collective.input_bytes is None or collective.output_bytes is None:
            raise NoHintError(f"{collective.start.name} has a symbolic size without a hint")
        input_bytes = collective.input_bytes
        arguments = (collective.kind, input_bytes, collective.output_bytes, collective.group.ranks or (0,))
        duration = self.estimator(collective.start) if self.estimator is not None else None
        task = Task(
            collective.start.name,
            Kind.START,
            self.profile.communication_ns(*arguments) if duration is None else max(0, round(duration)),
            lane=self._lane(collective),
            issue_ns=self.profile.issue_ns(*arguments) + self._preparation_ns(preparation, input_bytes),
            size_bytes=max(collective.input_bytes, collective.output_bytes),
            label=collective.label,
            source=ops.source_line(collective.start),
        )
        self._add(task, [*preparation, collective.start], preds)

    def _preparation_ns(self, preparation: list[torch.fx.Node], input_bytes: int) -> int:
        """Time to cast or pack a message. Padding is left out: not every rank has something to pad."""
        if any(_torch.op_name(node.target) in COPIES for node in preparation):
            return self.profile.compute_ns(0, 2 * input_bytes, "float32", 1)
        return 0

    def _add_wait(self, node: torch.fx.Node, preds: set[int]) -> None:
        previous = -1
        collectives = self.view.collectives_of_wait[node]
        for position, collective in enumerate(collectives):
            start = self.task_of[collective.start]
            last = position == len(collectives) - 1
            repeated = len(collective.waits) > 1 and collective.waits[0] is not node
            label = "" if repeated else "W" + collective.label
            task = Task(
                node.name if last else f"{node.name}.{position}",
                Kind.WAIT,
                lane=self.tasks[start].lane,
                start=start,
                label=label,
                source=ops.source_line(node),
            )
            own = {start} | (preds if last else set()) | ({previous} if previous >= 0 else set())
            previous = self._add(task, [node] if last else [], own)
            self.waits_of.setdefault(start, []).append(previous)

    def _ordering(self) -> None:
        for before, after in self.view.ordering_edges():
            b, a = self.task_of.get(before), self.task_of.get(after)
            if b is None or a is None or a == b:
                continue
            if b > a:
                # A preparation that sits inside its start may come later than it did: the start is what counts.
                continue
            self.preds[a].add(b)
        if not self.ranks_agree:
            # Whatever durations and peaks each rank sees, all issue their collectives in the order that came in.
            starts = [i for i, task in enumerate(self.tasks) if task.kind is Kind.START]
            for b, a in pairwise(starts):
                self.preds[a].add(b)

    def _memory(self) -> GraphMemory:
        tasks = [task.name for task in self.tasks]
        return GraphMemory(self.view, self.shards, self.task_of, tasks, self.members, self.waits_of)
