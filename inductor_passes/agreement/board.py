"""The key-value store that ranks share, reduced to what agreement needs; every failure of it is one kind of error."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from inductor_passes import _torch

#: Between two looks at the store a rank sleeps for this share of the time that it has waited, within these bounds: the
#: store is asked some 50 times in 10 s, and a rank learns an answer soon after it came.
_SHARE, _SHORTEST_S, _LONGEST_S = 0.2, 0.001, 0.25
#: Not the process's generator: programs would draw other numbers, and each rank others, the longer ranks wait.
_random = random.Random()
T = TypeVar("T")


class StoreError(Exception):
    """The store cannot be used; the message says why."""


class ClosedError(StoreError):
    """This process does not use the store any more; the message says why."""


class Clock:
    """Time as a rank sees it; another one in tests."""

    def now(self) -> float:
        """Seconds that only ever grow."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class Board:
    """A store, used through a handful of operations that are counted.

    Attributes:
        operations: how many there were; a look at several keys at a time counts as one.
        waited_s: time slept in :meth:`until`.
        closed: why every further operation fails; "" while the store is used.
    """

    def __init__(self, store: Any, clock: Clock | None = None) -> None:
        self._store = store
        self.clock = clock or Clock()
        self.operations = 0
        self.waited_s = 0.0
        self.closed = ""

    def put(self, key: str, value: str) -> None:
        """Write, over what is there."""
        self._do(lambda: self._store.set(key, value))

    def put_once(self, key: str, value: str) -> str:
        """Write where nothing is; what is there now, whoever wrote it."""
        return self._do(lambda: bytes(self._store.compare_set(key, "", value)).decode(errors="replace"))

    def add(self, key: str) -> int:
        """Count one more; the number counted so far."""
        return self._do(lambda: int(self._store.add(key, 1)))

    def count(self, key: str) -> int:
        """The number counted so far."""
        return self._do(lambda: int(self._store.add(key, 0)))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there; does not wait."""
        return self._do(lambda: bool(self._store.check(list(keys))))

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Values of keys that are there."""
        return self._do(lambda: _torch.read_many(self._store, list(keys)))

    def reconnect(self) -> None:
        """Use another connection to the same store."""
        self._store = self._do(lambda: _torch.reconnected(self._store))

    def until(self, found: Callable[[], T | None], deadline: float) -> T | None:
        """Call ``found`` until it returns something, None when ``deadline`` comes first; it is called at least once."""
        began = self.clock.now()
        while True:
            result = found()
            now = self.clock.now()
            if result is not None or now >= deadline:
                return result
            pause = min(max((now - began) * _SHARE, _SHORTEST_S), _LONGEST_S) * _random.uniform(0.75, 1.25)
            pause = min(pause, deadline - now)
            self.clock.sleep(pause)
            self.waited_s += pause

    def _do(self, operation: Callable[[], T]) -> T:
        if self.closed:
            raise ClosedError(self.closed)
        self.operations += 1
        try:
            return operation()
        except Exception as error:  # stores raise RuntimeError, DistError, socket errors, ValueError ...
            raise StoreError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
