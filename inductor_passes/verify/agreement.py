"""Whether the ranks of a group hold the same plan: digests are compared through the store, by the protocol of
``agreement``.

This is never a collective, so a missing rank cannot hang the others. What comes from the store is data of limited size
that is checked, compared and shown.

A rank that does not answer in time (it may compile another stage of a pipeline) is reported and never an error. Only a
digest that differs is one.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Sequence
from typing import Literal

from inductor_passes import _torch
from inductor_passes.agreement import Ballot, Kind, Literals, bounded, session_of
from inductor_passes.records.errors import MeantError
from inductor_passes.report import Finding

Mode = Literal["warn", "error"]

_lock = threading.Lock()
_generation: dict[tuple[str, str], int] = {}


class RanksDifferError(MeantError, RuntimeError):
    """The ranks of a group hold different plans; the message shows the first difference."""


def compare_digests(
    digest: str,
    details: Sequence[str],
    group: str,
    *,
    key: str,
    mode: Mode = "warn",
    timeout_s: float = 30.0,
    literals: Literals | None = None,
) -> list[Finding]:
    """Compare a plan's digest with the other ranks of a group.

    Args:
        digest: equal on ranks that agree.
        details: the plan as text, one line per step, with the user's source line behind `` | `` where known; the first
            line that differs is what gets shown.
        group: name of the process group whose ranks compare.
        key: identifies the graph among all that are compared on this group, equal on all ranks. Used again (a
            recompilation) it counts on.
        mode: ``"warn"`` warns, ``"error"`` raises when digests differ.
        timeout_s: how long to wait for the others altogether.
        literals: numbers that the digest leaves open, see ``agreement.literals``.

    Returns:
        A ``ranks-differ`` finding when a rank differs; ``ranks-unanswered`` when not all ranks answered in time.

    Raises:
        RanksDifferError: ``mode="error"`` and digests differ.
        ValueError: a bad mode or timeout.
    """
    if mode not in ("warn", "error"):
        raise ValueError(f'inductor_passes: rank check mode={mode!r} is not allowed; expected "warn" or "error"')
    if timeout_s <= 0:
        raise ValueError(f"inductor_passes: timeout_s={timeout_s} is not allowed; expected above 0")
    found = _compare(digest, details, group, numbered(group, key), timeout_s, literals or Literals())
    for finding in found:
        if mode == "error" and finding.rule == "ranks-differ":
            raise RanksDifferError(f"inductor_passes: {finding.message}")
        warnings.warn(f"inductor_passes: {finding.message}", stacklevel=2)
    return found


def numbered(group: str, key: str) -> str:
    """A key with the number of times that it has been used on a group."""
    with _lock:
        generation = _generation.get((group, key), 0)
        _generation[group, key] = generation + 1
    return f"{key} {generation}"


def _compare(
    digest: str, details: Sequence[str], group: str, name: str, timeout_s: float, literals: Literals
) -> list[Finding]:
    place = _torch.resolve_group_ranks(group)
    ranks = () if place is None else tuple(sorted(place[1]))
    session = session_of(ranks) if ranks and _torch.process_rank() in ranks else None
    if session is None:
        return [Finding("ranks-unanswered", "", f"process group {group} does not exist here; nothing was compared")]
    if len(ranks) == 1 or _torch.moves_nothing():
        return []
    full = hashlib.blake2b(f"{name} {group} {digest}".encode(), digest_size=16).hexdigest()
    lines = list(details)
    ballot = Ballot(full, literals, ranks[:2], f"plan {name} {group}", lambda: lines, what="plan")
    outcome = bounded(session, ballot, timeout_s)
    if outcome.agreed:
        return []
    if outcome.kind in (Kind.DIFFERS, Kind.LITERAL):
        return [Finding("ranks-differ", "", f"plans differ on group {group}: {outcome.why}")]
    hint = "ranks may compile another graph"
    return [Finding("ranks-unanswered", "", f"plans were not compared on group {group}: {outcome.why}; {hint}")]
