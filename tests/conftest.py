"""Shared set-up: helpers of this folder are importable everywhere, settings do not leak from test to test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    """Process-wide settings as they were before, whatever a test did to them."""
    from inductor_passes import config

    with config.patch():
        yield
