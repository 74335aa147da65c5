"""Orders that keep the compute tasks in a given sequence and place communication around them.

``lazy`` is the order of least prefetching: starts right before their first wait, waits right before their first
reader. Its memory profile is what the program needs without any overlap, so it leaves a scheduler under a memory cap
the most room; it is also an order to fall back on when the input itself prefetches beyond the cap.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.schedule import native
from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.tables import Tables

_COMPUTE = int(Kind.COMPUTE)
_WAIT = int(Kind.WAIT)


def lazy(t: Tables, order: Sequence[int], hold_waits: bool = False) -> list[int]:
    """``order`` with every collective as late as its readers allow; compute keeps its sequence. O(N + edges).

    Waits that nobody reads directly stay behind the compute task that they followed, as do the starts that nobody
    waits for. With ``hold_waits`` that holds for all waits, and only starts move: a reduction's input is released
    by its wait, so waiting later can cost memory.
    """
    if (flat := native.flat(t)) is not None:
        return native.lazy(*flat, order, hold_waits)
    kind = t.kind
    anchors: list[int] = []
    for i in order:
        anchor = kind[i] == _COMPUTE
        if kind[i] == _WAIT:
            anchor = hold_waits or not t.succs[i]
        elif not anchor:
            anchor = not t.waits[i]
        if anchor:
            anchors.append(i)
    return on_demand(t, [*anchors, *order], t.preds)


def on_demand(t: Tables, roots: Sequence[int], needs: Sequence[Sequence[int]]) -> list[int]:
    """Each root right behind what it needs, in that order. O(N + edges).

    Args:
        needs: the predecessors of each task, the first one to be placed first.
    """
    if (flat := native.flat(t)) is not None:
        return native.on_demand(*flat, roots, needs)
    placed = bytearray(t.n)
    result: list[int] = []
    for root in roots:
        stack = [root]
        while stack:
            i = stack[-1]
            if placed[i]:
                stack.pop()
                continue
            missing = [p for p in needs[i] if not placed[p]]
            if missing:
                # Reversed, because the last one pushed is placed first.
                stack.extend(reversed(missing))
                continue
            placed[i] = 1
            result.append(i)
            stack.pop()
    return result
