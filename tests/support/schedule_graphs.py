"""Synthetic scheduling problems in the shape of distributed training steps, and random small ones.

Shared by the planner's tests and by ``tools/bench compile``. Input orders are what a compiler emits: every
collective directly followed by its wait, just before (gathers) or after (reductions) the compute that needs it.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

from inductor_passes.schedule.problem import INPUT, Kind, Lane, Problem, Storage, Task


@dataclass
class Builder:
    """Appends tasks in input order; values are storage numbers, so data edges and lifetimes come for free."""

    name: str
    lanes: tuple[Lane, ...] = (Lane("pg0"),)
    issue_ns: int = 0
    tasks: list[Task] = field(default_factory=list)
    preds: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    producers: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)
    pinned: list[bool] = field(default_factory=list)

    def input(self, size: int, pinned: bool = True) -> int:
        return self._value(size, INPUT, INPUT, pinned)

    def _value(self, size: int, producer: int, ready: int, pinned: bool) -> int:
        self.sizes.append(size)
        self.producers.append(producer)
        self.ready.append(ready)
        self.readers.append([])
        self.pinned.append(pinned)
        return len(self.sizes) - 1

    def _task(self, task: Task, reads: list[int], after: tuple[int, ...]) -> int:
        number = len(self.tasks)
        self.tasks.append(task)
        self.preds.append(sorted({self.ready[v] for v in reads if self.ready[v] >= 0} | set(after)))
        for v in reads:
            self.readers[v].append(number)
        return number

    def compute(self, label: str, ns: int, reads: list[int], size: int, pinned: bool = False) -> int:
        """A compute task; returns the value it produces."""
        task = Task(f"{label}_{len(self.tasks)}", Kind.COMPUTE, ns, label=label)
        number = self._task(task, reads, ())
        return self._value(size, number, number, pinned)

    def collective(
        self, label: str, ns: int, reads: list[int], size: int, lane: int = 0, pinned: bool = False
    ) -> int:
        """A start directly followed by its wait; returns the value that is ready after the wait."""
        n = len(self.tasks)
        start = self._task(
            Task(f"{label}_{n}", Kind.START, ns, lane, -1, self.issue_ns, size, label), reads, ()
        )
        wait = self._task(
            Task(f"W{label}_{n}", Kind.WAIT, 0, lane, start, 0, size, f"W{label}"), [], (start,)
        )
        for v in reads:
            self.readers[v].append(wait)
        value = self._value(size, start, wait, pinned)
        self.readers[value].append(wait)
        return value

    def build(self) -> Problem:
        return Problem(
            tasks=tuple(self.tasks),
            preds=tuple(map(tuple, self.preds)),
            lanes=self.lanes,
            storages=tuple(
                Storage(s, p, tuple(r), pin, f"s{k}")
                for k, (s, p, r, pin) in enumerate(zip(self.sizes, self.producers, self.readers, self.pinned))
            ),
            name=self.name,
        )


def fsdp_forward(
    layers: int, parts: int = 4, compute_ns: int = 1000, gather_ns: int = 600, issue_ns: int = 0
) -> Problem:
    """Gather a layer's parameters, run its ``parts`` kernels, keep activations for the backward."""
    b = Builder(f"fsdp_forward_{layers}", issue_ns=issue_ns)
    x = b.input(40)
    shards = [b.input(20) for _ in range(layers)]
    for i in range(layers):
        full = b.collective(f"AG{i}", gather_ns, [shards[i]], 160)
        for _ in range(parts):
            x = b.compute("mm", compute_ns // parts, [x, full], 40, pinned=True)
    b.compute("loss", compute_ns // 4, [x], 1, pinned=True)
    return b.build()


def fsdp_backward(
    layers: int,
    parts: int = 4,
    compute_ns: int = 2000,
    gather_ns: int = 600,
    scatter_ns: int = 700,
    lanes: tuple[Lane, ...] = (Lane("pg0"),),
    issue_ns: int = 0,
) -> Problem:
    """Gather again, run data and weight gradients, reduce-scatter the weight gradient; activations die on the way."""
    b = Builder(f"fsdp_backward_{layers}_{len(lanes)}", lanes=lanes, issue_ns=issue_ns)
    grad = b.input(40, pinned=False)
    shards = [b.input(20) for _ in range(layers)]
    saved = [[b.input(40, pinned=False) for _ in range(parts)] for _ in range(layers)]
    step = compute_ns // (2 * parts)
    for i in reversed(range(layers)):
        full = b.collective(f"AG{i}", gather_ns, [shards[i]], 160)
        pieces = []
        for part in reversed(range(parts)):
            upstream = grad
            grad = b.compute("dx", step, [upstream, full], 40)
            pieces.append(b.compute("dw", step, [upstream, saved[i][part]], 160 // parts))
        packed = b.compute("cat", step // 4, pieces, 160)
        b.collective(f"RS{i}", scatter_ns, [packed], 20, lane=len(lanes) - 1, pinned=True)
    b.compute("end", 1, [grad], 1, pinned=True)
    return b.build()


def tp_fsdp_forward(
    layers: int, gathers: int = 6, gather_ns: int = 100, reduce_ns: int = 300, issue_ns: int = 20
) -> Problem:
    """Activations reduced on one communicator after every layer, its parameters gathered on another.

    Issuing takes time of the compute lane, which has nothing else to do while it waits for a reduction.
    """
    b = Builder(f"tp_fsdp_forward_{layers}", lanes=(Lane("dp"), Lane("tp")), issue_ns=issue_ns)
    x = b.input(40)
    for i in range(layers):
        full = [b.collective(f"AG{i}.{k}", gather_ns, [b.input(20)], 100) for k in range(gathers)]
        x = b.compute("mm", 200, [x, full[0]], 40)
        for value in full[1:]:
            x = b.compute("mm", 100, [x, value], 40)
        x = b.collective(f"AR{i}", reduce_ns, [x], 40, lane=1)
    b.compute("loss", 100, [x], 1, pinned=True)
    return b.build()


def tp_fsdp_backward(
    layers: int, compute_ns: int = 2000, gather_ns: int = 500, scatter_ns: int = 500, reduce_ns: int = 350
) -> Problem:
    """Tensor parallel activations' all-reduces on one communicator, parameter traffic on another."""
    b = Builder(f"tp_fsdp_backward_{layers}", lanes=(Lane("dp"), Lane("tp")))
    grad = b.input(40, pinned=False)
    shards = [b.input(20) for _ in range(layers)]
    saved = [[b.input(40, pinned=False) for _ in range(4)] for _ in range(layers)]
    step = compute_ns // 8
    for i in reversed(range(layers)):
        full = b.collective(f"AG{i}", gather_ns, [shards[i]], 120)
        pieces = []
        for half in range(2):
            for part in range(2):
                upstream = grad
                grad = b.compute("dx", step, [upstream, full], 40)
                pieces.append(b.compute("dw", step, [upstream, saved[i][2 * half + part]], 30))
            grad = b.collective(f"AR{i}", reduce_ns, [grad], 40, lane=1)
        packed = b.compute("cat", step // 4, pieces, 120)
        b.collective(f"RS{i}", scatter_ns, [packed], 20, pinned=True)
    b.compute("end", 1, [grad], 1, pinned=True)
    return b.build()


def hsdp_backward(layers: int, compute_ns: int = 2000, link: str = "") -> Problem:
    """Gather and scatter within a host, all-reduce the shards between hosts."""
    lanes = (Lane("shard", link), Lane("scatter", link), Lane("replicate"))
    b = Builder(f"hsdp_backward_{layers}", lanes=lanes)
    grad = b.input(40, pinned=False)
    shards = [b.input(20) for _ in range(layers)]
    saved = [b.input(80, pinned=False) for _ in range(layers)]
    step = compute_ns // 4
    for i in reversed(range(layers)):
        full = b.collective(f"AG{i}", 500, [shards[i]], 120)
        upstream = grad
        mid = b.compute("dx", step, [upstream, full], 40)
        dw1 = b.compute("dw", step, [upstream, saved[i]], 60)
        grad = b.compute("dx", step, [mid, full], 40)
        dw2 = b.compute("dw", step, [mid, saved[i]], 60)
        part = b.collective(f"RS{i}", 500, [dw1, dw2], 20, lane=1)
        b.collective(f"AR{i}", 800, [part], 20, lane=2, pinned=True)
    b.compute("end", 1, [grad], 1, pinned=True)
    return b.build()


def moe_forward(layers: int, shared_ns: int = 500, expert_ns: int = 900, dispatch_ns: int = 450) -> Problem:
    """Expert parallel: all-to-all there and back around the experts, shared experts to hide them, FSDP gathers."""
    b = Builder(f"moe_forward_{layers}", lanes=(Lane("dp"), Lane("ep")))
    x = b.input(40)
    shards = [b.input(20) for _ in range(layers)]
    for i in range(layers):
        full = b.collective(f"AG{i}", 500, [shards[i]], 120)
        attention = b.compute("attn", 800, [x, full], 40, pinned=True)
        routed = b.compute("router", 60, [attention], 40)
        there = b.collective(f"A2A{i}", dispatch_ns, [routed], 60, lane=1)
        experts = b.compute("experts", expert_ns, [there, full], 60)
        back = b.collective(f"A2B{i}", dispatch_ns, [experts], 40, lane=1)
        shared = b.compute("shared", shared_ns, [attention, full], 40)
        shared = b.compute("shared2", shared_ns, [shared, full], 40)
        x = b.compute("add", 40, [back, shared, attention], 40, pinned=True)
    b.compute("loss", 100, [x], 1, pinned=True)
    return b.build()


def many_small_forward(layers: int, per_layer: int = 12) -> Problem:
    """Latency-bound gathers of many small parameters."""
    b = Builder(f"many_small_{layers}")
    x = b.input(40)
    for _ in range(layers):
        for k in range(per_layer):
            shard = b.input(1)
            full = b.collective(f"ag{k}", 21, [shard], 8)
            x = b.compute("op", 12, [x, full], 40, pinned=True)
    b.compute("loss", 10, [x], 1, pinned=True)
    return b.build()


def training_graphs(layers: int = 16) -> list[Problem]:
    """One of each shape, at comparable sizes."""
    return [
        fsdp_forward(layers),
        fsdp_forward(layers, gather_ns=1100),
        fsdp_backward(layers),
        fsdp_backward(layers, gather_ns=1100, scatter_ns=1100),
        fsdp_backward(layers, lanes=(Lane("ag"), Lane("rs"))),
        fsdp_backward(layers, lanes=(Lane("ag", "nic"), Lane("rs", "nic"))),
        tp_fsdp_backward(layers),
        hsdp_backward(layers),
        hsdp_backward(layers, link="nvlink"),
        moe_forward(layers),
        many_small_forward(layers),
    ]


def random_problem(seed: int, tasks: int = 8, fences: bool = False) -> Problem:
    """A random small DAG with one to three lanes, shared links, storages and issue costs."""
    rng = random.Random(seed)
    n_lanes = rng.randint(1, 3)
    lanes = tuple(
        Lane(f"pg{k}", link=rng.choice(["", "", "nic"]), fixed_order=rng.random() < 0.2) for k in range(n_lanes)
    )
    b = Builder(f"random_{seed}", lanes=lanes)
    values = [b.input(rng.randint(0, 9), rng.random() < 0.5) for _ in range(rng.randint(1, 3))]
    while len(b.tasks) < tasks:
        reads = rng.sample(values, min(len(values), rng.randint(0, 2)))
        size, pinned = rng.randint(0, 9), rng.random() < 0.15
        if rng.random() < 0.45 and len(b.tasks) + 2 <= tasks:
            b.issue_ns = rng.choice([0, 0, 1, 2])
            values.append(
                b.collective(f"C{len(b.tasks)}", rng.randint(0, 9), reads, size, rng.randrange(n_lanes), pinned)
            )
        else:
            values.append(b.compute(f"k{len(b.tasks)}", rng.randint(0, 9), reads, size, pinned))
        if fences and rng.random() < 0.15:
            b.tasks[-1] = dataclasses.replace(b.tasks[-1], fence=True)
    return b.build()


def every_order(problem: Problem) -> list[tuple[int, ...]]:
    """All legal orders of a small problem."""
    edges = [frozenset(e) for e in problem.edges()]
    n = len(edges)
    found: list[tuple[int, ...]] = []
    order: list[int] = []
    placed: set[int] = set()

    def extend() -> None:
        if len(order) == n:
            found.append(tuple(order))
            return
        for i in range(n):
            if i not in placed and edges[i] <= placed:
                placed.add(i)
                order.append(i)
                extend()
                order.pop()
                placed.discard(i)

    extend()
    return found


def best_makespan(problem: Problem, budget_bytes: int | None) -> int | None:
    """The optimum by enumerating every legal order with an independent replay; None when nothing fits.

    Depth first with shared prefixes; the only pruning is on memory and on a prefix that is already too slow.
    """
    tasks, n = problem.tasks, len(problem.tasks)
    edges = [sum(1 << p for p in e) for e in problem.edges()]
    storages = problem.storages
    reader_mask = [sum(1 << r for r in set(s.readers)) for s in storages]
    best: list[int | None] = [None]

    def live_after(done: int) -> int:
        total = problem.base_bytes
        for s, mask in zip(storages, reader_mask):
            born = s.producer == INPUT or done >> s.producer & 1
            dead = not s.pinned and mask & done == mask and (mask or s.producer != INPUT)
            if born and not dead:
                total += s.size_bytes
        return total

    def extend(done: int, now: int, links: dict[str, int], ends: dict[int, int]) -> None:
        if best[0] is not None and now >= best[0]:
            return
        if done == (1 << n) - 1:
            finish = max([now, *links.values()])
            if best[0] is None or finish < best[0]:
                best[0] = finish
            return
        live = live_after(done)
        for i, task in enumerate(tasks):
            if done >> i & 1 or edges[i] & ~done:
                continue
            allocated = sum(s.size_bytes for s in storages if s.producer == i)
            if budget_bytes is not None and live + allocated > budget_bytes:
                continue
            later, next_links, next_ends = now, links, ends
            if task.kind is Kind.COMPUTE:
                later += task.duration_ns
            elif task.kind is Kind.START:
                later += task.issue_ns
                lane = problem.lanes[task.lane]
                key = f"link:{lane.link}" if lane.link else f"lane:{task.lane}"
                end = max(later, links.get(key, 0)) + task.duration_ns
                next_links, next_ends = {**links, key: end}, {**ends, i: end}
            else:
                later = max(now, ends[task.start]) + task.issue_ns
            extend(done | 1 << i, later, next_links, next_ends)

    if budget_bytes is None or live_after(0) <= budget_bytes:
        extend(0, 0, {}, {})
    return best[0]
