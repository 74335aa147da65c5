"""What a graph means to us: storages, hazards, roles."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir import ops
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build
from inductor_passes.schedule.problem import ProblemError
from tests.support.graphs import GraphBuilder, aten
from tests.support.world import fake_world

c10d = torch.ops._c10d_functional


def trace(function, *shapes):
    with FakeTensorMode() as mode:
        inputs = [torch.empty(s) for s in shapes]
    del mode
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def legal(graph: torch.fx.Graph, names: list[str]) -> bool:
    """Whether an order of the named nodes (the rest in input order) is legal for the problem of the graph."""
    fx = build(GraphView(graph), CostProfile.default("cpu"))
    index = {m.name: t for t, members in enumerate(fx.members) for m in members}
    tasks = list(dict.fromkeys(index[n] for n in names))
    order = sorted(range(len(fx.problem)), key=lambda t: tasks.index(t) if t in tasks else len(tasks) + t)
    try:
        fx.problem.check_order(order)
    except ProblemError:
        return False
    return True


def test_a_reduction_that_may_run_in_place_waits_for_the_gather_of_its_operand() -> None:
    with fake_world(2):
        name = dist.group.WORLD.group_name

        def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            z = x + 1
            gathered = c10d.all_gather_into_tensor(z, 2, name)
            other = y @ y
            whole = c10d.wait_tensor(gathered)
            reduced = c10d.all_reduce(z, "sum", name)
            return whole, c10d.wait_tensor(reduced), other

        graph = trace(f, (4, 4), (4, 4))
        before = ["add", "all_gather_into_tensor"]
        assert legal(graph, [*before, "wait_tensor", "all_reduce"])
        assert not legal(graph, [*before, "all_reduce", "wait_tensor"])


def test_a_write_waits_for_the_collective_that_reads() -> None:
    with fake_world(2):
        name = dist.group.WORLD.group_name

        def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            gathered = c10d.all_gather_into_tensor(x, 2, name)
            whole = c10d.wait_tensor(gathered)
            torch.ops.aten.copy_.default(x, y)
            return whole

        graph = trace(f, (4, 4), (4, 4))
        assert legal(graph, ["all_gather_into_tensor", "wait_tensor", "copy_"])
        assert not legal(graph, ["all_gather_into_tensor", "copy_", "wait_tensor"])
        assert not legal(graph, ["copy_", "all_gather_into_tensor"])


def test_views_share_and_products_do_not() -> None:
    graph = trace(lambda x: (x.t(), x @ x), (4, 4))
    view = GraphView(graph)
    by_name = {n.name: n for n in view.nodes}
    x = by_name["x_1"]
    assert view.storages.of(by_name["t"]) == view.storages.of(x)
    assert view.storages.of(by_name["mm"]) != view.storages.of(x)
    assert view.storages.of(by_name["mm"])[0].size_bytes == 64


def test_roles() -> None:
    with fake_world(2):
        name = dist.group.WORLD.group_name

        def f(x: torch.Tensor) -> torch.Tensor:
            g = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, name))
            return g.view(-1) + 1

        view = GraphView(trace(f, (4, 4)))
    roles = {n.name: view.role(n) for n in view.nodes}
    assert roles["all_gather_into_tensor"] is Role.START and roles["wait_tensor"] is Role.WAIT
    assert roles["view"] is Role.FREE and roles["add"] is Role.COMPUTE


def test_an_unknown_operator_is_a_fence() -> None:
    library = torch.library.Library("ip_test_ir", "DEF")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.ip_test_ir.mystery.default, (graph.placeholder("x"),))
    assert ops.role(node) is Role.FENCE
    assert ops.role(graph.call_function(print, (node,))) is Role.FENCE
    assert ops.role(graph.call_function(max, (1, 2))) is Role.FREE
    assert ops.role(graph.call_function(torch.ops.aten.nonzero.default, (node,))) is Role.FENCE, "the host waits"
    assert ops.role(graph.call_method("add_", (node, 1))) is Role.FENCE


def test_a_pointwise_reader_stays_behind_the_one_that_needs_the_value_in_memory() -> None:
    """In front of it Inductor computes the value anew, and operands stay: 2.2 times the peak."""
    b = GraphBuilder()
    x, w = b.placeholder("x", 8, 8), b.placeholder("w", 8, 8)
    value = b.call(aten.sin.default, b.call(aten.mm.default, x, w))
    early = b.call(aten.neg.default, value)
    needs = b.call(aten.mm.default, value, w)
    again = b.call(aten.mm.default, value, x)
    late = b.call(aten.mul.Tensor, b.call(aten.view.default, value, [64]), 0.5)
    b.graph.output((early, needs, again, late))
    assert GraphView(b.graph).ordering_edges() == [(needs, late)]


def test_a_pointwise_reader_stays_behind_one_of_those_that_need_the_value_in_memory() -> None:
    """The gradient of a weight is held back for as long as it pays, and nothing waits for it."""
    b = GraphBuilder()
    x, w = b.placeholder("x", 8, 8), b.placeholder("w", 8, 8)
    value = b.call(aten.sin.default, b.call(aten.mm.default, x, w))
    of_weight = b.call(aten.mm.default, value, x)
    between = b.call(aten.neg.default, value)
    of_input = b.call(aten.mm.default, value, w)
    residual = b.call(aten.add.Tensor, value, b.call(aten.mul.Tensor, of_input, 2.0))
    b.graph.output((of_weight, between, residual))
    assert GraphView(b.graph).ordering_edges() == [(of_weight, between), (of_input, residual)]


def test_no_reader_of_a_part_waits_for_all_parts() -> None:
    """Found in async TP of a training step: what is saved of a norm joins all parts, and held back each part's norm."""
    b = GraphBuilder()
    x, y = b.placeholder("x", 8, 8), b.placeholder("y", 8, 8)
    first, second = b.call(aten.rsqrt.default, x), b.call(aten.rsqrt.default, y)
    saved = b.call(aten.cat.default, [first, second])
    b.graph.output((saved, *(b.call(aten.mul.Tensor, one, 2.0) for one in (first, second))))
    assert GraphView(b.graph).ordering_edges() == []


def test_the_ranks_of_a_group_are_written_out_once() -> None:
    """Every node is asked for its group, by the passes and by the verifier."""
    with fake_world(4) as group:
        first = resolve(group)
        assert first.ranks == (0, 1, 2, 3) and resolve(dist.group.WORLD).ranks is first.ranks
        pair = dist.new_group([0, 2])
        assert resolve(pair.group_name).ranks == (0, 2) and resolve(pair).ranks is resolve(pair.group_name).ranks
    # A group of the same name that comes later is another one.
    with fake_world(3) as again:
        assert again == group and resolve(again).ranks == (0, 1, 2)
    assert resolve(again).ranks == ()
