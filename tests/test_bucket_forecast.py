"""What is planned before a graph is merged: the problem of the merged graph, and the plan that comes with it."""

from __future__ import annotations

import dataclasses

import pytest
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.bucket.pass_ import BucketPass
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build
from inductor_passes.rewriting.contract import Facts, Outcome, Solved
from inductor_passes.schedule.carry import carried, repaired
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import INPUT, Problem, Storage
from inductor_passes.schedule.simulate import simulate
from tests.support.random_layers import random_layers
from tests.support.schedule_graphs import random_problem
from tests.support.world import fake_world, mesh_world
from tools.capture.graphs import capture
from tools.capture.models import SCENARIOS

GPU = CostProfile.default("cuda")


@dataclasses.dataclass(frozen=True)
class _Recorded(BucketPass):
    """Remembers its outcomes."""

    outcomes: list[Outcome] = dataclasses.field(default_factory=list, compare=False)

    def run(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        self.outcomes.append(super().run(graph, facts))
        return self.outcomes[-1]


def merged(gm: torch.fx.GraphModule, budget: str) -> tuple[Solved, Problem] | None:
    """What the pass expected of the graph, and the graph's problem afterwards; None where it merged nothing."""
    one = _Recorded()
    done = run_passes(gm.graph, [one], PassConfig(memory_budget=budget), GPU)
    (report,) = done.report.passes
    if not report.changed or report.rolled_back is not None:
        return None
    solved = one.outcomes[-1].solved
    assert solved is not None
    return solved, build(GraphView(gm.graph), GPU).problem


def roles(problem: Problem) -> list[tuple[int, int, int]]:
    return [(int(task.kind), task.lane, task.start) for task in problem.tasks]


def made(problem: Problem) -> list[Storage]:
    """Storages that tasks make, without their names."""
    found = [dataclasses.replace(one, name="") for one in problem.storages if one.producer != INPUT]
    return sorted(found, key=lambda one: (one.producer, one.size_bytes, one.readers, one.pinned, one.workspace))


#: ``llama70b_fsdp512`` has shards of unequal size; in fewer layers nothing is merged.
SAME = [
    *((name, 2, "0") for name in ("llama8b_fsdp64", "hybrid", "fsdp_tp_sp", "context_parallel", "latency_bound")),
    ("llama70b_fsdp512", 6, "+50%"),
]


@pytest.mark.parametrize(("scenario", "layers", "budget"), SAME)
def test_the_forecast_is_the_problem_of_the_merged_graph(scenario: str, layers: int, budget: str) -> None:
    looked = 0
    with fake_world(SCENARIOS[scenario].world):
        for gm in capture(SCENARIOS[scenario], layers).values():
            if (found := merged(gm, budget)) is None:
                continue
            solved, problem = found
            looked += 1
            forecast = solved.problem
            assert roles(forecast) == roles(problem)
            assert forecast.preds == problem.preds
            assert made(forecast) == made(problem)
            # What is not merged is where it was expected; most of a graph is not.
            same = sum(one.name == other.name for one, other in zip(forecast.tasks, problem.tasks))
            assert same > len(problem) // 2
            moved = carried(solved.plan, forecast, problem)
            assert moved is not None and moved.feasible == solved.plan.feasible
            problem.check_order(moved.order)
            assert moved.makespan_ns <= solved.plan.makespan_ns * 1.001
    assert looked


def test_the_forecast_keeps_the_order_of_random_graphs() -> None:
    """Its input order is the merged graph's: what has the same name in both comes in the same sequence."""
    looked = 0
    with mesh_world((2, 2)) as mesh:
        for seed in range(40):
            if (found := merged(random_layers(seed, mesh), "unlimited")) is None:
                continue
            solved, problem = found
            looked += 1
            kept = {task.name for task in solved.problem.tasks} & {task.name for task in problem.tasks}
            assert [t.name for t in solved.problem.tasks if t.name in kept] == [
                t.name for t in problem.tasks if t.name in kept
            ], seed
    assert looked > 10


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_a_plan_is_carried_to_a_problem_that_asks_for_more(seed: int, data: st.DataObject) -> None:
    problem = random_problem(seed, 14)
    cap = data.draw(st.sampled_from([None, simulate(problem).peak_bytes]))
    known = plan(problem, cap)
    again = carried(known, problem, problem)
    assert again is not None and again.value <= known.value
    first, second = sorted(data.draw(st.lists(st.integers(0, 13), min_size=2, max_size=2, unique=True)))
    preds = list(problem.preds)
    preds[second] = tuple(sorted({*preds[second], first}))
    stricter = dataclasses.replace(problem, preds=tuple(preds))
    order = repaired(stricter, known.order)
    stricter.check_order(order)
    # What was legal already stays as it is.
    if known.order.index(first) < known.order.index(second):
        assert order == list(known.order)
    moved = carried(known, problem, stricter)
    if cap is not None and simulate(stricter, order).peak_bytes > cap:
        assert moved is None
    else:
        assert moved is not None and moved.feasible
        stricter.check_order(moved.order)
        seen = simulate(stricter, moved.order)
        assert (moved.makespan_ns, moved.peak_bytes) == (seen.makespan_ns, seen.peak_bytes)
    shorter = dataclasses.replace(problem, tasks=problem.tasks[:-1], preds=problem.preds[:-1], storages=())
    if all(task.start != 13 for task in problem.tasks):
        assert carried(known, problem, shorter) is None


def test_merging_is_no_worse_than_the_order_alone() -> None:
    """Where merged collectives gain nothing, the graph as it is counts with the best plan that is known of it."""
    for seed in range(30):
        with mesh_world((2, 2)) as mesh:
            makespans = []
            for bucket in ("on", "off"):
                settings = PassConfig(memory_budget="unlimited", bucket=bucket, redistribute="off")
                done = run_passes(random_layers(seed, mesh).graph, passes_of(settings), settings, GPU)
                makespans.append(done.report.schedules[0].makespan_after_ns)
            assert makespans[0] <= makespans[1], seed
