"""What an order costs when durations are not as estimated, and slack against that.

Durations are estimates: kernels run beside transfers, links are shared, a peer comes late. So an order is also replayed
under *disturbances*, a fixed and deterministic set of other durations, and judged by the mean of its makespans.
An order that issues every collective at the last moment is as fast as any by the estimates and the slowest when they
are wrong. *Slack* is a start before its machine falls free, and a wait not before its first reader. It costs memory,
and no time by the estimates.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from inductor_passes.schedule import native
from inductor_passes.schedule.placing import starts_up, waits_down
from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.simulate import timed, value
from inductor_passes.schedule.tables import Tables, once

_COMPUTE, _START = int(Kind.COMPUTE), int(Kind.START)
#: By how many percent durations differ from their estimates.
SPREAD = 30
#: Disturbances in which every task has a spread of its own.
_MIXED = 4
#: Machines that are disturbed alone, at most.
_MACHINES = 4
#: A peer comes late by this share (percent) of all compute.
_LATE = 10
#: What is tried, from the least memory up: memory in percent of the order's own peak (None: unlimited), and starts by
#: how many thousandths of the makespan before their machine falls free. A cap allows a beginning of the list, so a
#: larger one is never worse.
_TRIED: tuple[tuple[int | None, int], ...] = (
    *((100, ahead) for ahead in (0, 50, 300)),
    *((102, ahead) for ahead in (50, 300)),
    *((105, ahead) for ahead in (20, 100, 1000)),
    *((125, ahead) for ahead in (50, 300)),
    *((None, ahead) for ahead in (100, 1000)),
)
#: Sweeps of waits down and starts up.
_ROUNDS = 2
#: A mean that is better by less than one part of this many is no better: memory decides.
_EQUAL = 2000


@dataclass(frozen=True)
class Disturbed:
    """Makespans in ns of one order under all disturbances: their mean and the longest."""

    mean_ns: int
    worst_ns: int


@once
def _durations(t: Tables) -> tuple[Sequence[int], Sequence[int]]:
    """Durations on compute lane and machines, of all disturbances one after the other; arrays if they fit."""
    busy: list[int] = []
    lane: list[int] = []
    for of_compute, of_start in _disturbances(t):
        busy += [b * p // 100 if k == _COMPUTE else b for k, b, p in zip(t.kind, t.busy_ns, of_compute)]
        lane += [d * p // 100 for d, p in zip(t.lane_ns, of_start)]
    # A peer comes late to one collective a third, and one two thirds, through the program.
    starts = [i for i in range(t.n) if t.kind[i] == _START]
    late = sum(b for b, k in zip(t.busy_ns, t.kind) if k == _COMPUTE) * _LATE // 100
    for k in (1, 2) if starts else ():
        held = starts[k * len(starts) // 3]
        busy += t.busy_ns
        lane += t.lane_ns
        lane[held - t.n] += late
    try:
        return native.array_of(busy), native.array_of(lane)
    except OverflowError:
        return busy, lane


def _disturbances(t: Tables) -> Iterator[tuple[Iterable[int], Iterable[int]]]:
    """Percent of its estimate that a kernel, and that a transfer, takes, by task number."""
    for percent in (100 - SPREAD, 100 + SPREAD):
        yield itertools.repeat(percent), itertools.repeat(100)
        yield itertools.repeat(100), itertools.repeat(percent)
    for m in range(t.machines if 1 < t.machines <= _MACHINES else 0):
        yield itertools.repeat(100), [100 + SPREAD if machine == m else 100 for machine in t.machine]
    for seed in range(_MIXED):
        # The same for every problem, so worked out for a few lengths only.
        own = _mixed(seed, 1 << t.n.bit_length())
        yield own, own


@functools.lru_cache(maxsize=4 * _MIXED)
def _mixed(seed: int, n: int) -> tuple[int, ...]:
    return tuple(100 + SPREAD if _bit(i, seed) else 100 - SPREAD for i in range(n))


def _bit(number: int, seed: int) -> bool:
    """A bit that looks random, equal on all machines: Knuth's multiplicative hash."""
    mixed = (number * 2654435761 + seed * 40503 * 65537) & 0xFFFFFFFF
    mixed ^= mixed >> 15
    return bool((mixed * 2246822519 >> 13) & 1)


def makespans(t: Tables, order: Sequence[int]) -> list[int]:
    """Makespans in ns of a legal order, one per disturbance. O(disturbances · N)."""
    if not t.n:
        return []
    busy, lane = _durations(t)
    if (flat := native.flat(t)) is not None and isinstance(busy, array) and isinstance(lane, array):
        return native.makespans(*flat, order, (busy, lane), bool(t.slowdown))
    found = []
    for k in range(len(busy) // t.n):
        own = slice(k * t.n, (k + 1) * t.n)
        other = replace(t, busy_ns=list(busy[own]), lane_ns=list(lane[own]), flat=False, known={})
        found.append(timed(other, order).makespan)
    return found


def disturbed(t: Tables, order: Sequence[int]) -> Disturbed:
    """What a legal order costs under disturbances."""
    found = makespans(t, order) or [0]
    return Disturbed(sum(found) // len(found), max(found))


@dataclass(frozen=True)
class Hardened:
    """An order with slack, its mean makespan in ns under disturbances, and that of the order without."""

    order: list[int]
    mean_ns: int
    plain_ns: int


def with_slack(t: Tables, order: Sequence[int], cap_bytes: int | None) -> Hardened:
    """An order as fast as ``order`` that costs least under disturbances, with starts and waits moved.

    Memory up to ``cap_bytes`` (None: unlimited) is taken where the mean gets better by it.
    """
    makespan, peak = value(t, order)
    plain = disturbed(t, order).mean_ns
    best = Hardened(list(order), plain, plain)
    for percent, thousandths in _TRIED:
        limit = t.live0 + sum(t.alloc) if percent is None else peak * percent // 100
        if cap_bytes is not None and limit > max(cap_bytes, peak):
            break
        found: Sequence[int] = order
        for _ in range(_ROUNDS):
            found = starts_up(t, waits_down(t, found, limit), limit, makespan * thousandths // 1000)
        found_value = value(t, found)
        if found_value[0] > makespan or found_value[1] > limit:
            continue
        mean = disturbed(t, found).mean_ns
        if mean < best.mean_ns - best.mean_ns // _EQUAL:
            best = Hardened(list(found), mean, plain)
    return best
