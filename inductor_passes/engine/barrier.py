"""Errors in our code do not fail a compilation: torch calls us only through this module.

Every hook of Inductor that we serve runs inside :func:`guarded`. An error there becomes one warning, and torch goes on
as if our hook were not there. Two kinds of errors are raised: those that a setting of the user asks for
(:class:`~inductor_passes.records.errors.MeantError`), and all errors under ``verify="strict"``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch.fx

from inductor_passes.config import PassConfig
from inductor_passes.engine.backup import Backup
from inductor_passes.engine.complain import VerificationError, warn_once
from inductor_passes.records.errors import MeantError

log = logging.getLogger("inductor_passes")

Settings = PassConfig | Callable[[], PassConfig] | None


@contextlib.contextmanager
def guarded(what: str, instead: str, settings: Settings = None) -> Iterator[None]:
    """Keep errors of the body from torch.

    Args:
        what: what is being done, for the warning, e.g. ``planning the kernels``.
        instead: what happens instead, e.g. ``Inductor's order stays``.
        settings: with ``verify="strict"`` the error is raised as a :class:`VerificationError`. A function is called
            when there is an error.
    """
    try:
        yield
    except MeantError:
        raise
    except Exception as error:
        log.debug("%s failed", what, exc_info=True)
        message = f"inductor_passes: {what} failed: {type(error).__name__}: {error}"
        if _strict(settings):
            raise VerificationError(message) from error
        warn_once(f"{message}; {instead}")


def _strict(settings: Settings) -> bool:
    try:
        known = settings() if callable(settings) else settings
    except Exception:  # the error at hand may be that they cannot be read
        return False
    return known is not None and known.verify == "strict"


def unharmed(graph: torch.fx.Graph, what: str, change: Callable[[], None], settings: Settings = None) -> None:
    """:func:`guarded` for what changes ``graph`` in place: after an error the graph is as it was."""
    with guarded(what, "the graph is as it was and compilation goes on", settings):
        backup = Backup(graph)
        try:
            change()
        except MeantError:
            raise
        except Exception:
            backup.restore()
            raise
