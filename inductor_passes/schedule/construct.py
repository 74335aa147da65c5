"""Constructions: where the planner's first orders come from.

Without a cap: list schedules by several priorities, each refined by forward-backward improvement. Under a cap these
tell what would be ideal, and guarded list schedules come as close as memory allows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from inductor_passes.schedule.bounds import urgency
from inductor_passes.schedule.guarded import Guard, Timing, Trial, just_in_time
from inductor_passes.schedule.justify import backwards, improve
from inductor_passes.schedule.list_schedule import PriorityRule, list_schedule
from inductor_passes.schedule.simulate import value
from inductor_passes.schedule.tables import Tables

#: Up to this many tasks every rule is tried; above, work is saved once an order is close enough to the bound.
SMALL = 4000
#: Rounds of forward-backward improvement per rule, when thorough and when not.
_ROUNDS, _ROUNDS_QUICK = 2, 1


def close_enough(bound: int, thorough: bool) -> int:
    """The makespan in ns at which to stop: the bound, or within a thousandth of it to save work."""
    return bound if thorough else bound + bound // 1000


def near(makespan_ns: int, bound_ns: int) -> bool:
    """Whether so little is left to gain that no other search is begun: half a percent."""
    return makespan_ns <= bound_ns + bound_ns // 200


def rules(t: Tables, thorough: bool) -> list[PriorityRule]:
    """The list-scheduling rules, in the order in which they are tried."""
    position = range(t.n)
    by_tail = urgency(t)
    found = [
        PriorityRule("list/input", position, position),
        PriorityRule("list/input-compute", position, by_tail, strict=True),
        PriorityRule("list/critical-path", by_tail, by_tail),
    ]
    if thorough:
        found.append(PriorityRule("list/critical-path-input-collectives", by_tail, position))
    return found


def prefetching(t: Tables) -> list[tuple[str, list[int]]]:
    """Named orders that issue every collective as soon as it is ready: for when the others leave a machine idle.

    Issuing takes time of the compute lane, in which a machine that is fed just in time falls idle; with many short
    collectives that adds up. The price is memory, so these come last.
    """
    by_tail = urgency(t)
    rules = (
        PriorityRule("list/input-eager", range(t.n), range(t.n), eager=True),
        PriorityRule("list/critical-path-eager", by_tail, by_tail, eager=True),
        PriorityRule("list/input-idle", range(t.n), range(t.n), fill=True),
        PriorityRule("list/critical-path-idle", by_tail, by_tail, fill=True),
    )
    return [(rule.name, list_schedule(t, rule)) for rule in rules]


def construct(
    t: Tables, cap_bytes: int | None, bound: int, offer: Callable[[Trial], object], thorough: bool
) -> None:
    """Pass candidate orders to ``offer``; work is saved once one is close to ``bound`` within ``cap_bytes``.

    Args:
        thorough: try every rule; else save work once an order is close enough.
    """

    def candidate(name: str, order: Sequence[int]) -> Trial:
        found = Trial(name, order, *value(t, order))
        offer(found)
        return found

    def refined(name: str, first: Sequence[int]) -> list[Trial]:
        mine = [candidate(name, first)]
        for order in improve(t, first, _ROUNDS if thorough else _ROUNDS_QUICK):
            if mine[-1].makespan <= bound:
                break
            mine.append(candidate(f"{name}/justified", order))
        return mine

    enough = close_enough(bound, thorough)
    stop = functools.partial(close_enough, thorough=thorough)
    guard = None if cap_bytes is None else Guard(t, cap_bytes, enough, stop, candidate)
    ideals: list[Trial] = []
    for rule in rules(t, thorough):
        mine = refined(rule.name, list_schedule(t, rule))
        ideals += mine
        if thorough:
            continue
        fits = cap_bytes is None or mine[-1].peak <= cap_bytes
        if guard is not None and len(ideals) == len(mine) and not fits:
            guard.attempt(mine[-1], Timing(relief=True))
        if (guard is not None and guard.done) or (fits and mine[-1].makespan <= enough):
            break
    near = close_enough(bound, thorough=False)
    if guard is not None:
        if not guard.done:
            guard.descend(guard.ranked(ideals))
        if not guard.reached(near, functools.partial(close_enough, thorough=False)):
            guard.once_more(guard.ranked(refined("list/backwards", backwards(t))))
        return
    if min(c.makespan for c in ideals) > near:
        ideals += refined("list/backwards", backwards(t))
    fastest = min(c.makespan for c in ideals)
    for ideal in [c for c in ideals if c.makespan == fastest][: None if thorough else 1]:
        # Often as fast, and then with less memory.
        for timing in (Timing(), Timing(1, True)):
            rule = just_in_time(t, ideal, timing)
            candidate(rule.name, list_schedule(t, rule))
