"""The clock in a generated module: it times what the code calls, and leaves the code as it was."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.models import MLPConfig, mlp, mlp_batch
from inductor_passes.report import GraphReport, Swap, SwapOutcome
from inductor_passes.settings.errors import ConfigError
from inductor_passes.trace.artifacts import KINDS, TIMING
from inductor_passes.trace.collector import collect
from inductor_passes.trace.text import render_graph
from inductor_passes.tuning import measuring
from inductor_passes.tuning.clock import Clock, function_of
from inductor_passes.tuning.compare import timing
from inductor_passes.tuning.reconcile import account
from inductor_passes.tuning.tape import Step, Tape
from tests.support.compiled import without_kernels
from tests.support.tuned import MS, World, plan
from tests.support.world import fake_world

MODULE = """
import torch
aten = torch.ops.aten
class Launcher:
    grid = 3
    def run(self, x):
        return x
triton_poi_0 = Launcher()
def cpp_fused_0(x):
    return hook(x)
def hook(x):
    return x
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions
    def call(self, args):
        a, = args
        args.clear()
        b = torch.ops.aten.add.Tensor(a, a)
        c = aten.mul(b, torch.ones(1, dtype=torch.float32))
        return cpp_fused_0(triton_poi_0.run(c))
runner = Runner(partitions=[])
call = runner.call
"""
WHOLE = MODULE
PLAIN = MODULE.partition("class Runner")[0] + """
def call(args):
    a, = args
    args.clear()
    return cpp_fused_0(torch.ops.aten.add.Tensor(a, a))
"""
CALLED = ["torch.ops.aten.add.Tensor", "aten.mul", "triton_poi_0.run", "cpp_fused_0"]


class Timed:
    """A generated module with a clock in it, and what came of that."""

    def __init__(self, source: str = WHOLE, steps: int = 2, device: str = "cpu") -> None:
        self.module: dict[str, Any] = {}
        exec(source, self.module)
        self.before = dict(self.module)
        # Torch takes this before the first step, and keeps it.
        self.call = self.module["call"]
        self.code = function_of(self.module).__code__
        self.found: list[tuple[list[Step], str]] = []
        Clock(self.module, CALLED, steps, device, self._done)

    def _done(self, tape: Tape, why: str) -> None:
        self.found.append(([] if why else tape.steps(), why))

    def step(self, value: float = 1.0) -> Any:
        return self.call([torch.full((1,), value)])

    @property
    def clean(self) -> bool:
        return self.module == self.before and function_of(self.module).__code__ is self.code


@pytest.mark.parametrize("source", [WHOLE, PLAIN], ids=["partitions", "plain"])
def test_steps_are_timed_after_a_warm_up_and_nothing_stays(source: str) -> None:
    timed = Timed(source)
    results = []
    for number in range(5):
        assert timed.clean is (number >= 3)
        results.append(timed.step().item())
    assert results == [2.0] * 5 and timed.clean
    ((steps, why),) = timed.found
    assert why == "" and len(steps) == 2
    names = [n for n in CALLED if source is WHOLE or n in ("torch.ops.aten.add.Tensor", "cpp_fused_0")]
    for one in steps:
        assert list(one.names) == names
        times = [t for pair in zip(one.begins, one.ends) for t in pair]
        assert [one.begin_ns, *times, one.end_ns] == sorted([one.begin_ns, *times, one.end_ns])


def test_between_steps_the_module_has_its_own_globals() -> None:
    timed = Timed()
    timed.step()
    assert timed.module["torch"] is torch and timed.module["triton_poi_0"] is timed.before["triton_poi_0"]


def test_an_error_in_a_step_passes_through_and_ends_the_clock() -> None:
    timed = Timed()
    timed.step()

    def fails(_: Any) -> Any:
        raise KeyError("theirs")

    timed.module["hook"] = timed.before["hook"] = fails
    with pytest.raises(KeyError, match="theirs"):
        timed.step()
    assert timed.found == [([], "a call of the graph ended with KeyError")] and timed.clean


def test_two_threads_in_one_graph_are_not_timed_and_not_harmed() -> None:
    timed, inside, go = Timed(), threading.Event(), threading.Event()
    timed.step()

    def waits(x: Any) -> Any:
        if x.item() == 2.0 and not inside.is_set():
            inside.set()
            assert go.wait(60)
        return x

    timed.module["hook"] = timed.before["hook"] = waits
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(timed.step().item()))
    thread.start()
    assert inside.wait(60)
    results.append(timed.step(3.0).item())
    go.set()
    thread.join(60)
    assert sorted(results) == [2.0, 6.0]
    assert timed.found == [([], "two threads ran the graph at the same time")] and timed.clean


def test_a_graph_that_calls_more_than_in_its_warm_up_is_given_up() -> None:
    timed = Timed(steps=1)
    timed.step()

    def more(x: Any) -> Any:
        for _ in range(20):
            timed.module["aten"].mul(x, x)
        return x

    timed.module["hook"] = timed.before["hook"] = more
    assert timed.step().item() == 2.0
    assert timed.found == [([], "the graph does not make the same calls in every step")] and timed.clean


class Event:
    """An event of a device whose work is done at once."""

    now_ns = 0

    def __init__(self) -> None:
        self.at_ns = -1

    def record(self) -> None:
        Event.now_ns += 1000
        self.at_ns = Event.now_ns

    def synchronize(self) -> None:
        assert self.at_ns >= 0, "an event that was never recorded is waited for"

    def elapsed_time(self, other: Event) -> float:
        return (other.at_ns - self.at_ns) / 1e6


def test_on_a_device_events_are_recorded_around_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inductor_passes._torch.timing_events", lambda device, count: [Event() for _ in range(count)])
    timed = Timed(device="cuda")
    for _ in range(4):
        timed.step()
    ((steps, why),) = timed.found
    assert why == "" and timed.clean
    for one in steps:
        assert [t - one.begin_ns for t in one.begins] == [1000, 3000, 5000, 7000]
        assert [t - one.begin_ns for t in one.ends] == [2000, 4000, 6000, 8000]
        assert one.end_ns - one.begin_ns == 9000


def test_a_device_without_events_is_not_timed() -> None:
    timed = Timed(device="nonsense")
    timed.step()
    assert timed.found == [([], "the device has no events that take times")] and timed.clean


def test_code_without_a_plain_function_is_refused() -> None:
    for module in ({}, {"call": print}, {"call": lambda args, more=1: args}):
        with pytest.raises(ValueError, match="no plain function"):
            Clock(module, [], 1, "cpu", lambda tape, why: None)


def test_a_tape_keeps_what_was_timed_only() -> None:
    tape = Tape(3)
    tape.step(lambda: tape.timed(abs, "abs")(-1))
    assert tape.lay_out() and tape.steps() == []
    assert tape.step(lambda: tape.timed(abs, "abs")(-1)) == 1
    assert [one.names for one in tape.steps()] == [("abs",)]


def test_graphs_that_cannot_be_timed_say_so() -> None:
    with fake_world(2), without_kernels():
        torch._dynamo.reset()
        model = inductor_passes.simple_fsdp(mlp(MLPConfig()), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        options = inductor_passes.options(tune=2, replay="off")
        with collect(what_if=False) as reports:
            inductor_passes.explain(model, mlp_batch(MLPConfig())[0], options=options)
    assert reports and all(any("tune: not timed" in note for note in r.notes) for r in reports)


@pytest.mark.parametrize("value", [-1, 1001, "many", True, 1.5, None])
def test_a_number_of_steps_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"tune=.*expected a whole number of steps from 0 to 1000"):
        PassConfig(tune=value)


def test_a_number_of_steps_may_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDUCTOR_PASSES_TUNE", "7")
    assert PassConfig.from_env().tune == 7 and inductor_passes.options(tune=0)


def test_the_report_has_a_table_of_what_was_measured(tmp_path: Path) -> None:
    planned = plan([4 * MS] * 3, [MS] * 3)
    found = account(planned, World([9 * MS] * 3, late_ns=(0, 30 * MS)).records(planned))
    second = Swap(SwapOutcome.KEPT, call=59, before_ns=9 * MS, after_ns=7 * MS, predicted_ns=6 * MS)
    second = dataclasses.replace(second, plan="plan.json", peak_bytes=5 << 20)
    measured = timing(planned, found, profile="tuned.json", profile_hash="abc")
    report = GraphReport("forward", 0, timing=dataclasses.replace(measured, swap=second))
    assert GraphReport.from_json(report.to_json()) == report
    with (tmp_path / "out").open("w") as out:
        Console(file=out, width=160).print(render_graph(report))
    text = (tmp_path / "out").read_text()
    parts = ("measured in 5 steps of 2 ranks (0-1): step", "late peer", "30 ms, rank 1 last")
    swapped = "planned again: swapped in at call 59, faster; step 9 ms before, 7 ms after; its planned peak 5 MiB"
    for part in (*parts, "corrected cost profile abc: tuned.json", swapped, "; plan in plan.json"):
        assert part in text, text
    assert TIMING in KINDS
    back = dataclasses.replace(second, outcome=SwapOutcome.RETURNED, back=67, before_ns=7 * MS, after_ns=9 * MS)
    report = dataclasses.replace(report, timing=dataclasses.replace(measured, swap=back))
    with (tmp_path / "out").open("w") as out:
        Console(file=out, width=160).print(render_graph(report))
    text = (tmp_path / "out").read_text()
    assert "swapped in at call 59, not faster, swapped back at call 67; step 7 ms before, 9 ms after" in text, text
    assert "; the first plan in plan.json" in text, "the plan in the file is the one that runs"


def test_graphs_that_did_not_run_often_enough_are_named_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    graphs = measuring._Graphs()
    planned = plan([MS], [MS])
    modules: list[dict[str, Any]] = [{}, {}]
    for number, module in enumerate(modules):
        exec(PLAIN, module)
        graphs.add(planned, f"{number}/0", module, "not kept")
    for _ in range(1 + planned.about.steps):
        modules[0]["call"]([torch.ones(1)])
    assert graphs.wait(60)
    caplog.clear()
    graphs._tell_untimed()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "inductor_passes: tune=5: the program ended before these graphs had run 6 times, so nothing is known of them: "
        "forward_0 [1/0]"
    )


def test_a_profile_that_cannot_be_written_is_said_by_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "tuned.json")
    planned = plan([MS], [MS])
    planned = dataclasses.replace(planned, about=dataclasses.replace(planned.about, tune_file=path))
    found = account(planned, World([MS]).records(planned))
    where, note, why = measuring._saved(measuring._graphs.gathered, planned, found, CostProfile.default("cpu"))
    assert where == note == "" and why.startswith(f"the cost profile cannot be written to tune_file={path!r}: ")
