"""The second memory model: what Inductor's kernels make of an FX graph's values, held against Inductor itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import FxProblem, build
from inductor_passes.problems.generated import MOST_READS, Generated
from inductor_passes.schedule.problem import Problem
from tests.support.bucket_graphs import Program, aten
from tests.support.compiled import without_kernels

CPU = CostProfile.default("cpu")


def look(gm: torch.fx.GraphModule) -> tuple[Generated, FxProblem]:
    view = GraphView(gm.graph)
    return Generated(view, frozenset()), build(view, CPU)


def generated(fx: FxProblem) -> Problem:
    assert fx.generated is not None
    assert fx.generated.tasks == fx.problem.tasks and fx.generated.preds == fx.problem.preds
    return fx.generated


def names(problem: Problem) -> dict[str, set[str]]:
    """Storage -> the tasks that read it; of what the graph makes."""
    return {s.name: {problem.tasks[r].name for r in s.readers} for s in problem.storages if s.producer >= 0}


def test_a_pointwise_result_for_one_pointwise_reader_takes_no_memory() -> None:
    p = Program()
    x, y = p.input(64, 64), p.input(64, 64)
    product = p.call(aten.mm.default, x, y)
    sine = p.call(aten.sin.default, product)
    half = p.call(aten.mul.Tensor, sine, y)
    turned = p.call(aten.permute.default, half, [1, 0])
    last = p.call(aten.mm.default, turned, x)
    found, fx = look(p.done(last))
    assert found.computed_at(sine) is half and found.computed_at(half) is half
    plain, other = names(fx.problem), names(generated(fx))
    assert plain[product.name] == {sine.name} and sine.name in plain
    # The kernel of `mul` reads the product and stores its own result over it.
    assert sine.name not in other and half.name not in other
    assert other[product.name] == {half.name, last.name}
    sizes = [sum(s.size_bytes for s in one.storages) for one in (fx.problem, generated(fx))]
    assert sizes[0] - sizes[1] == 2 * 64 * 64 * 4


@pytest.mark.parametrize("why", ["two readers", "returned", "a product reads it", "a view of it is read", "a sum"])
def test_what_takes_memory_all_the_same(why: str) -> None:
    p = Program()
    x = p.input(64, 64)
    value = p.call(aten.sin.default, x)
    after = {
        "two readers": lambda: [p.call(aten.neg.default, value), p.call(aten.exp.default, value)],
        "returned": lambda: [value, p.call(aten.neg.default, value)],
        "a product reads it": lambda: [p.call(aten.mm.default, value, x)],
        "a view of it is read": lambda: [p.call(aten.neg.default, p.call(aten.permute.default, value, [1, 0]))],
        "a sum": lambda: [p.call(aten.sum.dim_IntList, value, [1])],
    }[why]()
    found, fx = look(p.done(*after))
    assert found.computed_at(value) is value
    assert value.name in names(generated(fx))


def test_code_that_reads_many_values_ends_in_memory() -> None:
    p = Program()
    xs = [p.input(64, 64) for _ in range(MOST_READS + 2)]
    sums = [xs[0]]
    for x in xs[1:]:
        sums.append(p.call(aten.add.Tensor, sums[-1], x))
    last = p.call(aten.sin.default, sums[-1])
    found, _ = look(p.done(last))
    full = sums[MOST_READS]  # reads one more than may be
    assert [found.computed_at(s) for s in sums[1:]] == [full] * MOST_READS + [last]
    assert [found.computed_at(s) is s for s in sums[1 : MOST_READS + 1]] == [False] * (MOST_READS - 1) + [True]


@pytest.mark.parametrize(
    ("why", "over"),
    [
        ("alone", True),
        ("reshaped", True),
        ("another reader", False),
        ("another type", False),
        ("turned around", False),
        ("an input", False),
        ("smaller", False),
    ],
)
def test_a_result_is_stored_over_an_operand_of_its_own(why: str, over: bool) -> None:
    p = Program()
    x = p.input(64, 64)
    operand = x if why == "an input" else p.call(aten.mm.default, x, p.input(64, 1 if why == "smaller" else 64))
    read, more = operand, []
    if why == "reshaped":
        read = p.call(aten.view.default, operand, [32, 128])
    if why == "turned around":
        read = p.call(aten.permute.default, operand, [1, 0])
    if why == "another reader":
        more = [p.call(aten.mm.default, operand, x)]
    if why == "another type":
        result = p.call(torch.ops.prims.convert_element_type.default, read, torch.int32)
    else:
        result = p.call(aten.mul.Tensor, read, x if why == "smaller" else 2.0)
    _, fx = look(p.done(result, *more))
    stored = names(generated(fx))
    assert (result.name not in stored) is over
    if over:
        (block,) = [s for s in generated(fx).storages if s.name == operand.name]
        assert block.pinned  # the result is returned


def test_a_kernel_of_several_operators_reads_where_the_last_of_them_is() -> None:
    """What is computed later keeps its operands until then."""
    p = Program()
    x, y = p.input(64, 64), p.input(64, 64)
    first = p.call(aten.mm.default, x, y)
    early = p.call(aten.sin.default, first)
    second = p.call(aten.mm.default, y, x)
    late = p.call(aten.add.Tensor, early, second)
    found, fx = look(p.done(p.call(aten.sum.default, late), p.call(aten.mm.default, late, x)))
    assert found.computed_at(early) is late
    assert late.name in names(generated(fx))[first.name]


def without_memory(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[int, list[str]]:
    """How many results of a compiled function are to take no memory, and those that Inductor has a buffer for."""
    said: list[set[str]] = []
    made: list[set[str]] = []

    def passes(graph: torch.fx.Graph) -> None:
        found = Generated(GraphView(graph), frozenset())
        said.append({n.name for n in graph.nodes if found.computed_at(n) is not n})

    def buffers(nodes: list[Any]) -> list[Any]:
        origins = (getattr(b.node, "origin_node", None) for n in nodes for b in n.get_outputs())
        made.append({origin.name for origin in origins if origin is not None})
        return nodes

    torch._dynamo.reset()
    settings = {"post_grad_custom_post_pass": passes, "_pre_fusion_custom_pass": buffers, "fx_graph_cache": False}
    with config.patch(settings), without_kernels():
        result = torch.compile(function, fullgraph=True)(*inputs)
        if result.requires_grad:
            result.backward()
    assert len(said) == len(made)
    wrong = [sorted(s & m) for s, m in zip(said, made)]
    return sum(map(len, said)), [name for names in wrong for name in names]


UNARY = (torch.sin, torch.exp, torch.relu, torch.sigmoid, torch.neg, torch.tanh, torch.erf)
BINARY = (torch.add, torch.mul, torch.sub, torch.maximum)


@pytest.mark.parametrize("seed", range(24))
def test_inductor_makes_no_buffer_for_what_takes_no_memory(seed: int) -> None:
    draw = random.Random(seed)

    steps = [
        (draw.random(), *(int(draw.expovariate(0.7)) for _ in range(2)), draw.choice(UNARY), draw.choice(BINARY))
        for _ in range(draw.randrange(6, 40))
    ]

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        values = [x, y, z.expand(16, 16)]
        for kind, i, j, unary, binary in steps:
            a, b = (values[max(0, len(values) - 1 - k)] for k in (i, j))
            if kind < 0.45:
                values.append(unary(a))
            elif kind < 0.8:
                values.append(binary(a, b))
            elif kind < 0.88:
                values.append(a @ b)
            elif kind < 0.94:
                values.append(a - a.mean(-1, keepdim=True))
            else:
                values.append(a.t().reshape(16, 16))
        return torch.stack(values[-3:]).sum()

    x, y, z = torch.randn(16, 16), torch.randn(16, 16), torch.randn(16)
    found, wrong = without_memory(function, x, y, z)
    assert not wrong
    assert found or len(steps) < 12


def test_inductor_makes_no_buffer_in_a_training_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.SiLU())
    found, wrong = without_memory(lambda x: (model(x) + x).square().mean(), torch.randn(8, 32))
    assert found > 5 and not wrong
