"""Which gathered parameters backward reuses instead of gathering again (selective unsharding).

A kept parameter saves a gather in backward and costs its gathered bytes from its gather in forward to its last use in
backward. Parameters are ranked by link time saved per byte held, among equal ones those that are held shortest first
(forward gathers them last). Of that ranking the longest prefix is taken with which both graphs stay within the budget
in their input order, then by a few plans the shortest one that is as fast as any: what hides behind compute is not paid
for with memory. Where merged messages would take the same memory, plans are made with them, and prefixes between none
and the longest are planned too: keeping more can be slower then. Ranks must agree, so sizes and problems are those of
``reorder``, the same for shards of unequal size.

Source of the idea: DeepCompile (Tanaka et al., 2025), which unshards by the same ratio until memory is full, without
planning what follows from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch.fx

from inductor_passes import _torch
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.canonical import UNEQUAL
from inductor_passes.ir.ops import source_line
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import INPUT, Kind, Problem, Storage, Task
from inductor_passes.settings.budget import MemoryBudget

NAME = "keep"
#: A prefix counts as fast as a longer one when it is at most this share slower: memory is worth more than that.
_AS_FAST = 1000
#: Plans of the step spent on shortening the prefix: it ends within a 16th of the shortest.
_SHORTENINGS = 4
#: Where kept parameters and merged messages compete for memory a plan takes longer: parts of the longest prefix at
#: which the step is planned, and plans spent on shortening.
_PARTS, _FEWER_SHORTENINGS = 2, 2


@dataclass(frozen=True)
class Gathered:
    """A parameter whose gather appears in forward and again in backward.

    Attributes:
        start: name of the gather in both graphs.
        held_bytes: what keeping it costs.
        link_ns: what gathering it again costs the link.
        position: of the gather among forward's nodes.
    """

    start: str
    held_bytes: int
    link_ns: int
    position: int
    source: str
    group: str

    @property
    def rank(self) -> tuple[int, int]:
        """Less is better: by link time per byte, then what forward gathers last."""
        return -(self.link_ns * 10**6 // self.held_bytes), -self.position


@dataclass(frozen=True)
class KeepChoice:
    """What came of it: the starts to keep, and the report."""

    kept: frozenset[str]
    report: PassReport


class Planned:
    """Plans states of a step, each graph as it is."""

    @property
    def competes(self) -> bool:
        """Whether anything but what is kept would take memory to save time."""
        return False

    def plans(self, problems: tuple[Problem, Problem], limit: int | None) -> tuple[Plan, Plan]:
        """Of forward and backward."""
        forward, backward = (plan(one, limit, effort=0, thorough=False) for one in problems)
        return forward, backward


@dataclass(frozen=True)
class _Step:
    forward: Plan
    backward: Plan

    @property
    def step_ns(self) -> int:
        return self.forward.makespan_ns + self.backward.makespan_ns

    @property
    def peak_bytes(self) -> int:
        return max(self.forward.peak_bytes, self.backward.peak_bytes)


def marked(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Nodes of gathers whose keeping is ours to decide."""
    return [node for node in graph.nodes if _torch.is_left_to_partitioner(node)]


def candidates(forward: GraphView, backward: GraphView, profile: CostProfile) -> list[Gathered]:
    """Gathers that are ours to decide and that backward repeats, best first."""
    again = {c.start.name: c for c in backward.collectives if _torch.is_left_to_partitioner(c.start)}
    found = [
        Gathered(
            start=c.start.name,
            held_bytes=c.output_bytes or 0,
            link_ns=_link_ns(c, profile),
            position=forward.position[c.start],
            source=source_line(c.start),
            group=c.group.name,
        )
        for c in forward.collectives
        if c.kind is CollectiveKind.ALL_GATHER and c.start.name in again and c.output_bytes
    ]
    return sorted(found, key=lambda g: g.rank)


def _link_ns(c: Collective, profile: CostProfile) -> int:
    return profile.communication_ns(c.kind, c.input_bytes or 0, c.output_bytes or 0, c.group.ranks or (0,))


def choose_kept(
    forward: Problem,
    backward: Problem,
    found: Sequence[Gathered],
    budget: MemoryBudget,
    step_peak_bytes: int,
    planned: Planned | None = None,
) -> KeepChoice:
    """The prefix of ``found`` to keep.

    Args:
        forward, backward: problems of the graphs when everything is gathered again.
        found: see :func:`candidates`.
        step_peak_bytes: what the budget is relative to.
        planned: plans states of the step; default: without buckets.
    """
    planned = planned or Planned()
    limit = budget.limit_bytes(step_peak_bytes)

    def with_kept(count: int) -> tuple[Problem, Problem]:
        names = {g.start for g in found[:count]}
        return holding(forward, names), without_gathers(backward, names)

    def fits(count: int) -> bool:
        return limit is None or max(peak_bytes(p) for p in with_kept(count)) <= limit

    def step(count: int) -> _Step:
        return _Step(*planned.plans(with_kept(count), limit))

    most = len(found) if fits(len(found)) else _bisect(0, len(found), fits)
    parts = _PARTS if planned.competes else 1
    steps = {count: step(count) for count in sorted({most * part // parts for part in range(parts + 1)})}
    before, best_ns = steps[0], min(one.step_ns for one in steps.values())
    enough = best_ns + best_ns // _AS_FAST
    kept = min(count for count, one in steps.items() if one.step_ns <= enough)
    low = max((count for count in steps if count < kept), default=0)
    for _ in range(_FEWER_SHORTENINGS if planned.competes else _SHORTENINGS):
        middle = (low + kept) // 2
        if middle == low:
            break
        steps[middle] = step(middle)
        if steps[middle].step_ns <= enough:
            kept = middle
        else:
            low = middle
    after = steps[kept]
    report = _report(found, kept, most, before, after, limit)
    return KeepChoice(frozenset(g.start for g in found[:kept]), report)


def pinned(
    forward: Problem, backward: Problem, found: Sequence[Gathered], kept: Collection[str], limit: int | None
) -> KeepChoice | str:
    """The choice that a plan file makes, or in words why the budget does not allow it."""
    names = set(kept)
    both = holding(forward, names), without_gathers(backward, names)
    peak = max(map(peak_bytes, both))
    if limit is not None and peak > max(limit, peak_bytes(forward), peak_bytes(backward)):
        return (
            f"`kept` needs {peak} bytes at the step's peak, the memory budget allows {limit}; raise memory_budget or "
            "keep less"
        )
    chosen = [g for g in found if g.start in names]
    metrics: dict[str, float] = {
        "kept": len(chosen),
        "kept_bytes": sum(g.held_bytes for g in chosen),
        "gathered_again": len(found) - len(chosen),
    }
    decisions = [
        Decision(
            NAME,
            g.start,
            Verdict.APPLIED if g.start in names else Verdict.REFUSED,
            Reason.PLAN_PINNED,
            f"{g.held_bytes} bytes held or {g.link_ns} ns on the link",
            source=g.source,
            group=g.group,
        )
        for g in found
    ]
    return KeepChoice(frozenset(names), PassReport(NAME, changed=bool(names), decisions=decisions, metrics=metrics))


def refused(found: Sequence[Gathered]) -> PassReport:
    """The report when nothing is kept because ranks could disagree, see ``canonical.Shards``."""
    return PassReport(
        NAME,
        decisions=[
            Decision(NAME, g.start, Verdict.REFUSED, Reason.RANKS_DIFFER, UNEQUAL, source=g.source, group=g.group)
            for g in found
        ],
        metrics={"kept": 0, "gathered_again": len(found)},
    )


def jointly(found: Sequence[Gathered], kept: int, limit: int) -> PassReport:
    """The report where the first ``kept`` of ``found`` were chosen together with what is computed again."""
    decisions = [
        Decision(
            NAME,
            g.start,
            Verdict.APPLIED if i < kept else Verdict.REFUSED,
            Reason.PROFITABLE if i < kept else Reason.MEMORY_BUDGET,
            f"{g.held_bytes} bytes held or {g.link_ns} ns on the link, within {limit} bytes",
            source=g.source,
            group=g.group,
            setting="" if i < kept else "memory_budget",
        )
        for i, g in enumerate(found)
    ]
    metrics: dict[str, float] = {
        "kept": kept,
        "kept_bytes": sum(g.held_bytes for g in found[:kept]),
        "gathered_again": len(found) - kept,
    }
    return PassReport(NAME, changed=kept > 0, decisions=decisions, metrics=metrics)


def _bisect(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """A number for which ``holds`` while not for the next, given that it does for ``low`` and not for ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def holding(problem: Problem, starts: set[str]) -> Problem:
    """The forward problem when the results of the gathers ``starts`` live to its end."""
    if not starts:
        return problem
    storages = tuple(
        [
            Storage(s.size_bytes, s.producer, s.readers, True, s.name, s.workspace) if s.name in starts else s
            for s in problem.storages
        ]
    )
    return dataclasses.replace(problem, storages=storages)


def without_gathers(problem: Problem, starts: set[str]) -> Problem:
    """The backward problem when the results of the gathers ``starts`` are there from the beginning."""
    if not starts:
        return problem
    gone = {i for i, t in enumerate(problem.tasks) if t.kind is Kind.START and t.name in starts}
    waits = {i for i, t in enumerate(problem.tasks) if t.kind is Kind.WAIT and t.start in gone}
    tasks = tuple(
        Task(t.name, Kind.COMPUTE, 0, label=t.label, source=t.source) if i in gone or i in waits else t
        for i, t in enumerate(problem.tasks)
    )
    storages = []
    for s in problem.storages:
        if s.producer in gone and s.name in starts:
            storages.append(Storage(s.size_bytes, INPUT, s.readers, s.pinned, s.name, s.workspace))
            continue
        # What only prepared a message is not there; the parameter itself is the caller's.
        if s.producer in gone:
            continue
        left = tuple([r for r in s.readers if r not in gone and r not in waits])
        storages.append(Storage(s.size_bytes, s.producer, left, s.pinned, s.name, s.workspace))
    return dataclasses.replace(problem, tasks=tasks, storages=tuple(storages))


def _report(
    found: Sequence[Gathered], kept: int, most: int, before: _Step, after: _Step, limit: int | None
) -> PassReport:
    gain = before.step_ns - after.step_ns
    total = sum(g.link_ns for g in found[:kept])
    decisions = []
    for i, g in enumerate(found):
        if i < kept:
            verdict, reason, setting = Verdict.APPLIED, Reason.PROFITABLE, ""
            detail = f"held from forward to backward: {g.held_bytes} bytes instead of {g.link_ns} ns on the link"
        elif i >= most:
            verdict, reason, setting = Verdict.REFUSED, Reason.MEMORY_BUDGET, "memory_budget"
            detail = f"gathered again: {g.held_bytes} bytes more are above the cap of {limit} bytes"
        else:
            verdict, reason, setting = Verdict.REFUSED, Reason.NOT_PROFITABLE, ""
            detail = "gathered again: the planned step is no faster when it is kept"
        share = gain * g.link_ns // total if i < kept and total else 0
        decisions.append(
            Decision(NAME, g.start, verdict, reason, detail, source=g.source, group=g.group, gain_ns=share,
                     setting=setting)
        )
    metrics: dict[str, float] = {
        "kept": kept,
        "kept_bytes": sum(g.held_bytes for g in found[:kept]),
        "gathered_again": len(found) - kept,
        "step_gathered_again_ns": before.step_ns,
        "step_ns": after.step_ns,
        "peak_gathered_again_bytes": before.peak_bytes,
        "peak_bytes": after.peak_bytes,
    }
    return PassReport(NAME, changed=kept > 0, decisions=decisions, metrics=metrics)


def keep(nodes: Sequence[torch.fx.Node], kept: Collection[str]) -> None:
    """Take the recompute tags off the gathers ``kept`` and off what prepares and unpacks them."""
    mine = set(nodes)
    for node in nodes:
        if node.name not in kept:
            continue
        stack, seen = [node], {node}
        while stack:
            one = stack.pop()
            _torch.allow_saving(one)
            for near in (*one.all_input_nodes, *one.users):
                if near in mine and near not in seen:
                    seen.add(near)
                    stack.append(near)
