"""Closed sets of words that settings and planner share."""

from __future__ import annotations

from typing import Literal

Effort = Literal["normal", "high", "exact"]
"""How hard the planner tries; see ``schedule/effort.py``."""

#: The variable that, off, makes the planner run in Python only; see ``schedule/native.py``. Plans are the same.
NATIVE = "INDUCTOR_PASSES_NATIVE"
