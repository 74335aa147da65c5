"""Members of a message taken out in one launch: the kernel, the operator, the pass."""

from __future__ import annotations

import operator
import subprocess
import sys

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from inductor_passes.bucket.unpack_pass import UnpackPass
from inductor_passes.config import PassConfig
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.canonical import shards
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Reason, Verdict
from inductor_passes.rewriting import cpu_calls, unpack_op
from inductor_passes.rewriting.merge import merge
from inductor_passes.rewriting.sums import taken_in
from tests.support.async_tp_programs import GROUP, Program, c10d, inputs, run_ranks, trace
from tests.support.graphs import GraphBuilder
from tests.support.processes import LIMIT_S, environment
from tests.support.world import fake_world

ON_CPU = UnpackPass(devices=("cpu",))
aten = torch.ops.aten


def run(gm, one=ON_CPU, **settings):
    config, profile = PassConfig.from_mapping({"verify": "strict", **settings}), CostProfile.default("cuda")
    done = run_passes(gm.graph, [one], config, profile)
    gm.graph.lint()
    gm.recompile()
    return done.report.passes[0]


def calls(gm, name):
    return [n for n in gm.graph.nodes if getattr(n.target, "_opname", "") == name]


def _weights(x, m):
    """A bucket of three weights: matmuls read the first two, a scaling the third."""
    message = c10d.wait_tensor(c10d.all_gather_into_tensor(m, 2, GROUP))
    parts = [
        aten.clone.default(aten.slice.Tensor(message, 1, a, b), memory_format=torch.contiguous_format)
        for a, b in ((0, 32), (32, 96), (96, 112))
    ]
    y = x @ parts[0].view(8, 8)
    return y @ parts[1].view(8, 16), parts[2] * 2


WEIGHTS = Program("weights", _weights, ((4, 8), (1, 112)))


def test_members_that_matmuls_read_come_out_together() -> None:
    with fake_world(2):
        gm, before = trace(WEIGHTS), trace(WEIGHTS)
        report = run(gm, memory_budget="unlimited")
        (made,) = calls(gm, "unpack")
        assert made.args[1:] == ([0, 32], [32, 64]) and len(calls(gm, "clone")) == 1
        (decision,) = report.decisions
        assert decision.verdict is Verdict.APPLIED and decision.gain_ns > 0
        values = [inputs(WEIGHTS, rank) for rank in range(2)]
        for a, b in zip(run_ranks(before, values), run_ranks(gm, values)):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_memory_budget_may_say_no() -> None:
    def late(x, m):
        message = c10d.wait_tensor(c10d.all_gather_into_tensor(m, 2, GROUP))
        for k in range(4):
            part = aten.slice.Tensor(message, 1, 4096 * k, 4096 * (k + 1))
            x = x @ aten.clone.default(part, memory_format=torch.contiguous_format).view(128, 64)[:64]
        return x

    program = Program("late", late, ((4, 64), (1, 4 * 4096)))
    with fake_world(2):
        gm = trace(program)
        names = [n.name for n in gm.graph.nodes]
        report = run(gm, memory_budget="0")
        assert report.rolled_back is Reason.OVER_BUDGET and [n.name for n in gm.graph.nodes] == names
        assert run(trace(program), memory_budget="unlimited").changed


def test_on_a_cpu_and_by_default_nothing_happens() -> None:
    with fake_world(2):
        gm = trace(WEIGHTS)
        assert not run(gm, UnpackPass()).changed and not calls(gm, "unpack")
    assert not any(isinstance(p, UnpackPass) for p in passes_of(PassConfig()))
    assert any(isinstance(p, UnpackPass) for p in passes_of(PassConfig(unpack="kernel")))


def test_the_operator_and_its_fake() -> None:
    message = torch.arange(24.0).view(2, 12)
    torch.library.opcheck(unpack_op.unpack, (message, [0, 5], [5, 7]))
    first, second = unpack_op.unpack(message, [1, 8], [2, 4])
    assert first.tolist() == [[1, 2], [13, 14]] and second.is_contiguous()


def test_the_kernel_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.unpack_worker"],
        env=environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]


def test_the_kernel_compiles_for_a_gpu() -> None:
    """Down to PTX, without a GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from inductor_passes.kernels import unpack as kernel

    three = ("*fp32",) * 3
    signature = {
        "message": "*fp32",
        "outs": three,
        "firsts": ("i32",) * 3,
        "widths": ("i32",) * 3,
        "columns": "i32",
        "block": "constexpr",
    }
    source = ASTSource(kernel.take_apart, signature, constexprs={(5,): 1024})
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    except (RuntimeError, OSError) as error:
        pytest.skip(f"this Triton compiles for no GPU here: {error}")
    assert compiled.asm["ptx"].count("st.global") >= 3


def _products(m: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second, looped = torch.ops.inductor_passes.unpack(m, [0, 32, 96], [32, 64, 16])
    return x @ first.view(8, 8), x @ second.view(8, 16), looped * 2


@pytest.mark.parametrize("columns", [112, 113])
def test_generated_code_copies_by_calls_and_has_no_loop_for_it(columns: int) -> None:
    """A loop per member would be a C++ function of its own for every place in a message."""
    cpu_calls.register()
    torch._dynamo.reset()
    m, x = torch.randn(2, columns), torch.randn(4, 8)
    found, (code,) = run_and_get_code(torch.compile(_products, fullgraph=True), m, x)
    for value, expected in zip(found, _products(m, x), strict=True):
        assert torch.equal(value, expected)
    assert code.count("_copied_columns(reinterpret_tensor(") == 3
    # The function that copies, and the loop that doubles.
    assert code.count("cpp_pybinding(") == 2


def test_weights_of_matmuls_and_small_ones_are_copied_by_calls_and_what_a_loop_reads_is_not() -> None:
    """Found: twice as many C++ functions as default Inductor has, most of them copies out of messages."""
    with fake_world(2):
        b = GraphBuilder()
        sizes = {"multiplied": (8, 8), "scaled": (128, 128), "returned": (8, 8), "norm": (8, 8)}
        shards = [b.placeholder(name, *size) for name, size in sizes.items()]
        starts = [b.call(c10d.all_gather_into_tensor.default, shard, 2, GROUP) for shard in shards]
        multiplied, scaled, returned, norm = (b.call(c10d.wait_tensor.default, start) for start in starts)
        product = b.call(aten.mm.default, b.placeholder("x", 4, 16), multiplied)
        b.graph.output((product, b.call(aten.mul.Tensor, scaled, 2), returned, b.call(aten.mul.Tensor, norm, 2)))
        view = GraphView(b.graph)
        assert taken_in(view) == {scaled, starts[1], norm, starts[3]}
        (done,) = merge(b.graph, view, [list(view.collectives)], call_copies=True)
        b.graph.lint()
        now = {old: next(n for n in b.graph.nodes if n.name == new) for old, new in done.results}
        made = {old: new.args[0].target for old, new in now.items()}
        assert made == {
            multiplied.name: operator.getitem,
            scaled.name: aten.clone.default,
            returned.name: operator.getitem,
            norm.name: operator.getitem,
        }


def test_the_pass_that_merges_asks_for_calls_where_inductor_generates_code() -> None:
    asked = {
        codegen: next(p for p in passes_of(PassConfig(codegen=codegen)) if p.name == "bucket").call_copies
        for codegen in ("inductor", "aot_eager")
    }
    assert asked == {"inductor": True, "aot_eager": False}


def test_a_copy_by_a_call_shows_that_a_shard_was_padded() -> None:
    """All ranks have to see that shards are of unequal size, through every form of a merged gather."""
    with fake_world(2):
        b = GraphBuilder()
        starts = [b.call(c10d.all_gather_into_tensor.default, b.placeholder(name, 4, 8), 2, GROUP) for name in "ab"]
        cut = [b.call(aten.slice.Tensor, b.call(c10d.wait_tensor.default, start), 0, 0, 7) for start in starts]
        x = b.placeholder("x", 3, 7)
        b.graph.output(tuple(b.call(aten.mm.default, x, weight) for weight in cut))
        view = GraphView(b.graph)
        merge(b.graph, view, [list(view.collectives)], call_copies=True)
        after = GraphView(b.graph)
        assert {n.args[0].args[0].target for n in cut[0].all_input_nodes} == {torch.ops.inductor_passes.unpack.default}
        assert len(shards(after).uneven) == 1


def test_a_copy_costs_what_it_moves_and_not_the_message() -> None:
    b = GraphBuilder()
    message = b.placeholder("message", 2, 1024)
    made = b.call(torch.ops.inductor_passes.unpack.default, message, [8], [32])
    b.graph.output((b.call(aten.mm.default, b.placeholder("x", 3, 2), b.call(operator.getitem, made, 0)),))
    profile = CostProfile.default("cpu")
    moved = 2 * 2 * 32 * 4
    assert ComputeCosts(GraphView(b.graph), profile).duration_ns(made) == profile.compute_ns(0, moved, "float32", 1)
