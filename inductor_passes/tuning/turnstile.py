"""Counts the calls of a generated module, and changes at one of them to another module that runs the same graph.

It stands in the function that runs the graph, as a :class:`~inductor_passes.tuning.clock.Clock` does before it. When
nothing is to be changed any more the function has its own code again or, where the other module stays, code that hands
its arguments on to that.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from inductor_passes.tuning.callers import nobody_calls
from inductor_passes.tuning.clock import function_of
from inductor_passes.tuning.swap import LATE, DeadStoreError, Decision, Vote

log = logging.getLogger("inductor_passes")

_NAME = "_inductor_passes_turnstile"
#: The agreed call is so far ahead, in seconds at the speed of the calls so far, four times as far at each further try;
#: and in calls, within these bounds.
_AHEAD_S, _FEWEST, _MOST = 1.0, 3, 100_000


def _nothing(*_: Any) -> None:
    """Nothing is to be done."""


def _through_turnstile(*args: Any) -> Any:
    """Its code stands in for a function of a generated module, whose globals it then has."""
    return globals()["_inductor_passes_turnstile"](*args)


class Turnstile:
    """Stands behind the function that runs a graph.

    Args:
        module: globals of the generated module.
        count: calls that it had so far.

    Attributes:
        module, count: these.
        broken: why calls cannot be counted, "" where they can.

    Raises:
        ValueError: the function cannot be stood in for; the message says why.
    """

    def __init__(self, module: dict[str, Any], count: int) -> None:
        self.module = module
        self._function = function_of(module)
        self._code = self._function.__code__
        self._original = types.FunctionType(self._code, module, self._function.__name__)
        self._other: Callable[[list[Any]], Any] | None = None
        self._lock = threading.Lock()
        self._inside = 0
        self._began, self._first = time.monotonic(), count
        self._last = self._began
        self._vote: Vote | None = None
        self._at = 0
        self._to: Callable[[list[Any]], Any] | None = None
        self._then: Callable[[Decision], None] = _nothing
        #: A call before the vote, and what is done at it.
        self._early: tuple[int, Callable[[], None]] = 0, _nothing
        #: The graph does not run any more: nobody knows which plan the other ranks run.
        self._dead: DeadStoreError | None = None
        self.count = count
        self.broken = ""
        module[_NAME] = self
        self._function.__code__ = _through_turnstile.__code__

    def own(self) -> types.FunctionType:
        """Runs the module's own code, whichever runs the graph now."""
        return self._original

    def ahead(self, attempt: int, more: int = 0) -> int:
        """A call that is well before this rank, ``more`` calls behind such a one."""
        with self._lock:
            calls = self.count - self._first
            period_s = (time.monotonic() - self._began) / calls if calls else _AHEAD_S
            margin = math.ceil(_AHEAD_S * 4**attempt / max(period_s, 1e-6))
            return self.count + min(max(margin, _FEWEST * 4**attempt), _MOST) + more

    def arm(
        self,
        call: int,
        vote: Vote,
        to: Callable[[list[Any]], Any] | None,
        then: Callable[[Decision], None],
        early: tuple[int, Callable[[], None]] = (0, _nothing),
    ) -> None:
        """Vote at a call, run another module from there on where the vote is for it, and tell the caller.

        Args:
            to: runs the graph; None for the module's own code.
            then: called once with what was decided, on the thread that makes the call.
            early: what is to be done so many calls earlier, on that thread; a rank for which that is too late is too
                late for the vote.
        """
        calls, start = early
        with self._lock:
            late = call - calls <= self.count
            why = self.broken or (LATE if late else "")
            if not why:
                self._at, self._vote, self._to, self._then = call, vote, to, then
                self._early = (call - calls if calls else 0), start
        if why:
            then(vote.refuse(why))

    def disarm(self) -> Vote | None:
        """The vote that has not come, which does not come any more."""
        with self._lock:
            vote, self._vote = self._vote, None
        return vote

    def discarded(self) -> bool:
        """Whether it is certain that nobody can call the graph any more, see ``callers``."""
        return nobody_calls(self.module)

    def idle_s(self) -> float:
        """Seconds since the last call began; since it counts, where there was none."""
        with self._lock:
            return time.monotonic() - self._last

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        with self._lock:
            self.count += 1
            self._last = time.monotonic()
            if self._inside:
                self.broken = "two threads ran the graph at the same time"
            self._inside += 1
            vote = self._vote if self.count == self._at else None
            early = self._early[1] if self._vote is not None and self.count == self._early[0] else None
        try:
            if self._dead is not None:
                raise self._dead
            if early is not None:
                _told(early)
            if vote is not None:
                self._turn(vote)
            other = self._other
            return self._original(*args) if other is None else other(args[-1])
        finally:
            with self._lock:
                self._inside -= 1

    def _turn(self, vote: Vote) -> None:
        self._vote = None
        try:
            decision = vote.cast()
        except DeadStoreError as error:
            self._dead = error
            raise
        if decision.yes:
            self._other = self._to
        _told(lambda: self._then(decision))

    def end(self) -> None:
        """Stop counting; what runs now stays. Calls that are on their way elsewhere find something to run."""
        other = self._other
        # These hold the second plan, and what holds this.
        self._to, self._then, self._early = None, _nothing, (0, _nothing)
        if other is None:
            self.module[_NAME] = self._original
            self._function.__code__ = self._code
            return

        def onward(*args: Any) -> Any:
            return other(args[-1])

        self.module[_NAME] = onward


def _told(what: Callable[[], None]) -> None:
    try:
        what()
    except Exception:  # what is told about a change must never stop a program
        log.debug("a change of plans cannot be handed on", exc_info=True)
