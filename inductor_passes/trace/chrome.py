"""A planned order as Chrome-trace JSON, the form that Perfetto and chrome://tracing open.

One process per rank; one thread for the compute lane and one per communicator; a counter track for memory; a flow
from each collective's issue over its transfer to its wait. Times are microseconds with three digits, so nanoseconds
survive. ``args.task`` is the task's number in the problem: whoever reads the trace can go back from a slice to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inductor_passes.schedule.memory import profile
from inductor_passes.schedule.problem import Kind, Problem, Task
from inductor_passes.schedule.simulate import Timeline
from inductor_passes.trace.payload import dumps_records

SCHEMA_VERSION = 1
COMPUTE_THREAD = 0


def chrome_trace(
    problem: Problem,
    order: Sequence[int],
    timeline: Timeline,
    *,
    rank: int = 0,
    head: dict[str, Any] | None = None,
    budget_bytes: int | None = None,
    parameters: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """The trace as JSON text: an object with ``traceEvents``, ``head``'s keys and ``displayTimeUnit``.

    Args:
        timeline: the simulation of ``order``.
        rank: the process id of all events.
        head: further top-level keys (phase, graph index); viewers ignore them.
        parameters: task name of a start -> names of those that it carries.
        budget_bytes: drawn as a second series of the memory counter when given.
    """
    events = [*_metadata(problem, rank), *_slices(problem, order, timeline, rank, parameters or {})]
    events += _memory(problem, order, timeline, rank, budget_bytes)
    top = {"schema_version": SCHEMA_VERSION, **(head or {}), "displayTimeUnit": "ns"}
    return dumps_records(top, "traceEvents", events)


def _encode(event: dict[str, Any]) -> str:
    return json.dumps(event, allow_nan=False, separators=(",", ":"))


def _time(ns: int) -> float:
    return ns / 1000


def _metadata(problem: Problem, rank: int) -> Iterator[str]:
    def meta(what: str, thread: int, args: dict[str, object]) -> str:
        return _encode({"ph": "M", "pid": rank, "tid": thread, "name": what, "args": args})

    yield meta("process_name", COMPUTE_THREAD, {"name": f"rank {rank}: {problem.name or 'graph'}"})
    yield meta("process_sort_index", COMPUTE_THREAD, {"sort_index": rank})
    for thread, name in enumerate(["compute", *(lane.name for lane in problem.lanes)]):
        yield meta("thread_name", thread, {"name": name})
        yield meta("thread_sort_index", thread, {"sort_index": thread})


def _slices(
    problem: Problem, order: Sequence[int], at: Timeline, rank: int, parameters: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    def slice_(name: str, category: str, thread: int, begin: int, end: int, args: dict[str, Any]) -> str:
        return _encode(
            {
                "ph": "X",
                "pid": rank,
                "tid": thread,
                "name": name,
                "cat": category,
                "ts": _time(begin),
                "dur": _time(end - begin),
                "args": args,
            }
        )

    def flow(phase: str, start: int, thread: int, ns: int) -> str:
        event: dict[str, Any] = {"ph": phase, "pid": rank, "tid": thread, "name": "collective", "cat": "collective"}
        event |= {"id": f"{rank}.{start}", "ts": _time(ns)}
        if phase == "f":
            event["bp"] = "e"
        return _encode(event)

    for i in order:
        task = problem.tasks[i]
        begin, end = at.start_ns[i], at.end_ns[i]
        if task.kind is Kind.COMPUTE:
            yield slice_(task.name, "compute", COMPUTE_THREAD, begin, end, _args(i, task, {}))
        elif task.kind is Kind.START:
            name = task.label or task.name
            thread = 1 + task.lane
            yield slice_(f"issue {name}", "issue", COMPUTE_THREAD, begin, end, {"task": i})
            yield slice_(name, "transfer", thread, at.lane_begin_ns[i], at.lane_end_ns[i], _args(i, task, parameters))
            yield flow("s", i, COMPUTE_THREAD, begin)
            yield flow("t", i, thread, at.lane_begin_ns[i])
        else:
            start = problem.tasks[task.start]
            yield slice_(f"wait {start.label or start.name}", "wait", COMPUTE_THREAD, begin, end, {"task": i})
            yield flow("f", task.start, COMPUTE_THREAD, end)


def _args(number: int, task: Task, parameters: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    args: dict[str, Any] = {"task": number}
    if task.label and task.label != task.name:
        args["label"] = task.label
    if task.kind is Kind.START:
        args |= {"node": task.name, "bytes": task.size_bytes}
    if names := parameters.get(task.name):
        args["parameters"] = list(names)
    if task.source:
        args["source"] = task.source
    return args


def _memory(problem: Problem, order: Sequence[int], at: Timeline, rank: int, budget_bytes: int | None) -> Iterator[str]:
    last = -1
    for i, size_bytes in zip(order, profile(problem, order)):
        if size_bytes == last:
            continue
        last = size_bytes
        args = {"bytes": size_bytes} | ({} if budget_bytes is None else {"budget": budget_bytes})
        ts = _time(at.start_ns[i])
        yield _encode({"ph": "C", "pid": rank, "tid": COMPUTE_THREAD, "name": "memory", "ts": ts, "args": args})
