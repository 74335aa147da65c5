"""The planner: the best legal order under a memory cap that the simulator has seen.

Candidates are the input order, list schedules by several rules, and what local search makes of the best of them. One
simulator judges all. The fastest of them get slack, and the one that costs least when durations are not as estimated
wins (``robust``); the input wins where it is as fast and costs hardly more then. Everything is a pure function of the
problem: no clock, no randomness, no iteration over sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inductor_passes.records.words import BoundOn
from inductor_passes.schedule import least_memory
from inductor_passes.schedule.bounds import lower_bound, without_memory
from inductor_passes.schedule.construct import SMALL, close_enough, construct, prefetching
from inductor_passes.schedule.ending import reorder_end
from inductor_passes.schedule.guarded import Trial
from inductor_passes.schedule.local_search import exact_search, local_search, search_all, search_whole
from inductor_passes.schedule.memory_bound import Bound, best_known
from inductor_passes.schedule.polish import polish
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.robust import disturbed, with_slack
from inductor_passes.schedule.simulate import value
from inductor_passes.schedule.tables import Tables, tables

#: States that local search may expand per unit of effort: per task, and for any problem.
_STATES_PER_TASK, _STATES = 2, 60_000
#: States that the search through all orders may keep per unit of effort.
_STATES_OF_ALL = 12_000
#: Windows that the exact solver may be given per unit of effort.
_EXACT_WINDOWS = 8
#: Other orders than the best one from which local search also starts.
_RUNNERS_UP = 3
#: Ends the method of an order that got slack.
SLACK = "/slack"
#: The input stays where the mean under disturbances would be better by less than one part of this many.
_WORTH_MOVING = 100


@dataclass(frozen=True)
class Plan:
    """An order and how good it is.

    Attributes:
        order: task numbers, legal for the problem that was planned.
        makespan_ns, peak_bytes: of ``order``, by the simulator.
        lower_bound_ns: no legal order is faster of those that ``bound_on`` speaks of.
        gap: ``makespan_ns / lower_bound_ns - 1``; 0.0 for an empty program.
        method: what found the order, e.g. ``input``, ``list/critical-path``, ``local-search``.
        input_makespan_ns, input_peak_bytes: of the input order.
        budget_bytes: the cap that was planned for, None when there was none.
        feasible: whether ``peak_bytes`` is within the cap; False only when ``order`` is the input order.
        disturbed_ns: mean makespan when durations are not as estimated (``robust``); 0 where nobody asked.
    """

    order: tuple[int, ...]
    makespan_ns: int
    peak_bytes: int
    lower_bound_ns: int
    gap: float
    method: str
    input_makespan_ns: int
    input_peak_bytes: int
    budget_bytes: int | None = None
    feasible: bool = True
    disturbed_ns: int = 0
    bound_on: BoundOn = "any memory"

    @property
    def value(self) -> tuple[bool, int, int, int]:
        """What plans of one problem under one cap are compared by; less is better."""
        return not self.feasible, self.makespan_ns, self.disturbed_ns, self.peak_bytes

    def against(self, bound: Bound) -> Plan:
        """The same plan held against another bound."""
        return replace(self, lower_bound_ns=bound.ns, gap=bound.gap(self.makespan_ns), bound_on=bound.on)


class _Best:
    """The best feasible order seen so far."""

    def __init__(self, problem: Problem, budget_bytes: int | None) -> None:
        self.problem = problem
        self.budget = budget_bytes
        self.order: Sequence[int] = problem.input_order
        self.makespan, self.peak = value(tables(problem), range(len(problem)))
        self.input_makespan, self.input_peak = self.makespan, self.peak
        self.method = "input"
        self.feasible = budget_bytes is None or self.peak <= budget_bytes
        self.seen: list[Trial] = []

    @property
    def runners_up(self) -> list[Trial]:
        """The best feasible orders that differ in value from the best one."""
        return [c for c in self.seen if (c.makespan, c.peak) != (self.makespan, self.peak)][:_RUNNERS_UP]

    def judge(self, method: str, order: Sequence[int], polished: bool = False) -> bool:
        """Simulate ``order`` and :meth:`offer` it."""
        return self.offer(Trial(method, order, *value(tables(self.problem), order)), polished)

    def offer(self, found: Trial, polished: bool = False) -> bool:
        """Keep the candidate if it is better (``polished``: or as good); whether it was."""
        if self.budget is not None and found.peak > self.budget:
            return False
        key = (found.makespan, found.peak)
        if found.makespan < self.input_makespan and all(key != (c.makespan, c.peak) for c in self.seen):
            # A little room for other starting points of the search than the best one.
            self.seen = sorted([*self.seen, found], key=lambda c: (c.makespan, c.peak))[: 1 + _RUNNERS_UP]
        if self.feasible:
            if key > (self.makespan, self.peak) or (key == (self.makespan, self.peak) and not polished):
                return False
            if self.method == "input" and found.makespan == self.makespan:
                return False
        self.order, self.method, self.feasible = found.order, found.name, True
        self.makespan, self.peak = key
        return True

    def harden(self, t: Tables) -> None:
        """Of the orders that are as fast as the best one, with slack, the one that costs least under disturbances."""
        rivals = [Trial(self.method, self.order, self.makespan, self.peak)]
        rivals += [c for c in self.seen if c.makespan == self.makespan and c.peak != self.peak]
        found = [with_slack(t, rival.order, self.budget) for rival in rivals]
        best = min(range(len(found)), key=lambda k: found[k].mean_ns)
        chosen, plain = found[best], found[0].plain_ns
        least_gain = plain // _WORTH_MOVING if self.method == "input" else 0
        if chosen.mean_ns < plain - least_gain:
            self.order = chosen.order
            # Later starts mean less contention: it may be faster, too.
            self.makespan, self.peak = value(t, chosen.order)
            self.method = f"{rivals[best].name.removesuffix(SLACK)}{SLACK}"


def _search(t: Tables, best: _Best, bound: int, effort: int, thorough: bool) -> bool:
    """Look near the best order, and with ``thorough`` near the runners-up as well; whether no order is faster now."""
    if best.budget is not None:
        best.judge("other-end", reorder_end(t, best.order, best.budget))
    if t.slowdown:
        # The search knows no contention.
        bound = without_memory(t)
    if effort and best.makespan > close_enough(bound, thorough):
        allowance = effort * (_STATES_PER_TASK * t.n + _STATES)
        starts = [best.order, *(c.order for c in best.runners_up)] if thorough else [best.order]
        for order in starts:
            best.judge("local-search", local_search(t, order, best.budget, bound, allowance // len(starts)))
    if not effort or best.makespan <= bound:
        return False
    order, none_faster = search_all(t, best.order, best.budget, effort * _STATES_OF_ALL)
    best.judge("all-orders", order)
    return none_faster and not t.slowdown


def plan(
    problem: Problem,
    budget_bytes: int | None,
    *,
    effort: int = 1,
    exact_window: bool = False,
    thorough: bool | None = None,
    start: Plan | None = None,
    slack: bool = True,
) -> Plan:
    """The best order found for ``problem`` whose peak is at most ``budget_bytes`` (None: unlimited).

    Never slower than the input order where that is within the budget. Where it is not, memory comes before time; when
    nothing is found within the budget, the input order is returned with ``feasible=False``.

    Args:
        effort: 0 only constructs; each unit above lets local search make a number of moves proportional to N.
        exact_window: also improve windows with OR-Tools CP-SAT (the ``exact`` extra).
        thorough: try every construction; default: for problems of up to ``construct.SMALL`` tasks.
        start: a plan of the same problem under the same cap: nothing is constructed anew, and the result is no worse
            by time, mean under disturbances, and memory, in this order.
        slack: spend memory that the cap leaves on slack; otherwise the least peak wins among equally fast orders.

    Raises:
        ExactUnavailableError: ``exact_window`` is needed but OR-Tools is not installed.
    """
    t = tables(problem)
    thorough = t.n <= SMALL if thorough is None else thorough
    bound = Bound(lower_bound(problem), "any memory")
    best = _Best(problem, budget_bytes)
    if t.n and (best.makespan > bound.ns or not best.feasible):
        if not best.feasible:
            for frugal in least_memory.orders(t):
                best.judge("least-memory", frugal)
        if start is None:
            construct(t, budget_bytes, bound.ns, best.offer, thorough)
        elif start.method != "input":
            best.judge(start.method, start.order)
        if not best.feasible and budget_bytes is not None:
            rescued = search_whole(t, budget_bytes, sum(t.busy_ns) + sum(t.lane_ns))
            if rescued is not None:
                best.judge("search", rescued)
        if best.feasible:
            bound = _improve(t, best, effort, exact_window, thorough)
    if best.method != "input":
        best.judge(best.method, polish(t, best.order), polished=True)
    if t.n and best.feasible and best.makespan > close_enough(bound.ns, thorough) and start is None:
        for name, eager in prefetching(t):
            best.judge(name, polish(t, eager))
    if t.n and best.feasible and slack:
        best.harden(t)
    found = _as_plan(t, best, bound)
    if start is None or found.value < start.value:
        return found
    return start if start.lower_bound_ns >= bound.ns else start.against(bound)


def _improve(t: Tables, best: _Best, effort: int, exact_window: bool, thorough: bool) -> Bound:
    """Search on from what was constructed, as far as the bound under the cap leaves something to find."""
    near_any = best.makespan <= close_enough(lower_bound(best.problem), thorough)
    bound = best_known(best.problem, None if near_any else best.budget)
    none_faster = False
    if best.makespan > close_enough(bound.ns, thorough):
        none_faster = _search(t, best, bound.ns, effort, thorough)
    if best.makespan > bound.ns and exact_window and not none_faster:
        windows = _EXACT_WINDOWS * max(1, effort)
        best.judge("exact-window", exact_search(t, best.order, best.budget, windows))
    return Bound(best.makespan, "all orders tried") if none_faster else bound


def _as_plan(t: Tables, best: _Best, bound: Bound) -> Plan:
    found = of_order(best.problem, best.order, best.budget, best.method, bound)
    return replace(found, disturbed_ns=disturbed(t, found.order).mean_ns)


def of_order(
    problem: Problem, order: Sequence[int], budget_bytes: int | None, method: str, bound: Bound | None = None
) -> Plan:
    """A legal order as a plan under a cap in bytes (None: unlimited), which it may exceed; ``disturbed_ns`` is 0.

    Args:
        bound: what it is held against; default: the best that is known within the memory that the order keeps.

    Raises:
        ProblemError: the order is not legal.
    """
    problem.check_order(order)
    t = tables(problem)
    input_makespan_ns, input_peak_bytes = value(t, range(t.n))
    makespan_ns, peak_bytes = value(t, order)
    feasible = budget_bytes is None or peak_bytes <= budget_bytes
    bound = bound or best_known(problem, budget_bytes if feasible else None, makespan_ns)
    return Plan(
        order=tuple(order),
        makespan_ns=makespan_ns,
        peak_bytes=peak_bytes,
        lower_bound_ns=bound.ns,
        gap=bound.gap(makespan_ns),
        method=method,
        input_makespan_ns=input_makespan_ns,
        input_peak_bytes=input_peak_bytes,
        budget_bytes=budget_bytes,
        feasible=feasible,
        bound_on=bound.on,
    )
