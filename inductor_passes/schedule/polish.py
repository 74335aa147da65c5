"""Among equally fast orders the one of least peak memory, and with that peak the most robust one.

1. Waits move down to right before their first reader as far as the peak allows.
2. Starts of gathers move down to the latest position that delays nothing. Both together lower the peak.
3. Waits move down again, then starts up to where their machine falls free, as far as the new peak allows. By the cost
   model that gains no time; it is slack for collectives that are slower than predicted.

Every step is checked by replay and dropped unless makespan and peak are at least as good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inductor_passes.schedule.placing import starts_down, starts_up, waits_down
from inductor_passes.schedule.simulate import value
from inductor_passes.schedule.tables import Tables


def polish(t: Tables, order: Sequence[int]) -> list[int]:
    """An order as fast as ``order``, of at most its peak, with starts and waits placed as described above."""
    result, best = list(order), value(t, order)
    steps: tuple[Callable[[int], list[int]], ...] = (
        lambda peak: waits_down(t, result, peak),
        lambda peak: starts_down(t, result),
        lambda peak: waits_down(t, result, peak),
        lambda peak: starts_up(t, result, peak),
    )
    for step in steps:
        changed = step(best[1])
        found = value(t, changed)
        if found <= best:
            result, best = changed, found
    return result
