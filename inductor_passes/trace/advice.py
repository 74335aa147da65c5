"""What would help, and by how much: one setting or change per binding reason, valued by planning again.

The gain is measured on the planner itself: the problem without the constraint (or with the suggested setting) is
planned again, and the gain is how much shorter the answer is than the compiled order. One or a few plans per reason,
none per collective. A gain that is only a bound (the change cannot be simulated) says "at most" in its detail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from inductor_passes.report import GAIN_AT_MOST, NOTHING, Reason
from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.effort import HIGH
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.settings.budget import MemoryBudget
from inductor_passes.trace import whatif

#: Budgets that are tried, in the form of the setting.
BUDGETS = ("0", "+1%", "+2%", "+5%", "+10%", "+25%", "+50%", "+100%", "+200%")
#: The smallest budget that brings this part of what unlimited memory brings is the one suggested.
ENOUGH = Fraction(9, 10)
#: Above this many tasks the what-if plans are constructed only, without local search, unless told otherwise.
LARGE = 3000
#: Up to this many tasks it is tried whether more planning would help.
SMALL = 500
_MERGE = "merge small collectives into buckets"
_IF_MEMORY = "a larger memory_budget, where the decisions of `bucket` name it"
_FEWER_BYTES = "fewer bytes or a faster link (simulate --bandwidth-scale 2)"


@dataclass(frozen=True)
class Advice:
    """A setting or change, its gain in ns for the whole graph (0: unknown), and what the gain rests on.

    The setting is :data:`~inductor_passes.report.NOTHING` where it was tried and nothing helps.
    """

    setting: str = ""
    gain_ns: int = 0
    detail: str = ""


def advise(
    problem: Problem,
    groups: Mapping[Reason, Sequence[int]],
    makespan_ns: int,
    least_peak_bytes: int,
    budget_bytes: int | None,
    *,
    setting: MemoryBudget | None = None,
    effort: int | None = None,
) -> dict[Reason, Advice]:
    """For each reason with its exposed collectives: what would help.

    Args:
        groups: reason -> task numbers of the collectives that it binds.
        makespan_ns: of the order that was compiled.
        least_peak_bytes: what a relative budget refers to.
        budget_bytes: the cap it was planned under, None when unlimited.
        setting: the memory budget that is set: nothing up to it is suggested, though the cap may be lower than it says
            (rows of C++ kernels hold more than the problem knows).
        effort: of the plans made here; see :func:`~inductor_passes.schedule.plan.plan`.
    """
    work = effort if effort is not None else int(len(problem) <= LARGE)

    def gain(changed: Problem) -> int:
        return max(0, makespan_ns - plan(changed, budget_bytes, effort=work).makespan_ns)

    result = {}
    for reason, starts in groups.items():
        advice = Advice()
        if reason is Reason.MEMORY_BUDGET:
            advice = _memory(problem, makespan_ns, least_peak_bytes, budget_bytes, setting, work)
        elif reason is Reason.LANE_BUSY:
            faster = whatif.scale_links(problem, bandwidth=Fraction(2))
            advice = Advice(
                _FEWER_BYTES,
                gain(faster),
                "communication fills its lane; gain for half the bytes",
            )
        elif reason is Reason.LATENCY_BOUND:
            advice = Advice(
                _MERGE if budget_bytes is None else f"{_MERGE} ({_IF_MEMORY})",
                gain(whatif.without_small_latencies(problem)),
                f"{GAIN_AT_MOST}, if small collectives had no latency",
            )
        elif reason is Reason.FENCE:
            advice = Advice(
                "remove the fence (a host synchronisation, P2P or unknown op)",
                gain(whatif.without_fences(problem)),
                "gain without any fence or fixed order",
            )
        elif reason is Reason.NOT_PROFITABLE:
            advice = _not_profitable(problem, makespan_ns, least_peak_bytes, budget_bytes, setting, work)
        elif reason in _CHANGES:
            free = gain(whatif.without_transfers(problem, starts))
            advice = Advice(_CHANGES[reason], free, f"{GAIN_AT_MOST}, if they took no time")
        if advice.gain_ns > 0 or advice.setting == NOTHING:
            result[reason] = advice
    return result


_CHANGES = {
    Reason.DATA_DEPENDENCY: "split the work around it (micro-batches or async tensor parallelism)",
    Reason.NO_INDEPENDENT_COMPUTE: "more work beside it (a larger batch, micro-batches) or fewer bytes",
    Reason.HEAD: "a smaller first collective, or one issued before this graph",
    Reason.TAIL: "a smaller last collective, or work after it in the same graph",
}


def _not_profitable(
    problem: Problem,
    makespan_ns: int,
    least_peak_bytes: int,
    budget_bytes: int | None,
    setting: MemoryBudget | None,
    effort: int,
) -> Advice:
    """Where an order was legal but none that is faster was found: memory, more planning, fewer bytes, or nothing."""
    if makespan_ns <= lower_bound(problem):
        return Advice(NOTHING, 0, "no order of this graph is faster")
    memory = _memory(problem, makespan_ns, least_peak_bytes, budget_bytes, setting, effort)
    if memory.gain_ns > 0:
        return memory
    if len(problem) <= SMALL:
        searched = makespan_ns - plan(problem, budget_bytes, effort=HIGH).makespan_ns
        if searched > 0:
            return Advice('effort="high"', searched)
    faster = whatif.scale_links(problem, bandwidth=Fraction(2))
    gain = makespan_ns - plan(faster, budget_bytes, effort=effort).makespan_ns
    if gain > 0:
        return Advice(_FEWER_BYTES, gain, "gain for half the bytes")
    return Advice(NOTHING, 0, "neither memory, nor more planning, nor half the bytes makes the step faster")


def _memory(
    problem: Problem,
    makespan_ns: int,
    least_peak_bytes: int,
    budget_bytes: int | None,
    setting: MemoryBudget | None,
    effort: int,
) -> Advice:
    """The smallest budget of the ladder that brings nearly all that unlimited memory would."""
    unlimited = makespan_ns - plan(problem, None, effort=effort).makespan_ns
    if budget_bytes is None or unlimited <= 0:
        return Advice()
    has = setting.fraction if setting is not None and setting.fraction is not None else Fraction(0)
    ladder = [
        (text, limit)
        # "0" is no more than anybody has; a cap below this graph's own peak comes from the other graph of the step.
        for text in BUDGETS[1:]
        if (fraction := MemoryBudget.parse(text).fraction) is not None
        and fraction > has
        and (limit := least_peak_bytes + int(least_peak_bytes * fraction)) > budget_bytes
    ]
    best = ("unlimited", unlimited)
    low, high = 0, len(ladder)
    # A larger budget is rarely worse, so bisection finds the smallest sufficient one in a few plans.
    while low < high:
        middle = (low + high) // 2
        text, limit = ladder[middle]
        gain = makespan_ns - plan(problem, limit, effort=effort).makespan_ns
        if gain >= ENOUGH * unlimited:
            best, high = (text, gain), middle
        else:
            low = middle + 1
    return Advice(f'memory_budget="{best[0]}"', best[1])
