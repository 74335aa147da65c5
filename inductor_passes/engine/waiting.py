"""Keeps what is found on a graph that is not compiled itself (the joint graph) for the graphs that are made of it.

Kept per compilation, not per compile id: the same id is used again after ``torch._dynamo.reset()`` and when a failed
compilation is repeated, and what was found the first time may be wrong the second time.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from inductor_passes import _torch

Item = TypeVar("Item")


class _NoCompilation:
    """Stands for a compilation where torch does not tell one from another."""


_ELSE = _NoCompilation()


class Waiting(Generic[Item]):
    """Things in order; each is taken once, and those of a compilation that failed go with it."""

    def __init__(self) -> None:
        self._items: WeakKeyDictionary[object, list[Item]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def put(self, *items: Item) -> None:
        """Add things for the compilation that runs on this thread."""
        with self._lock:
            self._items.setdefault(_torch.compilation() or _ELSE, []).extend(items)

    def take(self) -> list[Item]:
        """Everything that waits for the compilation that runs on this thread."""
        with self._lock:
            return self._items.pop(_torch.compilation() or _ELSE, [])

    def __len__(self) -> int:
        """The number of compilations for which something waits."""
        return len(self._items)
