"""A step is chosen with the messages that it will merge: which those are, what they cost, and that it is planned so."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.cost.profile import CostProfile
from inductor_passes.records.json_text import RecordError
from inductor_passes.schedule.partition import Costs
from inductor_passes.schedule.problem import INPUT, Kind, Lane, Problem, Storage, Task
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.step import derived, recompute
from inductor_passes.step.keep import without_gathers
from inductor_passes.step.merging import Mergeable, Merging, Travels, rescaled
from inductor_passes.step.stored import StoredStep
from inductor_passes.trace.whatif import scale_links
from tests.support.compiled import compiled_reports, kept
from tests.support.world import fake_world

LINE = Costs(alpha_ns=1000.0, beta_ns_per_byte=1.0, launch_ns=10.0)


def gathers(sizes: list[int], chained: bool = False) -> Problem:
    """Gathers of these sizes, a kernel after each; ``chained``: each gather sends what the kernel before it made."""
    tasks: list[Task] = []
    preds: list[tuple[int, ...]] = []
    storages = []
    for k, size in enumerate(sizes):
        before = len(tasks)
        tasks += [
            Task(f"g{k}", Kind.START, 1000 + size, lane=0, size_bytes=size),
            Task(f"w{k}", Kind.WAIT, lane=0, start=before),
            Task(f"mm{k}", Kind.COMPUTE, 100),
        ]
        preds += [(before - 1,) if chained and k else (), (before,), (before + 1,)]
        storages.append(Storage(size, before, (before + 1, before + 2), name=f"g{k}"))
    storages.append(Storage(1 << 16, INPUT, (len(tasks) - 1,), True, "input"))
    return Problem(tuple(tasks), tuple(preds), (Lane("pg"),), tuple(storages), name="gathers")


def travelling(sizes: list[int], key: str = "a") -> Mergeable:
    members = tuple(Travels(f"g{k}", size, size, key) for k, size in enumerate(sizes))
    return Mergeable(members, {key: LINE})


def starts(problem: Problem) -> list[Task]:
    return [t for t in problem.tasks if t.kind is Kind.START]


def test_small_messages_travel_together_up_to_a_size() -> None:
    sizes = [100] * 12
    problem = gathers(sizes)
    merging = Merging(problem, problem, (travelling(sizes), travelling(sizes)))
    assert merging.sizes == 3
    counts = [len(starts(forward)) for forward, _ in merging.merged((problem, problem))]
    # An eighth of the peak holds all of them, a 128th two.
    assert counts == [6, 2, 1]
    (merged, _) = merging.merged((problem, problem))[-1]
    assert starts(merged)[0].duration_ns == 1000 + 1200


def test_messages_that_wait_for_each_other_do_not_travel_together() -> None:
    sizes = [100] * 12
    problem = gathers(sizes, chained=True)
    merging = Merging(problem, problem, (travelling(sizes), travelling(sizes)))
    assert merging.sizes == 0 and merging.merged((problem, problem)) == []


def test_nothing_is_looked_at_where_latency_is_nothing() -> None:
    sizes = [10_000_000] * 4
    problem = gathers(sizes)
    assert Merging(problem, problem, (travelling(sizes), travelling(sizes))).sizes == 0
    assert Merging(problem, problem, (Mergeable(), Mergeable())).sizes == 0


def test_a_state_has_the_members_that_it_still_sends() -> None:
    sizes = [100] * 12
    problem = gathers(sizes)
    merging = Merging(problem, problem, (travelling(sizes), travelling(sizes)))
    there = without_gathers(problem, {f"g{k}" for k in range(9)})
    forward, backward = merging.merged((problem, there))[-1]
    assert [t.duration_ns for t in starts(forward)] == [2200] and [t.duration_ns for t in starts(backward)] == [1300]
    only_one = without_gathers(problem, {f"g{k}" for k in range(11)})
    assert [t.name for t in starts(merging.merged((problem, only_one))[-1][1])] == ["g11"]


def test_lines_follow_other_links() -> None:
    sizes = [100, 400, 800]
    problem = gathers(sizes)
    part = travelling(sizes)
    assert rescaled(part, problem, problem) == part
    slow = scale_links(problem, bandwidth=Fraction(1, 4), latency=Fraction(3))
    line = rescaled(part, problem, slow).costs["a"]
    assert line.alpha_ns == pytest.approx(3000, rel=0.01) and line.beta_ns_per_byte == pytest.approx(4, rel=0.01)
    # Of equal sizes nobody can tell latency and rate apart: both grow as the durations did.
    equal = gathers([100, 100])
    twice = dataclasses.replace(
        equal, tasks=tuple(dataclasses.replace(t, duration_ns=2 * t.duration_ns) for t in equal.tasks)
    )
    line = rescaled(travelling([100, 100]), equal, twice).costs["a"]
    assert (line.alpha_ns, line.beta_ns_per_byte, line.launch_ns) == (2000.0, 2.0, 20.0)


class Tiny(nn.Module):
    """Layers whose messages cost latency only, and weights that are read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 48)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(48), nn.Linear(48, width), nn.GELU(), nn.Linear(width, 48))
            for width in (32, 128, 40, 96)
        )
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(48)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for k, layer in enumerate(self.layers):
            h = h + layer(h * self.scales[2 * k]) * self.scales[2 * k + 1]
        return h @ self.embedding.weight.T


def tiny() -> nn.Module:
    return simple_fsdp(Tiny(), init_device_mesh("cpu", (4,)), reshard_after_forward="auto")


TOKENS = torch.arange(512).remainder(500).reshape(8, 64)


def test_little_is_lost_by_trying_all_sizes_for_a_few_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that win at the ends and in the middle are those that win between: within 2% at every limit."""
    with fake_world(4):
        compiled_reports(tiny(), TOKENS, memory_budget="-10%", dump_problem=str(tmp_path))
    (path,) = tmp_path.glob("rank0_step_*.json")
    stored = StoredStep.from_json(json.loads(path.read_text()))
    merged: list[int] = []
    plain = Merging.ways

    def counted(self: Merging, both: Any, sizes: Any) -> Any:
        merged.append(len([*sizes]))
        return plain(self, both, sizes)

    monkeypatch.setattr(Merging, "ways", counted)
    few, tried = recompute.points(stored.step, stored.gathered, merging=stored.merging), sum(merged)
    merged.clear()
    monkeypatch.setattr(recompute, "_probes", lambda step, everyone: ([*everyone], []))
    everything = recompute.points(stored.step, stored.gathered, merging=stored.merging)
    assert stored.merging.sizes > 1 and tried < sum(merged)
    for point in recompute.curve(everything):
        found = recompute.best(few, point.peak_bytes)
        assert found is not None and found.step_ns <= 1.02 * point.step_ns


def test_the_choice_is_made_with_merged_messages(tmp_path: Path) -> None:
    with fake_world(4):
        reports = compiled_reports(tiny(), TOKENS, memory_budget="-10%", dump_problem=str(tmp_path))
    chosen = next(p.metrics for r in reports for p in r.passes if p.name == recompute.NAME)
    made = sum(r.schedules[-1].makespan_after_ns for r in reports)
    assert 0.9 * made <= chosen["step_ns"] <= 1.1 * made
    (path,) = tmp_path.glob("rank0_step_*.json")
    stored = StoredStep.from_json(json.loads(path.read_text()))
    assert StoredStep.from_json(stored.to_json()) == stored
    found = recompute.points(stored.step, stored.gathered, merging=stored.merging)
    point = recompute.best(found, int(chosen["limit_bytes"]))
    assert point is not None and point.step_ns == chosen["step_ns"]
    alone = recompute.best(recompute.points(stored.step, stored.gathered), int(chosen["limit_bytes"]))
    assert alone is not None and alone.step_ns > 5 * point.step_ns
    # Elsewhere they have other sizes and prices.
    many = stored.priced(CostProfile.default("h100"), 64)
    line, other = (one.mergeable[0].costs["0"] for one in (stored, many))
    assert other.alpha_ns < line.alpha_ns and many.merging.sizes
    ones = dict(zip((o.name for o in stored.mergeable[0].members), stored.mergeable[0].members))
    moved = [(o.sent_bytes, ones[o.name].sent_bytes) for o in many.mergeable[0].members]
    assert all(after < before for after, before in moved if before > 64)


def test_what_is_kept_leaves_room_for_merged_messages() -> None:
    steps, numbers = [], []
    with fake_world(4):
        for budget in ("0", "64KiB", "256KiB", "unlimited"):
            reports = compiled_reports(tiny(), TOKENS, memory_budget=budget)
            choice = kept(reports)
            assert choice is not None
            numbers.append(choice.metrics["kept"])
            steps.append(sum(r.schedules[-1].makespan_after_ns for r in reports))
            # The choice is planned quickly, and the graphs then thoroughly.
            assert 0.9 * steps[-1] <= choice.metrics["step_ns"] <= 1.25 * steps[-1]
    assert steps == sorted(steps, reverse=True) and numbers[-1] > numbers[0]


@pytest.mark.parametrize("change", [
    {"mergeable": []},
    {"mergeable": [{"members": [{"name": "g", "sent_bytes": -1, "received_bytes": 0, "key": "0"}]}, {}]},
    {"mergeable": [{"costs": {"0": {"alpha_ns": -1.0, "beta_ns_per_byte": 0.0}}}, {}]},
])
def test_a_file_with_impossible_messages_is_refused(change: dict[str, object]) -> None:
    problem = gathers([100, 100])
    data = StoredStep(derived.Step(problem, problem, ())).to_json()
    assert StoredStep.from_json(data).mergeable == (Mergeable(), Mergeable())
    with pytest.raises(RecordError, match="mergeable"):
        StoredStep.from_json({**data, **change})
