"""Steps for what is rare in models: lists of views, scalars, bytes, nothing, bodies, what other ranks do not have."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from tests.support.graphs import aten, c10d
from tools.fuzzing.collective_steps import CollectiveSteps

FLOAT8 = torch.float8_e4m3fn
#: Scalars up to here keep what they are added to exact.
EXACT_SCALAR = 128


def _body(function: Any, *shapes: Any) -> torch.fx.GraphModule:
    """A body: what ``function`` does with placeholders of the given fake values, as a graph."""
    graph = torch.fx.Graph()
    given = [graph.placeholder(f"arg{i}") for i in range(len(shapes))]
    for node, value in zip(given, shapes):
        node.meta["val"] = value
    results = function(graph, *given)
    graph.output(tuple(results) if isinstance(results, list) else results)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _op(graph: torch.fx.Graph, target: Any, *args: Any) -> torch.fx.Node:
    node = graph.call_function(target, args)
    fakes = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    node.meta["val"] = target(*fakes)
    return node


class UnusualSteps(CollectiveSteps):
    """Each step takes three integers, and does nothing where it does not fit."""

    # Lists of views

    def _members(self, target: Any, x: torch.fx.Node, *args: Any) -> None:
        several = self.keep(self.call(target, x, *args), x, self.bound[x], value=False)
        for i in range(len(several.meta["val"])):
            self.members.append(self.keep(self.call(operator.getitem, several, i), x, self.bound[x]))

    def _split(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a, lambda n: n.meta["val"].shape[0] > 1)) is None:
            return
        rows, columns = x.meta["val"].shape
        half = rows // 2
        kind = b % 5
        if kind == 0:
            self._members(aten.split.Tensor, x, half)
        elif kind == 1:
            self._members(aten.split_with_sizes.default, x, [half, rows - half])
        elif kind == 2:
            self._members(aten.chunk.default, x, 2)
        elif kind == 3 and columns > 1:
            self._members(aten.split.Tensor, x, columns // 2, 1)
        else:
            self._members(aten.unsafe_split.Tensor, x, half)

    def _unbind(self, a: int, b: int, c: int) -> None:
        dense = self.pick(a, lambda n: n.meta["val"].is_contiguous() and n.meta["val"].shape[0] % 2 == 0)
        if dense is not None:
            rows, columns = dense.meta["val"].shape
            shaped = self.call(aten.view.default, dense, [2, rows // 2, columns])
            self.keep(shaped, dense, self.bound[dense], value=False)
            self._members(aten.unbind.int, shaped, 0)

    def _update_member(self, a: int, b: int, c: int) -> None:
        """A write through a member of a list of views, or a view of one."""
        ready = set(self.readable())
        found = [m for m in self.members if m in ready and self.free(m)]
        if not found:
            return
        x = found[-1 - a % len(found)]
        bound = max(5, self.bound[x])
        if b % 3 == 1:
            x = self.keep(self.call(aten.slice.Tensor, x, 0, 0, 1), x, bound, value=False)
        if b % 2:
            node = self.call(aten.neg_.default, x)
        else:
            node = self.call(aten.remainder_.Scalar, x, 3)
        self.keep(node, x, bound)
        for other in self.buffer:
            if self.buffer[other] == self.buffer[x]:
                self.bound[other] = max(self.bound[other], bound)

    # Collectives that are alike, or behind each other

    def _twins(self, a: int, b: int, c: int) -> None:
        """Two collectives of one size, of different tensors."""
        if (x := self._operand(a, 1, self.sizes[b % 3], growth=self.sizes[b % 3])) is None:
            return
        y = self.keep(self.call(aten.neg.default, x), None, self.bound[x])
        for one in (x, y):
            if c % 2:
                start = self.call(c10d.all_reduce.default, one, "sum", self.groups[b % 3])
                self.launch(start, [one], self.bound[one] * self.sizes[b % 3])
            else:
                start = self.call(c10d.all_gather_into_tensor.default, one, self.sizes[b % 3], self.groups[b % 3])
                self.launch(start, [one], self.bound[one])

    def _nested_gather(self, a: int, b: int, c: int) -> None:
        """Over one dimension of the mesh, then over the other."""
        for dim in ((1, 2), (2, 1))[b % 2]:
            if (x := self._operand(a, growth=self.sizes[dim])) is None:
                return
            before = len(self.values)
            start = self.call(c10d.all_gather_into_tensor.default, x, self.sizes[dim], self.groups[dim])
            self.launch(start, [x], self.bound[x])
            self.land(-1)
            a = 0 if len(self.values) > before else a

    # Scalars, bytes, nothing

    def _scalar(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is None:
            return
        x = self.small(x)
        one = self.keep(self.call(aten.amax.default, x), None, self.bound[x], value=False)
        self.scalars.append(one)
        if c % 3 == 0:
            self.launch(self.call(c10d.broadcast.default, one, 0, self.groups[0]), [one], self.bound[x])
        elif c % 3 == 1:
            start = self.call(c10d.all_reduce.default, one, ("sum", "max")[b % 2], self.groups[b % 3])
            self.launch(start, [one], self.bound[x] * self.sizes[b % 3])

    def _scalar_used(self, a: int, b: int, c: int) -> None:
        if not self.scalars or (x := self.pick(a)) is None:
            return
        one, x = self.scalars[-1 - b % len(self.scalars)], self.small(x)
        if self.bound[one] <= EXACT_SCALAR:
            self.keep(self.call(aten.add.Tensor, x, one), None, self.bound[x] + self.bound[one])

    def _float8(self, a: int, b: int, c: int) -> None:
        """Gathered as it is, or as bytes where a backend cannot."""
        if (x := self._operand(a, growth=self.sizes[b % 3])) is None:
            return
        x = self.small(x)
        small = self.keep(self.call(aten._to_copy.default, x, dtype=FLOAT8), None, self.bound[x], value=False)
        as_bytes = c % 2
        sent = small
        if as_bytes:
            sent = self.keep(self.call(aten.view.dtype, small, torch.uint8), small, self.bound[x], value=False)
        start = self.call(c10d.all_gather_into_tensor.default, sent, self.sizes[b % 3], self.groups[b % 3])
        self.launch(start, [sent], self.bound[x])

    def _float8_back(self, a: int, b: int, c: int) -> None:
        if not self.eights:
            return
        x = self.eights[a % len(self.eights)]
        if x.meta["val"].dtype == torch.uint8:
            x = self.keep(self.call(aten.view.dtype, x, FLOAT8), x, self.bound[x], value=False)
        wide = (torch.float32, torch.bfloat16)[b % 2]
        self.keep(self.call(aten._to_copy.default, x, dtype=wide), None, self.bound[x] + 1)

    def _empty(self, a: int, b: int, c: int) -> None:
        """A collective of no elements."""
        if (x := self.pick(a)) is None:
            return
        nothing = self.keep(self.call(aten.slice.Tensor, x, 0, 0, 0), x, 1, value=False)
        nothing = self.keep(self.call(aten.clone.default, nothing), None, 1, value=False)
        if c % 2:
            start = self.call(c10d.all_reduce.default, nothing, "sum", self.groups[b % 3])
        else:
            start = self.call(c10d.all_gather_into_tensor.default, nothing, self.sizes[b % 3], self.groups[b % 3])
        self.launch(start, [nothing], 1)

    def _empty_joined(self, a: int, b: int, c: int) -> None:
        if not self.empties:
            return
        nothing = self.empties[b % len(self.empties)]
        like = nothing.meta["val"]
        x = self.pick(a, lambda n: n.meta["val"].dtype == like.dtype and n.meta["val"].shape[1] == like.shape[1])
        if x is not None:
            self.keep(self.call(aten.cat.default, [nothing, x]), None, self.bound[x])

    # Bodies

    def _attribute(self, module: torch.fx.GraphModule) -> torch.fx.Node:
        name = f"body_{len(list(self.root.children()))}"
        self.root.add_module(name, module)
        return self.graph.get_attr(name)

    def _higher_order(self, target: Any, values: Any, *args: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = values
        return node

    def _cond(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is None:
            return
        fake = x.meta["val"]
        with self.mode:
            shifted = _body(lambda g, y: [_op(g, aten.neg.default, y)], fake)
            other = _body(lambda g, y: [_op(g, aten.abs.default, _op(g, aten.relu.default, y))], fake)
        one = self.keep(self.call(aten.amax.default, x), None, self.bound[x], value=False)
        holds = self.keep(self.call(aten.gt.Scalar, one, b % 3), None, 1, value=False)
        bodies = [self._attribute(m) for m in (shifted, other)]
        with self.mode:
            values = (torch.empty(fake.shape, dtype=fake.dtype),)
        node = self._higher_order(torch.ops.higher_order.cond, values, holds, *bodies, (x,))
        self.keep(node, None, self.bound[x], value=False)
        self.keep(self.call(operator.getitem, node, 0), None, self.bound[x])

    def _loop(self, a: int, b: int, c: int) -> None:
        """A body that runs as often as a counter says."""
        if (x := self.pick(a, lambda n: n.meta["val"].is_contiguous())) is None:
            return
        fake = x.meta["val"]
        count = self.call(aten.full.default, [], 0, dtype=torch.int64)
        self.keep(count, None, 1, value=False)
        number = count.meta["val"]
        with self.mode:
            more = _body(lambda g, i, y: _op(g, aten.lt.Scalar, i, 1 + b % 3), number, fake)
            again = _body(
                lambda g, i, y: [_op(g, aten.add.Tensor, i, 1), _op(g, aten.neg.default, y)], number, fake
            )
        bodies = [self._attribute(m) for m in (more, again)]
        with self.mode:
            values = (torch.empty((), dtype=torch.int64), torch.empty(fake.shape, dtype=fake.dtype))
        node = self._higher_order(torch.ops.higher_order.while_loop, values, *bodies, (count, x), ())
        # A loop that never runs returns what it was given.
        self.keep(node, x, self.bound[x], value=False)
        last = self.keep(self.call(operator.getitem, node, 1), x, self.bound[x], value=False)
        self.keep(self.call(aten.clone.default, last), None, self.bound[x])

    # What other ranks do not have. All ranks make the same choices afterwards, so they communicate alike.

    def _rank_reader(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is not None and self.variant == b % 2:
            self.extra.append(self.call(aten.neg.default, x))

    def _rank_cast(self, a: int, b: int, c: int) -> None:
        """A cast that one rank alone could do before it communicates."""
        if (x := self.pick(a)) is None:
            return
        x = self.small(x)
        self.keep(self.call(aten._to_copy.default, x, dtype=torch.bfloat16), None, self.bound[x])
        if self.variant == b % 2:
            self.extra.append(self.call(aten.relu.default, x))

    def _rank_constant(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is None:
            return
        fake = x.meta["val"]
        number = 1 + self.variant
        self.keep(self.call(aten.full.default, list(fake.shape), number, dtype=fake.dtype), None, 2)
