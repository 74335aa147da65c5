"""No cyclic garbage collection while a graph is planned.

A graph of 10,000 nodes with its problem and orders is millions of live objects and hardly any garbage. The collector
would walk all of them again and again, which takes a good part of the planning time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pause the collector if it is on; also a decorator."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
