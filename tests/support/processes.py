"""Processes that tests start: where this project lies, and an environment in which they can import it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: How long anything that has to end may take: only what hangs takes longer, on a loaded machine too.
LIMIT_S = 900.0


def environment(**more: str) -> dict[str, str]:
    """This process's with ``more``; this project is importable first."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def collect_rarely() -> None:
    """Python looks for circles of references less often, and never among what has been imported until now.

    Tracing makes millions of objects that live: a seventh of a compilation's time went into looking at them again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
