"""Entries of ``compress`` that name nothing: said once, with the names that there are.

An entry may be meant for a graph that has not been compiled yet. So matches are counted over all graphs of the process,
and looked at when a backward or a graph for inference was compiled: the forwards are known then.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from inductor_passes.compress.candidates import Fit, fits
from inductor_passes.config import PassConfig
from inductor_passes.engine.complain import warn_of_graph
from inductor_passes.ir.view import GraphView

#: So many names of each kind are given as examples.
MOST = 4


@dataclass
class _Seen:
    """Over the graphs that were compiled with the same rules."""

    fit: Fit = field(default_factory=Fit)
    said: bool = False


_lock = threading.Lock()
_seen: dict[tuple[tuple[str, str], ...], _Seen] = {}


def note(view: GraphView, settings: PassConfig, phase: str) -> str:
    """Count what the rules fit in a graph as it came; O(messages x rules).

    Returns:
        Which of them have fitted nothing so far, the first time that this can be said; else "".
    """
    rules = settings.narrowing.rules
    if all(pattern == "*" for pattern, _ in rules):
        return ""
    with _lock:
        seen = _seen.setdefault(rules, _Seen())
        seen.fit = seen.fit.with_(fits(view.collectives, rules))
        if seen.said or phase == "forward" or not seen.fit.messages:
            return ""
        seen.said = True
        said = _said(rules, seen.fit)
    if said:
        warn_of_graph(f"inductor_passes: {said}")
    return said


def _said(rules: tuple[tuple[str, str], ...], fit: Fit) -> str:
    idle = [pattern for pattern, _ in rules if pattern != "*" and not fit.first.get(pattern)]
    nothing = [pattern for pattern in idle if not fit.alone.get(pattern)]
    hidden = [pattern for pattern in idle if pattern not in nothing]
    parts = []
    if nothing:
        groups, parameters = ", ".join(sorted(fit.groups)), sorted(fit.parameters)
        some = ", ".join(parameters[:MOST]) + (f" and {len(parameters) - MOST} more" if len(parameters) > MOST else "")
        known = f"buffers and parameters {some}" if some else "no parameter is known"
        names = f"groups and mesh dimensions {groups}; {known}"
        parts.append(
            f"{_listed(nothing)} no message of the graphs compiled so far; there are {names} "
            "(gradients that no_sync holds are reduced outside of graphs)"
        )
    if hidden:
        parts.append(f"{_listed(hidden, 'stands', 'stand')} behind others that fit all the same messages: move up")
    return f"compress: {'; '.join(parts)}" if parts else ""


def _listed(patterns: list[str], one: str = "fits", several: str = "fit") -> str:
    quoted = ", ".join(f'"{pattern}"' for pattern in patterns)
    return f"{'entry' if len(patterns) == 1 else 'entries'} {quoted} {one if len(patterns) == 1 else several}"
