"""Telling the user that something was undone: once per cause, or as an error under ``verify="strict"``.

What is said of a graph goes into its generated code, too: a process that finds it in a cache compiles nothing, and has
the same reason to complain.
"""

from __future__ import annotations

import threading

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.records import once
from inductor_passes.records.errors import MeantError
from inductor_passes.report import PassReport

_warned, warn_once = once.warned, once.warn_once

_lock = threading.Lock()
#: What was said of the graphs of a function that are being compiled, by its compile id.
_of_graphs: dict[str, list[str]] = {}


def warn_of_graph(message: str) -> None:
    """:func:`warn_once`, and again in every process that takes the graph's code out of a cache."""
    with _lock:
        said = _of_graphs.setdefault(_torch.compile_id(), [])
        if message not in said:
            said.append(message)
    warn_once(message)


def take_said() -> tuple[str, ...]:
    """What was said of the function's graphs since this was asked last: for the code that is generated now."""
    with _lock:
        return tuple(_of_graphs.pop(_torch.compile_id(), ()))


class VerificationError(MeantError, RuntimeError):
    """``verify="strict"`` and a pass produced something that is not allowed, or failed."""


def complain(what: str, report: PassReport, config: PassConfig, error: BaseException | None) -> None:
    """Warn once about something undone, or raise under ``verify="strict"``."""
    message = f"inductor_passes: {what}: {report.rolled_back.value if report.rolled_back else ''} ({report.detail})"
    if config.verify == "strict" or (config.plan and config.plan_mismatch == "error"):
        # A graph without a pass's result is not the graph that a pinned plan was made for.
        raise VerificationError(message) from error
    warn_of_graph(f"{message}; the graph is as it was and compilation goes on")
