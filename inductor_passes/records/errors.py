"""The base of errors that reach the user: a setting asked for them."""

from __future__ import annotations


class MeantError(Exception):
    """Raised because a setting says so, or cannot be followed; no barrier keeps it from the user."""
