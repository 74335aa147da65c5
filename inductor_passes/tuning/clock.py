"""Times the first calls of a generated module, and then takes itself out of it without a trace.

A statement at the end of the module (:func:`loaded`) puts other code into the function that runs the graph: it goes
through a :class:`Clock`, which runs the original code, one warm-up call without times and ``steps`` calls with
stand-ins among the module's globals (``stand_ins``). Then function and globals are what Inductor generated. Torch keeps
the function itself, so this also holds for code from a warm cache.

A clock never changes what is computed: the same callables get the same arguments in the same order.
"""

from __future__ import annotations

import logging
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from inductor_passes.tuning.stand_ins import stand_ins
from inductor_passes.tuning.tape import Tape

log = logging.getLogger("inductor_passes")

_NAME = "_inductor_passes_clock"
#: A graph whose last call is not longer ago than this, in seconds, or than its calls are apart, is being timed.
_RECENT_S = 1.0


def _through_clock(*args: Any) -> Any:
    """Its code stands in for a function of a generated module, whose globals it then has."""
    return globals()["_inductor_passes_clock"](*args)


class Clock:
    """Stands behind the function that runs a graph for a warm-up call and ``steps`` calls.

    Args:
        module: globals of the generated module.
        called: what its code calls, as it writes it.
        steps: at least 1.
        device: that computes.
        done: called once, on the thread of the last step, with the tape, and a sentence when nothing was timed.
        function: runs the graph with these globals; None for the one that the module has.

    Raises:
        ValueError: the function cannot be stood in for; the message says why.
    """

    def __init__(
        self,
        module: dict[str, Any],
        called: list[str],
        steps: int,
        device: str,
        done: Callable[[Tape, str], None],
        function: types.FunctionType | None = None,
    ) -> None:
        self._module = module
        self._function = function_of(module) if function is None else function
        self._code = self._function.__code__
        self._original = types.FunctionType(self._code, module, self._function.__name__)
        self._called = called
        self._left = steps
        self._warm = False
        self._done = done
        self._tape = Tape(steps, device)
        self._turn = threading.Lock()
        self._stand_ins: dict[str, Any] | None = None
        self._together = False
        #: Begins of the last two calls.
        self._called_s = (0.0, 0.0)
        module[_NAME] = self
        self._function.__code__ = _through_clock.__code__

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        self._called_s = self._called_s[1], time.monotonic()
        if not self._turn.acquire(blocking=False):
            # Another thread is in the graph: both would write to one tape.
            self._together = True
            return self._original(*args)
        try:
            return self._step(args)
        finally:
            self._turn.release()

    @property
    def over(self) -> bool:
        """Whether the function runs its own code again."""
        return self._function.__code__ is self._code

    @property
    def running(self) -> bool:
        """Whether the rest of its calls is likely to come soon."""
        before, last = self._called_s
        if not last or self.over:
            return False
        return time.monotonic() - last < max(_RECENT_S, 2 * (last - before) if before else 0.0)

    def _step(self, args: tuple[Any, ...]) -> Any:
        if self.over:
            # It ended while this call was on its way.
            return self._original(*args)
        if self._stand_ins is None:
            self._stand_ins = stand_ins(self._module, self._called, self._tape)
        before = {name: self._module[name] for name in self._stand_ins}
        self._module.update(self._stand_ins)
        try:
            result = self._tape.step(lambda: self._original(*args))
        except BaseException as error:
            self._end(f"a call of the graph ended with {type(error).__name__}")
            raise
        finally:
            self._module.update(before)
        self._count()
        return result

    def _count(self) -> None:
        if self._together:
            self._end("two threads ran the graph at the same time")
        elif not self._warm:
            self._warm = True
            if not self._tape.lay_out():
                self._end("the device has no events that take times")
        elif self._tape.overflowed:
            self._end("the graph does not make the same calls in every step")
        else:
            self._left -= 1
            if not self._left:
                self._end("")

    def _end(self, why: str) -> None:
        self._function.__code__ = self._code
        self._module.pop(_NAME, None)
        self._stand_ins = None
        try:
            self._done(self._tape, why)
        except Exception:  # a measurement must never stop a program
            log.debug("what was timed cannot be handed on", exc_info=True)


def function_of(module: dict[str, Any]) -> types.FunctionType:
    """The function of a generated module that runs its graph.

    Raises:
        ValueError: there is none whose code can be put back.
    """
    runner = module.get("Runner")
    found = vars(runner).get("call") if isinstance(runner, type) else module.get("call")
    if not isinstance(found, types.FunctionType) or found.__closure__ or found.__defaults__:
        raise ValueError("the generated code has no plain function that runs the graph")
    return found
