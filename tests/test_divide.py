"""Averages over ranks that generated code for a CPU divides by calls of one function."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import options
from inductor_passes._torch import cpu_calls as cpu_calls_of_torch
from inductor_passes.rewriting import divide_op
from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.async_tp_programs import GROUP, c10d
from tests.support.compiled import calls, compiled_with_calls
from tests.support.graphs import GraphBuilder
from tests.support.world import fake_world

aten = torch.ops.aten
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.dtype.itemsize])


@given(
    dtype=st.sampled_from(DTYPES),
    count=st.integers(0, 100),
    first=st.integers(0, 9),
    divisor=st.sampled_from((1, 2, 3, 7, 8, 12, 1000, 1 << 24)),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=6, deadline=None)
def test_a_call_gives_the_bits_of_the_loop(dtype: torch.dtype, count: int, first: int, divisor: int, seed: int) -> None:
    """Any bit pattern: subnormal numbers, infinities and signed zeros among them; NaN stays NaN."""
    words = torch.randint(-(1 << 62), 1 << 62, (first + count + 1,), generator=torch.Generator().manual_seed(seed))
    message = words.view(dtype)
    found, code = compiled_with_calls(lambda m: divide_op.OPERATOR(m[first : first + count], divisor), message)
    expected, _ = compiled_with_calls(lambda m: m[first : first + count] / divisor, message)
    assert calls(code, "_divided_") == 1
    numbers = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan()) and found.stride() == expected.stride()
    assert torch.equal(bits(found)[numbers], bits(expected)[numbers])


def test_parts_of_all_sizes_are_divided_by_one_function_and_what_a_loop_computes_by_that_loop() -> None:
    def averages(x, m, turned):
        halves = [divide_op.OPERATOR(part, 3) for part in m.split([5, 64, 1], 0)]
        cut = divide_op.OPERATOR(m.view(7, 5, 4)[:, :, 1:3], 3), divide_op.OPERATOR(m.view(7, 5, 4)[:, 1:3], 3)
        return *halves, *cut, divide_op.OPERATOR(x + 1, 3), divide_op.OPERATOR(turned.t(), 3)

    inputs = torch.randn(6), torch.randn(70, 2), torch.randn(4, 5)
    found, code = compiled_with_calls(averages, *inputs)
    for one, expected in zip(found, averages(*inputs), strict=True):
        assert torch.equal(one, expected)
    assert calls(code, "_divided_") == 5 and code.count("_divide_float32 = ") == 1
    # The loops of what is computed and of what is turned may be one.
    assert code.count("cpp_pybinding(") in (2, 3)


@given(
    sizes=st.lists(st.integers(0, 4), min_size=0, max_size=4),
    cut=st.integers(0, 3),
    first=st.integers(0, 2),
)
def test_rows_are_where_the_elements_are(sizes: list[int], cut: int, first: int) -> None:
    """Against the tensor itself: of a slice along any dimension, the rows hold its elements in its order."""
    whole = torch.arange(math.prod(sizes)).view(sizes)
    part = whole if not sizes else whole.narrow(cut % len(sizes), 0, 0) if not whole.numel() else None
    if part is None:
        dim = cut % len(sizes)
        begin = min(first, sizes[dim] - 1)
        part = whole.narrow(dim, begin, sizes[dim] - begin)
    found = cpu_calls_of_torch._rows(list(part.shape), list(part.stride()))
    assert found is not None
    rows, stride, width = found
    at = [part.storage_offset() + row * stride + k for row in range(rows) for k in range(width)]
    assert at == part.flatten().tolist()


def test_what_is_no_rows_is_left_to_loops() -> None:
    for turned in (torch.empty(3, 4).t(), torch.empty(2, 3, 4)[:, ::2, 1:], torch.empty(4, 4)[:, ::3]):
        assert cpu_calls_of_torch._rows(list(turned.shape), list(turned.stride())) is None


def test_large_parts_are_divided_by_several_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        message = torch.randn(1 << 18)
        found, _ = compiled_with_calls(lambda m: divide_op.OPERATOR(m[8:], 3), message)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found, message[8:] / 3)


def test_the_operator() -> None:
    torch.library.opcheck(divide_op.divide, (torch.randn(2, 3), 4))


def _averaged(divisor: object = 2, dtype: torch.dtype = torch.float32, read: bool = False, arrived: bool = True):
    with fake_world(2):
        b = GraphBuilder()
        sent = b.placeholder("p", 8, dtype=dtype)
        sent = b.call(c10d.reduce_scatter_tensor.default, sent, "sum", 2, GROUP)
        done = b.call(c10d.wait_tensor.default, sent)
        part = b.call(aten.slice.Tensor, done, 0, 0, 2) if arrived else b.call(aten.mul.Tensor, done, done)
        average = b.call(aten.div.Tensor, part, divisor)
        b.graph.output((average, *([b.call(aten.relu.default, average)] if read else [])))
    return b.graph


@pytest.mark.parametrize(
    ("graph", "changed"),
    [
        (lambda: _averaged(), 1),
        (lambda: _averaged(8.0), 1),
        (lambda: _averaged(0.5), 0),
        (lambda: _averaged(-2), 0),
        (lambda: _averaged((1 << 24) + 1), 0),
        (lambda: _averaged(dtype=torch.complex64), 0),
        (lambda: _averaged(dtype=torch.int64), 0),
        (lambda: _averaged(read=True), 0),
        (lambda: _averaged(arrived=False), 0),
    ],
    ids=["part", "whole float", "half", "negative", "large", "complex", "integers", "also read", "computed"],
)
def test_only_averages_that_are_returned_are_divided_so(graph, changed: int) -> None:
    found = graph()
    assert divide_op.lower(found) == changed
    found.lint()
    assert [n.target for n in found.nodes].count(divide_op.OPERATOR.default) == changed


def test_a_step_compiles_one_function_for_all_its_averages() -> None:
    """Found: ten of forty functions divided, each bucket with its own sizes."""
    torch._dynamo.reset()
    with fake_world(4):
        sizes = [24 + 8 * k for k in range(5)]
        model = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
        model = simple_fsdp(model, init_device_mesh("cpu", (4,)))

        def step() -> None:
            torch.compile(model, options=options(), fullgraph=True)(torch.ones(8, 24)).sum().backward()

        _, codes = run_and_get_code(step)
        gradients = [p.grad for p in model.parameters()]
    assert calls(codes[1], "_divided_") == len(gradients) == 8 and "cpp_fused_div" not in codes[1]
    assert codes[1].count("_divide_float32 = ") == 1
