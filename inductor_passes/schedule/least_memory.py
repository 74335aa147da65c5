"""Orders that need little memory: what a budget is relative to, and what there is to fall back on below it.

Default Inductor puts its kernels into the best of several such orders whatever that costs in time, so the program's own
order says too much about the memory that it needs.

Source of the rules: torch/_inductor/memory.py (``topological_sort_lpmf``, ``topological_sort_dfs``). Here they are near
linear: the greedy one looks at a few of the ready tasks, and a task counts with what it reads itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from inductor_passes.schedule import native
from inductor_passes.schedule.memory import live_bytes
from inductor_passes.schedule.reference import lazy, on_demand
from inductor_passes.schedule.tables import Tables, once

#: Ready tasks that the greedy rule looks at in each step.
_LOOKED_AT = 16
#: What saves less than this of the peak is not worth another order.
_WORTH = (99, 100)


@once
def orders(t: Tables) -> list[Sequence[int]]:
    """The input order, and orders that free early or start late. O((N + edges) log N) the first time."""
    found = greedy(t)
    return [
        range(t.n),
        lazy(t, range(t.n)),
        lazy(t, range(t.n), hold_waits=True),
        found,
        lazy(t, found),
        small_first(t),
        large_needs_first(t),
    ]


def least(t: Tables, peak_bytes: Callable[[Sequence[int]], int]) -> int:
    """The lowest peak in bytes of :func:`orders`; the input's unless another one is worth it.

    Args:
        peak_bytes: of an order.
    """
    came, *others = map(peak_bytes, orders(t))
    lowest = min(others)
    return lowest if lowest * _WORTH[1] < came * _WORTH[0] else came


@once
def least_peak(t: Tables) -> int:
    """The lowest peak in bytes that is known for the problem; see :func:`least`."""
    return least(t, lambda order: max(live_bytes(t, order), default=t.live0))


def greedy(t: Tables) -> list[int]:
    """In each step the ready task that frees most, of those that do not raise the peak so far."""
    if (flat := native.flat(t)) is not None:
        return native.greedy(*flat, _LOOKED_AT)
    unread = [len(readers) for readers in t.readers]
    missing = [len(p) for p in t.preds]
    done = bytearray(t.n)

    def growth(i: int) -> int:
        freed = t.transient[i] + sum(t.size[s] for s in t.consumes[i] if unread[s] == 1)
        return t.alloc[i] - freed

    # A task is entered again when it has become the last reader of something; the entry with less growth comes first.
    by_growth = [(growth(i), i) for i in range(t.n) if not missing[i]]
    by_size = [(t.alloc[i], growth(i), i) for _, i in by_growth]
    heapq.heapify(by_growth)
    heapq.heapify(by_size)
    live = most = t.live0
    order: list[int] = []

    def chosen() -> int:
        passed: list[tuple[int, int]] = []
        found = -1
        while by_growth and found < 0 and len(passed) < _LOOKED_AT:
            entry = heapq.heappop(by_growth)
            if done[entry[1]]:
                continue
            if live + t.alloc[entry[1]] <= most:
                found = entry[1]
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(by_growth, entry)
        while found < 0:
            found = heapq.heappop(by_size)[2]
            if done[found]:
                found = -1
        return found

    while len(order) < t.n:
        i = chosen()
        done[i] = 1
        order.append(i)
        most = max(most, live + t.alloc[i])
        live += growth(i)
        for s in t.consumes[i]:
            unread[s] -= 1
            if unread[s] == 1:
                last = next(r for r in t.readers[s] if not done[r])
                if not missing[last]:
                    heapq.heappush(by_growth, (growth(last), last))
        for j in t.succs[i]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(by_growth, (growth(j), j))
                heapq.heappush(by_size, (t.alloc[j], growth(j), j))
    return order


def small_first(t: Tables) -> list[int]:
    """Small tasks first, each right behind what it needs."""
    weight = [a + sum(t.size[s] for s in reads) for a, reads in zip(t.alloc, t.consumes)]
    needs = [sorted(before, key=lambda p: (weight[p], p)) for before in t.preds]
    return on_demand(t, sorted(range(t.n), key=lambda i: (weight[i], i)), needs)


def large_needs_first(t: Tables) -> list[int]:
    """Results in the program's order; of what a task needs first what takes most memory on the way to a small result.

    Source: R. Sethi, J. D. Ullman, The Generation of Optimal Code for Arithmetic Expressions, 1970; they number trees.
    """
    kept = [a - freed for a, freed in zip(t.alloc, t.transient)]
    most: list[int] = []
    needs: list[list[int]] = []
    for i in range(t.n):
        before = sorted(t.preds[i], key=lambda p: (kept[p] - most[p], p))
        needs.append(before)
        held = peak = 0
        for p in before:
            peak = max(peak, held + most[p])
            held += kept[p]
        most.append(max(peak, held + t.alloc[i]))
    return on_demand(t, [i for i in range(t.n) if not t.succs[i]], needs)
