"""The memory of a step in words: what was computed again, what more memory would buy, and what lives at the peak."""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.schedule.memory import profile
from inductor_passes.schedule.problem import INPUT, Kind, Problem, Storage
from inductor_passes.step.derived import Step
from inductor_passes.step.recompute import Point, added

#: Blocks that are named per kind, and points of the curve that are said.
_NAMED, _POINTS = 3, 8


def made(step: Step, point: Point, fastest_ns: int) -> list[str]:
    """What is computed again and what that costs, against the fastest step in which everything is saved.

    Args:
        fastest_ns: of those that keep as many parameters.
    """
    if not point.recomputed:
        return ["memory: nothing is computed again but what Inductor does by itself"]
    chosen = [step.candidates[i] for i in point.recomputed]
    longer_ns = max(0, point.step_ns - fastest_ns)
    return [
        f"memory: {len(chosen)} of {len(step.candidates)} saved values ({sum(c.size_bytes for c in chosen)} bytes) are "
        f"computed again: {added(step, point.recomputed)}; the planned step is {longer_ns} ns longer for it "
        f"({fastest_ns} -> {point.step_ns} ns)"
    ]


def curve(points: Sequence[Point], base_bytes: int, limit: int) -> list[str]:
    """The planned step over the budget, and what 5% more memory would buy.

    Args:
        points: that none beats in memory and time, by memory.
        base_bytes: the peak of the step as it came: what the shares are of.
        limit: the budget.
    """
    last = len(points) - 1
    some = points if last < _POINTS else [points[k * last // (_POINTS - 1)] for k in range(_POINTS)]
    text = ", ".join(f"{p.peak_bytes} ({p.peak_bytes * 100 / max(1, base_bytes):.1f}%): {p.step_ns} ns" for p in some)
    now = min((p.step_ns for p in points if p.peak_bytes <= limit), default=None)
    more = min((p.step_ns for p in points if p.peak_bytes <= limit + base_bytes // 20), default=None)
    lines = [f"memory: the planned step over its peak in bytes (of {base_bytes}): {text}"]
    if now is not None and more is not None:
        buys = f"make the planned step {now - more} ns shorter" if more < now else "buy nothing"
        lines.append(f"memory: 5% more ({base_bytes // 20} bytes, of what the step needs as it came) would {buys}")
    return lines


def at_peak(forward: Problem, backward: Problem) -> list[str]:
    """What lives at the peak of the graph with the higher one, in its order."""
    name, problem = max((("forward", forward), ("backward", backward)), key=lambda one: max(profile(one[1]), default=0))
    live = profile(problem)
    if not live:
        return []
    place = live.index(max(live))
    kinds: dict[str, list[Storage]] = {}
    for s in problem.storages:
        begins = s.producer
        ends = len(problem) if s.pinned else max((begins, *s.readers))
        if begins <= place <= ends:
            kinds.setdefault(_kind(problem, s), []).append(s)
    parts = []
    for kind, ones in sorted(kinds.items(), key=lambda item: -sum(s.size_bytes for s in item[1])):
        largest = sorted(ones, key=lambda s: (-s.size_bytes, s.name))[:_NAMED]
        named = ", ".join(f"{s.name} {s.size_bytes}" for s in largest)
        parts.append(f"{kind} {sum(s.size_bytes for s in ones)} ({named}{', ...' if len(ones) > _NAMED else ''})")
    return [f"memory: at the peak of {name} ({max(live)} bytes, at {problem.tasks[place].name}): {'; '.join(parts)}"]


def _kind(problem: Problem, s: Storage) -> str:
    if s.producer == INPUT:
        return "the caller's" if s.pinned else "saved by forward"
    if s.workspace:
        return "held by the backend"
    if problem.tasks[s.producer].kind is Kind.START:
        return "messages"
    return "results" if s.pinned else "computed"
