"""What a step is chosen by is what its graphs then plan: better plans for the points that count, the buckets of the
chosen one handed on, forward without what was computed only to be saved, and gradients of uneven shards at their size.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.bucket.candidates import candidates
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.bucket.handed import handed
from inductor_passes.bucket.question import Question
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import agreeing
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build
from inductor_passes.report import GraphReport, Reason
from inductor_passes.rewriting.step_facts import StepFacts
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import INPUT, Kind, Lane, Problem, Storage, Task
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.step import derived, recompute
from inductor_passes.step.derived import Candidate, Step
from inductor_passes.step.merging import Merging
from tests.support.async_tp_programs import Program, rs, trace
from tests.support.bucket_graphs import narrow_then_wide
from tests.support.compiled import compiled_reports
from tests.support.world import fake_world
from tests.test_step_merging import gathers, travelling


class Narrow(nn.Module):
    """Layers of widths that two ranks do not share evenly, whose messages cost latency only."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        widths = [16, 24, 48, 17, 32]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(widths[k % 5]), nn.Linear(widths[k % 5], widths[(k + 1) % 5]))
            for k in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


def narrow(reshard: bool, budget: str) -> list[GraphReport]:
    with fake_world(2):
        model = simple_fsdp(Narrow(10), init_device_mesh("cpu", (2,)), reshard_after_forward=reshard)
        return compiled_reports(model, torch.randn(64, 16), memory_budget=budget)


def planned_ns(reports: list[GraphReport]) -> int:
    return sum(r.schedules[-1].makespan_after_ns for r in reports)


def reduced(packed: bool) -> Program:
    """Gradients of 15 rows and of 7, reduced over two ranks together or each for itself; this rank has the larger part.
    """

    def whole(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = nn.functional.pad(a.mm(a.t())[:, :4], (0, 0, 0, 1)), nn.functional.pad(b.sin(), (0, 0, 0, 1))
        if not packed:
            return rs(one) / 2, rs(other) / 2
        message = torch.cat([one.view(2, -1), other.view(2, -1)], 1)
        received = rs(message).view(-1)
        return received[:32].view(8, 4) / 2, received[32:].view(4, 4) / 2

    return Program("reduced", whole, ((15, 4), (7, 4)))


def test_a_shard_that_is_cut_off_twice_is_no_message_of_two() -> None:
    """On a rank whose shard is half of the largest, two cuts have the size of what was received."""

    def twice(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        received = rs(nn.functional.pad(a.sin(), (0, 0, 0, 2)))
        return received[:2] * 2, received[:2] * 3

    with fake_world(2):
        fx = build(GraphView(trace(Program("twice", twice, ((6, 4),))).graph), CostProfile.default("cpu"))
    assert fx.uneven
    assert [s.size_bytes for s in fx.problem.storages if s.pinned and s.producer != INPUT] == [4 * 4 * 4] * 2


@pytest.mark.parametrize("packed", [True, False])
def test_a_gradient_of_an_uneven_shard_counts_with_its_piece_of_a_message(packed: bool) -> None:
    """All ranks see the padded piece. With the whole message each, hardly anything would fit a budget."""
    with fake_world(2):
        fx = build(GraphView(trace(reduced(packed)).graph), CostProfile.default("cpu"))
    assert fx.uneven and fx.ranks_agree
    gradients = [s.size_bytes for s in fx.problem.storages if s.pinned and s.producer != INPUT]
    assert gradients == [8 * 4 * 4, 4 * 4 * 4]


def test_gradients_of_uneven_shards_are_merged_within_a_budget() -> None:
    reports = narrow(False, "+5%")
    backward = next(r for r in reports if r.phase == "backward")
    (bucket,) = [p for p in backward.passes if p.name == "bucket"]
    assert bucket.rolled_back is None and not [d for d in bucket.decisions if d.reason is Reason.OVER_BUDGET]
    # 20 parameters of each of two layers' kinds are reduced.
    assert bucket.metrics["collectives_before"] == 40 and bucket.metrics["collectives_after"] <= 8


def test_the_least_memory_is_planned_with_the_messages_that_fit_it() -> None:
    least, more = narrow(False, "-90%"), narrow(False, "+5%")
    (chosen,) = [p.metrics for r in least for p in r.passes if p.name == recompute.NAME]
    assert planned_ns(least) <= 1.1 * chosen["step_ns"]
    # Without them each of the 60 messages costs its latency.
    assert planned_ns(least) <= 4 * planned_ns(more)
    curve = next(note for r in least for note in r.notes if "over its peak" in note)
    sizes = [int(size) for size in re.findall(r"(\d+) \(\d+\.\d%\): \d+ ns", curve)]
    assert sizes and sizes == sorted(set(sizes)), curve


def test_buckets_are_handed_over_by_name() -> None:
    with fake_world(8) as world:
        view = GraphView(narrow_then_wide(world, 12).graph)
        problem, (found, _) = build(view, CostProfile.default("h100")).problem, candidates(view)
        costs = BucketCosts(view, CostProfile.default("h100"))
        limit = peak_bytes(problem)
        before = plan(problem, limit, effort=0)
        question = Question(problem, before, found, Dependencies(view), costs, limit)
        names = [c.collective.start.name for c in found]
        one = handed(question, proposed=((names[0], "gone", names[1]), (names[1], names[2]), (names[3],)))
        # Nobody travels twice, and nobody alone.
        assert [[c.collective.start.name for c in bucket] for bucket in one] == [names[:2]]
        assert handed(question, proposed=()) == []
        assert functools.partial(handed, proposed=(tuple(names),))(question)


def test_what_is_handed_over_is_part_of_the_key_of_caches() -> None:
    facts = StepFacts(1, 2, notes=("a note",), proposed=(("a", "b"),))
    made, arguments = facts.__reduce__()
    assert made(*arguments) == StepFacts(1, 2, proposed=(("a", "b"),))


@pytest.mark.parametrize("cap", [0, 400, 2000, 1 << 20])
def test_buckets_fit_where_they_are_said_to(cap: int) -> None:
    sizes = [100] * 12
    problem = gathers(sizes)
    merging = Merging(problem, problem, (travelling(sizes), travelling(sizes)))
    least = peak_bytes(problem)
    way = merging.fitting((problem, problem), least + cap)
    for merged, proposed in zip(way.problems, way.proposed):
        found = plan(merged, least + cap, effort=0)
        assert found.feasible and found.peak_bytes <= least + cap
        inside = [name for bucket in proposed for name in bucket]
        assert len(inside) == len(set(inside)) and all(len(bucket) > 1 for bucket in proposed)
    assert way.proposed[0] if cap >= 2000 else True
    assert merging.way((problem, problem), way.proposed).problems == way.problems


def test_forward_does_not_compute_what_only_backward_reads() -> None:
    """f0 makes the result, f1 and f2 something for backward alone: computed again there, forward is without it."""
    tasks = tuple(Task(f"f{k}", Kind.COMPUTE, 10) for k in range(3))
    storages = (
        Storage(100, 0, (1,), True, "result"),
        Storage(200, 1, (2,), False, "between"),
        Storage(300, 2, (), True, "saved"),
    )
    forward = Problem(tasks, ((), (0,), (1,)), (), storages, name="forward")
    backward = Problem(
        (Task("b0", Kind.COMPUTE, 10),),
        ((),),
        (),
        (Storage(300, INPUT, (0,), False, "saved"), Storage(100, INPUT, (0,), False, "result")),
        name="backward",
    )
    step = Step(forward, backward, (Candidate("saved", 300, (1, 2), 2, (0,)),), reads={1: (1,)})
    both = derived.derived(step, (0,))
    assert both is not None
    assert [t.duration_ns for t in both[0].tasks] == [10, 0, 0] and peak_bytes(both[0]) == 100
    assert [t.name for t in both[1].tasks] == ["f1.again", "f2.again", "b0"]
    # What something else needs stays: here the saved value's own input is a result as well.
    kept = Problem(tasks, ((), (0,), (1,)), (), (storages[0], Storage(200, 1, (2,), True, "between"), storages[2]))
    both = derived.derived(Step(kept, backward, step.candidates, reads=step.reads), (0,))
    assert both is not None and [t.duration_ns for t in both[0].tasks] == [10, 10, 0]


def test_lanes_without_messages_need_no_refinement() -> None:
    problem = gathers([100] * 3)
    step = Step(problem, Problem(problem.tasks, problem.preds, (Lane("pg"),), problem.storages), ())
    found = recompute.points(step)
    assert recompute.curve(found) and all(p.proposed == ((), ()) for p in found)


class Shifted(nn.Module):
    """A constant that is made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(64, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(x + torch.tensor([0, 16, 32, 48])).sum(1))


@pytest.mark.parametrize("budget", ["0", "unlimited", "-20%"])
def test_a_model_with_a_constant_can_keep_its_parameters(budget: str) -> None:
    """A constant of a joint graph is a tensor that torch cannot copy where fake tensors are made."""
    with fake_world(2):
        model = simple_fsdp(Shifted(), init_device_mesh("cpu", (2,)), reshard_after_forward="auto")
        reports = compiled_reports(model, torch.randint(16, (8, 4)), memory_budget=budget)
    assert [r.phase for r in reports] == ["forward", "backward"]


def test_ranks_compare_what_the_partitioner_told() -> None:
    """By places: nodes are not called the same on all ranks."""
    with fake_world(8) as world:
        view = GraphView(narrow_then_wide(world, 12).graph)
        names = [c.start.name for c in view.collectives]
        one = agreeing._told(StepFacts(1, 2, proposed=((names[1], names[3]),), reached_bytes=7), view)
        assert one == "1 2 7 [[1, 3]]" and agreeing._told(None, view) == ""
        assert one != agreeing._told(StepFacts(1, 2, proposed=((names[1], names[2]),), reached_bytes=7), view)
