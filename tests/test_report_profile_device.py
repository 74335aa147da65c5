"""Profiles of a device: kernels and transfers are found by what launched them, and stalls are the transfers' own."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inductor_passes.cost.profile import CostProfile
from inductor_passes.trace.profile_events import read_profile
from inductor_passes.trace.profiled import Measured, match
from inductor_passes.trace.reader import read_trace
from inductor_passes.trace.reprofile import updated_profile
from tests.support.trace_samples import fsdp_problem, planned
from tests.test_report import TraceDir

COMPUTE, TRANSFERS = 7, 20


@dataclass
class Device:
    """A host that launches and a device with two streams, as a profiler sees them; times in us."""

    now: float = 100.0
    events: list[dict[str, Any]] = field(default_factory=list)
    free: dict[int, float] = field(default_factory=lambda: {COMPUTE: 0.0, TRANSFERS: 0.0})
    stalls: dict[str, float] = field(default_factory=dict)
    waiting: list[tuple[str, float]] = field(default_factory=list)
    correlation: int = 0

    def slice(self, category: str, name: str, begin: float, length: float, **arguments: Any) -> None:
        thread = {"kernel": arguments.get("stream", 0)}.get(category, 1)
        process = 0 if category == "kernel" else 1
        self.events.append(
            {"ph": "X", "cat": category, "pid": process, "tid": thread, "name": name, "ts": begin, "dur": length}
            | {"args": arguments}
        )

    def launch(self, name: str, length: float, stream: int, category: str = "cuda_runtime") -> float:
        """One kernel; returns its end."""
        self.correlation += 1
        asked = self.now + 1.0
        self.slice(category, "cudaLaunchKernel", asked, 2.0, correlation=self.correlation)
        begin = max(asked + 3.0, self.free[stream])
        if stream == COMPUTE:
            # What the stream was told to wait for first, in that order.
            reached = max(asked, self.free[stream])
            for label, end in self.waiting:
                self.stalls[label] = self.stalls.get(label, 0.0) + max(0.0, end - reached)
                reached = max(reached, end)
            begin = max(begin, reached)
            self.waiting = []
        self.slice("kernel", name, begin, length, correlation=self.correlation, stream=stream)
        self.free[stream] = begin + length
        return begin + length


def profile_of(traces: TraceDir, path: Path, factor: float, seed: int) -> Device:
    """A step in the planned order on a device where everything takes ``factor`` times as long as planned."""
    numbers = random.Random(seed)
    (graph,) = read_trace(traces.path).graphs
    payload = graph.payload("chrome_trace_after")
    assert payload is not None
    device = Device()
    planned_us = {e["name"]: e["dur"] for e in payload["traceEvents"] if e.get("cat") == "transfer"}
    ends: dict[str, float] = {}
    for e in payload["traceEvents"]:
        if e["ph"] != "X" or e["cat"] == "transfer":
            continue
        began = device.now
        if e["cat"] == "compute":
            library = bool(e["args"].get("label"))
            name = f"aten::{e['args']['label']}" if library else f"triton_poi_fused_{e['name']}"
            device.launch(name, e["dur"] * factor, COMPUTE, "cuda_runtime" if library else "cuda_driver")
        elif e["cat"] == "issue":
            label = e["name"].removeprefix("issue ")
            name = "_c10d_functional::all_gather_into_tensor_out"
            ends[label] = device.launch("ncclDevKernel_AllGather_RING_LL", planned_us[label] * factor, TRANSFERS)
        else:
            label, name = e["name"].removeprefix("wait "), "_c10d_functional::wait_tensor"
            device.waiting.append((label, ends[label]))
        device.slice("cpu_op", name, began, 8.0)
        device.now = began + 8.0 + numbers.choice([0.5, 1.0, 40.0])
    device.slice("user_annotation", "## Call CompiledFxGraph abc ##", 99.0, device.now)
    # Somebody else's: another thread's launch, a launch without work, work without a launch.
    device.slice("kernel", "ncclDevKernel_Broadcast", 120.0, 1.0, correlation=10**6, stream=9)
    device.slice("cuda_runtime", "cudaEventRecord", 120.0, 1.0, correlation=10**7)
    numbers.shuffle(device.events)
    path.write_text(json.dumps({"traceEvents": device.events, "distributedInfo": {"rank": 0}}))
    return device


def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, seed: int) -> tuple[Device, Measured]:
    traces = TraceDir(tmp_path / "trace", monkeypatch)
    problem = fsdp_problem(4)
    report, answer = planned(problem, world_size=2)
    traces.add(report, problem, answer.order)
    device = profile_of(traces, tmp_path / "p.json", factor, seed)
    (found,) = match(read_trace(traces.path), [tmp_path / "p.json"])
    return device, found


@pytest.mark.parametrize("seed", range(6))
def test_transfers_and_stalls_are_the_device_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    device, found = measured(tmp_path, monkeypatch, 1.5, seed)
    transfers = [p for p in found.pairs if p.what == "transfer"]
    assert len(transfers) == 4
    assert all(p.measured_ns == pytest.approx(1.5 * p.predicted_ns, abs=2) for p in transfers)
    stalls = {p.label: p.measured_ns for p in found.pairs if p.what == "exposed"}
    assert stalls == {label: pytest.approx(1000 * us, abs=5) for label, us in device.stalls.items()}
    assert sum(stalls.values()) > 0
    for what, count in (("block", 4), ("library", 4)):
        pairs = [p for p in found.pairs if p.what == what]
        assert len(pairs) == count
        for p in pairs:
            assert p.measured_ns == pytest.approx(1.5 * p.predicted_ns, abs=5), p


def test_a_slow_host_is_not_a_transfer_s_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short transfers that end before the host has launched what reads them stall nothing."""
    device, found = measured(tmp_path, monkeypatch, 0.001, 0)
    assert sum(device.stalls.values()) == 0
    assert [p.measured_ns for p in found.pairs if p.what == "exposed"] == [0] * 4


def test_costs_follow_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = measured(tmp_path, monkeypatch, 2.0, 1)
    base = CostProfile.default("cuda", ranks_per_host=2)
    better = updated_profile(base, [found])
    transfer = next(p for p in found.pairs if p.what == "transfer")
    message = "all_gather", transfer.size_bytes // 2, transfer.size_bytes, (0, 1)
    now = better.communication_ns(*message)
    assert now != base.communication_ns(*message) and now == pytest.approx(transfer.measured_ns, rel=0.01)


def test_work_belongs_to_the_call_that_launched_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(tmp_path, monkeypatch, 1.0, 2)
    rank, (call,) = read_profile(tmp_path / "p.json")
    assert rank == 0
    assert not any("Broadcast" in w.name for w in call.work)
    assert all(call.begin_ns <= w.launched_ns < call.end_ns for w in call.work)
    assert {w.stream for w in call.work} == {("0", str(COMPUTE)), ("0", str(TRANSFERS))}
