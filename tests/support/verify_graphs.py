"""Random distributed FX graphs with fake tensors, and all legal orders of them, for tests of the verifier.

The builder keeps its own books on which node touches which memory and for how long; legality of an order is defined
by those books, pair by pair, and not by anything that the package under test computes.
"""

from __future__ import annotations

import itertools
import operator
import random
from dataclasses import dataclass, field

import torch
import torch.distributed._functional_collectives
import torch.fx

from tests.support.graphs import GraphBuilder, aten, c10d

_LIBRARY = torch.library.Library("verify_tests", "DEF")
_LIBRARY.define("unknown(Tensor x) -> Tensor")
_LIBRARY.define("unknown_pair(Tensor x) -> (Tensor, Tensor)")
_LIBRARY.define("scribble(Tensor(a!) x, Tensor y) -> ()")
_LIBRARY.impl("unknown", lambda x: x.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("unknown", lambda x: torch.empty_like(x), "Meta")
_LIBRARY.impl("unknown_pair", lambda x: (x.clone(), x.clone()), "CompositeExplicitAutograd")
_LIBRARY.impl("unknown_pair", lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta")
_LIBRARY.impl("scribble", lambda x, y: None, "CompositeExplicitAutograd")
_LIBRARY.impl("scribble", lambda x, y: None, "Meta")
unknown = torch.ops.verify_tests.unknown.default
unknown_pair = torch.ops.verify_tests.unknown_pair.default
scribble = torch.ops.verify_tests.scribble.default


@dataclass(eq=False)
class Access:
    """One node's use of one buffer, from the node until the last of ``until`` (itself when empty)."""

    node: torch.fx.Node
    buffer: int
    writes: bool
    until: list[torch.fx.Node] = field(default_factory=list)


@dataclass
class Program:
    """A graph and the books of its builder."""

    graph: torch.fx.Graph
    accesses: list[Access]
    chains: dict[str, list[torch.fx.Node]]
    communication: list[torch.fx.Node]
    fences: list[torch.fx.Node]
    buffer: dict[torch.fx.Node, int]

    def edges(self) -> dict[torch.fx.Node, set[torch.fx.Node]]:
        """Node -> nodes that must come before it."""
        position = {n: i for i, n in enumerate(self.graph.nodes)}
        before: dict[torch.fx.Node, set[torch.fx.Node]] = {n: set(n.all_input_nodes) for n in position}
        per_buffer: dict[int, list[Access]] = {}
        for access in self.accesses:
            per_buffer.setdefault(access.buffer, []).append(access)
        for accesses in per_buffer.values():
            for a in accesses:
                for b in accesses:
                    if a.node is not b.node and position[a.node] < position[b.node] and (a.writes or b.writes):
                        before[b.node].update(n for n in [a.node, *a.until] if n is not b.node)
        for chain in self.chains.values():
            for a, b in itertools.pairwise(chain):
                before[b].add(a)
        for fence in self.fences:
            # What a fence does is not known: it may draw as well.
            for node in [*self.communication, *self.chains.get("random", [])]:
                if position[node] < position[fence]:
                    before[fence].add(node)
                elif node is not fence:
                    before[node].add(fence)
        # Inductor does a sum in place on an input that is overwritten later, unless something reads it in between.
        sums = (c10d.all_reduce.default, c10d.all_reduce_coalesced.default)
        inputs = {self.buffer[n] for n in position if n.op == "placeholder" and n in self.buffer}
        for access in self.accesses:
            if access.node.target in sums and access.buffer in inputs and not access.writes:
                for other in per_buffer[access.buffer]:
                    if not other.writes and position[other.node] > position[access.node]:
                        before[other.node].add(access.node)
        output = next(reversed(position))
        before[output].update(n for n in position if n is not output)
        return before

    def legal_order(self, rng: random.Random) -> list[torch.fx.Node]:
        """A random order among all legal ones; placeholders first."""
        before = self.edges()
        after: dict[torch.fx.Node, list[torch.fx.Node]] = {n: [] for n in before}
        count = {}
        for node, preds in before.items():
            count[node] = len(preds)
            for p in preds:
                after[p].append(node)
        ready = [n for n in before if count[n] == 0]
        order = []
        while ready:
            inputs = [n for n in ready if n.op == "placeholder"]
            node = inputs[0] if inputs else ready[rng.randrange(len(ready))]
            ready.remove(node)
            order.append(node)
            for n in after[node]:
                count[n] -= 1
                if not count[n]:
                    ready.append(n)
        assert len(order) == len(before), "the builder's books contradict each other"
        return order


def apply_order(graph: torch.fx.Graph, order: list[torch.fx.Node]) -> None:
    """Move the nodes of a graph into an order."""
    for a, b in itertools.pairwise(order):
        a.append(b)


class Builder(GraphBuilder):
    """Keeps the books of what it writes."""

    def __init__(self, groups: dict[str, str]) -> None:
        super().__init__()
        self.groups = groups
        self.program = Program(self.graph, [], {}, [], [], {})
        self.outputs: list[torch.fx.Node] = []
        self._buffers = 0

    def _buffer(self, node: torch.fx.Node, of: torch.fx.Node | None = None) -> None:
        if of is None:
            self._buffers += 1
        self.program.buffer[node] = self._buffers if of is None else self.program.buffer[of]

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.fx.Node:
        count = sum(n.op == "placeholder" for n in self.graph.nodes)
        node = self.placeholder(f"arg{count}", *shape, dtype=dtype)
        self._buffer(node)
        return node

    def _touch(self, node: torch.fx.Node, operand: torch.fx.Node, writes: bool = False) -> Access:
        access = Access(node, self.program.buffer[operand], writes)
        self.program.accesses.append(access)
        return access

    def compute(self, target, *args, **kwargs) -> torch.fx.Node:
        """A pure op with one result of its own."""
        node = self.call(target, *args, **kwargs)
        for operand in node.all_input_nodes:
            self._touch(node, operand)
        self._buffer(node)
        return node

    def view(self, target, source: torch.fx.Node, *args) -> torch.fx.Node:
        node = self.call(target, source, *args)
        self._buffer(node, source)
        return node

    def write(self, target, destination: torch.fx.Node, *args) -> torch.fx.Node:
        """An in-place op on its first operand."""
        node = self.call(target, destination, *args)
        for operand in node.all_input_nodes:
            self._touch(node, operand, writes=operand is destination)
        self._buffer(node, destination)
        return node

    def chain(self, name: str, node: torch.fx.Node) -> torch.fx.Node:
        self.program.chains.setdefault(name, []).append(node)
        return node

    def fence(self, node: torch.fx.Node) -> torch.fx.Node:
        self.program.fences.append(node)
        return self.chain("fence", node)

    def start(self, target, *args, group: str = "world", inputs=(), in_place: torch.fx.Node | None = None):
        """A collective; returns the start and the accesses that its waits end."""
        kwargs = {"out": in_place} if "_out" in str(target) else {}
        node = self.call(target, *args, self.groups[group], **kwargs)
        spans = [self._touch(node, i) for i in inputs if i is not in_place]
        if in_place is not None:
            spans.append(self._touch(node, in_place, writes=True))
            self._buffer(node, in_place)
        else:
            self._buffer(node)
        self.program.communication.append(node)
        self.chain(f"group {group}", node)
        return node, spans

    def wait(self, result: torch.fx.Node, spans: list[Access]) -> torch.fx.Node:
        node = self.call(c10d.wait_tensor.default, result)
        self._buffer(node, result)
        self.program.communication.append(node)
        for span in spans:
            span.until.append(node)
        return node

    def finish(self) -> Program:
        self.graph.output(tuple(self.outputs))
        return self.program


def random_program(rng: random.Random, groups: dict[str, str], length: int = 30) -> Program:
    """A random legal program; every kind of node that the mutations need occurs in it."""
    b = Builder(groups)
    inputs = [b.input(16, 16) for _ in range(4)]
    state = b.input(16, 16)
    values = list(inputs)
    sizes = {"world": 8, "row": 4, "column": 4, "other": 4}
    pending: list[tuple[list[torch.fx.Node], list[Access], int]] = []

    def pick() -> torch.fx.Node:
        return values[-1] if rng.random() < 0.4 else rng.choice(values)

    def square(node: torch.fx.Node) -> torch.fx.Node:
        rows = node.meta["val"].shape[0]
        return node if rows == 16 else b.view(aten.slice.Tensor, node, 0, 0, 16)

    def all_gather() -> None:
        group = rng.choice(list(sizes))
        x = pick()
        s, spans = b.start(c10d.all_gather_into_tensor.default, x, sizes[group], group=group, inputs=[x])
        pending.append(([s], spans, 0))

    def all_gather_out() -> None:
        group = rng.choice(list(sizes))
        x = pick()
        out = b.compute(aten.empty.memory_format, [16 * sizes[group], 16])
        s, spans = b.start(
            c10d.all_gather_into_tensor_out.default, x, sizes[group], group=group, inputs=[x], in_place=out
        )
        pending.append(([s], spans, 0))

    def coalesced() -> None:
        group = rng.choice(list(sizes))
        xs = [pick(), pick()]
        s, spans = b.start(
            c10d.all_gather_into_tensor_coalesced.default, xs, sizes[group], group=group, inputs=dict.fromkeys(xs)
        )
        items = []
        for i in range(2):
            item = b.call(operator.getitem, s, i)
            b._buffer(item)
            items.append(item)
        pending.append((items, spans, 0))

    def reduce_scatter() -> None:
        group = rng.choice(list(sizes))
        x = pick()
        op = rng.choice(["sum", "avg"])
        s, spans = b.start(c10d.reduce_scatter_tensor.default, x, op, sizes[group], group=group, inputs=[x])
        pending.append(([s], spans, 1))

    def all_reduce() -> None:
        x = pick()
        s, spans = b.start(c10d.all_reduce.default, x, "sum", group=rng.choice(list(sizes)), inputs=[x])
        pending.append(([s], spans, 0))

    def all_reduce_in_place() -> None:
        x = b.compute(aten.clone.default, pick())
        s, spans = b.start(c10d.all_reduce_.default, x, "sum", group=rng.choice(list(sizes)), in_place=x)
        pending.append(([s], spans, 0))

    def all_to_all() -> None:
        group = rng.choice(list(sizes))
        x = pick()
        split = [16 // sizes[group]] * sizes[group]
        s, spans = b.start(c10d.all_to_all_single.default, x, split, split, group=group, inputs=[x])
        pending.append(([s], spans, 0))

    def broadcast() -> None:
        x = pick()
        s, spans = b.start(c10d.broadcast.default, x, 0, group=rng.choice(list(sizes)), inputs=[x])
        pending.append(([s], spans, 0))

    def compute() -> None:
        kind = rng.randrange(4)
        if kind == 0:
            values.append(b.compute(aten.mm.default, pick(), pick()))
        elif kind == 1:
            values.append(b.compute(aten.relu.default, pick()))
        elif kind == 2:
            values.append(b.view(aten.t.default, pick()))
        else:
            values.append(b.compute(aten.add.Tensor, pick(), pick()))

    def temporary() -> None:
        x = b.compute(aten.clone.default, pick())
        values.append(b.compute(aten.relu.default, x))
        values.append(b.compute(aten.mm.default, values[-1], pick()))
        v = b.view(aten.slice.Tensor, x, 0, 0, 8)
        b.write(aten.mul_.Tensor, v, 2)
        values.append(x)

    def draw() -> None:
        values.append(b.chain("random", b.compute(aten.rand_like.default, pick())))

    def assertion() -> None:
        total = b.compute(aten.any.default, pick())
        node = b.call(aten._assert_async.msg, total, "expected something")
        b._touch(node, total)
        b.chain("assert", node)

    def unknown_op() -> None:
        values.append(b.fence(b.compute(unknown, pick())))

    def scribble_op() -> None:
        x = b.compute(aten.clone.default, pick())
        y = pick()
        node = b.call(scribble, x, y)
        b._touch(node, x, writes=True)
        if y is not x:
            b._touch(node, y)
        b.fence(node)
        values.append(x)

    def land(index: int) -> None:
        results, spans, rows = pending.pop(index)
        for result in results:
            w = b.wait(result, spans)
            if rng.random() < 0.1:
                b.wait(result, spans)
            if rows:
                w = b.compute(aten.repeat.default, w, [16 // w.meta["val"].shape[0], 1])
            values.append(square(w))

    starts = [all_gather, all_gather_out, coalesced, reduce_scatter, all_reduce]
    starts += [all_reduce_in_place, all_to_all, broadcast]
    others = [compute, compute, compute, temporary, draw, assertion]
    rare = [unknown_op, scribble_op]
    script = rng.sample(starts, len(starts)) + [draw, draw, temporary, assertion, assertion, unknown_op, scribble_op]
    while len(script) < length:
        script.append(rng.choice(rng.choice([starts, others, others, rare if rng.random() < 0.3 else others])))
    rng.shuffle(script)
    for step in script:
        step()
        while pending and rng.random() < 0.35:
            land(rng.randrange(len(pending)))
    while pending:
        land(0)
    b.write(aten.copy_.default, state, pick())
    b.write(aten.copy_.default, inputs[0], values[-1])
    b.outputs = list(dict.fromkeys([values[-1], values[-2], pick()]))
    used = values[4:]
    total = b.compute(aten.cat.default, used)
    b.outputs.append(total)
    return b.finish()
