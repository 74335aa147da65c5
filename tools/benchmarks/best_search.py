"""A long search for the best order of one problem: what the planner is measured against where the bound does not tell.

Iterated local search in the manner of the noising method (Charon and Hudry, 1993): durations are disturbed, an order is
made for the disturbed problem (from scratch, or by local search from the best order known), and local search continues
from it on the real one. In between, CP-SAT solves windows of the best order, itself as the hint.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.local_search import exact_search, local_search
from inductor_passes.schedule.memory_bound import best_known
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import simulate
from inductor_passes.schedule.tables import tables

#: Standard deviations of the logarithm of a duration, tried in turn.
NOISE = (0.02, 0.3, 0.1, 0.05)
#: States that one local search may expand, per task.
STATES = 120
#: Windows solved exactly each time that the best order has changed.
WINDOWS = 40
#: What found the order that an earlier search had stored.
STORED = "stored"
#: Orders this much above the best one are worth a local search.
CLOSE = 1.02


@dataclass
class Search:
    """The state of a search.

    Attributes:
        makespan_ns, peak_bytes: of ``order``, the best one known.
        rounds: disturbed problems tried. ``found``: ``(round, makespan, by what)`` of every improvement.
    """

    problem: Problem
    cap_bytes: int | None
    order: Sequence[int]
    makespan_ns: int
    peak_bytes: int
    rounds: int
    found: list[tuple[int, int, str]]

    def offer(self, order: Sequence[int], by: str) -> bool:
        """Keep the order if it is legal, within the cap and faster."""
        timeline = simulate(self.problem, order)
        if timeline.makespan_ns >= self.makespan_ns:
            return False
        if self.cap_bytes is not None and timeline.peak_bytes > self.cap_bytes:
            return False
        self.problem.check_order(tuple(order))
        self.order, self.makespan_ns, self.peak_bytes = tuple(order), timeline.makespan_ns, timeline.peak_bytes
        self.found.append((self.rounds, timeline.makespan_ns, by))
        return True


def search(
    problem: Problem, cap_bytes: int | None, seconds: float, seed: int = 0, known: Sequence[int] | None = None
) -> Search:
    """The best order within ``cap_bytes`` found in ``seconds``.

    Starts from the input order of ``problem``, a plan with more effort, and ``known``.

    Raises:
        ExactUnavailableError: OR-Tools is not installed.
    """
    until = time.monotonic() + seconds
    numbers = random.Random(seed)
    bound, t = best_known(problem, cap_bytes).ns, tables(problem)
    first = simulate(problem)
    best = Search(problem, cap_bytes, problem.input_order, first.makespan_ns, first.peak_bytes, 0, [])
    allowance = STATES * t.n
    if known is not None:
        best.offer(known, STORED)
    best.offer(plan(problem, cap_bytes, effort=4, thorough=True).order, "plan with more effort")
    solved: Sequence[int] = ()
    while time.monotonic() < until and best.makespan_ns > bound:
        if solved != best.order:
            solved = best.order
            best.offer(exact_search(t, best.order, cap_bytes, WINDOWS), "exact windows")
        noise = NOISE[best.rounds // 2 % len(NOISE)]
        disturbed = _disturbed(problem, noise, numbers)
        best.rounds += 1
        order: Sequence[int]
        if best.rounds % 2:
            order = plan(disturbed, cap_bytes, effort=0, thorough=True).order
            by = f"construction, noise {noise}"
        else:
            order = local_search(tables(disturbed), best.order, cap_bytes, lower_bound(disturbed), allowance // 4)
            by = f"walk from the best, noise {noise}"
        best.offer(order, by)
        if simulate(problem, order).makespan_ns <= CLOSE * best.makespan_ns:
            best.offer(local_search(t, order, cap_bytes, bound, allowance), f"{by}, local search")
    return best


def _disturbed(problem: Problem, noise: float, numbers: random.Random) -> Problem:
    tasks = tuple(
        replace(task, duration_ns=round(task.duration_ns * math.exp(numbers.gauss(0, noise)))) for task in problem.tasks
    )
    return replace(problem, tasks=tasks, name=f"{problem.name} disturbed")
