"""Time that passes only when everybody waits, and a store that is slow, loses answers or goes away: for schedules by
the thousand, each another interleaving, in no real time.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from inductor_passes.agreement.board import Clock


class Gone(BaseException):
    """The rank dies here."""


class VirtualClock(Clock):
    """A clock for ``workers`` threads: it moves on when all of them sleep."""

    def __init__(self, workers: int) -> None:
        self._time = 0.0
        self._awake = workers
        self._sleepers: list[tuple[float, int]] = []
        self._tickets = itertools.count()
        self._woken: set[int] = set()
        self._changed = threading.Condition()

    def now(self) -> float:
        return self._time

    def sleep(self, seconds: float) -> None:
        with self._changed:
            ticket = next(self._tickets)
            heapq.heappush(self._sleepers, (self._time + max(0.0, seconds), ticket))
            self._awake -= 1
            self._advance()
            while ticket not in self._woken:
                if not self._changed.wait(60):
                    raise RuntimeError("a thread neither sleeps nor ends")
            self._woken.discard(ticket)

    def leave(self) -> None:
        """A thread has ended."""
        with self._changed:
            self._awake -= 1
            self._advance()

    def _advance(self) -> None:
        if self._awake or not self._sleepers:
            return
        self._time = self._sleepers[0][0]
        while self._sleepers and self._sleepers[0][0] <= self._time:
            self._woken.add(heapq.heappop(self._sleepers)[1])
            self._awake += 1
        self._changed.notify_all()


class UnreliableStore:
    """A store behind a connection: every operation takes a random time.

    Args:
        fails: called before and after each operation with ``applied``; raises when it is to fail there.
    """

    def __init__(
        self, store: Any, clock: VirtualClock, rng: random.Random, slowness: float, fails: Callable[[bool], None]
    ) -> None:
        self._store, self._clock, self._rng, self._slowness, self._fails = store, clock, rng, slowness, fails

    def clone(self) -> UnreliableStore:
        return self

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self._clock.sleep(self._rng.random() * self._slowness)
            self._fails(False)
            result = operation(*args)
            self._fails(True)
            self._clock.sleep(self._rng.random() * self._slowness)
            return result

        return call


def together(clock: VirtualClock, work: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of functions run in a thread each; None for one that died."""
    results: list[Any] = [None] * len(work)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = work[index]()
        except Gone:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            clock.leave()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results
