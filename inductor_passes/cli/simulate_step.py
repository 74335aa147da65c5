"""``inductor-passes simulate`` of a whole step: the choice of what is computed again and kept, made for other links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inductor_passes.cli import terminal
from inductor_passes.cli.terminal import CommandError

if TYPE_CHECKING:
    from inductor_passes.schedule.problem import Problem
    from inductor_passes.step.recompute import Point
    from inductor_passes.step.stored import StoredStep

#: The choice plans a step some hundred times.
MAX_TASKS = 100_000
#: What a case of swept links is called ("" where there is one), and what it does to a problem's durations.
Link = tuple[str, "Callable[[Problem], Problem]"]


@dataclass(frozen=True)
class Wanted:
    """What is asked of a step.

    Attributes:
        budgets: values of ``memory_budget``.
        steps_ns: times for which the least memory is wanted.
        profile: a file or a device whose links are to be taken, "" for those of the step.
        ranks: how many ranks share it, None for those of the step.
    """

    budgets: Sequence[str]
    steps_ns: Sequence[int]
    profile: str
    ranks: int | None


@dataclass(frozen=True)
class Answer:
    """One case: the step's peak as Inductor would run it, and what is possible."""

    label: str
    peak_bytes: int
    points: Sequence[Point]


def answer(path: Path, data: object, links: Sequence[Link], wanted: Wanted, *, as_json: bool) -> None:
    """Choose again for every link, and print it."""
    from inductor_passes.step import derived, recompute

    stored = _moved(_load(path, data), wanted)
    answers = []
    for label, change in links:
        there = stored.changed(change)
        found = recompute.points(there.step, there.gathered, merging=there.merging)
        answers.append(Answer(label, derived.peak_of(there.step), found))
    if as_json:
        from inductor_passes.trace.payload import dumps

        print(dumps({"schema_version": 1, "cases": [_record(one, wanted) for one in answers]}, indent=1))
        return
    for one in answers:
        _print(one, wanted)


def _load(path: Path, data: object) -> StoredStep:
    from inductor_passes.records.json_text import RecordError
    from inductor_passes.step.stored import StoredStep

    try:
        stored = StoredStep.from_json(data)
        tasks = len(stored.step.forward) + len(stored.step.backward)
        if tasks > MAX_TASKS:
            raise RecordError(f"{tasks} tasks are too many; expected at most {MAX_TASKS}")
        return stored
    except RecordError as error:
        raise CommandError(f"{path}: {error}") from error


def _moved(stored: StoredStep, wanted: Wanted) -> StoredStep:
    """The step on the links that are asked for."""
    if not wanted.profile:
        if wanted.ranks is not None:
            raise CommandError("--ranks needs --profile, which prices collectives over so many ranks")
        return stored
    from inductor_passes.cost.profile import CostProfile, ProfileError
    from inductor_passes.cost.specs import CPU, lookup

    name = wanted.profile
    try:
        if not Path(name).exists() and lookup(name) is CPU and name.lower() != "cpu":
            raise CommandError(f"--profile {name} is no file and no known device; expected one such as h100")
        profile = CostProfile.load(name) if Path(name).exists() else CostProfile.default(name)
        return stored.priced(profile, wanted.ranks)
    except (ProfileError, ValueError) as error:
        raise CommandError(f"--profile {name}: {error}") from error


def _limit(budget: str, one: Answer) -> int | None:
    from inductor_passes.settings.budget import MemoryBudget

    return MemoryBudget.parse(budget).limit_bytes(one.peak_bytes)


def _within(one: Answer, step_ns: int) -> Point | None:
    """The point of least memory that takes at most ``step_ns``."""
    return min((p for p in one.points if p.step_ns <= step_ns), key=lambda p: (p.peak_bytes, *p.rank), default=None)


def _record(one: Answer, wanted: Wanted) -> dict[str, object]:
    from inductor_passes.step import recompute

    def shown(point: Point | None) -> dict[str, object] | None:
        if point is None:
            return None
        kept = {"recomputed": len(point.recomputed), "kept": point.kept}
        return {"peak_bytes": point.peak_bytes, "step_ns": point.step_ns, **kept}

    budgets = [
        {"budget": b, "limit_bytes": _limit(b, one), "best": shown(recompute.best(one.points, _limit(b, one)))}
        for b in wanted.budgets
    ]
    return {
        "link": one.label,
        "peak_bytes": one.peak_bytes,
        "budgets": budgets,
        "steps": [{"within_ns": ns, "least": shown(_within(one, ns))} for ns in wanted.steps_ns],
        "curve": [shown(p) for p in recompute.curve(one.points)],
    }


def _print(one: Answer, wanted: Wanted) -> None:
    from inductor_passes.step import recompute
    from inductor_passes.trace.table import PlainTable
    from inductor_passes.trace.units import change, duration, size

    curve = recompute.curve(one.points)

    def cells(point: Point) -> tuple[str, ...]:
        share = f"{point.peak_bytes * 100 / max(1, one.peak_bytes) - 100:+.0f}%"
        slower = change(curve[-1].step_ns, point.step_ns)
        taken = str(len(point.recomputed)), str(point.kept)
        return size(point.peak_bytes), share, duration(point.step_ns), slower, *taken

    at = f", {one.label}" if one.label else ""
    heads = ("peak", "of the step as it came", "planned step", "against the fastest", "computed again", "kept")
    table = PlainTable(title=f"the fastest step within a budget{at}; as it came it needs {size(one.peak_bytes)}")
    for head in ("budget", *heads):
        table.add_column(head, justify="right")
    for budget in wanted.budgets:
        point = recompute.best(one.points, _limit(budget, one))
        least = recompute.least(one.points)
        found = cells(point) if point else (f"no plan; the least is {size(least.peak_bytes)}", *[""] * 5)
        table.add_row(budget, *found)
    console = terminal.console(150)
    console.print(table)
    table = PlainTable(title=f"the step over its peak{at}")
    for head in heads:
        table.add_column(head, justify="right")
    for point in curve:
        table.add_row(*cells(point))
    console.print(table)
    for ns in wanted.steps_ns:
        least_point = _within(one, ns)
        terminal.say(
            f"step of {duration(ns)}{at}: "
            + (
                f'needs {size(least_point.peak_bytes)}, memory_budget="={least_point.peak_bytes}B"'
                if least_point
                else f"cannot be reached; the fastest is {duration(curve[-1].step_ns)}"
            )
        )
