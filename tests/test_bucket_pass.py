"""The pass: what it merges, why not, that the planned step never gets slower, that the budget holds, how it scales."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx

from inductor_passes.bucket.candidates import candidates
from inductor_passes.bucket.choose import choose, merged
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.bucket.greedy import greedy
from inductor_passes.bucket.pass_ import BucketPass
from inductor_passes.bucket.question import Question
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build
from inductor_passes.report import PassReport, Reason, Verdict
from inductor_passes.rewriting.merge import merge
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.robust import Disturbed
from inductor_passes.schedule.simulate import simulate
from inductor_passes.schedule.tables import Tables
from tests.support.bucket_graphs import (
    Program,
    assert_same_bits,
    aten,
    inputs_by_rank,
    kinds,
    output_layouts,
    run_all_ranks,
    text,
)
from tests.support.random_layers import random_layers
from tests.support.world import fake_world, mesh_world

GPU = CostProfile.default("cuda")
cast = torch.ops.prims.convert_element_type.default


def layers(world: str, count: int, *, width: int = 16, per_layer: int = 2, extra: int = 0) -> torch.fx.GraphModule:
    """Gathers of parameters, matmuls that use them, and a reduction of what stands for a gradient, layer by layer."""
    p = Program()
    x = p.input(8, width, dtype=torch.bfloat16)
    parameters = [[p.input(width // 8, width) for _ in range(per_layer)] for _ in range(count)]
    gradients = []
    for layer in parameters:
        for parameter in layer:
            weight = p.collective("all_gather", p.call(cast, parameter, torch.bfloat16), world)
            x = p.call(aten.relu.default, p.call(aten.mm.default, x, p.call(aten.permute.default, weight, [1, 0])))
            for _ in range(extra):
                x = p.copy_of(x)
        gradient = p.call(aten.mm.default, p.call(aten.permute.default, x, [1, 0]), x)
        gradients.append(p.collective("reduce_scatter", p.call(cast, gradient, torch.float32), world))
    return p.done(x, *gradients)


def run_pass(
    gm: torch.fx.GraphModule, one: BucketPass | None = None, *, budget: str = "+100%", profile: CostProfile = GPU
) -> PassReport:
    config = PassConfig(memory_budget=budget, verify="strict")
    done = run_passes(gm.graph, [one or BucketPass()], config, profile)
    gm.recompile()
    (report,) = done.report.passes
    return report


def test_small_collectives_travel_together_and_nothing_else_changes() -> None:
    with fake_world(8) as world:
        gm = layers(world, 6)
        inputs, layouts, before = inputs_by_rank(gm, 8), output_layouts(gm), kinds(gm)
        expected = run_all_ranks(gm, inputs)
        report = run_pass(gm, budget="+300%")
        assert report.changed and report.rolled_back is None and not report.findings
        assert len(before.split()) == 18 and len(kinds(gm).split()) < 9
        assert report.metrics["collectives_after"] == len(kinds(gm).split())
        assert report.metrics["makespan_after_ns"] < report.metrics["makespan_before_ns"]
        assert 0 < report.metrics["lower_bound_any_buckets_ns"] <= report.metrics["makespan_after_ns"]
        assert report.metrics["peak_after_bytes"] <= 4 * report.metrics["peak_before_bytes"]
        assert len(report.decisions) == 18
        applied = [d for d in report.decisions if d.verdict is Verdict.APPLIED]
        assert applied and all(d.reason is Reason.PROFITABLE and d.gain_ns > 0 for d in applied)
        assert output_layouts(gm) == layouts
        assert_same_bits(expected, run_all_ranks(gm, inputs))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_time_per_byte_does_not_grow_with_a_message(device: str, kind: str) -> None:
    """What the bound over all partitions relies on, but for rounding."""
    profile = CostProfile.default(device)
    for ranks in (2, 8, 64, 512):
        sent, received = {"all_gather": (1, ranks), "reduce_scatter": (ranks, 1)}.get(kind, (ranks, ranks))
        sizes = [64 * 5**k // 4**k for k in range(80)]
        times = [profile.communication_ns(kind, s * sent, s * received, tuple(range(ranks))) for s in sizes]
        for (small, before), (large, after) in itertools.pairwise(zip(sizes, times)):
            assert (after - 1) * small <= (before + 1) * large


def test_large_collectives_stay_alone() -> None:
    """64 MiB each: a latency saved does not pay for the copies."""
    with fake_world(8) as world:
        gm = layers(world, 3, width=4096)
        report = run_pass(gm)
        assert not report.changed and len(kinds(gm).split()) == 9
        assert {d.reason for d in report.decisions} == {Reason.NOT_PROFITABLE}
        assert all("copies included" in d.detail for d in report.decisions)


def test_without_memory_to_spare_the_graph_stays() -> None:
    with fake_world(8) as world:
        gm = layers(world, 6)
        before = text(gm)
        report = run_pass(gm, budget="0")
        reasons = {d.reason for d in report.decisions if d.verdict is Verdict.REFUSED}
        assert reasons == {Reason.MEMORY_BUDGET} and len(report.decisions) == 18
        assert not report.changed and text(gm) == before


def test_a_slower_partition_is_refused() -> None:
    """One bucket of everything makes the first matmul wait for the last parameter: the planner sees it."""
    everything = {}

    def all_in_one(question: Question) -> list[Any]:
        members = [c for c in question.found if c.collective.kind == "all_gather"]
        everything["members"] = len(members)
        return [members]

    with fake_world(8) as world:
        gm = layers(world, 4, width=2048, extra=3)
        before = text(gm)
        report = run_pass(gm, BucketPass(partitions=(all_in_one,)), budget="+100%")
        assert everything["members"] == 8 and text(gm) == before and not report.changed
        refused = [d for d in report.decisions if d.reason in (Reason.SLOWER, Reason.OVER_BUDGET)]
        assert len(refused) == 8 and "planned step" in refused[0].detail


def test_a_partition_that_loses_when_durations_are_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a bucket saves by the estimates it must not lose when they are wrong."""
    with fake_world(8) as world:
        gm = layers(world, 4)
        before = text(gm)
        def disturbed(t: Tables, order: Sequence[int]) -> Disturbed:
            return Disturbed(1_000_000_000 // t.n, 0)  # the fewer tasks, the worse

        monkeypatch.setattr("inductor_passes.schedule.plan.disturbed", disturbed)
        report = run_pass(gm, budget="+400%")
        assert text(gm) == before and not report.changed
        monkeypatch.undo()
        assert run_pass(gm, budget="+400%").changed
        assert Reason.FRAGILE in {d.reason for d in report.decisions}


@pytest.mark.parametrize("width", [16, 64, 256, 1024])
@pytest.mark.parametrize(("budget", "merges"), [("0", False), ("+10%", False), ("+100%", True), ("+300%", True)])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_the_chosen_partition_is_never_slower_and_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, width: int, budget: str, merges: bool, large: bool
) -> None:
    if large:
        monkeypatch.setattr("inductor_passes.bucket.choose.QUICK_TASKS", 0)
    with fake_world(8) as world:
        view = GraphView(layers(world, 4, width=width).graph)
        problem = build(view, GPU).problem
        peak = simulate(problem).peak_bytes
        limit = PassConfig(memory_budget=budget).budget.limit_bytes(peak)
        assert limit is not None
        costs = BucketCosts(view, GPU)
        found, _ = candidates(view)
        choice = choose(problem, found, Dependencies(view), costs, BucketPass().partitions, limit)
        alone = plan(problem, limit, effort=0)
        # With little memory a small bucket fits beside messages of these sizes, and pays.
        assert bool(choice.buckets) is (merges or width in (64, 256))
        if choice.buckets:
            after = plan(merged(problem, choice.buckets, costs), limit, effort=0)
            assert after.makespan_ns < alone.makespan_ns and after.peak_bytes <= limit and after.feasible
        elif choice.tried:
            assert choice.objection is not None
        members = [member for bucket in choice.buckets for member in bucket]
        assert len({*members}) == len(members)


def test_on_a_large_graph_the_first_partition_that_helps_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs help; everything in one message helps more."""

    def pairs(question: Question) -> list[list[Any]]:
        return [question.found[:2]]

    def everything(question: Question) -> list[list[Any]]:
        return [question.found]

    monkeypatch.setattr("inductor_passes.bucket.choose._LARGE_TASKS", 0)
    with fake_world(8) as world:
        p = Program()
        gathered = [p.collective("all_gather", p.input(8), world) for _ in range(12)]
        view = GraphView(p.done(*gathered).graph)
        problem = build(view, GPU).problem
        found, _ = candidates(view)
        costs = BucketCosts(view, GPU)
        choice = choose(problem, found, Dependencies(view), costs, (pairs, everything), None)
        assert [len(bucket) for bucket in choice.buckets] == [12]
        first = choose(problem, found, Dependencies(view), costs, (pairs,), None)
        assert choice.plan.makespan_ns < first.plan.makespan_ns < first.before.makespan_ns
        assert choice.bound_ns <= choice.plan.makespan_ns


def test_a_dependent_collective_is_refused_as_such() -> None:
    with fake_world(8) as world:
        p = Program()
        first = p.collective("all_reduce", p.input(8), world)
        gm = p.done(p.collective("all_reduce", p.call(aten.neg.default, first), world))
        report = run_pass(gm)
        assert [d.reason for d in report.decisions] == [Reason.DATA_DEPENDENCY] * 2
        assert "AR1" in report.decisions[0].detail and not report.changed


def test_kinds_can_be_switched_off_and_checked() -> None:
    with fake_world(8) as world:
        gm = layers(world, 4)
        report = run_pass(gm, BucketPass(kinds=("reduce_scatter",)), budget="+400%")
        assert sum(d.reason is Reason.DISABLED for d in report.decisions) == 8
        assert kinds(gm).count("AG") == 8 and kinds(gm).count("RS") < 4
    with pytest.raises(ValueError, match=r"broadcast.*all_gather"):
        BucketPass(kinds=("broadcast",))
    with pytest.raises(ValueError, match=r'form is .*"coalesced"'):
        BucketPass(form="fast")  # type: ignore[arg-type]


def test_the_coalesced_form_is_charged_no_copies() -> None:
    with fake_world(8) as world:
        view = GraphView(layers(world, 2).graph)
        found, _ = candidates(view)
        gathers = [c for c in found if c.collective.kind == "all_gather"]
        packed, coalesced = BucketCosts(view, GPU), BucketCosts(view, GPU, frozenset({world}))
        load = packed.load(gathers)
        assert load == coalesced.load(gathers) and load.members == len(gathers) == 4
        assert coalesced.pack_ns(load) == coalesced.unpack_ns(load) == 0
        assert packed.pack_ns(load) > 0 and packed.unpack_ns(load) > 0
        gm = layers(world, 2)
        assert run_pass(gm, BucketPass(form="coalesced")).changed
        assert "all_gather_into_tensor_coalesced" in text(gm) and "cat(" not in text(gm)


def test_the_merged_problem_is_the_problem_of_the_merged_graph() -> None:
    """Same collectives with the same durations, whichever way the problem is made."""
    with fake_world(8) as world:
        gm = layers(world, 4)
        view = GraphView(gm.graph)
        found, _ = candidates(view)
        costs = BucketCosts(view, GPU)
        problem = build(view, GPU).problem
        buckets = greedy(Question(problem, plan(problem, None, effort=0), found, Dependencies(view), costs, None))
        assert buckets
        predicted = merged(problem, buckets, costs)
        merge(gm.graph, view, [[m.collective for m in b] for b in buckets])
        rebuilt = build(GraphView(gm.graph), GPU).problem

        def starts(problem: Any) -> list[tuple[int, int]]:
            return sorted((t.duration_ns, t.lane) for t in problem.tasks if t.kind is Kind.START)

        def issue(problem: Any) -> int:
            return sum(t.issue_ns for t in problem.tasks)

        assert starts(predicted) == starts(rebuilt)
        # Packing graph inputs is a task of its own in the one and part of issuing the message in the other.
        packing = sum(t.duration_ns for t in predicted.tasks) - sum(t.duration_ns for t in problem.tasks)
        assert issue(predicted) < issue(rebuilt) <= issue(predicted) + max(packing, 0) + issue(problem)


@pytest.mark.parametrize("call_copies", [False, True])
def test_the_copies_of_a_bucket_are_priced_as_those_of_the_merged_graph(call_copies: bool) -> None:
    """Copies fuse: with casts behind a gather, with the copy into the next message, with what makes a gradient."""

    def compute_ns(problem: Problem) -> int:
        return sum(task.duration_ns for task in problem.tasks if task.kind is Kind.COMPUTE)

    folded = 0
    with mesh_world((2, 4)) as mesh:
        for seed in range(8):
            gm = random_layers(seed, mesh)
            view = GraphView(gm.graph)
            problem, (found, _) = build(view, GPU).problem, candidates(view)
            costs = BucketCosts(view, GPU, call_copies=call_copies)
            buckets = greedy(Question(problem, plan(problem, None, effort=0), found, Dependencies(view), costs, None))
            predicted, fused = merged(problem, buckets, costs), costs.fused(buckets)
            merge(gm.graph, view, [[m.collective for m in b] for b in buckets], call_copies=call_copies)
            rebuilt = build(GraphView(gm.graph), GPU).problem
            assert compute_ns(predicted) == pytest.approx(compute_ns(rebuilt), rel=0.01), seed
            gathers = (k for k, bucket in enumerate(buckets) if costs.copies_out(costs.load(bucket)))
            folded += sum(ns == 0 for k in gathers for ns in fused.copy_out_ns[k])
    # On a CPU so small members are copied out by calls, whatever reads them.
    assert (folded > 0) is not call_copies


@pytest.mark.parametrize("readers", ["loop", "matmul", "both", "nobody"])
def test_a_copy_out_costs_a_kernel_where_something_reads_memory(readers: str) -> None:
    with fake_world(8) as world:
        p = Program()
        first, second = (p.collective("all_gather", p.input(8, 8), world) for _ in range(2))
        results = [p.call(aten.neg.default, second)]
        if readers in ("loop", "both"):
            results.append(p.call(aten.neg.default, first))
        if readers in ("matmul", "both"):
            results.append(p.call(aten.mm.default, first, p.input(8, 8)))
        view = GraphView(p.done(*results).graph)
        costs, (found, _) = BucketCosts(view, GPU), candidates(view)
        fused = costs.fused([found])
        assert [ns > 0 for ns in fused.copy_out_ns[0]] == [readers in ("matmul", "both"), False]
        assert (costs.unpack_ns(costs.load(found)) > 0) is (readers in ("matmul", "both"))


def test_what_makes_a_gradient_fuses_with_the_copy_into_the_message() -> None:
    with fake_world(8) as world:
        p = Program()
        scaled = [p.call(aten.mul.Tensor, p.input(64, 8), 0.5) for _ in range(2)]
        view = GraphView(p.done(*(p.collective("reduce_scatter", one, world) for one in scaled)).graph)
        costs, (found, _) = BucketCosts(view, GPU), candidates(view)
        fused = costs.fused([found])
        kernel = costs.kernel_ns
        alone = [GPU.compute_ns(0, 2 * 64 * 8 * 4, "float32", 1)] * 2
        assert all(ns < kernel < before for ns, before in zip(fused.producers_ns.values(), alone))
        assert fused.pack_ns[0] == GPU.compute_ns(0, 2 * 64 * 8 * 4, "uint8", 1)


def calls_of(function: Callable[[], Any]) -> int:
    """How many Python functions ``function`` calls: work that does not depend on the machine's load."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_work_grows_linearly_to_ten_thousand_nodes() -> None:
    with fake_world(8) as world:
        visits, calls, nodes = [], [], []
        for count in (50, 200):
            gm = layers(world, count, extra=18)
            view = GraphView(gm.graph)
            found, _ = candidates(view)
            gathers = [c.collective for c in found if c.collective.kind == "all_gather"]
            scatters = [c.collective for c in found if c.collective.kind == "reduce_scatter"]
            groups = [pool[i : i + 5] for pool in (gathers, scatters) for i in range(0, len(pool), 5)]
            dependencies = Dependencies(view)
            assert all(dependencies.independent(group) for group in groups)
            nodes.append(len(view.nodes))
            visits.append(dependencies.visits)
            calls.append(calls_of(lambda: merge(gm.graph, view, groups)))  # noqa: B023
            gm.graph.lint()
            assert len(kinds(gm).split()) == len(groups)
        assert nodes[1] > 10_000 and len(view.collectives) == 600
        assert visits[1] / visits[0] < 1.1 * nodes[1] / nodes[0]
        assert calls[1] / calls[0] < 1.1 * nodes[1] / nodes[0]
