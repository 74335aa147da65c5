"""Tells our objects among Inductor's options from the user's, without importing the passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Ours:
    """Base class of all of them.

    Attributes:
        others: the user's hooks for the same place, which run inside this one.
    """

    def __init__(self, others: Sequence[Any] = ()) -> None:
        self.others: tuple[Any, ...] = tuple(others)


def is_ours(one: object) -> bool:
    """Whether an entry of one of Inductor's lists of hooks is ours."""
    return isinstance(one, Ours)


def users(one: object) -> tuple[Any, ...]:
    """The user's hooks in an entry of an option: one of ours only carries them."""
    return one.others if isinstance(one, Ours) else (one,)
