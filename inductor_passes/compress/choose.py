"""Which narrowed messages make the step shorter: the planner judges, and each one that gains nothing is left alone.

A narrowed collective is the same tasks with other durations: its lane is busy for the shorter message, and the compute
lane narrows when it issues and widens when it has waited. That step is planned. If it is not shorter nothing is
narrowed. Otherwise candidates are taken back, those that save least first, as long as the step in that order stays as
short: what compute hides as it is keeps all of its digits. What is left is needed, each one, for the shorter step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inductor_passes.compress.candidates import Candidate, carried
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import Kind, Problem, Task
from inductor_passes.schedule.simulate import timed
from inductor_passes.schedule.tables import tables

#: Tasks times tries that taking back may simulate; above, several candidates are tried at once.
MAX_SIMULATED = 4_000_000


@dataclass(frozen=True)
class Choice:
    """What came of it.

    Attributes:
        taken: to be narrowed, in graph order.
        before: the plan of the graph as it is.
        after_ns: the step with them, as far as this problem says.
        all_ns: the step with all candidates.
    """

    taken: tuple[Candidate, ...]
    before: Plan
    after_ns: int
    all_ns: int


def choose(problem: Problem, found: Sequence[Candidate], limit_bytes: int | None) -> Choice:
    """See the module's docstring.

    Args:
        problem: its START tasks carry the names of the candidates' starts.
        found: forced ones are taken whatever comes of it.
        limit_bytes: the cap on memory; None: none.
    """
    before = plan(problem, limit_bytes, effort=0)
    narrowed = plan(edited(problem, found), limit_bytes, effort=0)
    forced = tuple(one for one in found if one.forced)
    if narrowed.makespan_ns >= before.makespan_ns or len(forced) == len(found):
        return Choice(forced, before, before.makespan_ns, narrowed.makespan_ns)
    kept = _needed(problem, found, narrowed)
    taken = tuple(one for one in found if one in kept)
    after = _step_ns(problem, taken, narrowed.order)
    return Choice(taken, before, after, narrowed.makespan_ns)


def edited(problem: Problem, taken: Collection[Candidate]) -> Problem:
    """The problem with these candidates narrowed."""
    by_name = carried(list(taken))
    last = {task.start: number for number, task in enumerate(problem.tasks) if task.kind is Kind.WAIT}
    tasks = list(problem.tasks)
    for number, task in enumerate(problem.tasks):
        one = by_name.get(task.name) if task.kind is Kind.START else None
        if one is None:
            continue
        tasks[number] = _start(task, one)
        if number in last:
            wait = tasks[last[number]]
            tasks[last[number]] = dataclasses.replace(wait, issue_ns=wait.issue_ns + one.now.after_ns)
    return dataclasses.replace(problem, tasks=tuple(tasks))


def _start(task: Task, one: Candidate) -> Task:
    # An own estimate of the duration carries over.
    duration = task.duration_ns * one.now.link_ns // one.was.link_ns if one.was.link_ns else one.now.link_ns
    issue = max(0, task.issue_ns + one.now.before_ns - one.was.before_ns)
    return dataclasses.replace(task, duration_ns=duration, issue_ns=issue)


def _needed(problem: Problem, found: Sequence[Candidate], narrowed: Plan) -> set[Candidate]:
    """Those without which the step is longer; forced ones always."""
    kept = set(found)
    best = narrowed.makespan_ns
    free = sorted((one for one in found if not one.forced), key=lambda one: one.gain_ns)
    size = max(1, -(-len(problem.tasks) * len(free) // MAX_SIMULATED))
    for first in range(0, len(free), size):
        group = free[first : first + size]
        rest = kept.difference(group)
        step = _step_ns(problem, rest, narrowed.order)
        if step <= best:
            kept, best = rest, step
    return kept


def _step_ns(problem: Problem, taken: Collection[Candidate], order: Sequence[int]) -> int:
    return timed(tables(edited(problem, taken)), order).makespan
