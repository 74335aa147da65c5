"""Do the ranks of every group that a graph uses issue the same collectives: the opt-in check at compile time.

Compared per process group: the collectives in the order that the FX passes decided (code generation keeps it), as every
rank of the group has to see them. A rank that compiles publishes and waits for the others for a limited time; a rank
that takes the graph from a cache publishes and goes on. Never a collective, and a rank that stays silent is a warning
only.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence

from inductor_passes import _torch, verify
from inductor_passes.config import PassConfig
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Finding
from inductor_passes.verify.agreement import Mode
from inductor_passes.verify.events import Action, events

#: How long a rank that compiles waits for the others, for all groups together.
TIMEOUT_S = 30.0
#: How long one group may take at least when earlier ones used the time up, and a rank that must not wait.
GLANCE_S = 0.05


def steps_by_group(view: GraphView) -> dict[str, list[str]]:
    """Group name -> its collectives in order, each as ``what | source line``; groups that this rank is in."""
    rank = _torch.process_rank()
    found: dict[str, list[str]] = {}
    for event in events(view):
        if event.action in (Action.START, Action.BLOCKING) and rank in event.ranks:
            source = f" | {event.source}" if event.source else ""
            found.setdefault(event.group, []).append(event.line() + source)
    return found


def digest(steps: Sequence[str]) -> str:
    """Equal for equal collectives; where they come from in the source does not matter."""
    lines = [step.partition(" | ")[0] for step in steps]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]


def check(view: GraphView, phase: str, settings: PassConfig) -> dict[str, list[str]]:
    """Compare a graph that was just planned; returns its steps by group, empty when ``rank_check`` is off.

    Raises:
        RanksDifferError: ``rank_check="error"`` and a rank of a group has other collectives.
    """
    if settings.rank_check == "off":
        return {}
    steps = steps_by_group(view)
    compare(steps, phase, settings.rank_check, TIMEOUT_S)
    return steps


def from_cache(steps: Mapping[str, Sequence[str]], phase: str) -> None:
    """Publish for a graph that came out of a cache, and look at what is there already without waiting."""
    compare(steps, phase, "warn", GLANCE_S)


def compare(steps: Mapping[str, Sequence[str]], phase: str, mode: Mode, timeout_s: float) -> list[Finding]:
    """What the other ranks of each group have instead; see :func:`verify.compare_digests`.

    ``phase`` and the compile id name the graph: the same on all ranks that compile the same frames in the same order.
    """
    deadline = time.monotonic() + timeout_s
    found: list[Finding] = []
    for group, lines in sorted(steps.items()):
        left = max(GLANCE_S, deadline - time.monotonic())
        key = f"{_torch.compile_id()}/{phase}"
        found += verify.compare_digests(digest(lines), lines, group, key=key, mode=mode, timeout_s=left)
    return found
