"""Telling the user that something was undone: once per cause, or as an error under ``verify="strict"``."""

from __future__ import annotations

from inductor_passes.config import PassConfig
from inductor_passes.records import once
from inductor_passes.records.errors import MeantError
from inductor_passes.report import PassReport

_warned, warn_once = once.warned, once.warn_once


class VerificationError(MeantError, RuntimeError):
    """``verify="strict"`` and a pass produced something that is not allowed, or failed."""


def complain(what: str, report: PassReport, config: PassConfig, error: BaseException | None) -> None:
    """Warn once about something undone, or raise under ``verify="strict"``."""
    message = f"inductor_passes: {what}: {report.rolled_back.value if report.rolled_back else ''} ({report.detail})"
    if config.verify == "strict" or (config.plan and config.plan_mismatch == "error"):
        # A graph without a pass's result is not the graph that a pinned plan was made for.
        raise VerificationError(message) from error
    warn_once(f"{message}; the graph is as it was and compilation goes on")
