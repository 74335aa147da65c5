"""Warnings that appear once per process, however many graphs repeat their cause."""

from __future__ import annotations

import logging

#: What has been said.
warned: set[str] = set()


def warn_once(message: str) -> None:
    """A warning that appears once per process."""
    if message not in warned:
        warned.add(message)
        logging.getLogger("inductor_passes").warning("%s", message)
