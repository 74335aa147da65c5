"""Forward-backward improvement: schedule the mirrored program from the end, and use the result as due dates.

Priorities by longest path do not see that a lane's load piles up at the end: a weight gradient has a short path to the
end of the program, but a hundred reductions queue behind it on one lane. Scheduling the mirrored program (edges turned
round, waits and starts exchanged) packs everything against the end, machines included, so a task's time in it is its
latest begin under resource limits. Forward and backward passes alternate, each taking its priorities from the other
(K. Y. Li and R. J. Willis, *An iterative scheduling technique for resource-constrained project scheduling*, EJOR 56,
1992; double justification: V. Valls et al., EJOR 165, 2005).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from inductor_passes.schedule.list_schedule import Rule, list_schedule
from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.simulate import Trace, replay_time
from inductor_passes.schedule.tables import Tables

_COMPUTE, _START, _WAIT = int(Kind.COMPUTE), int(Kind.START), int(Kind.WAIT)


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
    )


def improve(t: Tables, order: Sequence[int], rounds: int) -> Iterator[list[int]]:
    """Orders from ``rounds`` backward and forward passes that begin with ``order``; memory is unlimited."""
    mirror = mirrored(t)
    n = t.n
    trace = replay_time(t, order)
    for _ in range(rounds):
        ends = _ends(t, trace)
        by_end = [-ends[n - 1 - i] for i in range(n)]
        back = list_schedule(mirror, Rule("", by_end, by_end))
        back_trace = replay_time(mirror, back)
        back_ends = _ends(mirror, back_trace)
        due = [back_trace.makespan - back_ends[n - 1 - i] for i in range(n)]
        # A start's due date is its begin on the machine: the mirrored wait only marks where that ends.
        order = list_schedule(t, Rule("", due, due))
        trace = replay_time(t, order)
        yield order


def _ends(t: Tables, trace: Trace) -> list[int]:
    """When each task ends; a ``START`` when its collective does, a ``WAIT`` where its collective did."""
    return [
        e if k == _COMPUTE else trace.lane_end[i] if k == _START else trace.lane_end[s]
        for i, (k, e, s) in enumerate(zip(t.kind, trace.end, t.start))
    ]
