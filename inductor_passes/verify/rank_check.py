"""Whether the ranks of every group that a graph uses issue the same collectives: the opt-in check at compile time.

Compared per process group: the collectives in the order that the FX passes decided (code generation keeps it), each
with the tensor that it moves. A rank that compiles waits for the others for a limited time. A rank that takes the graph
from a cache compares in a background thread. This is never a collective, and a rank that does not answer is only a
warning.

This check compares the plan. Whether ranks have the same graph is asked always, before anything is planned
(``agreement``); this check does not rely on that.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.fx

from inductor_passes import _torch, verify
from inductor_passes.agreement import Literals
from inductor_passes.config import PassConfig
from inductor_passes.report import Finding
from inductor_passes.verify.agreement import Mode
from inductor_passes.verify.events import Action, Event, events
from inductor_passes.verify.facts.view import View

#: How long a rank waits for the others, for all groups together.
TIMEOUT_S = 30.0
#: How long one group may take at least when earlier ones used the time up.
GLANCE_S = 0.05


@dataclass
class Steps:
    """The collectives of a process group on this rank.

    Attributes:
        lines: one per collective, as ``what | source line``.
        pieces: numbers of the pieces that they move, in order, and the line that each one belongs to.
        positions: per group that holds all ranks of this one: the positions of this rank and of its first two ranks.
    """

    lines: list[str] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)
    positions: list[tuple[int, ...]] = field(default_factory=list)

    def to_json(self) -> list[object]:
        """Plain data, for generated code."""
        return [self.lines, self.pieces, self.positions]

    @staticmethod
    def from_json(data: Sequence[Sequence[object]]) -> Steps:
        """Inverse of :meth:`to_json`."""
        lines, pieces, positions = data
        return Steps(list(map(str, lines)), [tuple(p) for p in pieces], [tuple(p) for p in positions])  # type: ignore[arg-type, misc]

    @property
    def literals(self) -> Literals:
        """The pieces as numbers that ranks compare."""
        return Literals(
            tuple(value for value, _ in self.pieces),
            "p" * len(self.pieces),
            tuple(self.positions),
            tuple(line for _, line in self.pieces),
        )


def steps_by_group(graph: torch.fx.Graph) -> dict[str, Steps]:
    """Group name -> its collectives in order; groups that this rank is in."""
    rank = _torch.process_rank()
    found: dict[str, Steps] = {}
    used: dict[str, Event] = {}
    for event in events(View(graph)):
        if event.action in (Action.START, Action.BLOCKING) and rank in event.ranks:
            used.setdefault(event.group, event)
            steps = found.setdefault(event.group, Steps())
            steps.pieces += [(piece, len(steps.lines)) for piece in event.tensor.pieces]
            steps.lines.append(event.line() + (f" | {event.source}" if event.source else ""))
    for name, steps in found.items():
        first = sorted(used[name].ranks)[:2]
        steps.positions = [
            tuple(other.ranks.index(r) for r in (rank, *first))
            for other in used.values()
            if set(used[name].ranks) <= set(other.ranks)
        ]
    return found


def digest(steps: Sequence[str]) -> str:
    """Equal for equal collectives; where they come from in the source does not matter."""
    lines = [step.partition(" | ")[0] for step in steps]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]


def check(graph: torch.fx.Graph, phase: str, settings: PassConfig) -> dict[str, Steps]:
    """Compare a graph that was just planned; returns its steps by group, empty when ``rank_check`` is off.

    Raises:
        RanksDifferError: ``rank_check="error"`` and a rank of a group has other collectives.
    """
    if settings.rank_check == "off":
        return {}
    steps = steps_by_group(graph)
    compare(steps, phase, settings.rank_check, TIMEOUT_S)
    return steps


def from_cache(steps: Mapping[str, Sequence[Sequence[object]]], phase: str) -> None:
    """Compare for a graph that came out of a cache, beside the program: ranks that compile it may be busy for long."""
    found = {group: Steps.from_json(one) for group, one in steps.items()}
    key = f"{_torch.compile_id()}/{phase}"
    threading.Thread(
        target=lambda: compare(found, phase, "warn", TIMEOUT_S, key), name="inductor_passes rank check", daemon=True
    ).start()


def compare(
    steps: Mapping[str, Steps], phase: str, mode: Mode, timeout_s: float, key: str | None = None
) -> list[Finding]:
    """What the other ranks of each group have instead; see :func:`verify.compare_digests`.

    ``key``, by default ``phase`` and the compile id, names the graph: the same on all ranks that compile the same
    frames in the same order.
    """
    key = f"{_torch.compile_id()}/{phase}" if key is None else key
    deadline = time.monotonic() + timeout_s
    found: list[Finding] = []
    for group, one in sorted(steps.items()):
        left = max(GLANCE_S, deadline - time.monotonic())
        found += verify.compare_digests(
            digest(one.lines), one.lines, group, key=key, mode=mode, timeout_s=left, literals=one.literals
        )
    return found
