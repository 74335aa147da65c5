"""What-if: the same program on another link, under another budget or without a constraint, planned again.

A relaxed problem has the same tasks and legal data order as the original, so the difference of the two makespans is
the gain that lifting the constraint is worth to this planner. Used for the settings that a verdict suggests and for
``inductor-passes simulate``.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

from inductor_passes.schedule.problem import Kind, Problem, Task


def family(task: Task) -> str:
    """What kind of collective a ``START`` is: its label without the number (``AG12`` -> ``AG``)."""
    return task.label.rstrip("0123456789") or "collective"


def latencies(problem: Problem) -> list[int]:
    """Per task the part of a ``START``'s duration in ns that does not depend on its size; 0 where it cannot be told.

    For each lane and kind of collective a line is laid through its smallest and its largest member; where it meets
    size 0 is the latency. With a single size on a lane nothing separates latency from bandwidth.
    """
    members: dict[tuple[int, str], list[int]] = defaultdict(list)
    for i, task in enumerate(problem.tasks):
        if task.kind is Kind.START:
            members[task.lane, family(task)].append(i)
    result = [0] * len(problem)
    for starts in members.values():
        small, large = (
            choose(starts, key=lambda i: (problem.tasks[i].size_bytes, problem.tasks[i].duration_ns))
            for choose in (min, max)
        )
        x0, x1 = problem.tasks[small].size_bytes, problem.tasks[large].size_bytes
        y0, y1 = problem.tasks[small].duration_ns, problem.tasks[large].duration_ns
        if x1 == x0 or y1 < y0:
            continue
        intercept = max(0, int(y0 - Fraction(y1 - y0, x1 - x0) * x0))
        for i in starts:
            result[i] = min(intercept, problem.tasks[i].duration_ns)
    return result


def scale_links(
    problem: Problem, *, bandwidth: Fraction = Fraction(1), latency: Fraction = Fraction(1), added_ns: int = 0
) -> Problem:
    """The same program on links of ``bandwidth`` times the rate and ``latency`` times the latency, plus ``added_ns``.

    Latency is what :func:`latencies` can tell from the durations; the rest of a duration scales with bandwidth.

    Raises:
        ValueError: a bandwidth that is not positive, a negative latency or addition.
    """
    if bandwidth <= 0:
        raise ValueError(f"bandwidth scale {float(bandwidth)} is not allowed; expected a number above 0")
    if latency < 0 or added_ns < 0:
        raise ValueError(f"latency scale {float(latency)} and addition {added_ns} ns must not be negative")
    fixed = latencies(problem)
    durations = {
        i: int(fixed[i] * latency + (task.duration_ns - fixed[i]) / bandwidth) + added_ns
        for i, task in enumerate(problem.tasks)
        if task.kind is Kind.START
    }
    return with_durations(problem, durations)


def scale_compute(problem: Problem, scale: Fraction) -> Problem:
    """The same program on a device ``scale`` times as fast. Raises :class:`ValueError` unless ``scale`` > 0."""
    if scale <= 0:
        raise ValueError(f"compute scale {float(scale)} is not allowed; expected a number above 0")
    durations = {i: int(task.duration_ns / scale) for i, task in enumerate(problem.tasks) if task.kind is Kind.COMPUTE}
    return with_durations(problem, durations)


def with_durations(problem: Problem, durations: Mapping[int, int]) -> Problem:
    """The same program with other durations in ns for some tasks."""
    tasks = tuple(
        dataclasses.replace(task, duration_ns=durations[i]) if i in durations else task
        for i, task in enumerate(problem.tasks)
    )
    return dataclasses.replace(problem, tasks=tasks)


def without_fences(problem: Problem) -> Problem:
    """The same program without fences and fixed lane orders; what the data demands stays."""
    tasks = tuple(dataclasses.replace(task, fence=False) if task.fence else task for task in problem.tasks)
    lanes = tuple(dataclasses.replace(lane, fixed_order=False) for lane in problem.lanes)
    return dataclasses.replace(problem, tasks=tasks, lanes=lanes)


def without_transfers(problem: Problem, starts: Collection[int]) -> Problem:
    """The same program if these collectives took no time: a bound on what any change to them can gain."""
    return with_durations(problem, dict.fromkeys(starts, 0))


def latency_bound(problem: Problem, fixed: Sequence[int], start: int) -> bool:
    """Whether at least half of a collective's duration is latency; ``fixed`` is :func:`latencies` of the problem."""
    return 2 * fixed[start] >= problem.tasks[start].duration_ns > 0 and fixed[start] > 0


def without_small_latencies(problem: Problem) -> Problem:
    """The same program if every latency-bound collective travelled with a neighbour and paid no latency of its own."""
    fixed = latencies(problem)
    return with_durations(
        problem,
        {
            i: task.duration_ns - fixed[i]
            for i, task in enumerate(problem.tasks)
            if task.kind is Kind.START and latency_bound(problem, fixed, i)
        },
    )
