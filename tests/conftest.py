"""Shared set-up: helpers of this folder are importable everywhere, settings do not leak from test to test."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

_OWN_CACHE = "PASSES_TEST_CACHE"


def pytest_configure(config: pytest.Config) -> None:
    """A compile cache of this run's own, shared by its workers and ranks: what an earlier run left decides nothing."""
    if _OWN_CACHE not in os.environ:
        folder = tempfile.mkdtemp(prefix="inductor_passes_cache_")
        os.environ[_OWN_CACHE] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    """Process-wide settings as they were before, whatever a test did to them."""
    from inductor_passes import config

    with config.patch():
        yield
