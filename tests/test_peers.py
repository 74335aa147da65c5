"""What the tests of torch's own overlap scheduling, bucketing and reordering expect, expected of our passes.

Their situations in our own words, on graphs of the same shape; docs/peer_tests.md says which test is which and which do
not apply. As in those tests a collective takes as long as a matmul unless said otherwise, and everything else nothing.
The memory budget is the default unless a test sets one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_passes import verify
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir import ops
from inductor_passes.ir.view import GraphView
from inductor_passes.report import GraphReport
from tests.support.bucket_graphs import (
    Program,
    assert_same_bits,
    aten,
    c10d,
    inputs_by_rank,
    output_layouts,
    run_all_ranks,
)
from tests.support.world import fake_world

RANKS = 4
UNIT_NS = 1_000_000
cast = torch.ops.prims.convert_element_type.default
Estimator = Callable[[torch.fx.Node], "float | None"]


@pytest.fixture(scope="module")
def world() -> Iterator[str]:
    with fake_world(RANKS) as name:
        yield name


def durations(matmul: float = 1.0, latency: float = 0.0, pointwise: float = 0.0) -> Estimator:
    """Nanoseconds: ``matmul`` units for a matmul; a collective takes ``latency`` and with its payload one unit more."""

    def estimate(node: torch.fx.Node) -> float:
        if node.target is aten.mm.default:
            return matmul * UNIT_NS
        if "c10d" in str(node.target):
            return (1.0 + latency) * UNIT_NS
        return pointwise * UNIT_NS

    return estimate


def optimised(gm: torch.fx.GraphModule, estimator: Estimator | None = None, **settings: Any) -> GraphReport:
    """Our passes over a graph at the default budget, every one verified; all ranks compute the same bits as before."""
    inputs = inputs_by_rank(gm, RANKS)
    expected, layouts = run_all_ranks(gm, inputs), output_layouts(gm)
    config = PassConfig(
        **{"verify": "strict", "redistribute": "off", "estimator": estimator, **settings}
    )
    profile = CostProfile.default("cuda")
    done = run_passes(gm.graph, passes_of(config), config, profile)
    gm.graph.lint()
    gm.recompile()
    assert output_layouts(gm) == layouts
    assert_same_bits(expected, run_all_ranks(gm, inputs))
    return done.report


def schedule(gm: torch.fx.GraphModule) -> str:
    """Collectives, their waits and matmuls in order: ``AR0 mm0 W0 mm1``; numbers are the graph's own."""
    view = GraphView(gm.graph)
    found: list[str] = []
    for node in gm.graph.nodes:
        if node in view.by_start:
            found.append(view.by_start[node].label)
        elif node in view.collectives_of_wait:
            found += [f"W{c.index}" for c in view.collectives_of_wait[node]]
        elif node.target is aten.mm.default:
            found.append(node.name.replace("mm_default", "mm").replace("_", ""))
    return " ".join(found)


def exposed(report: GraphReport) -> float:
    """Units of communication that nothing hides in the final schedule."""
    return report.schedules[-1].exposed_after_ns / UNIT_NS


def mm(p: Program, a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node:
    return p.call(aten.mm.default, a, b)


# -- order -------------------------------------------------------------------------------------------------------------

REORDER = {"bucket": "off"}


def test_waits_sink_below_independent_matmuls(world: str) -> None:
    p = Program()
    a = p.input(4, 4)
    reduced = p.collective("all_reduce", a, world)
    b = mm(p, a, a)
    gm = p.done(mm(p, reduced, b))
    report = optimised(gm, durations(), **REORDER)
    assert schedule(gm) == "AR0 mm W0 mm1" and exposed(report) == 0


def test_collectives_rise_above_matmuls_that_they_do_not_need(world: str) -> None:
    p = Program()
    a = p.input(4, 4)
    b = mm(p, a, a)
    c = p.call(aten.relu.default, b)
    d = mm(p, c, c)
    reduced = p.collective("all_reduce", p.call(aten.add.Tensor, b, 1), world)
    gm = p.done(mm(p, d, reduced))
    report = optimised(gm, durations(), **REORDER)
    assert schedule(gm) == "mm AR0 mm1 W0 mm2" and exposed(report) == 0


def test_collectives_rise_and_waits_sink(world: str) -> None:
    p = Program()
    a = p.input(4, 4)
    b = mm(p, a, a)
    d = mm(p, p.call(aten.relu.default, b), b)
    reduced = p.collective("all_reduce", b, world)
    f = p.call(aten.relu.default, d)
    g = mm(p, f, f)
    gm = p.done(mm(p, reduced, g))
    report = optimised(gm, durations(), **REORDER)
    assert schedule(gm).startswith("mm AR0 mm1") and schedule(gm).index("W0") < schedule(gm).index("mm3")
    assert exposed(report) == 0


@pytest.mark.parametrize(("matmul", "left"), [(1.0, 0.0), (0.05, 1.9)], ids=["as long", "a twentieth"])
def test_what_the_next_collective_needs_runs_first(world: str, matmul: float, left: float) -> None:
    """Two reductions in a chain and two free matmuls, one of which the second reduction needs."""
    p = Program()
    a = p.input(4, 4)
    reduced = p.collective("all_reduce", a, world)
    free = mm(p, a, a)
    c = p.call(aten.relu.default, a)
    needed = mm(p, c, c)
    f = p.call(aten.mul.Tensor, p.call(aten.mul.Tensor, needed, c), reduced)
    again = p.collective("all_reduce", f, world)
    total = p.call(aten.add.Tensor, p.call(aten.add.Tensor, needed, reduced), again)
    gm = p.done(mm(p, total, free))
    report = optimised(gm, durations(matmul), **REORDER)
    order = schedule(gm).split()
    assert order.index("AR0") < order.index("mm1") < order.index("AR1") < order.index("W1") < order.index("mm2")
    assert exposed(report) == pytest.approx(left)


def test_collectives_without_anything_to_hide_them_keep_their_order(world: str) -> None:
    """Also where they are waited for in another order."""
    p = Program()
    starts = [p.start("all_reduce", p.input(n, n), world, "avg") for n in (10, 11, 12)]
    waits = [p.wait(s) for s in reversed(starts)]
    gm = p.done(*waits)
    report = optimised(gm, durations(), **REORDER)
    assert [t for t in schedule(gm).split() if t.startswith("AR")] == ["AR0", "AR1", "AR2"]
    view = GraphView(gm.graph)
    assert [c.inputs[0].meta["val"].shape[0] for c in view.collectives] == [10, 11, 12]
    assert exposed(report) == pytest.approx(3, rel=0.05)


def test_a_collective_on_another_collectives_result_stays_behind_its_wait(world: str) -> None:
    p = Program()
    gm = p.done(p.collective("all_gather", p.collective("all_gather", p.input(4, 4), world), world))
    optimised(gm, durations())
    assert schedule(gm) == "AG0 W0 AG1 W1"


def test_one_group_fetches_while_another_is_waited_for(world: str) -> None:
    """What is exposed on one group is time for the next collective of the other."""
    other = dist.new_group(list(range(RANKS))).group_name
    p = Program()
    a, b = p.input(4, 4), p.input(4, 4)
    first = p.call(aten.slice.Tensor, p.collective("all_gather", a, world), 0, 0, 4)
    mm1 = mm(p, first, first)
    second = p.call(aten.slice.Tensor, p.collective("all_gather", b, other), 0, 0, 4)
    gm = p.done(p.call(aten.add.Tensor, mm1, mm(p, second, second)))
    optimised(gm, durations(matmul=0.0, latency=9.0))
    assert schedule(gm).startswith("AG0 AG1 W0")


@pytest.mark.parametrize("first", ["a", "b"])
def test_chains_across_groups_are_scheduled(world: str, first: str) -> None:
    """Two gathers in flight on one group, a third one on another group of a result of the first two."""
    other = dist.new_group(list(range(RANKS))).group_name
    p = Program()
    a, b = p.start("all_gather", p.input(4, 4), world), p.start("all_gather", p.input(4, 4), world)
    waited = {name: p.wait({"a": a, "b": b}[name]) for name in ("ab" if first == "a" else "ba")}
    gm = p.done(waited["a"], p.collective("all_gather", waited["b"], other))
    report = optimised(gm, durations(matmul=0.0, latency=2.0), **REORDER)
    assert {c.rolled_back for c in report.passes} == {None}


def test_reductions_that_nothing_waits_for_do_not_drift_to_the_end(world: str) -> None:
    p = Program()
    a, b = p.input(4, 4), p.input(1, 4)
    first = mm(p, a, p.collective("all_gather", b, world))
    scattered = [p.start("reduce_scatter", first, world)]
    second = mm(p, a, a)
    scattered.append(p.start("reduce_scatter", second, world))
    third = mm(p, a, p.call(aten.relu.default, second))
    gm = p.done(third, *(p.wait(s) for s in scattered))
    report = optimised(gm, durations(), **REORDER)
    order = schedule(gm).split()
    last = max(i for i, t in enumerate(order) if t.startswith("mm"))
    assert any(i < last for i, t in enumerate(order) if t.startswith("RS"))
    assert exposed(report) <= 1


def test_with_room_for_one_in_flight_the_longer_one_is_hidden(world: str) -> None:
    p = Program()
    a, b, c = p.input(16, 16), p.input(4, 4), p.input(4, 4)
    hides = mm(p, a, a)
    short, long = p.start("all_gather", b, world), p.start("all_gather", c, world)
    gm = p.done(hides, p.wait(short), p.wait(long))

    def estimate(node: torch.fx.Node) -> float:
        return {hides: 8.0, short: 1.0, long: 8.0}.get(node, 0.0) * UNIT_NS

    report = optimised(gm, estimate, **REORDER)
    # On one communicator they run one after the other, so one unit is exposed whatever the order.
    assert exposed(report) <= 1
    assert report.schedules[-1].makespan_after_ns <= 9.2 * UNIT_NS


def test_pointwise_work_hides_a_collective_too(world: str) -> None:
    p = Program()
    a = p.input(512, 512)
    gathered = p.collective("all_gather", a, world)
    b = p.call(aten.sub.Tensor, p.call(aten.mul.Tensor, p.call(aten.add.Tensor, a, 1), 2), 3)
    gm = p.done(p.call(aten.sum.default, gathered), p.call(aten.sum.default, b))
    # The gathered tensor has 4 MiB.
    report = optimised(gm, durations(pointwise=0.5), memory_budget="unlimited")
    names = [n.name for n in gm.graph.nodes]
    assert names.index("sub_tensor") < names.index("wait_tensor_default")
    assert exposed(report) == 0


def test_a_random_draw_among_collectives_keeps_its_place_among_draws(world: str) -> None:
    p = Program()
    a = p.input(4, 4)
    gathered = p.start("all_gather", a, world)
    draws = [p.call(aten.rand_like.default, a) for _ in range(2)]
    gm = p.done(p.wait(gathered), *draws)
    torch.manual_seed(0)
    names = [n.name for n in gm.graph.nodes if n.target is aten.rand_like.default]
    config = PassConfig(verify="strict", estimator=durations(pointwise=1.0))
    run_passes(gm.graph, passes_of(config), config, CostProfile.default("cuda"))
    assert [n.name for n in gm.graph.nodes if n.target is aten.rand_like.default] == names
    assert schedule(gm) == "AG0 W0"


@pytest.mark.parametrize("budget", ["0", "+5%"])
def test_peak_memory_is_never_exceeded(world: str, budget: str) -> None:
    """With pairs of gathers and reductions that could all be issued at once."""
    p = Program()
    x, w = p.input(4, 16), p.input(16, 16)
    y = mm(p, x, w)
    results = []
    for _ in range(2):
        shards = [p.call(cast, p.input(64, 16), torch.bfloat16) for _ in range(2)]
        gathered = [p.collective("all_gather", s, world) for s in shards]
        results += [p.call(aten.sum.default, g) for g in gathered]
        results += [p.collective("reduce_scatter", s, world) for s in shards]
        y = p.call(aten.add.Tensor, y, mm(p, p.call(aten.mul.Tensor, x, 2), p.call(aten.mul.Tensor, w, 2)))
    gm = p.done(y, *results)
    before = verify.peak_bytes(gm.graph)
    assert before is not None
    optimised(gm, durations(), memory_budget=budget)
    after = verify.peak_bytes(gm.graph)
    assert after is not None and after <= before * (1.05 if budget == "+5%" else 1.0)


@pytest.mark.parametrize("budget", ["unlimited", "0"])
def test_one_collective_in_the_simplest_graph(world: str, budget: str) -> None:
    """No cap on memory and no room at all are both fine."""
    p = Program()
    gathered = p.collective("all_gather", p.input(8, 16), world)
    gm = p.done(mm(p, gathered, p.input(16, 16)))
    report = optimised(gm, durations(), memory_budget=budget)
    assert schedule(gm) == "AG0 W0 mm" and exposed(report) == 1


def test_a_prefetch_passes_several_matmuls(world: str) -> None:
    p = Program()
    a, b, w = p.input(2, 16), p.input(8, 16), p.input(16, 16)
    first = mm(p, b, w)
    second = mm(p, first, w)
    gathered = p.collective("all_gather", a, world)
    gm = p.done(second, mm(p, gathered, w))
    report = optimised(gm, durations(latency=1.0))
    assert schedule(gm) == "AG0 mm mm1 W0 mm2" and exposed(report) == 0


def test_the_results_of_a_coalesced_collective_are_one_collective(world: str) -> None:
    """Three waits, one start, one price; it runs while a matmul does."""
    p = Program()
    xs = [p.input(8, 8) for _ in range(3)]
    first = mm(p, xs[0], xs[0])
    scattered = p.call(c10d.reduce_scatter_tensor_coalesced.default, xs, "sum", RANKS, world)
    waits = [p.wait(p.call(operator.getitem, scattered, i)) for i in range(3)]
    gm = p.done(first, mm(p, xs[0], xs[1]), *waits)
    view = GraphView(gm.graph)
    assert len(view.collectives) == 1 and len(view.collectives[0].waits) == 3
    assert view.collectives[0].input_bytes == 3 * 8 * 8 * 4 and view.collectives[0].output_bytes == 3 * 2 * 8 * 4
    report = optimised(gm, durations())
    assert schedule(gm).split()[:2] == ["RS0", "mm"] and exposed(report) == 0


# -- buckets -----------------------------------------------------------------------------------------------------------





def collectives_of(gm: torch.fx.GraphModule, kind: str) -> int:
    return sum(c.kind == kind for c in GraphView(gm.graph).collectives)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_three_independent_collectives_become_one(world: str, kind: str) -> None:
    p = Program()
    results = [p.collective(kind, p.input(4, 4), world) for _ in range(3)]
    gm = p.done(*(p.call(aten.add.Tensor, r, i) for i, r in enumerate(results)))
    optimised(gm)
    assert collectives_of(gm, kind) == 1 and schedule(gm).count("W") == 1


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_casts_around_collectives_do_not_keep_them_apart(world: str, kind: str) -> None:
    """Cast before (mixed precision), and for gradients cast back behind."""
    p = Program()
    results = []
    for columns in (8, 4):
        sent = p.call(cast, p.input(16, columns), torch.bfloat16)
        results.append(p.call(cast, p.collective(kind, sent, world), torch.float32))
    x = p.input(4, 8)
    gm = p.done(mm(p, x, p.input(8, 4)), *results)
    optimised(gm)
    assert collectives_of(gm, kind) == 1


def test_gathers_of_several_dtypes_travel_together(world: str) -> None:
    p = Program()
    results = [p.collective("all_gather", p.input(4, 4, dtype=d), world) for d in
               (torch.float32, torch.bfloat16, torch.float16)]
    gm = p.done(*results)
    optimised(gm)
    assert collectives_of(gm, "all_gather") == 1
    assert [n.meta["val"].dtype for n in gm.graph.output_node().args[0]] == [
        torch.float32, torch.bfloat16, torch.float16
    ]


def test_kinds_do_not_mix(world: str) -> None:
    """Reductions to all and to shards over one group, with one operation and dtype."""
    p = Program()
    xs = [p.input(4, 4), p.input(4, 4)]
    starts = [p.start(kind, x, world) for kind in ("all_reduce", "reduce_scatter") for x in xs]
    gm = p.done(*(p.wait(s) for s in starts))
    optimised(gm)
    assert collectives_of(gm, "all_reduce") == collectives_of(gm, "reduce_scatter") == 1


def test_groups_do_not_mix(world: str) -> None:
    """Gathers of parameters on one group merge, the one of activations on another group is left alone."""
    tensor_parallel = dist.new_group([0, 1]).group_name
    p = Program()
    parameters = [p.collective("all_gather", p.input(4, 4), world) for _ in range(2)]
    activation = p.call(aten.add.Tensor, p.input(4, 4), p.input(4, 4))
    gm = p.done(*parameters, p.collective("all_gather", activation, tensor_parallel))
    config = PassConfig(verify="strict")
    run_passes(gm.graph, passes_of(config), config, CostProfile.default("cuda"))
    by_group = [c.group.name for c in GraphView(gm.graph).collectives]
    assert sorted(by_group) == sorted([world, tensor_parallel])


def test_a_result_that_another_one_needs_stays_apart(world: str) -> None:
    p = Program()
    first = p.collective("all_gather", p.input(4, 4), world)
    sent = p.call(aten.add.Tensor, p.input(4, 4), p.call(aten.slice.Tensor, first, 0, 0, 4))
    gm = p.done(first, p.collective("all_gather", sent, world))
    optimised(gm)
    assert collectives_of(gm, "all_gather") == 2


def test_only_independent_ones_of_a_dependent_set_merge(world: str) -> None:
    """Four gathers, the second of which needs the first one's result: some merge, those two never."""
    p = Program()
    xs = [p.input(4, 4) for _ in range(4)]
    base = p.collective("all_gather", xs[0], world)
    needy = p.collective("all_gather", p.call(aten.add.Tensor, p.call(aten.slice.Tensor, base, 0, 0, 4), xs[1]), world)
    others = [p.collective("all_gather", x, world) for x in xs[2:]]
    gm = p.done(base, needy, *others)
    optimised(gm)
    assert 2 <= collectives_of(gm, "all_gather") < 4


def test_a_chain_of_reductions_merges_rank_by_rank(world: str) -> None:
    """As in a loss over sharded classes: two sums, two sums of what comes of them; a sum and its successor never."""
    p = Program()
    a, b, c, d = (p.input(4, 4) for _ in range(4))
    first = [p.collective("all_reduce", x, world) for x in (a, b)]
    second = [p.collective("all_reduce", p.call(aten.add.Tensor, x, y), world) for x, y in zip(first, (c, d))]
    gm = p.done(*second)
    optimised(gm)
    assert collectives_of(gm, "all_reduce") == 2


def test_merging_does_not_uncover_what_was_hidden(world: str) -> None:
    """One gather behind each of two matmuls, the second of which needs the first gather's result."""
    p = Program()
    a, b = p.input(4, 4), p.input(4, 4)
    first = p.collective("all_gather", a, world)
    free = mm(p, a, a)
    second = mm(p, p.call(aten.slice.Tensor, first, 0, 0, 4), b)
    gathered = p.collective("all_gather", b, world)
    gm = p.done(free, second, gathered)
    report = optimised(gm, durations())
    assert exposed(report) <= 1
    final = report.schedules[-1]
    assert final.makespan_after_ns <= final.makespan_before_ns


@pytest.mark.parametrize("needs", [False, True])
def test_buckets_never_make_the_plan_longer(world: str, needs: bool) -> None:
    """Four gathers and two matmuls; where the second matmul needs the first two gathers, pairs, else all together."""
    p = Program()
    a, b, c, d = (p.input(8, 8) for _ in range(4))
    gathered = [p.collective("all_gather", x, world) for x in (a, b)]
    gathered += [p.collective("all_gather", p.call(aten.slice.Tensor, x, 0, 0, 4), world) for x in (c, d)]
    mm1 = mm(p, p.call(aten.mul.Tensor, a, 5), a)
    if needs:
        part = [p.call(aten.slice.Tensor, g, 0, 0, 8) for g in gathered[:2]]
        mm1 = p.call(aten.add.Tensor, mm1, p.call(aten.add.Tensor, *part))
    mm2 = mm(p, mm1, c)
    gm = p.done(mm1, mm2, *gathered)
    profile = CostProfile.default("cuda")
    config = PassConfig(redistribute="off", bucket="off")
    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(gm.graph, {}))
    alone = run_passes(copied, passes_of(config), config, profile).report
    report = optimised(gm)
    assert report.schedules[-1].makespan_after_ns <= alone.schedules[-1].makespan_after_ns
    assert collectives_of(gm, "all_gather") < 4
    assert schedule(gm).startswith("AG0")


def test_hidden_and_exposed_ones_merge_where_that_keeps_what_is_hidden(world: str) -> None:
    p = Program()
    gathered = [p.collective("all_gather", p.input(8, 8), world) for _ in range(3)]
    x = p.input(2, 8)
    hides = mm(p, x, p.call(aten.permute.default, x, [1, 0]))
    gm = p.done(hides, *(p.call(aten.sum.default, g) for g in gathered))
    optimised(gm)
    assert collectives_of(gm, "all_gather") == 1
    assert schedule(gm) == "AG0 mm W0"


def test_casts_that_order_collectives_make_no_cycle(world: str) -> None:
    """Casts in front of gathers, matmuls and pointwise chains between them."""
    p = Program()
    xs = [p.input(4, 4) for _ in range(4)]
    early = [p.start("all_gather", p.call(cast, x, torch.bfloat16), world) for x in xs[:2]]
    between = p.call(aten.div.Tensor, p.call(aten.mul.Tensor, p.call(aten.add.Tensor, xs[2], 1), 2), 4)
    product = mm(p, xs[2], xs[3])
    waited = [p.wait(s) for s in early]
    late = [p.start("all_gather", p.call(cast, x, torch.bfloat16), world) for x in xs[2:]]
    chain = p.call(aten.mul.Tensor, p.call(aten.add.Tensor, xs[3], 1), 2)
    gm = p.done(*waited, *(p.wait(s) for s in late), between, product, chain)
    optimised(gm)
    assert collectives_of(gm, "all_gather") < 4


def test_moved_buckets_take_their_copies_along(world: str) -> None:
    """Packing and unpacking move with the bucket: the packed gathers still start ahead of the matmul."""
    p = Program()
    x, w = p.input(4, 64), p.input(64, 64)
    y = x
    for _ in range(4):
        y = mm(p, y, w)
    gathered = [p.collective("all_gather", p.call(cast, p.input(16, 16), torch.bfloat16), world) for _ in range(2)]
    gm = p.done(y, *gathered)
    optimised(gm, durations(latency=2.0))
    assert schedule(gm) == "AG0 mm mm1 mm2 W0 mm3"


@pytest.mark.parametrize(("chained", "gathers"), [(False, 1), (True, 2)], ids=["repeated", "chained"])
def test_repeated_and_chained_waits(world: str, chained: bool, gathers: int) -> None:
    """A gather that is waited for twice merges with its neighbour; a wait for a wait's result is a fence to us."""
    p = Program()
    start = p.start("all_gather", p.input(4, 4), world)
    once = p.wait(start)
    again = p.wait(once if chained else start)
    other = p.collective("all_gather", p.input(4, 4), world)
    gm = p.done(p.call(aten.add.Tensor, once, 1), p.call(aten.add.Tensor, again, 2), other)
    optimised(gm)
    assert collectives_of(gm, "all_gather") == gathers and verify.check(gm.graph) == []


# -- durations and the host --------------------------------------------------------------------------------------------


def test_own_durations_may_contradict_themselves(world: str) -> None:
    """A latency above the whole estimate, zero durations, and no answer at all: planned, never negative."""
    p = Program()
    a, b = p.input(4, 4), p.input(4, 4)
    first = p.start("all_gather", a, world)
    product = mm(p, a, b)
    second = p.start("all_gather", b, world)
    gm = p.done(product, p.wait(first), p.wait(second))
    for answer in (0.0, None, 3.0):
        report = optimised(gm, lambda node, answer=answer: answer)
        assert report.schedules[-1].exposed_after_ns >= 0


def test_copies_to_the_host_are_host_synchronisations(world: str) -> None:
    """One copy that does not wait and one that does, as when a router's counts become split sizes: never swapped."""
    with FakeTensorMode():
        graph = torch.fx.Graph()

        def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
            node = graph.call_function(target, args, kwargs)
            fakes, named = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = target(*fakes, **named)
            return node

        counts = graph.placeholder("counts")
        counts.meta["val"] = torch.empty(8, device="cuda", dtype=torch.int64)
        start = call(c10d.all_to_all_single.default, counts, [2] * 4, [2] * 4, world)
        exchanged = call(c10d.wait_tensor.default, start)
        sent = call(aten._to_copy.default, call(aten.neg.default, counts), device="cpu", non_blocking=True)
        received = call(torch.ops.prims.device_put.default, exchanged, torch.device("cpu"))
        back = call(aten._to_copy.default, sent, device="cuda")
        graph.output((sent, received, back))
        assert [ops.role(n) for n in (sent, received, back)] == [ops.Role.FENCE, ops.Role.FENCE, ops.Role.COMPUTE]
        reference = verify.snapshot(graph)
        received.append(sent)
        assert "fence-order" in {f.rule for f in verify.check(graph, reference=reference)}
