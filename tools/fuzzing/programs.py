"""Random distributed programs, and what it takes to judge a pass by them.

A program is a list of steps, each a name and three integers; whatever the integers are, the builder makes a legal graph
of them (indices count modulo what there is, steps that do not fit are left out). So every sublist of steps is a program
too, and a failure shrinks by leaving steps out.

All ranks run in one process (``LocalTensorMode``), twice: in ``prompt`` runs a collective's result is there at once; in
``late`` runs its output holds poison until the wait, and what is sent is read at the wait. A legal program cannot tell
the difference, a read before the wait or a write to a buffer in flight can. Data are integers, small enough to be exact
in every dtype, so that results are compared bit for bit.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.fx
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import verify
from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import complain
from inductor_passes.engine.compilation import Known
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.reorder.pass_ import ReorderPass
from inductor_passes.report import Reason
from inductor_passes.rewriting.contract import Facts, Outcome, Pass
from inductor_passes.verify.snapshot import finding_key
from tests.support.graphs import GraphBuilder, aten, c10d
from tests.support.world import fake_world

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

Step = tuple[str, int, int, int]
Timing = Literal["prompt", "late"]

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
#: Integers up to here are exact in every dtype above, and so are sums of a few of them.
EXACT = 31
POISON = 99
#: In the verifier's message about an operator that is not in place but may become so.
IN_PLACE = "Inductor may do it in place"
LARGEST = 4096
#: The host reads an element of a tensor.
SEEN = aten._local_scalar_dense.default
TRANSFERS = {c10d.isend.default, c10d.irecv.default, c10d.batch_p2p_ops.default}
STEPS = {
    "input": 2,
    "pointwise": 6,
    "add": 5,
    "mm": 4,
    "cast": 2,
    "view": 4,
    "draw": 1,
    "temporary": 2,
    "update": 3,
    "wait": 18,
    "wait_again": 2,
    "all_gather": 6,
    "all_gather_out": 2,
    "all_gather_coalesced": 2,
    "reduce_scatter": 6,
    "reduce_scatter_coalesced": 2,
    "all_reduce": 5,
    "all_reduce_in_place": 2,
    "all_reduce_coalesced": 2,
    "all_to_all": 4,
    "all_reduce_coalesced_in_place": 1,
    "reduce_scatter_out": 2,
    "broadcast": 2,
    "broadcast_in_place": 2,
    "exchange": 2,
    "send_and_receive": 2,
    "unknown": 1,
    "scribble": 1,
    "host": 1,
    "check": 1,
    "matmul_chain": 2,
}


@dataclass(frozen=True)
class Case:
    """A program and how it is compiled.

    Attributes:
        steps: the program.
        ranks: size of the world; 4 or 8.
        settings: fields of ``PassConfig``.
        async_tp: whether every region that can be cut into parts is.
        device, ranks_per_host: of the cost profile.
        backward: whether the graph's inputs are named as those of a backward.
        vandal: position among the passes of one that breaks off half way, or -1 for none.
        effort: move allowance of the planner.
    """

    steps: tuple[Step, ...]
    ranks: int = 4
    settings: dict[str, str] = field(default_factory=dict)
    async_tp: bool = False
    device: str = "cpu"
    ranks_per_host: int = 8
    backward: bool = False
    vandal: int = -1
    effort: int = 1


@contextlib.contextmanager
def world(ranks: int) -> Iterator[tuple[str, ...]]:
    """A world without processes; yields the names of the group of all ranks and of the two dimensions of a mesh."""
    with fake_world(ranks) as everybody:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))
        yield (everybody, *(mesh.get_group(d).group_name for d in (0, 1)))


def random_case(rng: random.Random, ranks: int = 4) -> Case:
    """A case; every choice from ``rng``."""
    names = rng.sample(list(STEPS), k=rng.randint(len(STEPS) // 2, len(STEPS))) + ["wait"]
    weights = [STEPS[name] for name in names]
    steps = [
        (name, rng.randrange(64), rng.randrange(64), rng.randrange(64))
        for name in rng.choices(names, weights, k=rng.randint(6, 45))
    ]
    settings = {
        "memory_budget": rng.choice(["0", "+5%", "+20%", "100B", "1KiB", "unlimited"]),
        "bucket": rng.choice(["on", "on", "off"]),
        "schedule": rng.choice(["on", "on", "off"]),
        "redistribute": rng.choice(["off", "exact"]),
    }
    return Case(
        tuple(steps),
        ranks,
        settings,
        async_tp=rng.random() < 0.35,
        device=rng.choice(["cpu", "cuda"]),
        ranks_per_host=rng.choice([1, 2, 8]),
        backward=rng.random() < 0.3,
        vandal=rng.randrange(4) if rng.random() < 0.1 else -1,
        # Local search takes most of the time and finds legal orders of the same kind.
        effort=int(rng.random() < 0.15),
    )


# -- building ----------------------------------------------------------------------------------------------------------


@dataclass
class _Flight:
    """A collective between its start and its waits."""

    results: list[torch.fx.Node]
    reads: set[int]
    writes: set[int]
    bound: int


class _Builder(GraphBuilder):
    """Writes a graph step by step; knows what is in flight and how large values can be."""

    def __init__(self, groups: Sequence[str], backward: bool) -> None:
        super().__init__("program.py")
        self.groups = groups
        self.sizes = [dist.get_world_size(dist.distributed_c10d._resolve_process_group(g)) for g in groups]
        self.backward = backward
        self.values: list[torch.fx.Node] = []
        self.flights: list[_Flight] = []
        self.waited: list[torch.fx.Node] = []
        self.buffer: dict[torch.fx.Node, int] = {}
        self.bound: dict[torch.fx.Node, int] = {}
        self.inputs = 0

    def input(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        stem = ("primals", "tangents", "saved")[self.inputs % 3] if self.backward else "arg"
        self.inputs += 1
        node = self.placeholder(f"{stem}_{self.inputs}", rows, columns, dtype=dtype)
        self._keep(node, None, 2)

    def _keep(self, node: torch.fx.Node, of: torch.fx.Node | None, bound: int, value: bool = True) -> torch.fx.Node:
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
        reduced = self.call(aten.remainder.Scalar, node, 3)
        return self._keep(reduced, None, 3, value=False)

    def free(self, node: torch.fx.Node) -> bool:
        """Whether nothing in flight reads or writes the node's buffer."""
        return all(self.buffer[node] not in f.reads | f.writes for f in self.flights)

    def launch(
        self, start: torch.fx.Node, reads: Sequence[torch.fx.Node], bound: int, into: torch.fx.Node | None = None
    ) -> None:
        """Book a start: several results when it has several."""
        results = [start]
        if isinstance(start.meta["val"], (list, tuple)):
            self._keep(start, None, bound, value=False)
            results = [self.call(operator.getitem, start, i) for i in range(len(start.meta["val"]))]
        for result in results:
            self._keep(result, into, bound, value=False)
        writes = {self.buffer[r] for r in results}
        self.flights.append(_Flight(results, {self.buffer[r] for r in reads}, writes, bound))

    def land(self, index: int) -> None:
        flight = self.flights.pop(index % len(self.flights))
        for result in flight.results:
            node = self.call(c10d.wait_tensor.default, result)
            empty = result.meta["val"].numel() == 0  # what stands for a message that was sent
            self._keep(node, result, flight.bound, value=not empty)
            if not empty:
                self.waited.append(result)

    # Steps. Each takes three integers.

    def step(self, name: str, a: int, b: int, c: int) -> None:
        getattr(self, f"_{name}")(a, b, c)

    def _input(self, a: int, b: int, c: int) -> None:
        self.input((8, 8, 4, 16)[a % 4], (2, 3, 4, 8)[b % 4], DTYPES[c % len(DTYPES)])

    def _pointwise(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is not None:
            target = (aten.neg.default, aten.relu.default, aten.abs.default, aten.clone.default)[b % 4]
            self._keep(self.call(target, x), None, self.bound[x])

    def _add(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is None:
            return
        like = x.meta["val"]
        y = self.pick(b, lambda n: n.meta["val"].shape == like.shape and n.meta["val"].dtype == like.dtype)
        assert y is not None
        target = (aten.add.Tensor, aten.sub.Tensor)[c % 2]
        x, y = self.small(x), self.small(y)
        self._keep(self.call(target, x, y), None, self.bound[x] + self.bound[y])

    def _mm(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is None:
            return
        like = x.meta["val"]
        y = self.pick(b, lambda n: n.meta["val"].shape[0] == like.shape[1] and n.meta["val"].dtype == like.dtype)
        if y is None:
            y = self.call(aten.permute.default, x, [1, 0])
            self._keep(y, x, self.bound[x], value=False)
        if like.shape[0] * y.meta["val"].shape[1] > LARGEST or like.shape[1] > 32:
            return
        x, y = (self._keep(self.call(aten.remainder.Scalar, v, 2), None, 2, value=False) for v in (x, y))
        self._keep(self.call(aten.mm.default, x, y), None, 4 * like.shape[1])

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

    def _cast(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is not None:
            x = self.small(x)
            self._keep(self.call(aten._to_copy.default, x, dtype=DTYPES[b % len(DTYPES)]), None, self.bound[x])

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
        self._keep(node, x, self.bound[x])

    def _draw(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a, lambda n: n.meta["val"].is_floating_point())) is not None:
            drawn = self.call(aten.rand_like.default, x)
            self._keep(drawn, None, 1, value=False)
            self._keep(self.call(aten.round.default, drawn), None, 1)

    def _temporary(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is not None:
            x = self.small(x)
            copied = self._keep(self.call(aten.clone.default, x), None, self.bound[x] * 2)
            part = self._keep(self.call(aten.slice.Tensor, copied, 0, 0, 2), copied, self.bound[x] * 2, value=False)
            self._keep(self.call(aten.mul_.Tensor, part, 2), part, self.bound[copied], value=False)

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
            self._keep(node, x, bound)
            for other in self.buffer:
                if self.buffer[other] == self.buffer[x]:
                    self.bound[other] = max(self.bound[other], bound)

    def _wait(self, a: int, b: int, c: int) -> None:
        if self.flights:
            self.land(a)

    def _wait_again(self, a: int, b: int, c: int) -> None:
        found = [r for r in self.waited if all(self.buffer[r] not in f.writes for f in self.flights)]
        if found:
            result = found[a % len(found)]
            self._keep(self.call(c10d.wait_tensor.default, result), result, self.bound[result])

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
            self._keep(out, None, self.bound[x], value=False)
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
            own = self._keep(self.call(aten.clone.default, x), None, self.bound[x] * size)
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
            own = self._keep(self.call(aten.clone.default, x), None, self.bound[x])
            self.launch(self.call(c10d.broadcast_.default, own, 0, self.groups[0]), [own], self.bound[own], into=own)

    def _all_reduce_coalesced_in_place(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        xs = [x for i in (a, c) if (x := self._operand(i, 1, size)) is not None]
        if len(xs) == 2 and xs[0].meta["val"].dtype == xs[1].meta["val"].dtype:
            bound = max(self.bound[x] for x in xs) * size
            own = [self._keep(self.call(aten.clone.default, x), None, bound) for x in xs]
            start = self.call(c10d.all_reduce_coalesced_.default, own, "sum", self.groups[b % 3])
            self._keep(start, None, bound, value=False)
            results = [self.call(operator.getitem, start, i) for i in range(2)]
            for result, buffer in zip(results, own):
                self._keep(result, buffer, bound, value=False)
            touched = {self.buffer[n] for n in own}
            self.flights.append(_Flight(results, touched, touched, bound))

    def _reduce_scatter_out(self, a: int, b: int, c: int) -> None:
        size = self.sizes[b % 3]
        if (x := self._operand(a, size, size)) is not None:
            fake = x.meta["val"]
            out = self.call(aten.empty.memory_format, [fake.shape[0] // size, fake.shape[1]], dtype=fake.dtype)
            self._keep(out, None, self.bound[x] * size, value=False)
            start = self.call(c10d.reduce_scatter_tensor_out.default, x, "sum", size, self.groups[b % 3], out=out)
            self.launch(start, [x], self.bound[x] * size, into=out)

    # Transfers: the graph is rank 0's; every rank has its neighbour where this one has rank 1.

    def _landing_place(self, x: torch.fx.Node) -> torch.fx.Node:
        return self._keep(self.call(aten.zeros_like.default, x), None, self.bound[x])

    def _exchange(self, a: int, b: int, c: int) -> None:
        """A send and a receive in one batch."""
        if (x := self._operand(a)) is None:
            return
        buffer = self._landing_place(x)
        both = ([x, buffer], ["isend", "irecv"]) if c % 2 else ([buffer, x], ["irecv", "isend"])
        batch = self.call(c10d.batch_p2p_ops.default, both[1], [1, 1], [0, 0], both[0], self.groups[0])
        self._keep(batch, None, self.bound[x], value=False)
        results = [self.call(operator.getitem, batch, i) for i in range(2)]
        for result, tensor in zip(results, both[0]):
            self._keep(result, buffer if tensor is buffer else None, self.bound[x], value=False)
        writes = {self.buffer[r] for r in results}
        self.flights.append(_Flight(results, {self.buffer[x]}, writes, self.bound[x]))

    def _send_and_receive(self, a: int, b: int, c: int) -> None:
        """Apart, in two nodes with waits of their own; often read through the buffer instead of the wait's result."""
        if (x := self._operand(a)) is not None:
            self.launch(self.call(c10d.isend.default, x, 1, b % 4, self.groups[0]), [x], self.bound[x])
            buffer = self._landing_place(x)
            received = self.call(c10d.irecv.default, buffer, 1, b % 4, self.groups[0])
            self.launch(received, [], self.bound[x], into=buffer)
            if c % 2:
                self.land(-1)

    # Fences and effects.

    def _unknown(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is not None:
            self._keep(self.call(unknown, x), None, self.bound[x])

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
            row = self._keep(self.call(aten.select.int, x, 0, 0), x, self.bound[x], value=False)
            element = self._keep(self.call(aten.select.int, row, 0, 0), x, self.bound[x], value=False)
            node = self.graph.call_function(SEEN, (element,))
            node.meta["val"] = 0.0

    def _check(self, a: int, b: int, c: int) -> None:
        if (x := self.pick(a)) is not None:
            holds = self._keep(self.call(aten.eq.Tensor, x, x), None, 1, value=False)
            holds = self._keep(self.call(aten.all.default, holds), None, 1, value=False)
            self.call(aten._assert_async.msg, holds, "not equal to itself")

    def finish(self) -> torch.fx.GraphModule:
        while self.flights:
            self.land(0)
        outputs = list(dict.fromkeys([*self.values[-1:], *self.values[::3]]))
        self.graph.output(tuple(outputs)).meta["val"] = tuple(o.meta["val"] for o in outputs)
        self.graph.lint()
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)


def build(case: Case, groups: Sequence[str]) -> torch.fx.GraphModule:
    """The case's program as a graph with fake tensors."""
    builder = _Builder(groups, case.backward)
    builder.input(8, 4, torch.float32)
    builder.input(8, 4, torch.float32)
    builder.input(4, 8, torch.bfloat16)
    for step in case.steps:
        builder.step(*step)
    return builder.finish()


# -- running -----------------------------------------------------------------------------------------------------------


def inputs_of(gm: torch.fx.GraphModule, ranks: int) -> list[list[torch.Tensor]]:
    """Integers per placeholder and rank, different on every rank."""
    generator = torch.Generator().manual_seed(0)
    fakes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    return [[torch.randint(-2, 3, f.shape, generator=generator).to(f.dtype) for _ in range(ranks)] for f in fakes]


def _is_start(node: torch.fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "_c10d_functional"
        and not target._opname.startswith("wait_tensor")
    )


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _source(node: torch.fx.Node, pending: dict[torch.fx.Node, Any]) -> torch.fx.Node | None:
    """The open start behind a wait's operand."""
    seen: torch.fx.Node | None = node
    while seen is not None and seen not in pending:
        operand = seen.args[0] if seen.args and not _is_start(seen) else None
        seen = operand if isinstance(operand, torch.fx.Node) else None
    return seen


def execute(gm: torch.fx.GraphModule, inputs: Sequence[Sequence[torch.Tensor]], timing: Timing) -> list[torch.Tensor]:
    """Outputs, and inputs as they are afterwards, of all ranks one after the other."""
    ranks = len(inputs[0])
    torch.manual_seed(7)
    env: dict[torch.fx.Node, Any] = {}
    pending: dict[torch.fx.Node, Callable[[], None]] = {}
    mail = _Mail()
    feed = iter(inputs)
    with LocalTensorMode(ranks):
        held: list[Any] = []
        outputs: list[Any] = []
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                env[node] = LocalTensor({r: x.clone() for r, x in enumerate(next(feed))})
                held.append(env[node])
            elif node.op == "get_attr":
                env[node] = operator.attrgetter(str(node.target))(gm)
            elif node.op == "output":
                outputs += _leaves(torch.fx.node.map_arg(node.args[0], env.__getitem__))
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                if node.target is SEEN:
                    outputs.append(args[0].clone())
                    continue
                if node.target in TRANSFERS:
                    env[node], arrive = mail.transfer(node.target, args, timing == "late")
                    if timing == "late":
                        pending[node] = arrive
                    else:
                        arrive()
                    continue
                if timing == "late" and _is_start(node):
                    env[node], pending[node] = _start_late(node.target, args, kwargs)
                    continue
                if timing == "late" and "wait_tensor" in str(node.target):
                    operand = node.args[0]
                    assert isinstance(operand, torch.fx.Node)
                    source = _source(operand, pending)
                    if source is not None:
                        pending.pop(source)()
                env[node] = node.target(*args, **kwargs)
        return [t._local_tensors[r] for t in [*outputs, *held] for r in range(ranks)]


class _Letter:
    """A message: what it says is read from the sender's memory when it travels, at the first wait of either side."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self._read: Any = None

    def read(self) -> Any:
        if self._read is None:
            self._read = self._tensor.clone()
        return self._read


class _Mail:
    """Transfers between neighbours: what rank r sends, rank r ^ 1 receives; in order per tag."""

    def __init__(self) -> None:
        self._sent: dict[int, list[_Letter]] = {}

    def transfer(self, target: Any, args: tuple[Any, ...], late: bool) -> tuple[Any, Callable[[], None]]:
        """A transfer's results, and what makes the data travel."""
        if target is c10d.batch_p2p_ops.default:
            kinds, tags, tensors = args[0], args[2], args[3]
        else:
            kinds, tags, tensors = ["isend" if target is c10d.isend.default else "irecv"], [args[2]], [args[0]]
        letters: dict[int, _Letter] = {}
        for i, kind in enumerate(kinds):
            if kind == "isend":
                letters[i] = _Letter(tensors[i])
                self._sent.setdefault(tags[i], []).append(letters[i])
        for i, kind in enumerate(kinds):
            if kind == "irecv":
                letters[i] = self._sent[tags[i]].pop(0)
                if late:
                    tensors[i].fill_(POISON)

        def arrive() -> None:
            for i, kind in enumerate(kinds):
                message = letters[i].read()
                if kind == "irecv":
                    shards = message._local_tensors
                    tensors[i].copy_(LocalTensor({r: shards[r ^ 1] for r in shards}))

        results = [t.new_empty(0) if kind == "isend" else t for kind, t in zip(kinds, tensors)]
        return (results if target is c10d.batch_p2p_ops.default else results[0]), arrive


def _start_late(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    """Poisoned outputs of a collective, and what fills them at the wait."""
    written = [
        i
        for i, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and i < len(args)
    ]
    # What a collective overwrites in place it has to remember; everything else is read when the data travel.
    kept = {i: [t.clone() for t in args[i]] if isinstance(args[i], list) else args[i].clone() for i in written}
    result = target(*args, **kwargs)
    outs = _leaves(result)
    for out in outs:
        out.fill_(POISON)

    def arrive() -> None:
        sent = tuple(kept.get(i, argument) for i, argument in enumerate(args))
        into = {name: torch.empty_like(value) for name, value in kwargs.items() if name == "out"}
        for out, value in zip(outs, _leaves(target(*sent, **{**kwargs, **into}))):
            out.copy_(value)

    return result, arrive


def differs(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], signed_zeros: bool = True) -> str:
    """The first difference, bit by bit; "" when there is none. Without ``signed_zeros`` 0.0 equals -0.0."""
    if len(before) != len(after):
        return f"{len(before)} tensors before, {len(after)} after"
    for i, (b, a) in enumerate(zip(before, after)):
        if not signed_zeros and b.shape == a.shape and b.dtype == a.dtype and torch.equal(b, a):
            continue
        if b.shape != a.shape or b.dtype != a.dtype:
            return f"tensor {i}: {b.dtype} {tuple(b.shape)} before, {a.dtype} {tuple(a.shape)} after"
        if not torch.equal(b.contiguous().reshape(-1).view(torch.uint8), a.contiguous().reshape(-1).view(torch.uint8)):
            return f"tensor {i}: {b.tolist()} before, {a.tolist()} after"
    return ""


# -- judging -----------------------------------------------------------------------------------------------------------


class Vandal:
    """A pass that turns a graph upside down and breaks off."""

    name = "vandal"
    group_order = "kept"

    def run(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        for node in reversed(list(graph.nodes)):
            if not node.users and node.op == "call_function":
                graph.erase_node(node)
            elif node.op == "call_function" and isinstance(node.args[0], torch.fx.Node):
                node.replace_all_uses_with(node.args[0])
        raise RuntimeError("broke off in the middle")


def passes(case: Case, settings: PassConfig) -> list[Pass]:
    """The passes of a case in order."""
    chosen = [p if isinstance(p, ReorderPass) else p for p in passes_of(settings)]
    if case.async_tp:
        chosen.insert(0, AsyncTpPass(mode="force", parts=(2, 4)))
    if case.vandal >= 0:
        chosen.insert(min(case.vandal, len(chosen)), Vandal())
    return chosen


def judge(case: Case, groups: Sequence[str], cautious: list[str] | None = None) -> tuple[str, int]:
    """(what is wrong, "" when nothing is; how many passes changed the graph).

    A pass that the verifier undid is a failure, but for one reason: that Inductor might do an operator in place now.
    Passes may run into that; their names go into ``cautious``.
    """
    gm = build(case, groups)
    inputs = inputs_of(gm, case.ranks)
    reference = execute(gm, inputs, "prompt")
    before = verify.snapshot(gm.graph)
    if found := [f for f in verify.check(gm.graph) if IN_PLACE not in f.message]:
        return f"the verifier refuses the generated program: {found[0].rule}: {found[0].message}", 0
    settings = PassConfig(**case.settings)
    profile = CostProfile.default(case.device, ranks_per_host=case.ranks_per_host)
    known = Known("backward" if case.backward else "inference")
    try:
        report = run_passes(gm.graph, passes(case, settings), settings, profile, known=known).report
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0
    changed = sum(p.changed and p.rolled_back is None for p in report.passes)
    for one in report.passes:
        if one.rolled_back is Reason.VERIFIER and IN_PLACE in one.detail:
            if cautious is not None:
                cautious.append(one.name)
        elif one.rolled_back in (Reason.EXCEPTION, Reason.VERIFIER) and one.name != Vandal.name:
            return f"pass {one.name} was undone: {one.rolled_back.value} ({one.detail})", changed
    # The pipeline held each pass against what it was given; later passes rewrite what earlier certificates name.
    if found := [f for f in verify.check(gm.graph) if finding_key(f) not in before.findings]:
        return f"the verifier refuses the result: {found[0].rule}: {found[0].message}", changed
    gm.graph.lint()
    if not changed and not any(p.rolled_back for p in report.passes):
        return "", 0
    for timing in ("prompt", "late"):
        try:
            after = execute(gm, inputs, timing)
        except Exception as error:
            return f"the result does not run: {type(error).__name__}: {error}", changed
        # Async TP adds partial products: exact for integers up to the sign of a zero.
        if said := differs(reference, after, signed_zeros=not case.async_tp):
            if own := differs(reference, execute(build(case, groups), inputs, "late")):
                return f"the generated program itself is illegal: {own}", 0
            return f"other results ({timing}): {said}", changed
    return "", changed


def shrink(case: Case, groups: Sequence[str], allowance: int = 400) -> Case:
    """A smaller case that fails too: steps left out greedily (halves first), then settings switched off."""

    def fails(candidate: Case) -> bool:
        nonlocal allowance
        allowance -= 1
        try:
            return bool(judge(candidate, groups)[0])
        except Exception:  # a program that cannot even be built is another problem
            return False

    length = max(1, len(case.steps) // 2)
    while length >= 1 and allowance > 0:
        start = 0
        while start < len(case.steps) and allowance > 0:
            smaller = replace(case, steps=case.steps[:start] + case.steps[start + length :])
            if fails(smaller):
                case = smaller
            else:
                start += length
        length //= 2
    plain = [{"async_tp": False}, {"vandal": -1}, {"backward": False}, {"device": "cpu"}, {"ranks_per_host": 8}]
    plain += [{"settings": {**case.settings, key: "off"}} for key in ("redistribute", "bucket", "schedule")]
    for change in plain:
        if "settings" in change:
            off = {k: v for k, v in change["settings"].items() if v == "off"}
            change = {"settings": {**case.settings, **off}}
        simpler = replace(case, **change)
        if simpler != case and fails(simpler):
            case = simpler
    return case


def as_test(case: Case, groups: Sequence[str], said: str, name: str) -> str:
    """A failure as the source of a test, with its graph as a comment."""
    values = asdict(case)
    arguments = ",\n        ".join(f"{key}={value!r}" for key, value in values.items())
    graph = "\n".join(f"    # {line.strip()}" for line in str(build(case, groups).graph).splitlines() if line.strip())
    return (
        f"def test_{name}() -> None:\n    # {said[:300]!r}\n{graph}\n"
        f"    case = fuzz_programs.Case(\n        {arguments},\n    )\n"
        f"    with fuzz_programs.world({case.ranks}) as groups:\n"
        f'        assert fuzz_programs.judge(case, groups)[0] == ""\n'
    )


def quiet() -> None:
    """Forget which warnings were given: a long run repeats them."""
    complain._warned.clear()
