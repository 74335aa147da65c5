"""Random distributed programs that see memory through lists of views and write through their elements.

The builder keeps its own books on memory (``verify_graphs.Program``), so that it knows every legal order of a program.
Values are small integers in float32, exact in every order of adding. Programs run on all ranks in one process, with
collectives that are there at once or that hold poison until their wait (``tools.fuzzing.programs.execute``).
"""

from __future__ import annotations

import operator
import random
from typing import Any

import torch
import torch.fx

from tests.support.graphs import aten, c10d
from tests.support.verify_graphs import Access, Builder, Program

#: An operator that nobody knows, which writes to its first argument.
_LIBRARY = torch.library.Library("view_programs", "DEF")
_LIBRARY.define("scribble(Tensor(a!) x, Tensor y) -> ()")
_LIBRARY.impl("scribble", lambda x, y: [x.copy_(y.remainder(3))].clear(), "CompositeExplicitAutograd")
_LIBRARY.impl("scribble", lambda x, y: None, "Meta")
scribble = torch.ops.view_programs.scribble.default

ROWS, COLUMNS, MODULUS = 8, 4, 5


class ViewBuilder(Builder):
    """Adds lists of views, writes through views, and ops whose memory is not plain from their name."""

    def __init__(self, groups: dict[str, str], sizes: dict[str, int]) -> None:
        super().__init__(groups)
        self.sizes = sizes
        self.values: list[torch.fx.Node] = []
        #: (results, accesses that the waits end) of what is in flight
        self.flights: list[tuple[list[torch.fx.Node], list[Access]]] = []

    # -- what may be touched

    def _busy(self, writes: bool) -> set[int]:
        """Buffers that something in flight writes, with ``writes`` also those that it reads."""
        accesses = [a for _, spans in self.flights for a in spans if writes or a.writes]
        own = [self.program.buffer[r] for results, _ in self.flights for r in results]
        return {a.buffer for a in accesses} | set(own)

    def readable(self) -> list[torch.fx.Node]:
        busy = self._busy(writes=False)
        return [v for v in self.values if self.program.buffer[v] not in busy]

    def writable(self) -> list[torch.fx.Node]:
        busy = self._busy(writes=True)
        return [v for v in self.values if self.program.buffer[v] not in busy and 0 not in v.meta["val"].stride()]

    def keep(self, node: torch.fx.Node) -> torch.fx.Node:
        self.values.append(node)
        return node

    # -- nodes

    def elements(self, target: Any, source: torch.fx.Node, *args: Any) -> list[torch.fx.Node]:
        """A view that is a list, and its elements."""
        several = self.call(target, source, *args)
        self._buffer(several, source)
        found = []
        for i in range(len(several.meta["val"])):
            item = self.call(operator.getitem, several, i)
            self._buffer(item, source)
            found.append(self.keep(item))
        return found

    def maybe_copy(self, target: Any, source: torch.fx.Node, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A view, or a copy where the strides ask for one."""
        node = self.call(target, source, *args, **kwargs)
        shared = node.meta["val"].untyped_storage()._cdata == source.meta["val"].untyped_storage()._cdata
        self._touch(node, source)
        self._buffer(node, source if shared else None)
        return self.keep(node)

    def small(self, node: torch.fx.Node) -> torch.fx.Node:
        """The value of a node, small again."""
        return self.compute(aten.remainder.Scalar, node, MODULUS)

    def effect(self, target: Any, written: list[torch.fx.Node], *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A call that writes to some of its operands and returns nothing that is used."""
        node = self.call(target, *args, **kwargs)
        for operand in node.all_input_nodes:
            self._touch(node, operand, writes=operand in written)
        return node

    def shape(self, node: torch.fx.Node) -> list[int]:
        return list(node.meta["val"].shape)


class _Steps:
    """One random step each; a step that does not fit does nothing."""

    def __init__(self, builder: ViewBuilder, rng: random.Random) -> None:
        self.b, self.rng = builder, rng

    def _pick(self, found: list[torch.fx.Node]) -> torch.fx.Node | None:
        if not found:
            return None
        return found[-1 - min(self.rng.randrange(len(found)), self.rng.randrange(len(found)))]

    def input(self) -> None:
        self.b.keep(self.b.input(ROWS, COLUMNS))

    def own(self) -> None:
        if (x := self._pick(self.b.readable())) is not None:
            self.b.keep(self.b.compute(aten.clone.default, x))

    def views(self) -> None:
        x = self._pick(self.b.values)
        if x is None or self.b.shape(x)[0] < 2:
            return
        rows = self.b.shape(x)[0]
        half = rows // 2
        kind = self.rng.randrange(7)
        if kind == 0:
            self.b.elements(aten.split.Tensor, x, half)
        elif kind == 1:
            self.b.elements(aten.split_with_sizes.default, x, [half, rows - half])
        elif kind == 2:
            self.b.elements(aten.unsafe_split.Tensor, x, half)
        elif kind == 3:
            self.b.elements(aten.split.Tensor, x, max(1, self.b.shape(x)[1] // 2), 1)
        elif kind == 4 and rows % 2 == 0:
            shaped = self.b.view(aten.as_strided.default, x, *self._strided(x, half))
            self.b.elements(aten.unbind.int, shaped, 0)
        elif kind == 5:
            self.b.elements(aten.unsafe_split_with_sizes.default, x, [rows - half, half])
        else:
            self.b.elements(aten.unbind.int, self.b.view(aten.unsqueeze.default, x, 0), 0)

    def _strided(self, x: torch.fx.Node, half: int) -> tuple[list[int], list[int], int]:
        value = x.meta["val"]
        rows, columns = value.stride()
        return [2, half, value.shape[1]], [half * rows, rows, columns], value.storage_offset()

    def view(self) -> None:
        if (x := self._pick(self.b.values)) is None:
            return
        rows, columns = self.b.shape(x)
        kind = self.rng.randrange(7)
        if kind == 0:
            self.b.keep(self.b.view(aten.t.default, x))
        elif kind == 1 and rows > 1:
            self.b.keep(self.b.view(aten.slice.Tensor, x, 0, 0, rows // 2))
        elif kind == 2 and columns > 1:
            self.b.keep(self.b.view(aten.slice.Tensor, x, 1, 1, columns))
        elif kind == 3:
            self.b.keep(self.b.view(aten.alias.default, x))
        elif kind == 4:
            self.b.keep(self.b.view(aten.lift_fresh.default, x))
        elif kind == 5 and x.meta["val"].is_contiguous():
            self.b.keep(self.b.view(aten._unsafe_view.default, x, [columns, rows]))
        elif kind == 6:
            self.b.keep(self.b.view(aten.detach.default, x))

    def may_copy(self) -> None:
        if (x := self._pick(self.b.readable())) is None:
            return
        rows, columns = self.b.shape(x)
        kind = self.rng.randrange(3)
        if kind == 0:
            self.b.maybe_copy(aten.reshape.default, x, [columns, rows])
        elif kind == 1:
            self.b.maybe_copy(aten.contiguous.default, x)
        else:
            self.b.maybe_copy(aten.to.dtype, x, torch.float32)

    def compute(self) -> None:
        if (x := self._pick(self.b.readable())) is None:
            return
        alike = [v for v in self.b.readable() if self.b.shape(v) == self.b.shape(x)]
        kind = self.rng.randrange(3)
        if kind == 0:
            y = self._pick(alike)
            self.b.keep(self.b.small(self.b.compute(aten.add.Tensor, x, y)))
        elif kind == 1:
            self.b.keep(self.b.compute(aten.neg.default, x))
        else:
            turned = self.b.view(aten.t.default, x)
            self.b.keep(self.b.small(self.b.compute(aten.mm.default, self.b.small(x), self.b.small(turned))))

    def write(self) -> None:
        if (x := self._pick(self.b.writable())) is None:
            return
        free = {v for v in self.b.writable() if self.b.program.buffer[v] != self.b.program.buffer[x]}
        alike = [v for v in self.b.readable() if v in free and self.b.shape(v) == self.b.shape(x)]
        other = self._pick(alike)
        kind = self.rng.randrange(7)
        if kind == 0:
            self.b.write(aten.neg_.default, x)
        elif kind == 1:
            self.b.write(aten.remainder_.Scalar, x, 3)
        elif kind == 2:
            self.b.effect(aten._foreach_neg_.default, [x], [x])
        elif other is None:
            self.b.write(aten.fill_.Scalar, x, 2)
        elif kind == 3:
            self.b.write(aten.copy_.default, x, other)
        elif kind == 4:
            node = self.b.effect(aten.neg.out, [x], other, out=x)
            self.b._buffer(node, x)
        elif kind == 5:
            self.b.fence(self.b.effect(scribble, [x], x, other))
        else:
            self.b.effect(aten._foreach_copy_.default, [x], [x], [other])

    def gather(self) -> None:
        name = self.rng.choice(list(self.b.sizes))
        if (x := self._dense(self.b.readable())) is not None:
            start, spans = self.b.start(
                c10d.all_gather_into_tensor.default, x, self.b.sizes[name], group=name, inputs=[x]
            )
            self.b.flights.append(([start], spans))

    def reduce(self) -> None:
        name = self.rng.choice(list(self.b.sizes))
        if (x := self._dense(self.b.readable())) is not None:
            start, spans = self.b.start(c10d.all_reduce.default, x, "sum", group=name, inputs=[x])
            self.b.flights.append(([start], spans))

    def reduce_in_place(self) -> None:
        name = self.rng.choice(list(self.b.sizes))
        if (x := self._dense(self.b.writable())) is not None:
            start, spans = self.b.start(c10d.all_reduce_.default, x, "max", group=name, in_place=x)
            self.b.flights.append(([start], spans))

    def gather_several(self) -> None:
        found = [x for _ in range(2) if (x := self._dense(self.b.readable())) is not None]
        if len(found) < 2:
            return
        name = self.rng.choice(list(self.b.sizes))
        target = c10d.all_gather_into_tensor_coalesced.default
        start, spans = self.b.start(target, found, self.b.sizes[name], group=name, inputs=dict.fromkeys(found))
        results = [self.b.call(operator.getitem, start, i) for i in range(2)]
        for result in results:
            self.b._buffer(result)
        self.b.flights.append((results, spans))

    def _dense(self, found: list[torch.fx.Node]) -> torch.fx.Node | None:
        return self._pick([v for v in found if v.meta["val"].is_contiguous() and v.meta["val"].numel() <= 256])

    def wait(self) -> None:
        if not self.b.flights:
            return
        results, spans = self.b.flights.pop(self.rng.randrange(len(self.b.flights)))
        for result in results:
            self.b.keep(self.b.wait(result, spans))

    def draw(self) -> None:
        if (x := self._pick(self.b.readable())) is not None:
            drawn = self.b.chain("random", self.b.compute(aten.rand_like.default, x))
            self.b.keep(self.b.compute(aten.round.default, drawn))


_WEIGHTS = {
    "own": 2,
    "views": 6,
    "view": 4,
    "may_copy": 2,
    "compute": 4,
    "write": 7,
    "gather": 3,
    "reduce": 3,
    "reduce_in_place": 2,
    "gather_several": 1,
    "wait": 7,
    "draw": 1,
}


def random_view_program(
    rng: random.Random, groups: dict[str, str], sizes: dict[str, int], length: int = 30
) -> Program:
    """A random legal program of about ``length`` steps."""
    builder = ViewBuilder(groups, sizes)
    steps = _Steps(builder, rng)
    for _ in range(3):
        steps.input()
    for name in rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=length):
        getattr(steps, name)()
    while builder.flights:
        steps.wait()
    kept = [v for v in builder.values if v.op != "placeholder"]
    builder.outputs = list(dict.fromkeys([*kept[-3:], *kept[::4]]))
    return builder.finish()
