"""One cap for all passes: computed from the graph that came in, held by what comes out, and never a loss of time."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inductor_passes.authoring import (
    Compilation,
    CostProfile,
    GraphView,
    PassConfig,
    Timeline,
    build,
    passes_of,
    run_passes,
    simulate,
)
from inductor_passes.bucket import choose
from inductor_passes.engine import pipeline
from inductor_passes.ir.canonical import shards
from inductor_passes.problems.fx import kept_by_caller
from inductor_passes.rewriting.arrange import arrange
from inductor_passes.rewriting.contract import Cap
from inductor_passes.verify.facts.view import View
from inductor_passes.verify.memory import peak_of
from tests.support.graphs import GraphBuilder, aten, c10d
from tests.support.random_layers import random_layers
from tests.support.world import mesh_world
from tools.fuzzing import cases, programs

BUDGETS = ("0", "+5%", "+25%", "+100%", "unlimited")
GPU = CostProfile.default("cuda", 8)


def compiled(gm: torch.fx.GraphModule, **fields: str) -> tuple[Compilation, Timeline]:
    """What became of a graph, and the order that it has now, simulated."""
    config = PassConfig(**{"verify": "strict", **fields})
    done = run_passes(gm.graph, passes_of(config), config, GPU)
    return done, simulate(build(GraphView(gm.graph), GPU).problem)


def held(done: Compilation, after: Timeline) -> bool:
    """Whether the cap holds, or, where the graph came in above it, whether the graph is no higher."""
    limit, before = done.cap.limit_bytes, done.cap.input_peak_bytes
    assert before is not None or limit is None
    return limit is None or after.peak_bytes <= max(limit, before or 0)


def test_a_rewrite_that_takes_memory_leaves_nothing_over_the_cap() -> None:
    """Two nested gathers become one: its unpacking takes memory, and ``memory_budget="0"`` has none."""
    with mesh_world((2, 4)) as mesh:
        b = GraphBuilder()
        x = b.placeholder("x", 16, 8)
        for d in (1, 0):
            start = b.call(c10d.all_gather_into_tensor.default, x, mesh.size(d), mesh.get_group(d).group_name)
            x = b.call(c10d.wait_tensor.default, start)
        b.graph.output((b.call(aten.relu.default, x),))
        gm = torch.fx.GraphModule(torch.nn.Module(), b.graph)
        before = simulate(build(GraphView(gm.graph), GPU).problem).peak_bytes
        done, after = compiled(gm, memory_budget="0")
    assert done.cap.limit_bytes == done.cap.input_peak_bytes == before
    assert after.peak_bytes <= before


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(BUDGETS), st.sampled_from(["exact", "reassociate"]))
def test_the_cap_holds_after_all_passes(seed: int, budget: str, tier: str) -> None:
    with mesh_world((2, 4)) as mesh:
        done, after = compiled(random_layers(seed, mesh), memory_budget=budget, redistribute=tier)
        assert held(done, after), [(p.name, p.changed, p.rolled_back) for p in done.report.passes]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(BUDGETS))
def test_no_pass_makes_the_planned_step_slower(seed: int, budget: str) -> None:
    with mesh_world((2, 4)) as mesh:
        _, best = compiled(random_layers(seed, mesh), memory_budget=budget, redistribute="reassociate")
        for off in ({"bucket": "off"}, {"redistribute": "off"}, {"bucket": "off", "redistribute": "off"}):
            fields = {"memory_budget": budget, "redistribute": "reassociate", **off}
            _, other = compiled(random_layers(seed, mesh), **fields)
            assert best.makespan_ns <= other.makespan_ns, off


@pytest.mark.parametrize("seed", [*range(1, 5), 23655])  # the last: buckets that fit into "0" are the better ones
def test_more_memory_is_not_slower(seed: int) -> None:
    with mesh_world((2, 4)) as mesh:
        steps = [compiled(random_layers(seed, mesh), memory_budget=b)[1].makespan_ns for b in BUDGETS]
    for less, more in itertools.pairwise(steps):
        assert more <= less


@pytest.mark.parametrize("budget", ["+25%", "unlimited"])
def test_what_is_not_planned_would_not_have_won(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions and whole runs are left out where their bound says that they lose: the same graphs come out."""
    with mesh_world((2, 4)) as mesh:
        fast, plans = [], 0
        for again in range(2):
            if again:
                monkeypatch.setattr(choose, "lower_bound", lambda problem: 0)
                monkeypatch.setattr(choose, "bound_ns", lambda *_: 0)
            with mock.patch.object(choose, "plan", side_effect=choose.plan) as planned:
                for seed in range(1, 5):
                    gm = random_layers(seed, mesh)
                    compiled(gm, memory_budget=budget)
                    fast.append(str(gm.graph))
            plans, before = planned.call_count, plans
    assert fast[:4] == fast[4:]
    assert before < plans


def test_more_effort_plans_larger_graphs_again_with_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is normal for small graphs only is done for larger ones with ``effort="high"``."""
    monkeypatch.setattr(pipeline, "ALTERNATIVES_NODES", pipeline.ALTERNATIVES_NODES // pipeline.PATIENT)
    normal, high = [], []
    with mesh_world((2, 4)) as mesh:
        for found, effort in ((normal, "normal"), (high, "high")):
            for budget in BUDGETS[:2]:
                _, after = compiled(random_layers(6, mesh), memory_budget=budget, effort=effort)
                found.append(after.makespan_ns)
    assert high == sorted(high, reverse=True)
    assert all(more <= less for more, less in zip(high, normal)) and high != normal


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
@example(28, True)  # what prepares a bucket's message was counted until the wait
def test_planner_and_verifier_mean_the_same_by_peak(seed: int, planned: bool) -> None:
    """Two replays, written twice: over tasks and storages, and over nodes."""
    with mesh_world((2, 4)) as mesh:
        gm = random_layers(seed, mesh)
        if planned:
            compiled(gm, memory_budget="+25%")
        freed = [n.name for n in gm.graph.nodes if n.op == "placeholder" and not kept_by_caller(n, False)]
        view = GraphView(gm.graph)
        assert simulate(build(view, GPU).problem).peak_bytes == peak_of(View(gm.graph), freed)


@pytest.mark.parametrize("seed", range(4))
def test_planner_and_verifier_mean_the_same_by_peak_of_any_program(seed: int) -> None:
    """Transfers, coalesced collectives, results in place, views, lists of views, inputs that backward may free.

    The planner knows tasks only. Where nodes of a task live and die within it, it may count more, but never less; and
    where shards are uneven it counts those of the largest rank.
    """
    alike = 0
    with cases.world(4) as groups:
        for number in range(40):
            case = cases.random_case(random.Random(f"peak {seed}/{number}"))
            gm = programs.build(case, groups)
            if number % 4 == 0:
                run_passes(gm.graph, passes_of(PassConfig(**case.settings)), PassConfig(**case.settings), GPU)
            if shards(GraphView(gm.graph)).uneven:
                continue
            found = build(GraphView(gm.graph), GPU)
            # What prepares a message, or trims a result, moves to where the planner counts it.
            arrange(gm.graph, found.node_order(range(len(found.problem.tasks))))
            freed = [n.name for n in gm.graph.nodes if n.op == "placeholder" and not kept_by_caller(n, case.backward)]
            planned, verified = simulate(found.problem).peak_bytes, peak_of(View(gm.graph), freed)
            assert verified is not None
            within = any(s.name.endswith(".working") for s in found.problem.storages)
            assert planned == verified or (within and planned > verified), f"program {number}\n{gm.graph}"
            alike += planned == verified
    assert alike > 20


def test_what_is_sent_lives_until_the_send_has_been_waited_for() -> None:
    """Found by the fuzzer: the planner let go of it when the send was issued."""
    with mesh_world((2, 2)) as mesh:
        b = GraphBuilder()
        x = b.placeholder("x", 16, 8)
        sent = b.call(aten.relu.default, x)
        send = b.call(c10d.isend.default, sent, 1, 0, mesh.get_group(0).group_name)
        last = b.call(aten.neg.default, b.call(aten.neg.default, x))
        b.call(c10d.wait_tensor.default, send)
        b.graph.output((last,))
        problem = build(GraphView(b.graph), GPU).problem
        # x, what is sent, and the two results behind each other
        assert simulate(problem).peak_bytes == peak_of(View(b.graph)) == 4 * 512


def test_a_view_that_nobody_reads_keeps_no_memory_alive() -> None:
    """Found by the fuzzer; nor is an input that nobody reads ever let go."""
    b = GraphBuilder()
    x, unread = b.placeholder("x", 16, 8), b.placeholder("unread", 4, 8)
    temporary = b.call(aten.relu.default, x)
    kept = b.call(aten.neg.default, temporary)
    b.call(aten.view.default, unread, [8, 4])
    last = b.call(aten.mul.Tensor, kept, kept)
    b.call(aten.view.default, temporary, [8, 16])
    b.graph.output((last,))
    # x, the unread input, and two of the three results at a time
    assert peak_of(View(b.graph), ["unread"]) == 3 * 512 + 128


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_verifier_is_told_the_cap(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from inductor_passes import verify

    told: list[int | None] = []
    checked = verify.checked

    def listening(graph: Any, before: Any, asked: verify.Asked, known: Any) -> verify.Checked:
        told.append(asked.memory_budget)
        return checked(graph, before, asked, known)

    monkeypatch.setattr(verify, "checked", listening)
    # Alternatives are tried under lower caps.
    monkeypatch.setattr(pipeline, "ALTERNATIVES_NODES", 0)
    with mesh_world((2, 4)) as mesh:
        done, _ = compiled(random_layers(3, mesh), memory_budget=budget)
    assert told and told[-1] == done.cap.limit_bytes


@pytest.mark.parametrize(("verified", "relative", "absolute"), [(95, 100, 105), (100, 105, 105), (103, 108, 108)])
def test_an_absolute_limit_is_held_by_what_needs_no_more_by_the_verifiers_count(
    verified: int, relative: int, absolute: int
) -> None:
    """The planner may count more of the graph that came in, where it moves what prepares a message."""
    caps = [Cap(100, 100, 105, verified, absolute=whether) for whether in (False, True)]
    assert [one.verified_limit_bytes for one in caps] == [relative, absolute]
    assert all(Cap(100, 100, None, verified, absolute=one.absolute).verified_limit_bytes is None for one in caps)


@pytest.mark.parametrize(("budget", "absolute"), [("=2KiB", True), ("-20%", True), ("+5%", False), ("0", False)])
def test_a_budget_in_bytes_is_an_absolute_limit(budget: str, absolute: bool) -> None:
    with mesh_world((2, 4)) as mesh:
        done, _ = compiled(random_layers(3, mesh), memory_budget=budget)
    assert done.cap.absolute is absolute
