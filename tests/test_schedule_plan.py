"""The planner against brute force, its invariants, and readable schedules of small training steps."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
import textwrap
from collections.abc import Iterable

import pytest
from expecttest import assert_expected_inline
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inductor_passes.schedule.bounds import lower_bound, one_machine
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Kind, Lane, Problem, Task
from inductor_passes.schedule.robust import disturbed
from inductor_passes.schedule.simulate import simulate
from inductor_passes.schedule.tables import tables
from tests.support.processes import LIMIT_S, environment
from tests.support.schedule_graphs import (
    best_makespan,
    fsdp_backward,
    fsdp_forward,
    hsdp_backward,
    moe_forward,
    random_problem,
    tp_fsdp_backward,
    training_graphs,
)


def against_brute_force(seeds: range, tasks: int, effort: int) -> tuple[list[float], list[str]]:
    """Makespan / optimum of every instance and budget that can be met, and what went wrong."""
    ratios, wrong = [], []
    for seed in seeds:
        problem = random_problem(seed, tasks, fences=seed % 4 == 0)
        peak = peak_bytes(problem)
        for budget in (None, peak, peak + 4, peak - 3):
            optimum = best_makespan(problem, budget)
            found = plan(problem, budget, effort=effort)
            if optimum is not None:
                assert found.lower_bound_ns <= optimum
            if optimum is None or (not found.feasible and optimum > found.input_makespan_ns):
                assert found.order == problem.input_order
                continue
            if not found.feasible:
                wrong.append(f"seed {seed} budget {budget}: {optimum} ns fits, nothing found")
                continue
            assert found.makespan_ns >= optimum
            ratios.append(found.makespan_ns / optimum if optimum else 1.0)
    return ratios, wrong


def test_brute_force_eight_tasks() -> None:
    ratios, wrong = against_brute_force(range(240), 8, effort=1)
    assert not wrong
    assert len(ratios) > 650
    assert sum(r == 1 for r in ratios) >= 0.95 * len(ratios)
    assert max(ratios) <= 1.03


def test_brute_force_nine_tasks() -> None:
    ratios, wrong = against_brute_force(range(1000, 1050), 9, effort=1)
    assert not wrong
    assert sum(r == 1 for r in ratios) >= 0.95 * len(ratios)
    assert max(ratios) <= 1.03


def test_constructions_alone_are_close_on_random_instances() -> None:
    """Without any search the list schedules stay within a tenth of the optimum on average."""
    ratios, _ = against_brute_force(range(3000, 3060), 8, effort=0)
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.1


def slack_is_worth_it(problem: Problem, order: tuple[int, ...]) -> bool:
    """Under disturbances the order takes at least 1% less time on average than the input's."""
    t = tables(problem)
    return disturbed(t, order).mean_ns < 0.99 * disturbed(t, problem.input_order).mean_ns + 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 40), st.sampled_from([None, 0, 3, -2]))
@example(553, 6, None)
def test_invariants(seed: int, tasks: int, slack: int | None) -> None:
    problem = random_problem(seed, tasks, fences=seed % 3 == 0)
    peak = peak_bytes(problem)
    budget = None if slack is None else peak + slack
    found = plan(problem, budget)
    problem.check_order(found.order)
    timeline = simulate(problem, found.order)
    assert (timeline.makespan_ns, timeline.peak_bytes) == (found.makespan_ns, found.peak_bytes)
    assert found.lower_bound_ns <= found.makespan_ns <= found.input_makespan_ns
    assert (found.input_makespan_ns, found.input_peak_bytes) == (simulate(problem).makespan_ns, peak)
    if budget is not None:
        assert found.peak_bytes <= budget or (not found.feasible and found.order == problem.input_order)
    if found.makespan_ns == found.input_makespan_ns and found.feasible and (budget is None or peak <= budget):
        assert found.order == problem.input_order or slack_is_worth_it(problem, found.order)
    assert plan(problem, budget) == found


@pytest.mark.parametrize("effort", [0, 1])
@pytest.mark.parametrize("layers", [4, 24])
def test_training_graphs_against_the_bound(layers: int, effort: int) -> None:
    """Unlimited memory reaches the bound; within the input's peak the distance stays small."""
    gaps = []
    for problem in training_graphs(layers):
        free = plan(problem, None, effort=effort)
        assert free.gap <= 1e-9, problem.name
        peak = peak_bytes(problem)
        tight = plan(problem, peak, effort=effort)
        assert tight.peak_bytes <= peak
        gaps.append(tight.gap)
    limit = 1.06 if layers > 4 else 1.2
    assert math.exp(sum(math.log(1 + g) for g in gaps) / len(gaps)) <= limit


def test_memory_budget_is_where_prefetching_stops() -> None:
    """More memory never costs time, and a cap between the extremes holds."""
    problem = fsdp_backward(12, gather_ns=1100, scatter_ns=1100)
    peak = peak_bytes(problem)
    spans = []
    for extra in (0, 80, 160, 320, 640):
        found = plan(problem, peak + extra)
        assert found.peak_bytes <= peak + extra
        spans.append(found.makespan_ns)
    assert spans[0] > spans[-1]
    assert spans == sorted(spans, reverse=True)
    assert plan(problem, None).makespan_ns <= spans[-1]


def test_equal_time_takes_the_least_memory() -> None:
    """One gather ahead is enough, so the plan holds two layers' parameters, not all."""
    problem = fsdp_forward(10, gather_ns=200)
    found = plan(problem, None)
    assert found.gap == 0
    # The input's peak is that of the last layer, where nothing is left to prefetch.
    assert found.peak_bytes == peak_bytes(problem)


def labels(problem: Problem, order: Iterable[int]) -> str:
    return textwrap.fill(problem.schedule_text(order), 80) + "\n"


def planned(problem: Problem, budget: int | None) -> str:
    return labels(problem, plan(problem, budget).order)


def test_schedule_fsdp_forward() -> None:
    problem = fsdp_forward(4, parts=2)
    assert_expected_inline(labels(problem, problem.input_order), """\
AG0 WAG0 mm mm AG1 WAG1 mm mm AG2 WAG2 mm mm AG3 WAG3 mm mm loss
""")
    assert_expected_inline(planned(problem, None), """\
AG0 AG1 WAG0 mm AG2 mm WAG1 mm mm AG3 WAG2 mm mm WAG3 mm mm loss
""")
    assert_expected_inline(planned(problem, peak_bytes(problem)), """\
AG0 AG1 WAG0 mm mm AG2 WAG1 mm mm WAG2 mm mm AG3 WAG3 mm mm loss
""")


def test_schedule_fsdp_backward() -> None:
    problem = fsdp_backward(3, parts=2)
    assert_expected_inline(labels(problem, problem.input_order), """\
AG2 WAG2 dx dw dx dw cat RS2 WRS2 AG1 WAG1 dx dw dx dw cat RS1 WRS1 AG0 WAG0 dx
dw dx dw cat RS0 WRS0 end
""")
    assert_expected_inline(planned(problem, None), """\
AG2 AG1 dw WAG2 dx dx dw cat RS2 AG0 WAG1 dx dw WRS2 dx dw cat RS1 WAG0 dx dw dw
cat RS0 dx end WRS1 WRS0
""")
    assert_expected_inline(planned(problem, peak_bytes(problem)), """\
AG2 dw WAG2 dx dx dw cat RS2 dw WRS2 AG1 WAG1 dx dx dw cat AG0 RS1 dw WAG0 dx
WRS1 dw cat RS0 dx end WRS0
""")


def test_weight_gradients_cover_tensor_parallel_reductions() -> None:
    problem = tp_fsdp_backward(2)
    assert_expected_inline(planned(problem, None), """\
AG1 AG0 dw WAG1 dx dx AR1 dw WAR1 dx dx AR1 dw dw cat RS1 WAG0 WAR1 dx dx AR0 dw
dw WAR0 dx dw dw cat RS0 dx AR0 WAR0 end WRS0 WRS1
""")


def test_moe_shared_experts_cover_dispatch() -> None:
    assert_expected_inline(planned(moe_forward(2), None), """\
AG0 WAG0 AG1 attn router A2A0 shared WA2A0 experts A2B0 shared2 WA2B0 add WAG1
attn router A2A1 shared WA2A1 experts A2B1 shared2 WA2B1 add loss
""")


def test_ties_go_to_the_input() -> None:
    b = fsdp_forward(1)
    found = plan(b, None)
    assert found.order == b.input_order and found.method == "input"


def test_fence_is_not_crossed() -> None:
    problem = fsdp_forward(6)
    fences = [i for i, task in enumerate(problem.tasks) if task.label == "mm"][9:10]
    fenced = Problem(
        tasks=tuple(
            Task(t.name, t.kind, t.duration_ns, t.lane, t.start, label=t.label, fence=i in fences)
            for i, t in enumerate(problem.tasks)
        ),
        preds=problem.preds,
        lanes=problem.lanes,
        storages=problem.storages,
    )
    found = plan(fenced, None)
    at = found.order.index(fences[0])
    for i, task in enumerate(fenced.tasks):
        if task.kind is not Kind.COMPUTE:
            assert (found.order.index(i) < at) == (i < fences[0])
    assert plan(problem, None).makespan_ns < found.makespan_ns < found.input_makespan_ns


def test_fixed_lane_order_is_kept() -> None:
    for lane in (Lane("pg0", fixed_order=True), Lane("pg0")):
        problem = fsdp_backward(8, lanes=(lane,))
        found = plan(problem, None)
        starts = [i for i in found.order if problem.tasks[i].kind is Kind.START]
        assert (starts == sorted(starts)) == lane.fixed_order


def test_shared_link_is_never_faster_than_separate_lanes() -> None:
    for compute_ns, busy in ((2000, False), (500, True)):
        shared, separate = (plan(hsdp_backward(10, compute_ns, link=link), None) for link in ("nvlink", ""))
        assert separate.makespan_ns <= shared.makespan_ns
        assert (separate.makespan_ns < shared.makespan_ns) is busy


def test_unreachable_budget_returns_the_input() -> None:
    problem = fsdp_forward(3)
    found = plan(problem, 10)
    assert (found.order, found.feasible, found.method) == (problem.input_order, False, "input")


def test_stays_deterministic_across_processes() -> None:
    """Another hash seed must not change a plan: ranks have to agree."""
    script = (
        "from tests.support.schedule_graphs import fsdp_backward, random_problem\n"
        "from inductor_passes.schedule.plan import plan\n"
        "from inductor_passes.schedule.memory import peak_bytes\n"
        "for p in [fsdp_backward(9), random_problem(5, 22), random_problem(6, 26)]:\n"
        "    print(plan(p, peak_bytes(p)).order)\n"
    )
    digests = set()
    for seed in ("1", "77"):
        env = environment(PYTHONHASHSEED=seed)
        out = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True, timeout=LIMIT_S)
        digests.add(hashlib.sha256(out.stdout).hexdigest())
    assert len(digests) == 1


def test_one_machine_bound() -> None:
    """Seven jobs of Carlier's 1982 example: heads, durations, tails; the preemptive optimum is 49."""
    jobs = [(10, 5, 7), (13, 6, 26), (11, 7, 24), (20, 4, 21), (30, 3, 8), (0, 6, 17), (30, 2, 0)]
    assert one_machine(jobs) == 49
    assert one_machine([]) == 0


def test_bound_counts_lane_load_and_compute_load() -> None:
    problem = fsdp_forward(5, compute_ns=1000, gather_ns=3000)
    # Five gathers in a row, then the last layer's kernels and the loss.
    assert lower_bound(problem) == 5 * 3000 + 1000 + 250
    problem = fsdp_forward(5, compute_ns=1000, gather_ns=100)
    assert lower_bound(problem) == 100 + 5 * 1000 + 250
