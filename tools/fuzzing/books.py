"""A graph under construction: which values there are, what is in flight, how large values can be."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.fx

from tests.support.graphs import GraphBuilder, aten, c10d

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
#: Integers up to here are exact in every dtype above, and so are sums of a few of them.
EXACT = 31
LARGEST = 4096


@dataclass
class Flight:
    """A collective between its start and its waits."""

    results: list[torch.fx.Node]
    reads: set[int]
    writes: set[int]
    bound: int


class Books(GraphBuilder):
    """Writes a graph step by step; knows what is in flight and how large values can be."""

    def __init__(self, groups: Sequence[str], backward: bool, variant: int = 0, steady: bool = False) -> None:
        super().__init__("program.py")
        #: large values are scaled, not taken modulo something: small errors in them stay small
        self.steady = steady
        self.groups = groups
        self.sizes = [dist.get_world_size(dist.distributed_c10d._resolve_process_group(g)) for g in groups]
        self.backward = backward
        self.values: list[torch.fx.Node] = []
        self.flights: list[Flight] = []
        self.waited: list[torch.fx.Node] = []
        self.buffer: dict[torch.fx.Node, int] = {}
        self.bound: dict[torch.fx.Node, int] = {}
        self.inputs = 0
        #: elements of lists of views
        self.members: list[torch.fx.Node] = []
        #: values without dimensions, of 8 bits, without elements: few operators take them
        self.scalars: list[torch.fx.Node] = []
        self.eights: list[torch.fx.Node] = []
        self.empties: list[torch.fx.Node] = []
        #: which input gets which value at the end
        self.backs: dict[torch.fx.Node, torch.fx.Node] = {}
        #: which of the graphs that ranks have this is, and results that the others do not have
        self.variant = variant
        self.extra: list[torch.fx.Node] = []
        #: holds the bodies of higher-order operators
        self.root = torch.nn.Module()

    def input(self, rows: int, columns: int, dtype: torch.dtype) -> torch.fx.Node:
        stem = ("primals", "tangents", "saved")[self.inputs % 3] if self.backward else "arg"
        self.inputs += 1
        node = self.placeholder(f"{stem}_{self.inputs}", rows, columns, dtype=dtype)
        return self.keep(node, None, 2)

    def keep(self, node: torch.fx.Node, of: torch.fx.Node | None, bound: int, value: bool = True) -> torch.fx.Node:
        self.buffer[node] = len(self.buffer) if of is None else self.buffer[of]
        self.bound[node] = bound
        if value:
            self.values.append(node)
        return node

    def readable(self) -> list[torch.fx.Node]:
        """Values whose buffer no collective is about to write."""
        arriving = {b for flight in self.flights for b in flight.writes}
        return [v for v in self.values if self.buffer[v] not in arriving]

    def pick(self, index: int, fits: Callable[[torch.fx.Node], bool] = lambda _: True) -> torch.fx.Node | None:
        """A readable value; small indices are recent ones."""
        found = [v for v in self.readable() if fits(v)]
        return found[-1 - index % len(found)] if found else None

    def small(self, node: torch.fx.Node, factor: int = 1) -> torch.fx.Node:
        """The value, taken modulo something when ``factor`` times it would not be exact."""
        if self.bound[node] * factor <= EXACT * 4 and self.bound[node] <= EXACT:
            return node
        if self.steady and node.meta["val"].is_floating_point():
            halvings = math.ceil(math.log2(max(self.bound[node] * factor / (EXACT * 4), self.bound[node] / EXACT)))
            bound = max(1, self.bound[node] >> halvings) + 1
            return self.keep(self.call(aten.mul.Tensor, node, 0.5**halvings), None, bound, value=False)
        reduced = self.call(aten.remainder.Scalar, node, 3)
        return self.keep(reduced, None, 3, value=False)

    def free(self, node: torch.fx.Node) -> bool:
        """Whether nothing in flight reads or writes the node's buffer."""
        return all(self.buffer[node] not in f.reads | f.writes for f in self.flights)

    def launch(
        self, start: torch.fx.Node, reads: Sequence[torch.fx.Node], bound: int, into: torch.fx.Node | None = None
    ) -> None:
        """Book a start: several results when it has several."""
        results = [start]
        if isinstance(start.meta["val"], (list, tuple)):
            self.keep(start, None, bound, value=False)
            results = [self.call(operator.getitem, start, i) for i in range(len(start.meta["val"]))]
        for result in results:
            self.keep(result, into, bound, value=False)
        writes = {self.buffer[r] for r in results}
        self.flights.append(Flight(results, {self.buffer[r] for r in reads}, writes, bound))

    def land(self, index: int) -> None:
        """Wait for a flight; what arrives is listed by what can be done with it."""
        flight = self.flights.pop(index % len(self.flights))
        for result in flight.results:
            node = self.call(c10d.wait_tensor.default, result)
            value = node.meta["val"]
            plain = value.dim() == 2 and value.numel() > 0 and value.dtype.itemsize > 1
            self.keep(node, result, flight.bound, value=plain)
            if plain:
                self.waited.append(result)
            elif value.dim() == 0:
                self.scalars.append(node)
            elif value.dim() == 2:
                (self.eights if value.numel() else self.empties).append(node)
