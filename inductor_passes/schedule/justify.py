"""Forward-backward improvement: schedule the mirrored program from the end, and use the result as due dates.

Priorities by longest path do not see that a lane's load piles up at the end: a weight gradient has a short path to the
end of the program, but a hundred reductions queue behind it on one lane. Scheduling the mirrored program (edges turned
round, waits and starts exchanged) packs everything against the end, machines included, so a task's time in it is its
latest begin under resource limits. Forward and backward passes alternate, each taking its priorities from the other
(K. Y. Li and R. J. Willis, *An iterative scheduling technique for resource-constrained project scheduling*, EJOR 56,
1992; double justification: V. Valls et al., EJOR 165, 2005).

They need not begin forwards. A reduction of many gradients is ready last and should go last; what an order from the
front put behind it stays behind it in every pass. Seen from the back it has the longest path before it, so the mirrored
program scheduled by its own longest tails (:func:`backwards`) puts it where it belongs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from inductor_passes.schedule.bounds import urgency
from inductor_passes.schedule.list_schedule import PriorityRule, list_schedule
from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.simulate import Trace, replay_time
from inductor_passes.schedule.tables import Tables, once

_COMPUTE, _START, _WAIT = int(Kind.COMPUTE), int(Kind.START), int(Kind.WAIT)


@once
def mirrored(t: Tables) -> Tables:
    """The program backwards in time: task ``i`` becomes ``n - 1 - i``. Memory is left out.

    The first wait of a collective becomes its start and the start its wait. A collective that nobody waits for keeps
    only its issue: nothing tells when it would have to begin.
    """
    n = t.n
    kind, lane_ns, machine = [_COMPUTE] * n, [0] * n, [-1] * n
    start: list[int] = [-1] * n
    waits: list[list[int]] = [[] for _ in range(n)]
    preds = [[n - 1 - j for j in t.succs[n - 1 - i]] for i in range(n)]
    for s in range(n):
        if t.kind[s] != _START or not t.waits[s]:
            continue
        first = min(t.waits[s])
        begin, end = n - 1 - first, n - 1 - s
        kind[begin], kind[end] = _START, _WAIT
        lane_ns[begin], machine[begin], machine[end] = t.lane_ns[s], t.machine[s], t.machine[s]
        start[end], waits[begin] = begin, [end]
        # The collective ends before the first of its waits, so in the mirror it begins after all of them.
        preds[begin].extend(n - 1 - w for w in t.waits[s] if w != first)
    succs: list[list[int]] = [[] for _ in range(n)]
    for i, ps in enumerate(preds):
        for p in ps:
            succs[p].append(i)
    return dataclasses.replace(
        t,
        kind=kind,
        busy_ns=t.busy_ns[::-1],
        lane_ns=lane_ns,
        machine=machine,
        start=start,
        waits=waits,
        preds=preds,
        succs=succs,
        flat=None,
        known={},
    )


def improve(t: Tables, order: Sequence[int], rounds: int) -> Iterator[list[int]]:
    """Orders from ``rounds`` backward and forward passes that begin with ``order``; memory is unlimited."""
    mirror = mirrored(t)
    n = t.n
    for _ in range(rounds):
        ends = _ends(t, replay_time(t, order))
        order = _there_and_back(t, mirror, [-ends[n - 1 - i] for i in range(n)])
        yield order


def backwards(t: Tables) -> list[int]:
    """The order whose due dates are those of the mirrored program, scheduled by its longest tails; memory is unlimited.
    """
    mirror = mirrored(t)
    return _there_and_back(t, mirror, urgency(mirror))


def _there_and_back(t: Tables, mirror: Tables, priority: Sequence[int]) -> list[int]:
    """Schedule the mirrored program by ``priority``, and the program by the due dates that come of it."""
    back_trace = replay_time(mirror, list_schedule(mirror, PriorityRule("", priority, priority)))
    back_ends = _ends(mirror, back_trace)
    # A start's due date is its begin on the machine: the mirrored wait only marks where that ends.
    due = [back_trace.makespan - back_ends[t.n - 1 - i] for i in range(t.n)]
    return list_schedule(t, PriorityRule("", due, due))


def _ends(t: Tables, trace: Trace) -> list[int]:
    """When each task ends; a ``START`` when its collective does, a ``WAIT`` where its collective did."""
    return [
        e if k == _COMPUTE else trace.lane_end[i] if k == _START else trace.lane_end[s]
        for i, (k, e, s) in enumerate(zip(t.kind, trace.end, t.start))
    ]
