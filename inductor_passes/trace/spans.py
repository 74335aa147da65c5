"""Compile-time spans: how long each of our passes took, next to torch's own phases in tlparse's chromium events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

PREFIX = "inductor_passes."


@contextlib.contextmanager
def span(name: str, **values: object) -> Iterator[Callable[..., None]]:
    """A span named ``inductor_passes.<name>``; ``values`` and what the yielded function gets become its arguments.

    The body runs exactly once whatever happens to the trace: a trace that cannot be written loses the span, and
    an exception of the body passes through.

    Example::

        with span("plan", tasks=len(problem)) as attach:
            order = plan(problem, budget)
            attach(gap=gap)
    """
    with contextlib.ExitStack() as stack:
        attach = _no_attach
        with contextlib.suppress(Exception):
            from inductor_passes._torch import compile_span

            attach = stack.enter_context(_closing_quietly(compile_span(PREFIX + name)))

        def attach_quietly(**more: object) -> None:
            with contextlib.suppress(Exception):
                attach(**more)

        if values:
            attach_quietly(**values)
        yield attach_quietly


def _no_attach(**values: object) -> None:
    del values


class _closing_quietly(contextlib.AbstractContextManager[Callable[..., None]]):
    """Enter and leave a context whose own failure on leaving must not reach the compilation."""

    def __init__(self, inner: contextlib.AbstractContextManager[Callable[..., None]]) -> None:
        self._inner = inner

    def __enter__(self) -> Callable[..., None]:
        return self._inner.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        # The inner context sees a normal exit: the body's exception travels past it, untouched.
        with contextlib.suppress(Exception):
            self._inner.__exit__(None, None, None)
