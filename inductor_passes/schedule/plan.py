"""The planner: the best legal order under a memory cap that the simulator has seen.

Candidates are the input order, list schedules by several rules, and what local search makes of the best of them. One
simulator judges all; among equally fast candidates the input wins, then the one of least peak memory, then the
earlier one. Everything is a pure function of the problem: no clock, no randomness, no iteration over sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inductor_passes.schedule.bounds import lower_bound, tails
from inductor_passes.schedule.justify import improve
from inductor_passes.schedule.list_schedule import Rule, list_schedule
from inductor_passes.schedule.local_search import local_search
from inductor_passes.schedule.memory import Continuation
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.reference import lazy
from inductor_passes.schedule.simulate import Timeline, simulate
from inductor_passes.schedule.slack import as_progress, latest_issue, relieves
from inductor_passes.schedule.tables import Tables, tables

#: States that local search may expand per unit of effort: per task, and for any problem.
_STATES_PER_TASK, _STATES = 10, 40_000


@dataclass(frozen=True)
class Plan:
    """An order and how good it is.

    Attributes:
        order: task numbers, legal for the problem that was planned.
        makespan_ns, peak_bytes: of ``order``, by the simulator.
        lower_bound_ns: no legal order is faster, whatever memory it uses.
        gap: ``makespan_ns / lower_bound_ns - 1``; 0.0 for an empty program.
        method: what found the order, e.g. ``input``, ``list/critical-path``, ``local-search``.
        input_makespan_ns, input_peak_bytes: of the input order.
        budget_bytes: the cap that was planned for, None when there was none.
        feasible: whether ``peak_bytes`` is within the cap; False only when ``order`` is the input order.
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


class _Best:
    """The best feasible order seen so far."""

    def __init__(self, problem: Problem, budget_bytes: int | None) -> None:
        self.problem = problem
        self.budget = budget_bytes
        self.order: Sequence[int] = problem.input_order
        timeline = simulate(problem)
        self.makespan = self.input_makespan = timeline.makespan_ns
        self.peak = self.input_peak = timeline.peak_bytes
        self.method = "input"
        self.feasible = budget_bytes is None or self.peak <= budget_bytes

    def offer(self, order: Sequence[int], method: str) -> bool:
        """Keep ``order`` if it is better; whether it was."""
        timeline = simulate(self.problem, order)
        if self.budget is not None and timeline.peak_bytes > self.budget:
            return False
        key = (timeline.makespan_ns, timeline.peak_bytes)
        if self.feasible:
            if timeline.makespan_ns > self.makespan or key >= (self.makespan, self.peak):
                return False
            if self.method == "input" and timeline.makespan_ns == self.makespan:
                return False
        elif timeline.makespan_ns > self.input_makespan:
            return False
        self.order, self.method, self.feasible = order, method, True
        self.makespan, self.peak = key
        return True


def plan(
    problem: Problem, budget_bytes: int | None, *, effort: int = 1, exact_window: bool = False
) -> Plan:
    """The best order found for ``problem`` whose peak is at most ``budget_bytes`` (None: unlimited).

    Never slower than the input order. When neither the input order nor anything else is within the budget (and no
    slower than the input), the input order is returned with ``feasible=False``.

    Args:
        effort: 0 only constructs; each unit above lets local search make a number of moves proportional to N.
        exact_window: also improve windows with OR-Tools CP-SAT (the ``exact`` extra).
    """
    t = tables(problem)
    bound = lower_bound(problem)
    best = _Best(problem, budget_bytes)
    if best.makespan > bound or not best.feasible:
        for method, order in _constructions(t, best):
            best.offer(order, method)
            if best.feasible and best.makespan <= bound:
                break
        if best.feasible and best.makespan > bound and effort:
            better = local_search(t, best.order, budget_bytes, bound, effort * _STATES_PER_TASK * t.n + _STATES)
            best.offer(better, "local-search")
    order = tuple(best.order)
    problem.check_order(order)
    return Plan(
        order=order,
        makespan_ns=best.makespan,
        peak_bytes=best.peak,
        lower_bound_ns=bound,
        gap=best.makespan / bound - 1 if bound else 0.0,
        method=best.method,
        input_makespan_ns=best.input_makespan,
        input_peak_bytes=best.input_peak,
        budget_bytes=budget_bytes,
        feasible=best.feasible,
    )


def rules(t: Tables) -> list[Rule]:
    """The list-scheduling rules, in the order in which they are tried."""
    position = list(range(t.n))
    by_tail = [-q for q in tails(t)[0]]
    return [
        Rule("list/input-compute", position, by_tail, strict=True),
        Rule("list/critical-path", by_tail, by_tail),
        Rule("list/input-collectives", position, position),
        Rule("list/critical-path-input-collectives", by_tail, position),
        Rule("list/input-compute-eager", position, by_tail, eager=True),
    ]


def just_in_time(t: Tables, rule: Rule, order: Sequence[int], timeline: Timeline, margin: int) -> Rule:
    """``rule`` made to repeat the unconstrained ``order``, but with gathers issued no earlier than they are needed.

    ``margin`` is how many of its own durations sooner than that a collective may be issued.
    """
    position = [0] * t.n
    for k, i in enumerate(order):
        position[i] = k
    latest = latest_issue(t, order, timeline)
    due = as_progress(t, order, timeline, [time - margin * d for time, d in zip(latest, t.lane_ns)])
    release = [0 if early else d for early, d in zip(relieves(t), due)]
    return Rule(f"{rule.name}/just-in-time{margin or ''}", position, latest, strict=rule.strict, release=release)


def _constructions(t: Tables, best: _Best) -> Iterator[tuple[str, list[int]]]:
    position = range(t.n)
    free = [(rule, list_schedule(t, rule)) for rule in rules(t)]
    for rule, order in list(free):
        yield rule.name, order
        if rule.eager: continue
        for k, more in enumerate(improve(t, order, 3)):
            r=Rule(f"{rule.name}/justified{k + 1}", (), ())
            free.append((r, more))
            yield r.name, more
    if best.budget is None:
        return
    references: list[Sequence[int]] = [position] if best.input_peak <= best.budget else []
    for order in (lazy(t, position), lazy(t, position, hold_waits=True)):
        best.offer(order, "lazy")
        if simulate(best.problem, order).peak_bytes <= best.budget:
            references.append(order)
    for rule, order in free:
        timeline = simulate(best.problem, order)
        for jit in [just_in_time(t, rule, order, timeline, margin) for margin in (0, 1, 2)] + ([rule] if rule.compute else []):
            for reference in references:
                yield jit.name, list_schedule(t, jit, Continuation(t, reference, best.budget))
