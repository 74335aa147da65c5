"""Made-up plans and what ranks would measure of them, stores that fail, and a slow link, for tests of tuning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from inductor_passes.agreement.board import Board, StoreError
from inductor_passes.emulation import link as emulated_link
from inductor_passes.schedule.problem import Kind, Lane, Problem, Task
from inductor_passes.tuning.plan import About, Call, Collective, Planned
from inductor_passes.tuning.record import Record
from tests.support.ranks import Ranks

US = 1000
MS = 1_000_000


def plan(
    transfers_ns: Sequence[int],
    kernels_ns: Sequence[int],
    *,
    ahead: int = 1,
    ranks: int = 2,
    size: int = 1 << 20,
    slowdown_percent: int = 0,
    kernel_ns: float = 5.0 * US,
) -> Planned:
    """Gathers of one group, each issued ``ahead`` places early, and a kernel behind each wait; times as predicted.

    Args:
        kernels_ns: those beyond one per gather come at the end.
        size: bytes of the first gather; the n-th has n + 1 times as many.
        slowdown_percent: of kernels beside a gather; kernel_ns: the fixed cost of a kernel.
    """
    tasks, order, collectives = [], [], []
    count = len(transfers_ns)
    for k, ns in enumerate(transfers_ns):
        label = f"AG{k}"
        said: Any = {"size_bytes": (k + 1) * size, "label": label, "slowdown_percent": slowdown_percent}
        tasks.append(Task(f"s{k}", Kind.START, ns, lane=0, issue_ns=10 * US, **said))
        collectives.append(Collective(k, f"s{k}", label, "all_gather", (k + 1) * size, tuple(range(ranks))))
    tasks += [Task(f"w{k}", Kind.WAIT, lane=0, start=k, label=f"WAG{k}") for k in range(count)]
    tasks += [Task(f"mm{k}", Kind.COMPUTE, ns, label="mm") for k, ns in enumerate(kernels_ns)]
    order += range(min(ahead, count))
    for k in range(count):
        order += [*([k + ahead] if k + ahead < count else []), count + k, 2 * count + k]
    order += range(3 * count, len(tasks))
    problem = Problem(tuple(tasks), tuple(() for _ in tasks), (Lane("0", "link"),), name="made up")
    names = {Kind.START: "gather", Kind.WAIT: "wait", Kind.COMPUTE: "extern_kernels.mm"}
    calls = [Call(names[tasks[task].kind], (task,)) for task in order]
    about = About("forward", 0, problem.digest(order), 5, "cpu", tuple(range(ranks)), 5.0, kernel_ns=kernel_ns)
    return Planned.of(about, calls, collectives, problem, order)


@dataclass(frozen=True)
class World:
    """How it really is.

    Attributes:
        transfers_ns: what each gather takes.
        kernel_factor: how many times longer than predicted kernels take.
        clocks_ns: by how much each rank's clock is ahead.
        late_ns: how much later each rank begins a step.
        wake_ns: how late a rank may be woken up.
        slowdown: by what share a kernel takes longer while a transfer is under way.
    """

    transfers_ns: Sequence[int]
    kernel_factor: float = 1.0
    clocks_ns: Sequence[int] = (0, 0)
    late_ns: Sequence[int] = (0, 0)
    wake_ns: int = 0
    ask_ns: int = 5 * US
    slowdown: float = 0.0

    def records(self, planned: Planned, steps: int = 5, seed: int = 0) -> list[Record]:
        """What the ranks would measure."""
        rng = random.Random(seed)
        ranks = range(len(self.clocks_ns))
        rows: list[list[list[tuple[int, int]]]] = [[] for _ in ranks]
        begins: list[list[int]] = [[] for _ in ranks]
        now = 0
        for _ in range(steps):
            times = self._step(planned, now, rng)
            for rank in ranks:
                begins[rank].append(now + self.late_ns[rank] + self.clocks_ns[rank])
                rows[rank].append([(b + self.clocks_ns[rank], e + self.clocks_ns[rank]) for b, e in times[rank]])
            now = max(one[-1][1] for one in times) + MS
        return [measured(planned, rank, begins[rank], rows[rank]) for rank in ranks]

    def _step(self, planned: Planned, now: int, rng: random.Random) -> list[list[tuple[int, int]]]:
        """Per rank the true (begin, end) of each call. All ranks go through the calls together."""
        ranks = range(len(self.clocks_ns))
        at = [now + late for late in self.late_ns]
        issued: dict[int, list[int]] = {}
        ended: dict[int, int] = {}
        free = 0
        wire: list[tuple[int, int]] = []
        times: list[list[tuple[int, int]]] = [[] for _ in ranks]
        for call in planned.calls:
            task = planned.problem.tasks[call.tasks[0]]
            begin = list(at)
            if task.kind is Kind.START:
                at = [t + 10 * US for t in at]
                issued[call.tasks[0]] = list(at)
                begun = max(free, max(at))
                free = begun + self.transfers_ns[call.tasks[0]]
                wire.append((begun, free))
                ended[call.tasks[0]] = free
            elif task.kind is Kind.WAIT:
                woken = [ended[task.start] + rng.randint(0, self.wake_ns) for _ in ranks]
                at = [max(t + self.ask_ns, w) for t, w in zip(at, woken)]
            else:
                at = [self._computed(t, task.duration_ns * self.kernel_factor, wire) for t in at]
            for rank in ranks:
                times[rank].append((begin[rank], at[rank]))
        return times


    def _computed(self, begin: int, work_ns: float, wire: Sequence[tuple[int, int]]) -> int:
        """When a kernel ends; transfers on ``wire`` follow each other."""
        now = float(begin)
        for since, until in wire:
            if until <= now:
                continue
            before = max(0.0, since - now)
            if work_ns <= before:
                break
            now, work_ns = now + before, work_ns - before
            beside = min(until - now, work_ns * (1 + self.slowdown))
            now, work_ns = now + beside, work_ns - beside / (1 + self.slowdown)
        return round(now + work_ns)


def measured(planned: Planned, rank: int, begins: list[int], rows: list[list[tuple[int, int]]]) -> Record:
    """What a rank says whose calls began and ended so in each step."""
    from inductor_passes.tuning.record import record_of
    from inductor_passes.tuning.tape import Step

    names = tuple(call.name for call in planned.calls)
    steps = [
        Step(begin, row[-1][1], names, tuple(b for b, _ in row), tuple(e for _, e in row))
        for begin, row in zip(begins, rows)
    ]
    found = record_of(planned, steps, rank)
    assert isinstance(found, Record)
    return found


class FailingBoard(Board):
    """A rank's connection with which it dies, or loses the store for good, at one of its operations."""

    def __init__(self, store: Any, at: int, error: type[BaseException]) -> None:
        super().__init__(store)
        self._left, self._error = at, error

    def _do(self, operation: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise self._error("gone")
        return super()._do(operation)

    def reconnect(self) -> None:
        raise StoreError("gone")


def _set_link(latency_ns: int, bytes_per_s: float, _: int, __: int) -> None:
    emulated_link.register()
    emulated_link.set_rate(latency_ns, bytes_per_s)


def ranks_on_a_link(latency_ns: int, bytes_per_s: float, cache: Path, ranks: int = 2, **env: str) -> Ranks:
    """Ranks on an emulated link, with Inductor's caches of their own; to be entered."""
    setup = partial(_set_link, latency_ns, bytes_per_s)
    # Torch's flight recorder keeps the code that made each of the last 2,000 collectives: what a reset threw away would
    # count as code that may be called.
    env = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCH_FR_BUFFER_SIZE": "0", **env}
    return Ranks(ranks, backend=emulated_link.BACKEND, setup=setup, env=env)
