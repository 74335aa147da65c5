"""Steps that communicate nothing: arithmetic, views, lists of views, writes, effects, bodies."""

from __future__ import annotations

import torch
import torch.fx

from tests.support.graphs import aten, c10d
from tools.fuzzing.books import DTYPES, EXACT, LARGEST, Books
from tools.fuzzing.running import SEEN

#: Operators that no pass knows: a pure one, and one that writes to its first argument.
_LIBRARY = torch.library.Library("fuzz", "DEF")
_LIBRARY.define("unknown(Tensor x) -> Tensor")
_LIBRARY.define("scribble(Tensor(a!) x, Tensor y) -> ()")
_LIBRARY.impl("unknown", lambda x: x.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("unknown", torch.empty_like, "Meta")
_LIBRARY.impl("scribble", lambda x, y: [x.copy_(y.remainder(5))].clear(), "CompositeExplicitAutograd")
_LIBRARY.impl("scribble", lambda x, y: None, "Meta")
unknown = torch.ops.fuzz.unknown.default
scribble = torch.ops.fuzz.scribble.default


class LocalSteps(Books):
    """Each step takes three integers, and does nothing where it does not fit."""

    def _input(self, a: int, b: int, c: int) -> None:
        columns = (16, 33, 64, 8) if self.steady else (2, 3, 4, 8)
        self.input((8, 8, 4, 16)[a % 4], columns[b % 4], DTYPES[c % len(DTYPES)])

    def _pointwise(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is not None:
            target = (aten.neg.default, aten.relu.default, aten.abs.default, aten.clone.default)[b % 4]
            self.keep(self.call(target, x), None, self.bound[x])

    def _add(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is None:
            return
        like = x.meta["val"]
        y = self.pick(b, lambda n: n.meta["val"].shape == like.shape and n.meta["val"].dtype == like.dtype)
        assert y is not None
        target = (aten.add.Tensor, aten.sub.Tensor)[c % 2]
        x, y = self.small(x), self.small(y)
        self.keep(self.call(target, x, y), None, self.bound[x] + self.bound[y])

    def _mm(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is None:
            return
        like = x.meta["val"]
        y = self.pick(b, lambda n: n.meta["val"].shape[0] == like.shape[1] and n.meta["val"].dtype == like.dtype)
        if y is None:
            y = self.call(aten.permute.default, x, [1, 0])
            self.keep(y, x, self.bound[x], value=False)
        if like.shape[0] * y.meta["val"].shape[1] > LARGEST or like.shape[1] > 32:
            return
        if self.steady and like.is_floating_point():
            x, y = self.small(x), self.small(y)
        else:
            x, y = (self.keep(self.call(aten.remainder.Scalar, v, 2), None, 2, value=False) for v in (x, y))
        self.keep(self.call(aten.mm.default, x, y), None, max(4, self.bound[x] * self.bound[y]) * like.shape[1])

    def _cast(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is not None:
            x = self.small(x)
            self.keep(self.call(aten._to_copy.default, x, dtype=DTYPES[b % len(DTYPES)]), None, self.bound[x])

    def _view(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is None:
            return
        rows, columns = x.meta["val"].shape
        kind = b % 4
        if kind == 0:
            node = self.call(aten.permute.default, x, [1, 0])
        elif kind == 1 and rows >= 8:
            node = self.call(aten.slice.Tensor, x, 0, 0, rows // 2)
        elif kind == 2 and x.meta["val"].is_contiguous() and rows % 2 == 0:
            node = self.call(aten.view.default, x, [rows // 2, columns * 2])
        elif columns > 1:
            node = self.call(aten.slice.Tensor, x, 1, 0, columns - 1)
        else:
            return
        self.keep(node, x, self.bound[x])

    def _draw(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a, lambda n: n.meta["val"].is_floating_point())) is not None:
            drawn = self.call(aten.rand_like.default, x)
            self.keep(drawn, None, 1, value=False)
            self.keep(self.call(aten.round.default, drawn), None, 1)

    def _temporary(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is not None:
            x = self.small(x)
            copied = self.keep(self.call(aten.clone.default, x), None, self.bound[x] * 2)
            part = self.keep(self.call(aten.slice.Tensor, copied, 0, 0, 2), copied, self.bound[x] * 2, value=False)
            self.keep(self.call(aten.mul_.Tensor, part, 2), part, self.bound[copied], value=False)

    def _update(self, a: int, b: int, c: int) -> None:
        """An in-place operation, seen through every view."""
        x = self.pick(a, self.free)
        if x is None:
            return
        node: torch.fx.Node | None = None
        if b % 3 == 0:
            node = self.call(aten.neg_.default, x)
        elif b % 3 == 1:
            node = self.call(aten.remainder_.Scalar, x, 5)
        else:
            like = x.meta["val"]
            y = self.pick(c, lambda n: n.meta["val"].shape == like.shape and self.buffer[n] != self.buffer[x])
            if y is not None:
                y = self.small(y)
                node = self.call(aten.copy_.default, x, y)
        if node is not None:
            bound = max([5, *(self.bound[n] for n in node.all_input_nodes)])
            self.keep(node, x, bound)
            for other in self.buffer:
                if self.buffer[other] == self.buffer[x]:
                    self.bound[other] = max(self.bound[other], bound)

    def _written_back(self, a: int, b: int, c: int) -> None:
        """An input is sent and changed; at the end it gets its new value, as AOTAutograd writes such a change."""
        inputs = self.graph.find_nodes(op="placeholder")
        x = inputs[a % len(inputs)]
        if not self.free(x) or x in self.backs or self.bound[x] * self.sizes[b % 3] > EXACT:
            return
        if b % 4:
            start = self.call(c10d.all_reduce.default, x, "sum", self.groups[b % 3])
            self.launch(start, [x], self.bound[x] * self.sizes[b % 3])
        if c % 3 == 0 and self.flights:
            self.land(c)
        self.backs[x] = self.keep(self.call(aten.neg.default, x), None, self.bound[x])

    def _write_back(self) -> None:
        for x, value in self.backs.items():
            self.call(aten.copy_.default, x, value)

    def _unknown(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is not None:
            self.keep(self.call(unknown, x), None, self.bound[x])

    def _scribble(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a, self.free)) is None:
            return
        like = x.meta["val"]
        y = self.pick(c, lambda n: n.meta["val"].shape == like.shape and self.buffer[n] != self.buffer[x])
        if y is not None:
            self.call(scribble, x, y)
            for other in self.buffer:
                if self.buffer[other] == self.buffer[x]:
                    self.bound[other] = max(self.bound[other], 5)

    def _host(self, a: int, b: int, c: int) -> None:
        """The host looks at an element."""
        if (x := self.pick(a)) is not None:
            row = self.keep(self.call(aten.select.int, x, 0, 0), x, self.bound[x], value=False)
            element = self.keep(self.call(aten.select.int, row, 0, 0), x, self.bound[x], value=False)
            node = self.graph.call_function(SEEN, (element,))
            node.meta["val"] = 0.0

    def _check(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is not None:
            holds = self.keep(self.call(aten.eq.Tensor, x, x), None, 1, value=False)
            holds = self.keep(self.call(aten.all.default, holds), None, 1, value=False)
            self.call(aten._assert_async.msg, holds, "not equal to itself")
