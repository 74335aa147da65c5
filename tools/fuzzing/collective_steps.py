"""Steps that communicate: collectives in every form, transfers."""

from __future__ import annotations

import operator

import torch
import torch.fx

from inductor_passes.simple_fsdp import residuals as _registers  # noqa: F401
from tests.support.graphs import aten, c10d
from tools.fuzzing.books import LARGEST, Flight
from tools.fuzzing.local_steps import LocalSteps

SENT = torch.ops.inductor_passes.sent.default


class CollectiveSteps(LocalSteps):
    """Each step takes three integers, and does nothing where it does not fit."""

    def _matmul_chain(self, a: int, b: int, c: int) -> None:
        """What tensor parallelism makes: gather, matmul, scatter the sum."""
        first, last = len(self.values), a % 2
        self._all_gather(a, b, c)
        if self.flights:
            self.land(-1)
        if len(self.values) > first:
            self._mm(0, b, c)
        if last:
            self._reduce_scatter(0, b, c)

    def _feedback(self, a: int, b: int, c: int) -> None:
        """A message of a value and of what an earlier one lost of it, which is kept again: error feedback."""
        size = self.sizes[b % 3]
        kind = (c10d.reduce_scatter_tensor, c10d.all_gather_into_tensor, c10d.all_to_all_single)[c % 3]
        float32 = [v for v in self.readable() if v.meta["val"].dtype is torch.float32]
        if not float32 or (x := self._operand(a, size, size, size)) is None or x.meta["val"].dtype is not torch.float32:
            return
        rows, columns = x.meta["val"].shape
        residual = self.input(rows, columns, torch.float32)
        value = self.keep(self.call(aten.add.Tensor, residual, x), None, self.bound[x] + 2)
        split = [rows // size] * size
        rest: tuple[object, ...] = ("sum", size) if c % 3 == 0 else (size,) if c % 3 == 1 else (split, split)
        start = self.call(kind.default, value, *rest, self.groups[b % 3])
        self.launch(start, [value], self.bound[value] * (size if c % 3 == 0 else 1))
        if a % 2:
            self.land(-1)
        lost = self.call(aten.sub.Tensor, value, self.call(SENT, value))
        self.backs[residual] = self.call(aten.nan_to_num.default, lost, 0.0, 0.0, 0.0)

    def _wait(self, a: int, b: int, c: int) -> None:
        if self.flights:
            self.land(a)

    def _wait_again(self, a: int, b: int, c: int) -> None:
        found = [r for r in self.waited if all(self.buffer[r] not in f.writes for f in self.flights)]
        if found:
            result = found[a % len(found)]
            self.keep(self.call(c10d.wait_tensor.default, result), result, self.bound[result])

    def _operand(self, index: int, divisor: int = 1, factor: int = 1, growth: int = 1) -> torch.fx.Node | None:
        """A dense operand with that many rows or a multiple, exact when multiplied by ``factor``."""
        x = self.pick(
            index,
            lambda n: n.meta["val"].shape[0] % divisor == 0
            and n.meta["val"].is_contiguous()
            and n.meta["val"].numel() * growth <= LARGEST,
        )
        return None if x is None else self.small(x, factor)

    def _all_gather(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        if (x := self._operand(a, growth=size)) is not None:
            self.launch(
                self.call(c10d.all_gather_into_tensor.default, x, size, self.groups[b % 3]), [x], self.bound[x]
            )

    def _all_gather_out(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        if (x := self._operand(a, growth=size)) is not None:
            fake = x.meta["val"]
            out = self.call(aten.empty.memory_format, [fake.shape[0] * size, fake.shape[1]], dtype=fake.dtype)
            self.keep(out, None, self.bound[x], value=False)
            start = self.call(c10d.all_gather_into_tensor_out.default, x, size, self.groups[b % 3], out=out)
            self.launch(start, [x], self.bound[x], into=out)

    def _all_gather_coalesced(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        xs = [x for i in (a, c) if (x := self._operand(i, growth=size)) is not None]
        if len(xs) == 2 and xs[0].meta["val"].dtype == xs[1].meta["val"].dtype:
            start = self.call(c10d.all_gather_into_tensor_coalesced.default, xs, size, self.groups[b % 3])
            self.launch(start, xs, max(self.bound[x] for x in xs))

    def _reduce_scatter(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        if (x := self._operand(a, size, size)) is not None:
            op = ("sum", "sum", "max")[c % 3]
            start = self.call(c10d.reduce_scatter_tensor.default, x, op, size, self.groups[b % 3])
            self.launch(start, [x], self.bound[x] * size)

    def _reduce_scatter_coalesced(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        xs = [x for i in (a, c) if (x := self._operand(i, size, size)) is not None]
        if len(xs) == 2 and xs[0].meta["val"].dtype == xs[1].meta["val"].dtype:
            start = self.call(c10d.reduce_scatter_tensor_coalesced.default, xs, "sum", size, self.groups[b % 3])
            self.launch(start, xs, max(self.bound[x] for x in xs) * size)

    def _all_reduce(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        if (x := self._operand(a, 1, size)) is not None:
            start = self.call(c10d.all_reduce.default, x, ("sum", "sum", "max")[c % 3], self.groups[b % 3])
            self.launch(start, [x], self.bound[x] * size)

    def _all_reduce_in_place(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        if (x := self._operand(a, 1, size)) is not None:
            own = self.keep(self.call(aten.clone.default, x), None, self.bound[x] * size)
            start = self.call(c10d.all_reduce_.default, own, "sum", self.groups[b % 3])
            self.launch(start, [own], self.bound[own], into=own)

    def _all_reduce_coalesced(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        xs = [x for i in (a, c) if (x := self._operand(i, 1, size)) is not None]
        if len(xs) == 2 and xs[0].meta["val"].dtype == xs[1].meta["val"].dtype:
            start = self.call(c10d.all_reduce_coalesced.default, xs, "sum", self.groups[b % 3])
            self.launch(start, xs, max(self.bound[x] for x in xs) * size)

    def _all_to_all(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        if (x := self._operand(a, size)) is not None:
            split = [x.meta["val"].shape[0] // size] * size
            start = self.call(c10d.all_to_all_single.default, x, split, split, self.groups[b % 3])
            self.launch(start, [x], self.bound[x])

    def _broadcast(self, a: int, b: int, c: int) -> None:
        if (x := self._operand(a)) is not None:
            # From the first rank of the world: the groups of a mesh have different first ranks.
            self.launch(self.call(c10d.broadcast.default, x, 0, self.groups[0]), [x], self.bound[x])

    def _broadcast_in_place(self, a: int, b: int, c: int) -> None:
        if (x := self._operand(a)) is not None:
            own = self.keep(self.call(aten.clone.default, x), None, self.bound[x])
            self.launch(self.call(c10d.broadcast_.default, own, 0, self.groups[0]), [own], self.bound[own], into=own)

    def _all_reduce_coalesced_in_place(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        xs = [x for i in (a, c) if (x := self._operand(i, 1, size)) is not None]
        if len(xs) == 2 and xs[0].meta["val"].dtype == xs[1].meta["val"].dtype:
            bound = max(self.bound[x] for x in xs) * size
            own = [self.keep(self.call(aten.clone.default, x), None, bound) for x in xs]
            start = self.call(c10d.all_reduce_coalesced_.default, own, "sum", self.groups[b % 3])
            self.keep(start, None, bound, value=False)
            results = [self.call(operator.getitem, start, i) for i in range(2)]
            for result, buffer in zip(results, own):
                self.keep(result, buffer, bound, value=False)
            touched = {self.buffer[n] for n in own}
            self.flights.append(Flight(results, touched, touched, bound))

    def _reduce_scatter_out(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        if (x := self._operand(a, size, size)) is not None:
            fake = x.meta["val"]
            out = self.call(aten.empty.memory_format, [fake.shape[0] // size, fake.shape[1]], dtype=fake.dtype)
            self.keep(out, None, self.bound[x] * size, value=False)
            start = self.call(c10d.reduce_scatter_tensor_out.default, x, "sum", size, self.groups[b % 3], out=out)
            self.launch(start, [x], self.bound[x] * size, into=out)

    # Transfers: the graph is rank 0's; every rank has its neighbour where this one has rank 1.

    def _landing_place(self, x: torch.fx.Node) -> torch.fx.Node:
        return self.keep(self.call(aten.zeros_like.default, x), None, self.bound[x])

    def _exchange(self, a: int, b: int, c: int) -> None:
        """A send and a receive in one batch."""
        if (x := self._operand(a)) is None:
            return
        buffer = self._landing_place(x)
        both = ([x, buffer], ["isend", "irecv"]) if c % 2 else ([buffer, x], ["irecv", "isend"])
        batch = self.call(c10d.batch_p2p_ops.default, both[1], [1, 1], [0, 0], both[0], self.groups[0])
        self.keep(batch, None, self.bound[x], value=False)
        results = [self.call(operator.getitem, batch, i) for i in range(2)]
        for result, tensor in zip(results, both[0]):
            self.keep(result, buffer if tensor is buffer else None, self.bound[x], value=False)
        writes = {self.buffer[r] for r in results}
        self.flights.append(Flight(results, {self.buffer[x]}, writes, self.bound[x]))

    def _send_and_receive(self, a: int, b: int, c: int) -> None:
        """Apart, in two nodes with waits of their own; often read through the buffer instead of the wait's result."""
        if (x := self._operand(a)) is not None:
            self.launch(self.call(c10d.isend.default, x, 1, b % 4, self.groups[0]), [x], self.bound[x])
            buffer = self._landing_place(x)
            received = self.call(c10d.irecv.default, buffer, 1, b % 4, self.groups[0])
            self.launch(received, [], self.bound[x], into=buffer)
            if c % 2:
                self.land(-1)
