"""What matmul-like nodes cost, and higher-order operators that call or run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.fx
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention.flex_attention import flex_attention

from inductor_passes import _torch
from inductor_passes.cost.compute import ComputeCosts
from inductor_passes.cost.flops import flops, library_shape, operand_dtype
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build
from inductor_passes.step.stored import computed_in
from tests.support.graphs import GraphBuilder, aten
from tests.support.world import fake_world

H100 = CostProfile.default("h100")
SHAPE = (2, 8, 128, 64)
SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default


class Graph(GraphBuilder):
    """A graph of operators that do not run on fake tensors of a CPU: their results are given."""

    def input(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.fx.Node:
        return self.placeholder(f"x{len(self.graph.nodes)}", *shape, dtype=dtype)

    def given(self, target: Any, *args: Any, like: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = like
        return node

    def done(self, *nodes: torch.fx.Node) -> ComputeCosts:
        self.graph.output(nodes)
        return ComputeCosts(GraphView(self.graph), H100)


def test_attention_under_checkpointing_costs_what_attention_costs() -> None:
    g = Graph()
    q, k, v = (g.input(*SHAPE) for _ in range(3))
    state = g.input(16, dtype=torch.uint8)
    plain = g.call(SDPA, q, k, v)
    result = plain.meta["val"]
    saving = g.given(torch.ops.higher_order.run_and_save_rng_state, SDPA, q, k, v, like=(state.meta["val"], result))
    again = g.given(torch.ops.higher_order.run_with_rng_state, state, SDPA, q, k, v, like=result)
    costs = g.done(plain, saving, again)
    assert flops(plain) == flops(saving) == flops(again) == 4 * 2 * 8 * 128 * 128 * 64
    expected = costs.duration_ns(plain)
    # The generator's state is a few bytes more.
    assert costs.duration_ns(saving) == pytest.approx(expected, abs=2)
    assert costs.duration_ns(again) == pytest.approx(expected, abs=2)


def traced(function: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """The graph that a compiler is given for a function."""
    seen: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(gm)
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*inputs)
    return seen[0]


def test_flex_attention_costs_what_flash_attention_costs() -> None:
    gm = traced(flex_attention, *(torch.randn(2, 8, 512, 64) for _ in range(3)))
    (node,) = [n for n in gm.graph.nodes if n.target is torch.ops.higher_order.flex_attention]
    assert flops(node) == 4 * 2 * 8 * 512 * 512 * 64
    assert (operand_dtype(node), library_shape(node)) == ("float32", ("attention", 0))
    least = H100.compute_ns(4 * 2 * 8 * 512 * 512 * 64, 0, "float32", 1, ("attention", 0))
    assert ComputeCosts(GraphView(gm.graph), H100).duration_ns(node) >= least


def test_a_branch_costs_its_dearer_side_and_a_region_what_is_in_it() -> None:
    size, cheap = 256, 2 * 256**3

    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x @ x, (x,))

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return x @ x.sin()

    x = torch.randn(size, size)
    regions = ((branch, "cond", 2 * cheap), (lambda x: region(region(x)), "invoke_subgraph", cheap))
    for function, name, expected in regions:
        gm = traced(function, x)
        node = next(n for n in gm.graph.nodes if _torch.op_name(n.target) == f"higher_order::{name}")
        assert flops(node) == expected
        costs = ComputeCosts(GraphView(gm.graph), H100)
        assert costs.duration_ns(node) >= H100.compute_ns(expected, 0, "float32")


def test_a_higher_order_operator_is_no_part_of_a_fused_loop() -> None:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    # A region that is used once is inlined.
    gm = traced(lambda x: region(region(x.exp()) + 1), torch.randn(512, 512))
    node = next(n for n in gm.graph.nodes if _torch.op_name(n.target) == "higher_order::invoke_subgraph")
    costs = ComputeCosts(GraphView(gm.graph), H100)
    assert costs.made_by(node) is None
    work = costs.work(node)
    assert work is not None and work.bytes_moved == 2 * 512 * 512 * 4
    (before,) = node.all_input_nodes[1:]
    assert costs.leaves(before)


def test_what_communicates_in_a_region_takes_time() -> None:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        whole = fc.all_gather_tensor(x, 0, dist.group.WORLD)
        return whole[: x.shape[0]].sin() @ x[:, : x.shape[1]]

    with fake_world(8):
        gm = traced(lambda x: region(region(x)), torch.randn(256, 256))
        node = next(n for n in gm.graph.nodes if _torch.op_name(n.target) == "higher_order::invoke_subgraph")
        view = GraphView(gm.graph)
        assert view.role(node) is Role.FENCE
        link_ns = H100.communication_ns("all_gather", 256 * 256 * 4, 8 * 256 * 256 * 4, tuple(range(8)))
        compute_ns = H100.compute_ns(2 * 256**3, 0, "float32")
        assert ComputeCosts(view, H100).duration_ns(node) >= link_ns + compute_ns


@pytest.mark.parametrize(
    "left, right, columns",
    [
        ((64, 32), (4, 32, 16), (64, 16)),
        ((64, 32), (32, 16), (4, 64, 16)),
        ((4, 64, 32), (32, 16), (64, 16)),
        ((4, 64, 32), (4, 32, 16), (4, 64, 16)),
    ],
)
def test_products_of_groups_count_like_one_product_of_all_rows(
    left: tuple[int, ...], right: tuple[int, ...], columns: tuple[int, ...]
) -> None:
    g = Graph()
    a, b = g.input(*left), g.input(*right)
    ends = None if len(left) == len(right) == 3 else g.input(4, dtype=torch.int32)
    with g.mode:
        like = torch.empty(columns, dtype=torch.bfloat16)
    node = g.given(aten._grouped_mm.default, a, b, ends, like=like)
    batch = 4 if ends is None else 1
    assert flops(node) == 2 * batch * 64 * 32 * 16
    work = g.done(node).work(node)
    assert work is not None and work.flops == flops(node) and work.dtype == "bfloat16"


def test_a_packed_right_side_counts_by_the_result() -> None:
    g = Graph()
    x, w, scales = g.input(8, 64), g.input(32, 64, dtype=torch.int8), g.input(32)
    node = g.call(aten._weight_int8pack_mm.default, x, w, scales)
    assert flops(node) == 2 * 8 * 64 * 32
    g.done(node)


def test_a_stored_step_does_not_say_what_a_region_computes() -> None:
    """Its time is that of the graphs inside; FLOPs and bytes of the call alone would make it something else."""

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return x @ x.sin()

    gm = traced(lambda x: region(region(x)) @ x, torch.randn(64, 64))
    view = GraphView(gm.graph)
    named = [one.name for one in computed_in(view, build(view, H100), H100)]
    assert named == [n.name for n in view.nodes if n.target is aten.mm.default]
