"""The verdict on every collective of a planned order: hidden, or exposed for which binding reason.

A collective is exposed when the compute lane stands still for its transfer. The binding reason is found from its own
place in the simulated order. Looking back from its start: it queued for its lane, or a fence holds it, or its input
was ready but an earlier start does not fit into memory, or its input had only just been computed. Looking forward
from the stall: other work was ready but did not fit into memory, or none was ready. What is left decides between a
true data dependency (every kernel of the graph computes its input or needs its result), independent work that is
used up, and the graph's first and last communication.

Settings and gains come from planning again with one kind of constraint lifted (``trace/whatif.py``), once per reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from inductor_passes.operators import KIND_OF_LABEL
from inductor_passes.report import CollectiveReport, Parameter, Reason
from inductor_passes.schedule.least_memory import least_peak
from inductor_passes.schedule.memory import profile
from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.simulate import Timeline
from inductor_passes.schedule.tables import Tables, tables
from inductor_passes.settings.budget import MemoryBudget
from inductor_passes.trace.advice import Advice, advise
from inductor_passes.trace.exposure import Charges, charge_stalls
from inductor_passes.trace.whatif import family, latencies, latency_bound

#: A part of a collective's duration below which it does not count: kernels too short to hide anything.
NEGLIGIBLE = 0.1
#: How many tasks after a stall are looked at for work that was ready: it is rarely listed far behind.
READY_WINDOW = 512


def explain(
    problem: Problem,
    order: Sequence[int],
    timeline_before: Timeline,
    timeline_after: Timeline,
    budget_bytes: int | None,
    *,
    order_before: Sequence[int] | None = None,
    ranks: Mapping[str, tuple[int, ...]] | None = None,
    buckets: Mapping[str, tuple[str, ...]] | None = None,
    parameters: Mapping[str, tuple[Parameter, ...]] | None = None,
    what_if: bool = True,
    setting: MemoryBudget | None = None,
    effort: int | None = None,
) -> list[CollectiveReport]:
    """One report per ``START`` of ``problem``, in the order in which ``order`` issues them.

    Args:
        order: the order that was compiled; ``timeline_after`` is its simulation.
        timeline_before: the simulation of ``order_before`` (default: the input order).
        budget_bytes: the cap on the peak, None when unlimited.
        ranks: lane name -> global ranks of the communicator.
        buckets: task name of a start -> the starts that it was made of.
        parameters: task name of a start -> what it carries.
        what_if: plan again to find settings and gains; without it they are empty and 0.
        setting: the memory budget that is set, which is not suggested.
        effort: of that planning, best the one that found ``order``; by default 1, and 0 for large graphs.

    The exposed times add up to the makespan of ``timeline_after`` minus the busy time of the compute lane. A gain is
    that of its setting for the whole graph, so collectives with the same setting share one gain.
    """
    before = charge_stalls(problem, problem.input_order if order_before is None else order_before, timeline_before)
    charges = charge_stalls(problem, order, timeline_after)
    reasons = find_reasons(problem, order, timeline_after, charges, budget_bytes)
    advice: dict[Reason, Advice] = {}
    if what_if:
        groups, least = _by_reason(reasons), least_peak(tables(problem))
        step = timeline_after.makespan_ns
        advice = advise(problem, groups, step, least, budget_bytes, setting=setting, effort=effort)
    reports = []
    for i in (i for i in order if problem.tasks[i].kind is Kind.START):
        reason, detail = reasons.get(i, (Reason.HIDDEN, ""))
        hint = advice.get(reason, Advice())
        one = _timed(problem, i, charges.exposed_ns[i], before.exposed_ns[i])
        members = (buckets or {}).get(one.name, ())
        reports.append(
            replace(
                one,
                ranks=(ranks or {}).get(one.lane, ()),
                reason=reason,
                detail="; ".join(filter(None, (detail, hint.detail))),
                setting=hint.setting,
                gain_ns=hint.gain_ns,
                bucket=f"bucket of {len(members)}" if members else "",
                members=members,
                parameters=(parameters or {}).get(one.name, ()),
            )
        )
    return reports


def _timed(problem: Problem, start: int, exposed_ns: int, exposed_before_ns: int) -> CollectiveReport:
    """What the problem says of a collective, and its exposed times; as if it were hidden otherwise."""
    task = problem.tasks[start]
    return CollectiveReport(
        name=task.name,
        label=task.label or task.name,
        kind=KIND_OF_LABEL.get(family(task), family(task)),
        lane=problem.lanes[task.lane].name,
        ranks=(),
        size_bytes=task.size_bytes,
        duration_ns=task.duration_ns,
        hidden_ns=task.duration_ns - exposed_ns,
        exposed_ns=exposed_ns,
        exposed_before_ns=exposed_before_ns,
        reason=Reason.HIDDEN,
        source=task.source,
    )


def _by_reason(reasons: Mapping[int, tuple[Reason, str]]) -> dict[Reason, list[int]]:
    groups: dict[Reason, list[int]] = {}
    for start, (reason, _) in reasons.items():
        groups.setdefault(reason, []).append(start)
    return groups


def find_reasons(
    problem: Problem,
    order: Sequence[int],
    timeline: Timeline,
    charges: Charges,
    budget_bytes: int | None,
) -> dict[int, tuple[Reason, str]]:
    """Task number of every exposed ``START`` -> (binding reason, what it was seen from)."""
    view = _View.of(problem, order, timeline, charges, budget_bytes)
    found: dict[int, tuple[Reason, str]] = {}
    undecided = []
    for i in order:
        if charges.exposed_ns[i] <= 0:
            continue
        verdict = _from_the_start(view, i) or _from_the_stall(view, i)
        if verdict is None:
            undecided.append(i)
        else:
            found[i] = verdict
    found.update(_from_the_graph(view, undecided))
    return found


@dataclass(frozen=True)
class _View:
    """An order with what the questions below look up."""

    problem: Problem
    t: Tables
    order: Sequence[int]
    position: list[int]
    timeline: Timeline
    charges: Charges
    #: bytes live during each position
    live: list[int]
    budget_bytes: int | None
    latency_ns: list[int]

    @staticmethod
    def of(
        problem: Problem, order: Sequence[int], timeline: Timeline, charges: Charges, budget_bytes: int | None
    ) -> _View:
        position = [0] * len(problem)
        for k, i in enumerate(order):
            position[i] = k
        live = profile(problem, order)
        return _View(
            problem, tables(problem), order, position, timeline, charges, live, budget_bytes, latencies(problem)
        )

    def label(self, i: int) -> str:
        return self.problem.tasks[i].label or self.problem.tasks[i].name

    def fits(self, first: int, stop: int, extra_bytes: int) -> bool:
        """Whether ``extra_bytes`` more at positions ``first`` .. ``stop - 1`` stay within the budget."""
        if self.budget_bytes is None or first >= stop or not extra_bytes:
            return True
        return max(self.live[first:stop]) + extra_bytes <= self.budget_bytes


def _from_the_start(view: _View, i: int) -> tuple[Reason, str] | None:
    """Why its transfer did not begin earlier, unless it began as soon as its input was computed."""
    t, timeline = view.t, view.timeline
    small = NEGLIGIBLE * view.charges.exposed_ns[i]
    before = view.charges.previous[i]
    begin = timeline.lane_begin_ns[i]
    # An earlier start would have queued as well when its lane became free only just before it was issued.
    if before >= 0 and begin - timeline.lane_end_ns[before] <= small:
        if latency_bound(view.problem, view.latency_ns, i):
            share = round(100 * view.latency_ns[i] / t.lane_ns[i])
            return Reason.LATENCY_BOUND, f"{share}% of its time is latency, right behind {view.label(before)}"
        return Reason.LANE_BUSY, f"right behind {view.label(before)}"
    own = set(view.problem.preds[i])
    ready = max((p for p in t.preds[i] if p in own), key=lambda p: view.position[p], default=-1)
    allowed = max(t.preds[i], key=lambda p: view.position[p], default=-1)
    earliest = view.position[allowed] + 1 if allowed >= 0 else 0
    issued = timeline.start_ns[i]
    if issued - (timeline.end_ns[allowed] if allowed >= 0 else 0) > small:
        # It was issued later than its predecessors allow, with work in between that it could have run beside.
        if not view.fits(earliest, view.position[i], t.alloc[i]):
            return Reason.MEMORY_BUDGET, f"an earlier start needs {t.alloc[i]} bytes more than the budget leaves"
        return Reason.NOT_PROFITABLE, "no earlier start was found that makes the step faster"
    if allowed != ready and issued - (timeline.end_ns[ready] if ready >= 0 else 0) > small:
        what = "fence" if view.problem.tasks[allowed].fence else "fixed order of its communicator after"
        return Reason.FENCE, f"{what} {view.label(allowed)}"
    return None


def _from_the_stall(view: _View, i: int) -> tuple[Reason, str] | None:
    """Whether the wait that stood still for it could have come later: other work was ready but did not fit."""
    stall = view.charges.stall[i]
    if stall < 0:
        return None
    t, here = view.t, view.position[stall]
    blocked = 0
    for k in range(here + 1, min(here + 1 + READY_WINDOW, len(view.order))):
        j = view.order[k]
        if t.kind[j] != int(Kind.COMPUTE) or t.busy_ns[j] < NEGLIGIBLE * view.charges.exposed_ns[i]:
            continue
        if any(view.position[p] >= here for p in t.preds[j]):
            continue
        if view.fits(here, k, t.alloc[j]):
            return Reason.NOT_PROFITABLE, f"{view.label(j)} could run beside it, but no faster order was found"
        blocked = max(blocked, t.alloc[j])
    if blocked:
        return Reason.MEMORY_BUDGET, f"work that could run beside it needs {blocked} bytes more than the budget leaves"
    return None


def _from_the_graph(view: _View, starts: Sequence[int]) -> dict[int, tuple[Reason, str]]:
    """The rest began as soon as the data allowed and nothing else was ready: what does the graph itself offer?"""
    if not starts:
        return {}
    collectives = [i for i in view.order if view.t.kind[i] == int(Kind.START)]
    relatives = _relatives(view, starts)
    found = {}
    for i in starts:
        before, after, independent = relatives[i]
        small = NEGLIGIBLE * view.t.lane_ns[i]
        if i == collectives[0] and before <= small:
            found[i] = (Reason.HEAD, "")
        elif i == collectives[-1] and after <= small:
            found[i] = (Reason.TAIL, "")
        elif independent <= small:
            found[i] = (Reason.DATA_DEPENDENCY, "every kernel computes its input or needs its result")
        else:
            found[i] = (
                Reason.NO_INDEPENDENT_COMPUTE,
                f"{_us(independent)} of independent kernels are bound to other places or hide other collectives",
            )
    return found


def _relatives(view: _View, starts: Sequence[int]) -> dict[int, tuple[int, int, int]]:
    """For each of ``starts``: ns of compute that it needs, that needs it, and that does neither.

    One sweep each way with a bit per collective, then one sum per distinct combination of bits.
    """
    t = view.t
    bit = {i: 1 << k for k, i in enumerate(starts)}
    below, above = [0] * t.n, [0] * t.n
    for i in range(t.n):
        mask = 0
        for p in t.preds[i]:
            mask |= below[p] | bit.get(p, 0)
        below[i] = mask
    for i in range(t.n - 1, -1, -1):
        mask = 0
        for s in t.succs[i]:
            mask |= above[s] | bit.get(s, 0)
        above[i] = mask
    time: Counter[tuple[int, int]] = Counter()
    for i in range(t.n):
        if t.kind[i] == int(Kind.COMPUTE):
            time[above[i], below[i]] += t.busy_ns[i]
    total = sum(time.values())
    result = {}
    for i, own in bit.items():
        before = sum(ns for (needed, _), ns in time.items() if needed & own)
        after = sum(ns for (_, needs), ns in time.items() if needs & own)
        result[i] = (before, after, total - before - after)
    return result


def _us(ns: int) -> str:
    return f"{ns / 1000:.1f} us"
