"""Rules over single FX graphs, and legal reorders of them."""

from __future__ import annotations

import operator
import random
import sys
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from inductor_passes import verify
from inductor_passes.ir import ops
from inductor_passes.ir.view import GraphView
from inductor_passes.verify.events import Action
from tests.support.transfers import needs_transfers
from tests.support.verify_graphs import Builder, Program, apply_order, aten, c10d, random_program
from tests.support.world import grouped_world


@pytest.fixture(scope="module")
def groups():
    with grouped_world() as names:
        yield names


def test_random_programs_and_their_legal_orders_have_no_findings(groups):
    for seed in range(60):
        rng = random.Random(seed)
        program = random_program(rng, groups)
        reference = verify.snapshot(program.graph)
        assert verify.check(program.graph) == []
        for _ in range(5):
            apply_order(program.graph, program.legal_order(rng))
            assert verify.check(program.graph, reference=reference) == []


def brute_force_peak(program: Program) -> int:
    """Bytes of the buffers in the builder's books that are alive, node by node, by looking at all accesses."""
    nodes = list(program.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    size: dict[int, int] = {}
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    for node in nodes:
        buffer = program.buffer.get(node)
        value = node.meta.get("val")
        if buffer is not None and buffer not in size and isinstance(value, torch.Tensor):
            size[buffer] = value.untyped_storage().nbytes()
            maker = node.args[0] if node.target is operator.getitem else node
            born[buffer] = -1 if node.op == "placeholder" else position[maker]
            dies[buffer] = position[node]
    for node in nodes:
        for operand in node.all_input_nodes:
            if program.buffer.get(operand) in size:
                dies[program.buffer[operand]] = max(dies[program.buffer[operand]], position[node])
    for access in program.accesses:
        for end in access.until if access.buffer in size else ():
            dies[access.buffer] = max(dies[access.buffer], position[end])
    inputs = {b for b, at in born.items() if at < 0}
    return max(
        sum(size[b] for b in size if b in inputs or born[b] <= at <= dies[b]) for at in range(len(nodes))
    )


def test_peak_is_that_of_the_books(groups):
    for seed in range(40):
        rng = random.Random(seed)
        program = random_program(rng, groups)
        for _ in range(2):
            assert verify.peak_bytes(program.graph) == brute_force_peak(program)
            apply_order(program.graph, program.legal_order(rng))


def test_donated_inputs_are_freed_after_their_last_use(groups):
    b = Builder(groups)
    x = b.input(16, 16)
    y = b.compute(aten.relu.default, x)
    b.outputs = [b.compute(aten.mm.default, y, y)]
    graph = b.finish().graph
    assert verify.peak_bytes(graph) == 3 * 1024
    assert verify.peak_bytes(graph, donated=[x.name]) == 2 * 1024
    assert verify.check(graph, memory_budget=2 * 1024, donated=[x.name]) == []


def test_sizes_without_hints_have_no_peak(groups):
    b = Builder(groups)
    x = b.input(16, 16)
    b.outputs = [b.compute(aten.relu.default, x)]
    graph = b.finish().graph
    size = ShapeEnv().create_unbacked_symint()
    with b.mode:
        b.outputs[0].meta["val"] = torch.empty((size,), device="meta")
    assert verify.peak_bytes(graph) is None
    assert [f.rule for f in verify.check(graph, memory_budget=10**9)] == ["memory"]


def test_work_grows_with_the_graph_only(groups):
    """Line events of one check per node: the same for a graph eight times as long."""

    def lines_per_node(length: int) -> float:
        graph = random_program(random.Random(0), groups, length=length).graph
        reference = verify.snapshot(graph)
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            count += event == "line"
            return trace if "inductor_passes" in frame.f_code.co_filename else None

        sys.settrace(trace)
        try:
            assert verify.check(graph, reference=reference) == []
        finally:
            sys.settrace(None)
        return count / len(graph.nodes)

    assert lines_per_node(800) < 1.5 * lines_per_node(100)


def test_python_arithmetic_on_tensors_is_unknown(groups):
    b = Builder(groups)
    x = b.input(16, 16)
    y = b.call(operator.iadd, x, 1)
    size = b.call(aten.sym_size.int, x, 0)
    twice = b.graph.call_function(operator.mul, (size, 2))
    twice.meta["val"] = 32
    b.outputs = [y]
    assert ops.role(y) is ops.Role.FENCE
    assert ops.role(twice) is ops.Role.FREE


def test_attributes_share_memory_and_results_in_a_dict_have_their_own(groups):
    b = Builder(groups)
    x = b.input(16, 16)
    root = torch.nn.Module()
    root.weight = torch.nn.Parameter(torch.zeros(4))
    graph = b.graph
    graph.owning_module = root
    first, second = graph.get_attr("weight"), graph.get_attr("weight")
    for node in (first, second):
        node.meta["val"] = x.meta["val"]
    kernel = graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_functional, (), {"kwargs": {"p": x}})
    kernel.meta["val"] = {"p": x.meta["val"]}
    result = b.graph.call_function(operator.getitem, (kernel, "p"))
    result.meta["val"] = x.meta["val"]
    b.outputs = [result]
    view = GraphView(b.finish().graph)
    assert view.storages.of(first) == view.storages.of(second) != ()
    assert len(view.storages.of(result)) == 1 and view.storages.of(result) != view.storages.of(x)


def test_effects_keep_their_channels(groups):
    b = Builder(groups)
    x = b.input(16, 16)
    draw = b.call(aten.rand_like.default, x)
    check = b.call(aten._assert_async.msg, b.call(aten.any.default, x), "message")
    saved = b.graph.call_function(torch.ops.higher_order.run_and_save_rng_state, (aten.rand_like.default, x))
    plain = b.call(aten.relu.default, x)
    channels = [ops.effect_channel(n, ops.role(n)) for n in (draw, check, saved, plain)]
    assert channels == ["random", "assert", "random", ""]


def test_attention_that_drops_nothing_out_keeps_no_order(groups):
    """Found: computed again in backward, each layer's attention was held behind that of the layer before it."""
    library = torch.library.Library("inductor_passes_tests", "FRAGMENT")
    library.define("noisy(Tensor x, float dropout_p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("noisy", lambda x, dropout_p: torch.empty_like(x), "Meta")
    noise = torch.ops.inductor_passes_tests.noisy.default
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default

    def graph(target: Any, dropped: float) -> tuple[torch.fx.Graph, torch.fx.Node, torch.fx.Node]:
        b = Builder(groups)
        x = b.input(1, 2, 8, 8)
        draw = b.call(aten.rand_like.default, x)
        late = b.call(flash, x, x, x, 0.0) if target is flash else b.call(noise, x, 0.0)
        late.update_arg(3 if target is flash else 1, dropped)
        b.outputs = [draw, b.call(operator.getitem, late, 0) if target is flash else late]
        return b.finish().graph, draw, late

    for target, dropped, held in ((flash, 0.0, False), (flash, 0.5, True), (noise, 0.0, True)):
        legal, draw, late = graph(target, dropped)
        assert ((draw, late) in GraphView(legal).ordering_edges()) == held
        reference = verify.snapshot(legal)
        draw.prepend(late)
        assert {f.rule for f in verify.check(legal, reference=reference)} == ({"rng-order"} if held else set())


@needs_transfers
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["buffer of the graph", "buffer of the caller"])
def test_what_receives_writes_its_buffer_until_the_wait(groups, batched: bool, given: bool):
    """Its schema is functional, but the buffer is written and returned."""

    def graph(early: str = "") -> torch.fx.Graph:
        b = Builder(groups)
        x, place = b.input(4, 4), b.input(4, 4)
        buffer = place if given else b.call(aten.zeros_like.default, place)
        if batched:
            both = b.call(c10d.batch_p2p_ops.default, ["isend", "irecv"], [1, 1], [0, 0], [x, buffer], groups["world"])
            sent, received = (b.call(operator.getitem, both, i) for i in range(2))
        else:
            sent = b.call(c10d.isend.default, x, 1, 0, groups["world"])
            received = b.call(c10d.irecv.default, buffer, 1, 0, groups["world"])
        if early == "read":
            b.call(aten.relu.default, buffer)
        if early:
            b.call(aten.mul_.Tensor, {"read": x, "write": x, "overwrite": buffer}[early], 2)
        for one in (sent, received):
            b.call(c10d.wait_tensor.default, one)
        b.outputs = [b.call(aten.relu.default, buffer)]
        return b.finish().graph

    legal = graph()
    assert verify.check(legal) == []
    view = GraphView(legal)
    reader = next(n for n in legal.nodes if n.target is aten.relu.default)
    last_wait = [n for n in legal.nodes if n.target is c10d.wait_tensor.default][-1]
    assert (last_wait, reader) in view.ordering_edges()
    assert [len(e.starts) for e in verify.snapshot(legal).events if e.action is Action.WAIT] == [1, 1]
    assert {f.rule for f in verify.check(graph("read"))} == {"read-before-wait", "write-in-flight"}
    assert {f.rule for f in verify.check(graph("write"))} == {"write-in-flight"}
    assert {f.rule for f in verify.check(graph("overwrite"))} >= {"write-in-flight"}
    reader.append(last_wait)
    assert "read-before-wait" in {f.rule for f in verify.check(legal)}


def test_results_of_a_coalesced_collective_in_place_are_apart(groups):
    """Found by the fuzzer: every result counted as all of the operands' memory, so that legal programs were refused."""
    b = Builder(groups)
    x, y = (b.call(aten.clone.default, b.input(4, 4)) for _ in range(2))
    both = b.call(c10d.all_reduce_coalesced_.default, [x, y], "sum", groups["world"])
    first, second = (b.call(c10d.wait_tensor.default, b.call(operator.getitem, both, i)) for i in range(2))
    start = b.call(c10d.broadcast.default, first, 0, groups["world"])
    b.call(aten.mul_.Tensor, second, 2)
    b.outputs = [b.call(c10d.wait_tensor.default, start), y]
    graph = b.finish().graph
    assert verify.check(graph) == []
    view = GraphView(graph)
    assert [len(view.storages.of(n)) for n in (first, second)] == [1, 1]
    assert view.storages.of(second) == view.storages.of(y)
    next(n for n in graph.nodes if n.target is aten.mul_.Tensor).args = (x, 2)
    assert {f.rule for f in verify.check(graph)} == {"write-in-flight"}


@needs_transfers
def test_a_report_says_what_is_proven_and_what_is_assumed(groups):
    b = Builder(groups)
    x = b.input(4, 4)
    reduced = b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, x, "sum", groups["world"]))
    b.outputs = [reduced, b.call(torch.ops.verify_tests.unknown.default, x)]
    graph = b.finish().graph
    proven, assumed = verify.statement(graph, compared=False)
    assert proven.startswith("Proven: every result is waited for") and "launch order, which has no cycle" in proven
    assert "equal on all ranks" not in proven and "every rank runs this program" in assumed
    assert "verify_tests::unknown does not wait for another rank" in assumed and "transfer" not in assumed
    proven, assumed = verify.statement(graph, compared=True)
    assert "the order per group is equal on all ranks" in proven
    assert "every rank runs this program" not in assumed and "rank_check" in assumed
    with graph.inserting_before(graph.output_node()):
        sent = graph.call_function(c10d.isend.default, (x, 1, 0, groups["world"]))
        early = graph.call_function(c10d.all_reduce.default, (x, "sum", groups["world"]))
    sent.meta["val"], early.meta["val"] = x.meta["val"].new_empty(0), x.meta["val"]
    proven, assumed = verify.statement(graph, compared=False)
    assert "waited for" not in proven and "the program was right as it came (2 findings" in assumed
    assert "every transfer has its counterpart" in assumed
