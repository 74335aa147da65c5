"""The planned step over its peak memory, kept with the problem of one of its graphs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from inductor_passes.schedule.problem import Problem, ProblemError

#: Where it is in :attr:`Problem.meta`.
KEY = "step_curve"
_CURVE = re.compile(r"\d{1,18}:\d{1,18}(?:,\d{1,18}:\d{1,18})*", re.ASCII)


def with_curve(problem: Problem, curve: Sequence[tuple[int, int]]) -> Problem:
    """The problem with the curve of its step: (peak in bytes, makespan in ns) by memory; as it is without one."""
    if not curve:
        return problem
    text = ",".join(f"{peak}:{ns}" for peak, ns in curve)
    return dataclasses.replace(problem, meta={**problem.meta, KEY: text})


def curve_of(problem: Problem) -> list[tuple[int, int]]:
    """Inverse of :func:`with_curve`; empty where the problem has none.

    Raises:
        ProblemError: it has one of another form.
    """
    text = problem.meta.get(KEY, "")
    if not text:
        return []
    if _CURVE.fullmatch(text) is None:
        raise ProblemError(f"{problem.name}: meta {KEY} is no curve; expected bytes:ns,bytes:ns")
    return [(int(peak), int(ns)) for peak, _, ns in (point.partition(":") for point in text.split(","))]
