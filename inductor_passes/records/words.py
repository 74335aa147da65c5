"""Closed sets of words that settings and planner share."""

from __future__ import annotations

from typing import Literal

Effort = Literal["normal", "high", "exact"]
"""How hard the planner tries; see ``schedule/effort.py``."""

BoundOn = Literal["any memory", "this budget", "all orders tried"]
"""What a lower bound on a plan's makespan holds for: no order is faster, whatever memory it uses; no order within the
budget is faster; the planner has ruled out every faster order within the budget, so the plan is the fastest.
"""

#: The variable that, off, makes the planner run in Python only; see ``schedule/native.py``. Plans are the same.
NATIVE = "INDUCTOR_PASSES_NATIVE"
