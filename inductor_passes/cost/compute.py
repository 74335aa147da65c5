"""How long the compute of an FX graph takes, before Inductor has fused it.

A matmul-like node costs what the roofline says for its FLOPs and bytes. Everything that Inductor would fuse costs
memory traffic only where a fused region meets the outside: a value read from a matmul, a collective or an input, and a
value that one of those (or an output) reads. So a chain of pointwise ops counts once. A higher-order operator is a call
of its own, which takes what the graphs take that it runs. Views, getitems and size arithmetic are free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch.fx

from inductor_passes import _torch
from inductor_passes.cost.flops import bodies_of, flops, library_shape, operand_dtype, runs_one
from inductor_passes.cost.fused import operator_ns
from inductor_passes.cost.profile import CostProfile
from inductor_passes.cost.values import dtype_name, value_bytes
from inductor_passes.ir.higher_order import is_higher_order
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView
from inductor_passes.operators import UNPACK
from inductor_passes.records.limits import Count


@dataclass(frozen=True)
class Work:
    """What a cost profile prices compute by: the arguments of :meth:`CostProfile.compute_ns`."""

    flops: Count
    bytes_moved: Count
    dtype: str
    kernels: Count = 1
    shape: tuple[str, int] | None = None

    def duration_ns(self, profile: CostProfile) -> int:
        """How long it takes on the profile's device."""
        return profile.compute_ns(self.flops, self.bytes_moved, self.dtype, self.kernels, self.shape)


class ComputeCosts:
    """Durations in ns for the compute nodes of one graph.

    ``estimator`` comes first when it has an answer (``fn(node) -> ns | None``). ``packed`` are starts of collectives of
    which it is asked what compute would take if a fused kernel copied their operands into a message.
    """

    def __init__(
        self, view: GraphView, profile: CostProfile, estimator: Callable[[torch.fx.Node], float | None] | None = None
    ) -> None:
        self._view = view
        self._profile = profile
        self._estimator = estimator
        self._whole: dict[torch.fx.Graph, int] = {}
        self._flops = {n: flops(n) for n in view.nodes if view.role(n) is Role.COMPUTE}

    def duration_ns(self, node: torch.fx.Node, packed: Collection[torch.fx.Node] = ()) -> int:
        """Time of one node on the compute lane; 0 for views, inputs and outputs."""
        if self._estimator is not None:
            own = self._estimator(node)
            if own is not None:
                return max(0, round(own))
        blocked = operator_ns(node, self._profile) if self._view.role(node) is Role.FENCE else None
        if blocked is not None:
            return blocked
        if bodies := bodies_of(node):
            inside = [self._whole_ns(body.graph) for body in bodies]
            return max(inside) if runs_one(node) else sum(inside)
        work = self.work(node, packed)
        return 0 if work is None else work.duration_ns(self._profile)

    def _whole_ns(self, graph: torch.fx.Graph) -> int:
        """A graph that runs inside of a node: all its compute and all its collectives, one after the other."""
        # Equal layers run one graph.
        if graph in self._whole:
            return self._whole[graph]
        view = GraphView(graph)
        costs = ComputeCosts(view, self._profile, self._estimator)
        total = sum(costs.duration_ns(node) for node in view.nodes)
        for one in view.collectives:
            sizes, ranks = (one.input_bytes or 0, one.output_bytes or 0), one.group.ranks or (0,)
            total += self._profile.communication_ns(one.kind, *sizes, ranks)
            total += self._profile.issue_ns(one.kind, *sizes, ranks)
        self._whole[graph] = total
        return total

    def work(self, node: torch.fx.Node, packed: Collection[torch.fx.Node] = ()) -> Work | None:
        """What a node computes; None for what takes no time or does not compute."""
        if self._view.role(node) not in (Role.COMPUTE, Role.FENCE):
            return None
        count = self._flops.get(node)
        if count is not None or is_higher_order(node):
            moved = sum(value_bytes(n.meta.get("val")) for n in (node, *node.all_input_nodes))
            return Work(count or 0, moved, operand_dtype(node), 1, library_shape(node))
        if _is_call(node):
            # Of the message it reads what it takes out.
            return Work(0, 2 * value_bytes(node.meta.get("val")), dtype_name(node.meta.get("val")))
        read = sum(value_bytes(n.meta.get("val")) for n in node.all_input_nodes if self.made_by(n) is None)
        leaves = self.leaves(node, packed)
        written = value_bytes(node.meta.get("val")) if leaves else 0
        if not read and not leaves:
            return None
        return Work(0, read + written, dtype_name(node.meta.get("val")), 1 if leaves else 0)

    def made_by(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The node that computes a value, where Inductor would keep that inside of a fused region; else None.

        Views look through to their base.
        """
        while self._view.role(node) is Role.FREE and node.all_input_nodes:
            node = node.all_input_nodes[0]
        if self._view.role(node) is not Role.COMPUTE or self._flops.get(node) is not None:
            return None
        return None if is_higher_order(node) or _is_call(node) else node

    def leaves(self, node: torch.fx.Node, packed: Collection[torch.fx.Node] = ()) -> bool:
        """Whether something outside of a fused region reads the node's value, directly or through views."""
        pending = list(node.users)
        while pending:
            user = pending.pop()
            if self._view.role(user) is Role.FREE:
                pending.extend(user.users)
            elif user not in packed and self.made_by(user) is None:
                return True
        return False


def _is_call(node: torch.fx.Node) -> bool:
    """Whether it is an operator of ours, which Inductor calls: its results are in memory."""
    return _torch.op_name(node.target) == UNPACK
