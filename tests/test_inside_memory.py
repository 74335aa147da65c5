"""What attention's backward takes while it runs: the plan's formula, the verifier's list of tensors, and an H100."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.fx
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build
from inductor_passes.problems.inside import inside_bytes
from inductor_passes.verify import insides
from inductor_passes.verify.memory import peak_bytes

KINDS = ("flash", "cudnn", "efficient")
#: (batches, heads, heads of keys, queries, keys, width, bytes of an element, in the kernel's order) -> by kind what the
#: allocator counted beside the results on an H100 (torch 2.11, cuDNN 9), see docs/results/gpu.md.
MEASURED: dict[tuple[int, int, int, int, int, int, int, bool], dict[str, int]] = {
    (4, 16, 16, 1024, 1024, 64, 2, True): {"flash": 17039360, "cudnn": 17039872, "efficient": 17055744},
    (4, 16, 16, 1024, 1024, 64, 2, False): {"flash": 33816576, "cudnn": 17039872, "efficient": 25444352},
    (4, 16, 16, 1024, 1024, 64, 4, True): {"efficient": 17301504},
    (4, 16, 16, 1024, 1024, 64, 4, False): {"efficient": 34078720},
    (2, 8, 8, 1000, 1000, 128, 2, True): {"flash": 8454144, "cudnn": 8256512, "efficient": 8454656},
    (2, 8, 2, 512, 512, 64, 2, True): {"flash": 4227072, "cudnn": 4227584},
    (2, 8, 2, 512, 512, 64, 2, False): {"flash": 6324224, "cudnn": 4227584},
    (2, 8, 8, 300, 700, 80, 2, True): {"flash": 2383872, "cudnn": 1555456, "efficient": 3166208},
    (2, 8, 8, 300, 700, 80, 2, False): {"flash": 3919872, "cudnn": 1555456, "efficient": 3934208},
    (1, 4, 4, 130, 130, 96, 2, True): {"flash": 397312, "cudnn": 202240, "efficient": 527360},
    (2, 8, 8, 2048, 2048, 128, 2, True): {"flash": 16908288, "cudnn": 16908800, "efficient": 16912384},
    (2, 8, 8, 2048, 2048, 128, 2, False): {"flash": 33685504, "cudnn": 16908800, "efficient": 25300992},
    (1, 32, 8, 4096, 4096, 128, 2, True): {"flash": 134742016, "cudnn": 134742528},
    (1, 32, 8, 4096, 4096, 128, 2, False): {"flash": 201850880, "cudnn": 134742528},
}


def graph_of(kind: str, shape: tuple[int, int, int, int, int, int], itemsize: int, in_order: bool) -> torch.fx.Graph:
    """A graph that calls the backward of an attention on a GPU."""
    batches, heads, key_heads, queries, keys, width = shape
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    graph = torch.fx.Graph()

    def operand(name: str, count: int, length: int) -> torch.fx.Node:
        node = graph.placeholder(name)
        if in_order:
            value = torch.empty(batches, length, count, width, dtype=dtype, device="cuda").transpose(1, 2)
        else:
            value = torch.empty(batches, count, length, width, dtype=dtype, device="cuda")
        node.meta["val"] = value
        return node

    def small(name: str) -> torch.fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty((), dtype=torch.int64, device="cuda")
        return node

    with FakeTensorMode():
        grad, query = operand("tangents_1", heads, queries), operand("q", heads, queries)
        key, value, out = operand("k", key_heads, keys), operand("v", key_heads, keys), operand("out", heads, queries)
        lse, seed, offset = small("lse"), small("seed"), small("offset")
        lse.meta["val"] = torch.empty(batches, heads, queries, device="cuda")
        arguments: dict[str, tuple[Any, ...]] = {
            "flash": (grad, query, key, value, out, lse, None, None, queries, keys, 0.0, True, seed, offset),
            "cudnn": (
                *(grad, query, key, value, out, lse, seed, offset, None, None, None, queries, keys),
                *(0.0, True),
            ),
            "efficient": (
                *(grad, query, key, value, None, out, lse, seed, offset, 0.0, [True, True, True, False]),
                True,
            ),
        }
        target = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward").default
        node = graph.call_function(target, arguments[kind])
        found = tuple(torch.empty_like(n.meta["val"]) for n in (query, key, value))
        node.meta["val"] = (*found, None) if kind == "efficient" else found
        results = []
        for i in range(3):
            results.append(graph.call_function(operator.getitem, (node, i)))
            results[-1].meta["val"] = node.meta["val"][i]
    graph.output(tuple(results))
    return graph


def call_in(graph: torch.fx.Graph) -> torch.fx.Node:
    return next(n for n in graph.nodes if "attention_backward" in str(n.target))


@pytest.mark.parametrize(
    ("case", "kind"), [(case, kind) for case, found in MEASURED.items() for kind in found], ids=lambda v: str(v)
)
def test_what_an_allocator_counted(case: tuple[int, ...], kind: str) -> None:
    *shape, itemsize, in_order = case
    node = call_in(graph_of(kind, tuple(shape), itemsize, bool(in_order)))  # type: ignore[arg-type]
    # An allocator rounds each tensor up, and may leave the end of a large block unused.
    assert abs(inside_bytes(node) / MEASURED[case][kind] - 1) < 0.02  # type: ignore[index]
    assert insides.inside_bytes(node) == inside_bytes(node)


@given(
    st.sampled_from(KINDS),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 300), st.integers(1, 300)),
    st.sampled_from([8, 40, 64, 72, 128, 136, 256]),
    st.sampled_from([2, 4]),
    st.booleans(),
)
def test_two_derivations(
    kind: str, sizes: tuple[int, int, int, int, int], width: int, itemsize: int, in_order: bool
) -> None:
    batches, key_heads, times, queries, keys = sizes
    heads = key_heads * (1 if kind == "efficient" else times)
    graph = graph_of(kind, (batches, heads, key_heads, queries, keys, width), itemsize, in_order)
    assert inside_bytes(call_in(graph)) == insides.inside_bytes(call_in(graph)) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_has_it(kind: str) -> None:
    """It is there with the results, and gone behind them: for the planner and for the verifier."""
    graph = graph_of(kind, (2, 4, 4, 256, 256, 64), 2, True)
    problem = build(GraphView(graph), CostProfile.default("H100")).problem
    (inside,) = [s for s in problem.storages if s.name.endswith((".inside", ".working"))]
    assert inside.readers == () and inside.size_bytes == inside_bytes(call_in(graph))
    operands = sum(n.meta["val"].nbytes for n in graph.find_nodes(op="placeholder"))
    results = 3 * 2 * 4 * 256 * 64 * 2
    assert peak_bytes(graph) == operands + results + inside.size_bytes


def test_elsewhere_it_is_not_known() -> None:
    graph = graph_of("flash", (2, 4, 4, 256, 256, 64), 2, True)
    node = call_in(graph)
    with FakeTensorMode():
        node.all_input_nodes[1].meta["val"] = torch.empty(2, 4, 256, 64)
    assert inside_bytes(node) == insides.inside_bytes(node) == 0
