"""A window re-ordered by constraint programming (OR-Tools CP-SAT), always starting from the heuristic's answer.

The model is that of :mod:`~inductor_passes.schedule.window`: clocks at the window's beginning, longest paths after its
end. For every pair of tasks a Boolean says which comes first; times on the compute lane and on the machines follow it,
and a storage is live at a task if its producer does not come later and one of its readers does not come earlier.

One worker and a limit in deterministic time (the solver's own count of work) make the answer reproducible; it may
differ between versions of OR-Tools, so ranks must run the same one. Needs the ``exact`` extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inductor_passes.schedule.problem import Kind
from inductor_passes.schedule.tables import Tables
from inductor_passes.schedule.window import Answer, Head, Place, Tail

_COMPUTE, _START = int(Kind.COMPUTE), int(Kind.START)
#: Longest window, and the solver's work limit per window in its deterministic seconds.
LONGEST, WORK = 60, 4.0


class ExactUnavailableError(ImportError):
    """OR-Tools is not installed."""


def load_solver() -> Any:
    """The CP-SAT module.

    Raises:
        ExactUnavailableError: it cannot be imported; the message names the extra that installs it.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ExactUnavailableError(
            "exact_window=True needs OR-Tools: install inductor-passes[exact], or plan with exact_window=False"
        ) from error
    return cp_model


def solve_window(t: Tables, window: Sequence[int], place: Place, cap_bytes: int | None) -> Answer:
    """Like :func:`~inductor_passes.schedule.window.improve_window`; ``expanded`` counts the solver's branches."""
    cp = load_solver()
    model = cp.CpModel()
    head, tail, incumbent = place.head, place.tail, place.incumbent
    w = len(window)
    local = {i: k for k, i in enumerate(window)}
    horizon = incumbent[0]
    first: dict[tuple[int, int], Any] = {}
    position = [model.new_int_var(0, w - 1, "") for _ in window]
    model.add_all_different(position)
    for a in range(w):
        model.add_hint(position[a], a)
        for b in range(a + 1, w):
            x = model.new_bool_var("")
            model.add_hint(x, True)
            first[a, b], first[b, a] = x, x.negated()
            model.add(position[a] < position[b]).only_enforce_if(x)
            model.add(position[b] < position[a]).only_enforce_if(x.negated())
    for b, i in enumerate(window):
        for p in t.preds[i]:
            if p in local:
                model.add(first[local[p], b] == 1)
    makespan = model.new_int_var(0, horizon, "")
    end = _compute_lane(t, window, head, model, first, horizon)
    lane_end = _machines(t, window, head, tail, model, first, end, makespan, horizon)
    waited = set()
    for k, i in enumerate(window):
        if t.kind[i] > _START:
            s = t.start[i]
            waited.add(s)
            model.add(end[k] >= (lane_end[local[s]] if s in local else head.lane_end[s]) + t.busy_ns[i])
    for s, ended in ((window[k], e) for k, e in lane_end.items()):
        if tail.wait[s] and s not in waited:
            model.add(makespan >= ended + tail.wait[s])
    leaves = model.new_int_var(0, horizon, "")
    for e in end:
        model.add(leaves >= e)
    model.add(makespan >= leaves + tail.compute)
    if cap_bytes is not None:
        _memory(t, window, head, model, first, place.unread, cap_bytes)
    # The makespan first, then leaving the window early.
    model.minimize(makespan * (horizon + 1) + leaves)
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = WORK
    status = solver.solve(model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return Answer([], incumbent, solver.num_branches, False)
    order = sorted(range(w), key=lambda k: solver.value(position[k]))
    value = solver.value(makespan), solver.value(leaves)
    better = value < incumbent
    return Answer([window[k] for k in order] if better else [], value, solver.num_branches, status == cp.OPTIMAL)


def _compute_lane(
    t: Tables, window: Sequence[int], head: Head, model: Any, first: dict[tuple[int, int], Any], horizon: int
) -> list[Any]:
    begin = [model.new_int_var(head.now, horizon, "") for _ in window]
    end = [model.new_int_var(head.now, horizon, "") for _ in window]
    for k, i in enumerate(window):
        if t.kind[i] > _START:
            model.add(end[k] >= begin[k] + t.busy_ns[i])
        else:
            model.add(end[k] == begin[k] + t.busy_ns[i])
    for (a, b), x in first.items():
        model.add(begin[b] >= end[a]).only_enforce_if(x)
    return end


def _machines(
    t: Tables,
    window: Sequence[int],
    head: Head,
    tail: Tail,
    model: Any,
    first: dict[tuple[int, int], Any],
    end: Sequence[Any],
    makespan: Any,
    horizon: int,
) -> dict[int, Any]:
    """Stays on the machines in issue order; the end of each by local number."""
    lane_end: dict[int, Any] = {}
    for m in range(t.machines):
        mine = [k for k, i in enumerate(window) if t.kind[i] == _START and t.machine[i] == m]
        for k in mine:
            lane_end[k] = model.new_int_var(0, horizon, "")
            model.add(lane_end[k] >= end[k] + t.lane_ns[window[k]])
            model.add(lane_end[k] >= head.free[m] + t.lane_ns[window[k]])
            model.add(makespan >= lane_end[k] + tail.machine[m])
        for a in mine:
            for b in mine:
                if a != b:
                    model.add(lane_end[b] >= lane_end[a] + t.lane_ns[window[b]]).only_enforce_if(first[a, b])
        model.add(makespan >= min(horizon, head.free[m] + tail.machine[m]))
    return lane_end


def _memory(
    t: Tables,
    window: Sequence[int],
    head: Head,
    model: Any,
    first: dict[tuple[int, int], Any],
    unread: Sequence[int],
    cap: int,
) -> None:
    readers: dict[int, list[int]] = {}
    for k, i in enumerate(window):
        for s in t.consumes[i]:
            readers.setdefault(s, []).append(k)
    dying = {s: ks for s, ks in readers.items() if len(ks) == unread[s]}
    producer = {s: k for k, i in enumerate(window) for s in t.produces[i]}
    fixed = head.live - sum(t.size[s] for s in dying if s not in producer)
    for k, i in enumerate(window):
        live = [fixed + t.transient[i]]
        for s in sorted(dying.keys() | producer.keys()):
            born = producer.get(s)
            lives = model.new_bool_var("")
            live.append(t.size[s] * lives)
            # Live at k: born by then, and not yet read for the last time before it.
            came = [] if born is None or born == k else [first[born, k]]
            for r in dying.get(s, [None]):
                literals = came if r is None or r == k else [*came, first[k, r]]
                if literals:
                    model.add_bool_or([lives, *(c.negated() for c in literals)])
                else:
                    model.add(lives == 1)
        # What lives at a task that allocates nothing lived before it, unless the window begins there.
        if t.alloc[i]:
            model.add(sum(live) <= cap)
