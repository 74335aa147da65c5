"""Real files of every kind that a command reads, as plain data: what the fuzzer of commands damages."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import random
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from inductor_passes.cost.communication import KINDS, GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost, MatmulPoint, ShapeRate
from inductor_passes.pin.file import GraphPlan
from inductor_passes.report import Finding, GraphReport, RedistributionReport
from inductor_passes.trace import artifacts
from tests.support.trace_samples import fsdp_problem, planned

GRAPHS = 4


@dataclass
class Record:
    """One record of a log: the header's JSON, and the payload, JSON or text."""

    head: dict[str, Any]
    payload: Any
    is_json: bool = True

    def encoded(self, payload: bytes, checksum: bool = True) -> bytes:
        """As torch writes it, with ``payload`` in the place of its own."""
        digest = hashlib.md5(payload, usedforsecurity=False).hexdigest() if checksum else "0" * 32
        head = json.dumps({**self.head, "has_payload": digest}).encode("utf-8", "surrogatepass")
        body = b"".join(b"\n\t" + line for line in payload.split(b"\n"))
        return b"V0101 00:00:00.000000 1 x.py:1] " + head + body + b"\n"


@dataclass
class Corpus:
    """Undamaged files."""

    problem: dict[str, Any]
    profile: dict[str, Any]
    plan: dict[str, Any]
    logs: list[list[Record]]
    chrome: dict[str, Any]


@functools.cache
def _corpus() -> Corpus:
    problem = fsdp_problem(3)
    costs = tuple(CollectiveCost(kind, 1e4, 0.1, 1e3, 0.01) for kind in KINDS)
    profile = replace(
        CostProfile.default("cpu", 2),
        measured=True,
        matmul=(MatmulPoint("float32", 1e6, 1e3), MatmulPoint("float32", 1e9, 1e6)),
        groups=(GroupCost(GroupLayout(2, 1, 2), "gloo", "lo", costs),),
        shapes=(ShapeRate("matmul", "float32", 8, 0.1), ShapeRate("attention", "float32", 0, 0.2)),
    )
    named = {"ag0": "all_gather 8 bytes, 2 ranks", "ag1": ""}
    plan = GraphPlan("forward", 0, named, ("redistribute/R5",), (("ag0", "ag1"),), ("ag0",), ("ag0",))
    logs = [_log(rank, plan) for rank in range(2)]
    return Corpus(
        problem=problem.to_json(),
        profile=profile.to_json(),
        plan={"schema_version": 1, "graphs": [plan.to_json()]},
        logs=logs,
        chrome=_profiler_trace(logs[0]),
    )


def corpus() -> Corpus:
    """A fresh copy."""
    return copy.deepcopy(_corpus())


def _log(rank: int, plan: GraphPlan) -> list[Record]:
    records: list[Record] = []

    def write(name: str, encoding: str, payload: Any) -> None:
        head = {"artifact": {"name": name, "encoding": encoding}, "rank": rank, "frame_id": 0, "frame_compile_id": 0}
        text = payload()
        records.append(Record(head, json.loads(text) if encoding == "json" else text, encoding == "json"))

    with (
        mock.patch("inductor_passes._torch.trace_enabled", lambda: True),
        mock.patch("inductor_passes._torch.trace_artifact", write),
    ):
        for phase in ("forward", "backward"):
            problem = fsdp_problem(3, name=f"{phase}_0")
            report, answer = planned(problem, phase=phase, rank=rank, world_size=2)
            _decorate(report, plan)
            artifacts.emit(report, problem=problem, order_before=problem.input_order, order_after=answer.order)
            artifacts.emit_failure(report, report.passes[1], lambda: "graph():\n    %x = placeholder")
    return records


def _decorate(report: GraphReport, plan: GraphPlan) -> None:
    """Give the report one of everything."""
    report.plan = replace(plan, phase=report.phase).to_json()
    report.notes.append("a note")
    report.passes[1].findings.append(Finding("read-before-wait", "mm", "mm reads ag0", "ag0", "m.py:1"))
    placements = ("S(0) -> R over 2 ranks",)
    report.redistributions.append(
        RedistributionReport(("ag0",), "redistribute", True, "m.py:3", placements, 100, 50, ("R5",), ("",))
    )


def _profiler_trace(log: list[Record]) -> dict[str, Any]:
    """A step as torch.profiler would show it, in the order of the plan that the log holds."""
    wanted = "inductor_passes_chrome_trace_after_forward_0"
    (planned_events,) = (r.payload["traceEvents"] for r in log if r.head["artifact"]["name"] == wanted)
    names = {"issue": "_c10d_functional::all_gather_into_tensor_out", "wait": "_c10d_functional::wait_tensor"}
    events: list[dict[str, Any]] = []
    now = 100.0
    for e in planned_events:
        if e["ph"] == "X" and e["cat"] != "transfer":
            host = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 7, "ts": now, "dur": 300.0}
            events.append({**host, "name": names.get(e["cat"], "aten::mm"), "args": {"External id": 1}})
            launch = {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": len(events)}}
            kernel = {**host, "cat": "kernel", "name": "k", "tid": 9, "args": {"correlation": len(events), "stream": 7}}
            events += [launch, kernel] if e["cat"] == "compute" else []
            now += 301.0
    region = {"ph": "X", "cat": "user_annotation", "name": "## Call CompiledFxGraph abc ##", "pid": 1, "tid": 7}
    return {"traceEvents": [{**region, "ts": 99.0, "dur": now, "args": {}}, *events], "distributedInfo": {"rank": 0}}


@functools.cache
def _graphs() -> list[dict[str, Any]]:
    from inductor_passes.verify import graph_json
    from tests.support.verify_graphs import random_program
    from tests.support.world import grouped_world

    with grouped_world() as groups:
        found = [
            graph_json.to_json(random_program(random.Random(f"commands/{number}"), groups, 12).graph)
            for number in range(GRAPHS)
        ]
    return [*found, {**found[0], "bodies": {"body": found[1]}}]


def graphs() -> list[dict[str, Any]]:
    """Random distributed programs as graph files, fresh copies; the last one holds another as a body."""
    return copy.deepcopy(_graphs())


def log_bytes(records: list[Record]) -> bytes:
    """A whole log, undamaged."""
    return b"".join(one.encoded(payload_of(one)) for one in records)


def payload_of(one: Record) -> bytes:
    """The payload's text."""
    return (json.dumps(one.payload, indent=0) if one.is_json else str(one.payload)).encode("utf-8", "surrogatepass")
