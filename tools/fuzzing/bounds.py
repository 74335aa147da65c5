"""How far the results of a program may be off where messages are narrowed: an error that goes along with each value.

Every collective may round what it carries by a share of its largest element, each term of a sum once, and a sum that
goes to all ranks once more. Arithmetic passes errors on. What jumps (a remainder, a cast to whole numbers, a branch)
makes of an error one that has no bound: such results are not compared. What no narrowed message reaches has an error of
0, and has to be the same bit for bit.

The largest element of a value is that of a run of the program as it came, on any rank. Nodes that may share memory
share one error, which never falls.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.distributed as dist
import torch.fx

from tools.fuzzing.running import SEEN, TRANSFERS, leaves

#: Operators whose result is off by no more than their operands.
_STEADY = {
    *("neg", "relu", "abs", "clone", "permute", "slice", "select", "view", "split", "split_with_sizes", "unbind"),
    *("cat", "amax", "copy", "unknown", "broadcast", "wait_tensor", "_to_copy", "chunk", "nan_to_num"),
}
#: Those that may make a finite number of an infinite one, which a message may have given another sign. So does a cast
#: to a type without infinities.
_HIDES = {"relu", "amax", "nan_to_num"}
#: Operators that read no element.
_MADE = {"rand_like", "zeros_like", "full", "empty"}
_SUMS = ("all_reduce", "reduce_scatter_tensor")
_MOVED = ("all_gather_into_tensor", "all_to_all_single")


class Peaks:
    """The largest element of every node's value, on any rank: an observer of :func:`~running.execute_ranks`."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        #: whether every element was
        self.finite = True

    def __call__(self, node: torch.fx.Node, value: Any) -> None:
        for tensor in leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                wide = tensor.double().abs()
                self.finite &= bool(wide.isfinite().all())
                peak = float(wide.nan_to_num(0.0, 0.0, 0.0).max())
                self.found[node.name] = max(self.found.get(node.name, 0.0), peak)


def bounds(gm: torch.fx.GraphModule, peaks: Peaks, rounding: float, loose: bool) -> list[float]:
    """The largest error of each tensor that a rank's run returns, in order; infinite where there is no bound.

    Args:
        peaks: see :class:`Peaks`.
        rounding: what one rounding of a message may change, relative to its largest element; 0: none is narrowed.
        loose: sums may be added in another order.
    """
    found = _Errors(gm, peaks, rounding, loose)
    for _ in range(2):
        found.walk()
    return found.results


def _has_infinities(node: torch.fx.Node) -> bool:
    """Whether the type of a node's value knows them: some 8-bit floats end at a largest number."""
    return bool(torch.tensor(math.inf).to(node.meta["val"].dtype).float().isinf())


class _Errors:
    def __init__(self, gm: torch.fx.GraphModule, peaks: Peaks, rounding: float, loose: bool) -> None:
        self.graph, self.rounding, self.loose = gm.graph, rounding, loose
        self._memory = _shared(gm.graph)
        self._error: dict[torch.fx.Node, float] = {}
        self._peak: dict[torch.fx.Node, float] = {}
        for node in gm.graph.nodes:
            memory = self._memory[node]
            self._peak[memory] = max(self._peak.get(memory, 0.0), peaks.found.get(node.name, 0.0))
        self._finite = peaks.finite
        #: what has been sent to another rank is off by this much
        self._sent = 0.0
        self.results: list[float] = []

    def walk(self) -> None:
        """Errors after every node. A receive may come before the send that it belongs to: walk twice."""
        sent = self._sent
        self.results = []
        for node in self.graph.nodes:
            if node.op == "output":
                self.results += [self.of(n) for n in leaves(node.args[0]) if n is not None]
            elif node.op == "call_function":
                self._do(node)
        self.results += [self.of(n) for n in self.graph.find_nodes(op="placeholder")]
        if sent and self._sent > sent:
            self.results = [math.inf if error else 0.0 for error in self.results]

    def of(self, node: torch.fx.Node) -> float:
        """The error of a node's value as it is now."""
        return self._error.get(self._memory[node], 0.0)

    def peak(self, node: torch.fx.Node) -> float:
        """The largest element of a node's memory."""
        return self._peak[self._memory[node]] + self.of(node)

    def _do(self, node: torch.fx.Node) -> None:
        if node.target is SEEN:
            self.results.append(self.of(node.args[0]))  # type: ignore[arg-type]
            return
        if node.target in TRANSFERS:
            self._sent = max([self._sent, *(self.of(n) for n in node.all_input_nodes)])
            error = self._sent
        else:
            error = self._made(node)
            if error and math.isfinite(error):
                error += _coarse(node) * (self.peak(node) + error)
        memory = self._memory[node]
        self._error[memory] = max(self._error.get(memory, 0.0), error)

    def _made(self, node: torch.fx.Node) -> float:
        """The error of what a node computes, before it is rounded to its type."""
        name = _name(node)
        operands = _operands((node.args, node.kwargs))
        worst = max((self.of(n) for n in operands), default=0.0)
        if name in _MADE:
            return 0.0
        if name.startswith((*_SUMS, *_MOVED)):
            return self._communicated(node, name, operands, worst)
        if name == "mm":
            return self._product(node, operands)
        if name == "sent":
            return worst + self._lost(max(self.peak(n) for n in operands))
        if not worst:
            return 0.0
        if not self._finite and (name in _HIDES or (name == "_to_copy" and not _has_infinities(node))):
            return math.inf
        if name == "_to_copy" and not node.meta["val"].dtype.is_floating_point:
            return math.inf
        if node.target is torch.ops.aten.view.dtype:
            # Numbers that lie next to each other may have no bit in common.
            return math.inf
        if name in _STEADY or node.target is operator.getitem:
            return worst
        if name in ("add", "sub"):
            return sum(self.of(n) for n in operands)
        if name == "mul" and not isinstance(node.args[1], torch.fx.Node):
            return worst * abs(float(node.args[1]))  # type: ignore[arg-type]
        return math.inf

    def _lost(self, largest: float) -> float:
        """By one rounding of a message whose largest element is this; of nothing but zeros their signs."""
        return self.rounding * largest + 2.0**-123 if self.rounding else 0.0

    def _communicated(
        self, node: torch.fx.Node, name: str, operands: list[torch.fx.Node], worst: float
    ) -> float:
        given = {a.name: v for a, v in zip(node.target._schema.arguments, node.args)} | node.kwargs  # type: ignore[union-attr]
        largest = max((self.peak(n) for n in operands), default=0.0)
        if name.startswith(_MOVED):
            return worst + self._lost(largest)
        if given["reduce_op"] == "max":
            return worst if self._finite or not worst else math.inf
        size = dist.get_world_size(dist.distributed_c10d._resolve_process_group(given["group_name"]))
        total = size * largest
        error = size * worst + self._lost(total)
        if name.startswith("all_reduce"):
            error += self._lost(total + error)
        # Where a message was narrowed, or may have been, terms are added in another type and order.
        return error + (size * _coarse(node) * total if error or self.loose else 0.0)

    def _product(self, node: torch.fx.Node, operands: list[torch.fx.Node]) -> float:
        a, b = operands
        inner = a.meta["val"].shape[1]
        error = self.of(a) * self.peak(b) + self.of(b) * self.peak(a)
        changed = error or self.loose
        return float(inner * (error + (_coarse(node) * inner * self.peak(a) * self.peak(b) if changed else 0.0)))


def _coarse(node: torch.fx.Node) -> float:
    """Relative rounding of a node's type."""
    found = [torch.finfo(v.dtype).eps for v in leaves(node.meta.get("val")) if _is_float(v)]
    return max(found, default=0.0)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _name(node: torch.fx.Node) -> str:
    """Name of an operator, without the mark of one that works in place."""
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", ""))).removesuffix("_")


def _operands(value: Any) -> list[torch.fx.Node]:
    return [one for one in _flat(value) if isinstance(one, torch.fx.Node) and one.op != "get_attr"]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [one for inner in value.values() for one in _flat(inner)]
    if isinstance(value, (list, tuple)):
        return [one for inner in value for one in _flat(inner)]
    return [value]


def _shared(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """A node for each one's memory: nodes that may share memory have the same."""
    parent = {node: node for node in graph.nodes}

    def root(node: torch.fx.Node) -> torch.fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for node in graph.nodes:
        for other in _aliases(node):
            parent[root(other)] = root(node)
    return {node: root(node) for node in graph.nodes}


def _aliases(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a node may share memory with."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem or node.target in TRANSFERS or _name(node) == "wait_tensor":
        return _operands(node.args[0] if node.target is operator.getitem else node.args)
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.all_input_nodes  # a body may return what it was given
    schema = node.target._schema
    given = {a.name: v for a, v in zip(schema.arguments, node.args)} | node.kwargs
    marked = [a.name for a in schema.arguments if a.alias_info is not None]
    out = _operands(given.get("out"))
    return out + [n for name in marked for n in _operands(given.get(name))]
