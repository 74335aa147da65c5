"""Structured trace (TORCH_TRACE), compile ids and compile-time spans."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any


def trace_enabled() -> bool:
    """Whether torch writes a structured trace in this process, i.e. whether an artifact would reach a file.

    True with ``TORCH_TRACE`` set, and before torch's first own record; False afterwards without a trace directory.
    """
    return bool(logging.getLogger("torch.__trace").handlers)


def trace_artifact(name: str, encoding: str, payload_fn: Callable[[], str], under: str = "") -> None:
    """Write one artifact into the structured trace under the current compile id.

    ``encoding`` is ``json`` or ``string``, the two that tlparse renders. ``payload_fn`` is called only when a trace
    is being written. Errors of the payload and of the file system pass through to the caller.

    Args:
        under: the id of a compilation that is over, as :func:`compile_id` gave it; no id where this torch cannot read
            one.
    """
    from torch._guards import CompileId
    from torch._logging import trace_structured

    given: dict[str, Any] = {}
    if under:
        with contextlib.suppress(AttributeError, ValueError, AssertionError):
            given["compile_id"] = CompileId.from_string(under)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload_fn,
        expect_trace_id=False,
        **given,
    )


def compile_id() -> str:
    """The current compile id as torch prints it (``0/0``), or "" outside of a compilation."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return "" if current is None else str(current)


def compiling_for_s() -> float:
    """Seconds since the current compilation, of a frame or of its backward, began; 0 where torch does not say."""
    from torch._dynamo import utils

    context = getattr(utils, "get_metrics_context", lambda: None)()
    began_ns = getattr(context, "_start_time_ns", 0)
    if context is None or not began_ns or not context.in_progress():
        return 0.0
    return max(0.0, (time.time_ns() - began_ns) / 1e9)


def recompile_limit() -> int | None:
    """How often a function is compiled before Dynamo runs it without compiling; None where torch does not say."""
    from torch._dynamo import config

    limit = getattr(config, "recompile_limit", getattr(config, "cache_size_limit", None))
    return limit if isinstance(limit, int) else None


def compilation() -> object | None:
    """What stands for the compilation that runs on this thread, forward and backward; None where there is none.

    One object for each attempt: a compile id comes again. It can be referred to weakly.
    """
    from torch._guards import TracingContext

    return TracingContext.try_get()


@contextlib.contextmanager
def compile_span(name: str) -> Iterator[Callable[..., None]]:
    """A span in the compile-time trace (chromium events); yields a function that attaches ``key=value`` to it.

    Keys go to the span only: the record of compilation metrics has a fixed set of columns and breaks on others.
    """
    from torch._dynamo.utils import CompileEventLogger, dynamo_timed

    def attach(**values: object) -> None:
        CompileEventLogger.pt2_compile(name, **values)

    with dynamo_timed(name, log_pt2_compile_event=True):
        yield attach
