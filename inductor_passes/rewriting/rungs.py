"""Budgets below the user's: planning is a search, and may find more where it may use less."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from inductor_passes.rewriting.contract import Cap
from inductor_passes.settings.budget import MemoryBudget

#: The budgets that are tried, the largest first.
RUNGS = ("+100%", "+25%", "+5%", "0")


def lower(cap: Cap) -> Iterator[Cap]:
    """The caps of :data:`RUNGS` that are below one, the highest first."""
    if cap.least_peak_bytes is None:
        return
    for rung in RUNGS:
        budget = MemoryBudget.parse(rung)
        limit = budget.limit_bytes(cap.least_peak_bytes)
        if limit is not None and (cap.limit_bytes is None or limit < cap.limit_bytes):
            generated = cap.generated_least_peak_bytes
            generated_limit = None if generated is None else budget.limit_bytes(generated)
            yield dataclasses.replace(cap, limit_bytes=limit, generated_limit_bytes=generated_limit)


def larger(budget: MemoryBudget) -> list[str]:
    """The budgets of :data:`RUNGS` above one, the smallest first, then ``unlimited``."""
    if budget.unlimited:
        return []
    own, rungs = budget.fraction or 0, reversed(RUNGS)
    floor = f" or {budget.floor_bytes}B" if budget.floor_bytes else ""
    return [*(f"{r}{floor}" for r in rungs if (MemoryBudget.parse(r).fraction or 0) > own), "unlimited"]
