"""Messages between two ranks in the plan: what may move around them, and that no rank hangs."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes import _torch, verify
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import FxProblem, build
from inductor_passes.problems.transfers import Event, kept_order
from inductor_passes.rewriting.arrange import arrange
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.simulate import simulate
from inductor_passes.verify import queue
from tests.support import pipelines
from tests.support.graphs import GraphBuilder, aten, c10d
from tests.support.world import fake_world

RANKS = 4


@pytest.fixture(scope="module", autouse=True)
def world():
    with fake_world(RANKS) as name:
        yield name


@pytest.fixture(params=[False, True], ids=["in order", "at once"])
def at_once(request, monkeypatch) -> bool:
    """Whether the backend begins every message at its issue."""
    immediate(monkeypatch, request.param)
    return request.param


def immediate(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    monkeypatch.setattr(_torch, "sends_at_once", lambda name, device: yes)
    monkeypatch.setattr(_torch, "keeps_waits", lambda: yes)


def programs(seed: int, group: str) -> list[torch.fx.GraphModule]:
    """A program per rank that does not hang: ranks take part in one sequence of messages, and wait for each later."""
    rng = random.Random(seed)
    builders = [GraphBuilder() for _ in range(RANKS)]
    values = [[b.placeholder("x", 4, 4)] for b in builders]
    open_: list[list[torch.fx.Node]] = [[] for _ in builders]

    def land(rank: int) -> None:
        awaited = open_[rank].pop(rng.randrange(len(open_[rank])))
        values[rank].append(builders[rank].call(c10d.wait_tensor.default, awaited))

    def send(rank: int, peer: int) -> None:
        value = rng.choice([v for v in values[rank] if v.meta["val"].numel()])
        open_[rank].append(builders[rank].call(c10d.isend.default, value, peer, 0, group))

    def receive(rank: int, peer: int) -> None:
        buffer = builders[rank].call(aten.zeros_like.default, values[rank][0])
        open_[rank].append(builders[rank].call(c10d.irecv.default, buffer, peer, 0, group))

    for _ in range(12):
        if rng.random() < 0.25:
            for rank, b in enumerate(builders):
                value = rng.choice([v for v in values[rank] if v.meta["val"].numel()])
                open_[rank].append(b.call(c10d.all_reduce.default, value, "sum", group))
        else:
            sender, receiver = rng.sample(range(RANKS), 2)
            send(sender, receiver)
            receive(receiver, sender)
        for rank, b in enumerate(builders):
            if rng.random() < 0.5:
                value = rng.choice([v for v in values[rank] if v.meta["val"].numel()])
                values[rank].append(b.call(aten.mm.default, value, value))
            if open_[rank] and rng.random() < 0.4:
                land(rank)
    for rank, b in enumerate(builders):
        while open_[rank]:
            land(rank)
        b.graph.output(tuple(v for v in values[rank] if v.meta["val"].numel()))
    return [torch.fx.GraphModule(torch.nn.Module(), b.graph) for b in builders]


def random_order(fx: FxProblem, rng: random.Random) -> list[int]:
    """Any order that the problem allows."""
    left = [set(before) for before in fx.problem.edges()]
    order: list[int] = []
    remaining = set(range(len(left)))
    while remaining:
        task = rng.choice([i for i in sorted(remaining) if not left[i] & remaining])
        remaining.discard(task)
        order.append(task)
    return order


def problem(graph: torch.fx.Graph, agreed: bool = False) -> FxProblem:
    return build(GraphView(graph), CostProfile.default(), agreed=agreed)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("immediately", [False, True], ids=["in order", "at once"])
def test_ranks_that_reorder_on_their_own_never_hang(world, immediately, seed):
    with pytest.MonkeyPatch.context() as patch:
        immediate(patch, immediately)
        graphs = programs(seed, world)
        assert queue.run([g.graph for g in graphs], max_in_flight=None).completed
        rng = random.Random(seed)
        for module in graphs:
            graph, fx, before = module.graph, problem(module.graph), verify.snapshot(module.graph)
            was = list(graph.nodes)
            order = random_order(fx, rng) if rng.random() < 0.7 else list(plan(fx.problem, None).order)
            arrange(graph, fx.node_order(order))
            assert verify.check(graph, reference=before) == []
            _keeps_what_must_be_kept(was, list(graph.nodes), immediately)
        assert queue.run([g.graph for g in graphs], max_in_flight=None).completed


def _keeps_what_must_be_kept(was: list[torch.fx.Node], now: list[torch.fx.Node], immediately: bool) -> None:
    """By pairs: starts of a queue in order, no wait in front of a start that it was behind."""
    place = {node: i for i, node in enumerate(now)}

    def kind(node: torch.fx.Node) -> str:
        name = _torch.op_name(node.target).partition("::")[2] if node.op == "call_function" else ""
        return name if name in ("isend", "irecv", "all_reduce", "wait_tensor") else ""

    events = [node for node in was if kind(node)]
    for first, second in itertools.combinations(events, 2):
        if kind(first) == "wait_tensor":
            continue
        if kind(second) == "wait_tensor" or not immediately or kind(first) == kind(second):
            assert place[first] < place[second]


@pytest.mark.parametrize("agreed", [False, True])
def test_what_moves_around_a_message(world, at_once, agreed):
    b = GraphBuilder()
    x = b.placeholder("x", 256, 256)
    out = []
    for _ in range(3):
        received = b.call(c10d.irecv.default, b.call(aten.empty_like.default, x), 1, 0, world)
        h = b.call(aten.mm.default, b.call(c10d.wait_tensor.default, received), x)
        sent = b.call(c10d.isend.default, h, 2, 0, world)
        b.call(c10d.wait_tensor.default, sent)
        reduced = b.call(c10d.all_reduce.default, b.call(aten.mm.default, h, h), "sum", world)
        out.append(b.call(c10d.wait_tensor.default, reduced))
    b.graph.output(tuple(out))
    graph = torch.fx.GraphModule(torch.nn.Module(), b.graph).graph
    fx = problem(graph, agreed)
    found = plan(fx.problem, None)
    # The memory that the next message is received into comes behind the send, and so does the receive.
    assert fx.problem.schedule_text(found.order).startswith("RECV0 WRECV0")
    assert found.makespan_ns < simulate(fx.problem).makespan_ns
    before = verify.snapshot(graph)
    arrange(graph, fx.node_order(found.order))
    assert verify.check(graph, reference=before, group_order="any" if agreed else "kept") == []


def exchange(world: str) -> torch.fx.Graph:
    """A receive and a send, then both waits; a collective behind them."""
    b = GraphBuilder()
    x = b.placeholder("x", 4, 4)
    received = b.call(c10d.irecv.default, b.call(aten.zeros_like.default, x), 1, 0, world)
    sent = b.call(c10d.isend.default, x, 1, 0, world)
    again = b.call(c10d.isend.default, x, 2, 0, world)
    waits = [b.call(c10d.wait_tensor.default, one) for one in (received, sent, again)]
    reduced = b.call(c10d.all_reduce.default, x, "sum", world)
    b.graph.output((waits[0], b.call(c10d.wait_tensor.default, reduced)))
    return torch.fx.GraphModule(torch.nn.Module(), b.graph).graph


def node(graph: torch.fx.Graph, name: str) -> torch.fx.Node:
    """By the name of its operator, with its number from the second of its kind on."""
    operator, _, number = name.partition(" ")
    found = [n for n in graph.nodes if _torch.op_name(n.target) == f"_c10d_functional::{operator}"]
    return found[int(number or 0)]


#: Node that is moved, the node that it is put in front of, and what must be said where messages are issued in one
#: queue, and where each begins at once.
MOVES = [
    ("wait_tensor", "isend", {"transfer-wait"}, {"transfer-wait"}),
    ("wait_tensor 1", "isend 1", {"transfer-wait"}, {"transfer-wait"}),
    ("isend 1", "isend", {"transfer-order"}, {"transfer-order"}),
    ("isend", "irecv", {"transfer-order"}, set()),
    ("all_reduce", "isend", {"transfer-order"}, set()),
    ("all_reduce", "wait_tensor", set(), set()),
    ("wait_tensor 1", "wait_tensor", set(), set()),
]


@pytest.mark.parametrize(("moved", "ahead_of", "in_order", "immediately"), MOVES)
def test_moves_that_could_hang_are_found(world, at_once, moved, ahead_of, in_order, immediately):
    graph = exchange(world)
    before = verify.snapshot(graph)
    assert verify.check(graph, reference=before) == []
    node(graph, ahead_of).prepend(node(graph, moved))
    assert {f.rule for f in verify.check(graph, reference=before)} == (immediately if at_once else in_order)


def test_sinking_a_start_below_a_wait_is_found(world, at_once):
    graph = exchange(world)
    before = verify.snapshot(graph)
    node(graph, "wait_tensor").append(node(graph, "isend 1"))
    assert {f.rule for f in verify.check(graph, reference=before)} == {"transfer-wait"}


def test_a_lost_message_is_found(world):
    graph = exchange(world)
    before = verify.snapshot(graph)
    for name in ("wait_tensor 2", "isend 1"):
        graph.erase_node(node(graph, name))
    assert {f.rule for f in verify.check(graph, reference=before)} == {"wait-lost", "transfer-lost"}


def test_a_message_that_is_not_waited_for_is_a_fence(world, at_once):
    b = GraphBuilder()
    x = b.placeholder("x", 64, 64)
    b.call(c10d.isend.default, x, 1, 0, world)
    reduced = b.call(c10d.all_reduce.default, x, "sum", world)
    b.graph.output((b.call(c10d.wait_tensor.default, reduced),))
    graph = torch.fx.GraphModule(torch.nn.Module(), b.graph).graph
    view = GraphView(graph)
    assert view.transfers == {} and view.role(node(graph, "isend")) is Role.FENCE
    tasks = problem(graph).problem.tasks
    assert [t.name for t in tasks if t.fence] == [node(graph, "isend").name]


def test_agreeing_ranks_may_swap_collectives_between_two_messages_only():
    one = ("p2p",)
    events = [Event(0, one), Event(1, one), Event(2, one, True), Event(3, transfer=True), Event(4, one), Event(5)]
    assert set(kept_order(events, agreed=True)) == {(0, 2), (1, 2), (2, 3), (2, 4), (2, 5)}
    alone = set(kept_order(events, agreed=False))
    assert {(0, 1), (1, 2), (2, 3), (2, 4), (4, 5)} <= alone


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_a_pipeline_is_planned_faster(world, monkeypatch, rank, batched):
    immediate(monkeypatch, True)
    step = pipelines.stage(rank, RANKS, world, batched)
    inputs, pair = pipelines.microbatches(8, 64, 512), pipelines.weights(RANKS, 512)[rank]
    graph = make_fx(step, tracing_mode="fake")(inputs, *pair).graph
    graph.eliminate_dead_code()
    fx = problem(graph)
    before, found = simulate(fx.problem).makespan_ns, plan(fx.problem, None)
    assert before / found.makespan_ns >= min(1.3, 0.95 * before / found.lower_bound_ns)
