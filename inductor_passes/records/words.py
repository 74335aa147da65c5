"""Closed sets of words that settings and planner share."""

from __future__ import annotations

from typing import Literal

Effort = Literal["normal", "high", "exact"]
"""How hard the planner tries; see ``schedule/effort.py``."""
