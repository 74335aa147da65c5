"""torch's ``activation_memory_budget`` as a block of a program, for those that are compared with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def saving(share: float) -> Iterator[None]:
    """Inside, what is compiled saves this share of the activations that it would save; 1: nothing is changed."""
    from torch._functorch import config

    if share == 1:
        yield
        return
    settings: dict[str, Any] = {"activation_memory_budget": share}
    # Not in every torch; without it the knapsack stops at a mesh that a graph holds.
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        settings["unsafe_treat_script_objects_as_zero_size"] = True
    with config.patch(**settings):
        yield
