"""Messages that generated code for a CPU puts together by calls of one function."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import options
from inductor_passes.rewriting import pack_op
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.async_tp_programs import GROUP, c10d
from tests.support.compiled import calls, compiled_with_calls
from tests.support.graphs import GraphBuilder
from tests.support.world import fake_world

aten = torch.ops.aten


def packed(*parts: torch.Tensor) -> torch.Tensor:
    return pack_op.OPERATOR([*parts])


def loops(code: str) -> list[str]:
    """The C++ functions of a graph, but the one that copies."""
    return [part for part in code.split("cpp_pybinding(")[1:] if "std::memcpy" not in part.split("''')")[0]]


def test_what_is_in_memory_is_copied_by_a_call_and_what_is_computed_is_written_by_its_loop() -> None:
    def pack(x, w, g):
        product = (x @ w).view(2, -1)
        return packed(product, (g + 1).view(2, -1), g.to(torch.float32), w.view(2, -1))

    x, w, g = torch.randn(4, 8), torch.randn(8, 6), torch.randn(2, 5)
    found, code = compiled_with_calls(pack, x, w, g)
    assert torch.equal(found, torch.cat([(x @ w).view(2, -1), g + 1, g, w.view(2, -1)], 1))
    # The product; the others are a loop.
    assert calls(code, "_copied_columns") == 1 and len(loops(code)) == 1


def test_no_function_is_compiled_for_a_place_in_a_message() -> None:
    """Found: packs of two buckets of different sizes were a C++ function per bucket and shape."""

    def pack(x, *weights):
        a, b, c = ((x @ w).view(2, -1) for w in weights)
        return packed(a, b), packed(b, c, a)

    inputs = [torch.randn(4, 3), *(torch.randn(3, n) for n in (2, 6, 10))]
    found, code = compiled_with_calls(pack, *inputs)
    a, b, c = ((inputs[0] @ w).view(2, -1) for w in inputs[1:])
    for one, members in zip(found, [(a, b), (b, c, a)], strict=True):
        assert torch.equal(one, torch.cat(members, 1))
    assert calls(code, "_copied_columns") == 5 and not loops(code)


def test_small_inputs_are_packed_by_one_loop_and_large_ones_by_calls() -> None:
    inputs = [torch.randn(2, n) for n in (3, 8192, 1, 5)]
    found, code = compiled_with_calls(lambda *given: packed(*given), *inputs)
    assert torch.equal(found, torch.cat(inputs, 1))
    assert calls(code, "_copied_columns") == 1 and len(loops(code)) == 1


def test_the_operator() -> None:
    parts = [torch.randn(2, 3), torch.randn(2, 1)]
    torch.library.opcheck(pack_op.pack, (parts,))
    assert torch.equal(packed(*parts), torch.cat(parts, 1))


FORMS = {
    "input": lambda x, rows: x.view(rows, -1),
    "product": lambda x, rows: (x.reshape(rows, -1) @ x.reshape(-1, rows)).view(rows, -1),
    "computed": lambda x, rows: x.view(rows, -1) * 2,
    "columns": lambda x, rows: x.view(rows, -1)[:, 1:],
    "every second": lambda x, rows: x.view(rows, -1)[:, ::2],
    "turned": lambda x, rows: x.view(-1, rows).t(),
    "turned product": lambda x, rows: (x.reshape(rows, -1) @ x.reshape(-1, rows)).t(),
    "sums": lambda x, rows: x.view(rows, -1).sum(1, keepdim=True),
    "one row for all": lambda x, rows: x.view(rows, -1)[:1].expand(rows, -1),
    "some rows": lambda x, rows: torch.cat([x, x]).view(2 * rows, -1)[::2],
    "no columns": lambda x, rows: x.view(rows, -1)[:, :0],
}
_MULTIPLIES = ("product", "turned product", "sums")


@given(
    rows=st.sampled_from((1, 2, 3)),
    members=st.lists(st.tuples(st.sampled_from(sorted(FORMS)), st.integers(1, 9)), min_size=1, max_size=7),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)),
)
@settings(max_examples=10, deadline=None)
def test_it_is_a_concatenation(rows: int, members: list[tuple[str, int]], dtype: torch.dtype) -> None:
    if dtype in (torch.bool, torch.uint8):
        members = [("turned" if form in _MULTIPLIES else form, width) for form, width in members]
    inputs = [torch.randint(0, 2, (rows * width,)).to(dtype) for _, width in members]

    def parts(given):
        return [FORMS[form](x, rows).to(dtype) for (form, _), x in zip(members, given, strict=True)]

    found, _ = compiled_with_calls(lambda *given: packed(*parts(given)), *inputs)
    expected = torch.cat(parts(inputs), 1)
    assert torch.equal(found, expected) and found.stride() == expected.stride()


def _message(
    kind: str, *shapes: tuple[int, int], dim: int = 1, also_read: bool = False, dtype: torch.dtype = torch.float32
) -> torch.fx.Graph:
    with fake_world(2):
        b = GraphBuilder()
        parts = [b.placeholder(f"p{k}", *shape, dtype=dtype) for k, shape in enumerate(shapes)]
        message = b.call(aten.cat.default, parts, dim)
        rest = {"gather": (2, GROUP), "scatter": ("sum", 2, GROUP)}[kind]
        target = c10d.all_gather_into_tensor if kind == "gather" else c10d.reduce_scatter_tensor
        done = b.call(c10d.wait_tensor.default, b.call(target.default, message, *rest))
        b.graph.output((done, *([message] if also_read else [])))
    return b.graph


@pytest.mark.parametrize(
    ("graph", "changed"),
    [
        (lambda: _message("gather", (1, 5), (1, 3)), 1),
        (lambda: _message("scatter", (2, 5), (2, 3)), 1),
        (lambda: _message("scatter", (2, 5), (2, 5), dim=0), 0),
        (lambda: _message("scatter", (2, 5), (2, 3), also_read=True), 0),
        (lambda: _message("gather", (1, 5), (1, 3), dtype=torch.uint8), 0),
        (lambda: _message("gather", (1, 5), (1, 3), dtype=torch.complex64), 0),
    ],
    ids=["gather", "scatter", "rows", "also read", "bytes", "complex"],
)
def test_only_messages_of_columns_are_packed_so(graph, changed: int) -> None:
    found = graph()
    assert pack_op.lower(found) == changed
    found.lint()
    assert [n.target for n in found.nodes].count(pack_op.OPERATOR.default) == changed


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(3))
        self.wide = torch.nn.Linear(24, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.wide(x).sum()


def test_a_step_packs_its_messages_by_calls_and_has_no_loop_for_it() -> None:
    torch._dynamo.reset()
    with fake_world(4):
        model = simple_fsdp(Layers(), init_device_mesh("cpu", (4,)))

        def step() -> None:
            torch.compile(model, options=options(), fullgraph=True)(torch.randn(8, 24)).backward()

        with collect() as reports:
            _, codes = run_and_get_code(step)
    assert [r.phase for r in reports] == ["forward", "backward"] and len(codes) == 2
    assert all(calls(code, "_copied_columns") >= 8 for code in codes) and "reduce_scatter" in codes[1]
    moved = re.compile(r"auto tmp0 = [^;]*;\s+tmp0\.store\(")
    # The shards of parameters; gradients are put together without a loop that only copies.
    assert [len([loop for loop in loops(code) if moved.search(loop)]) for code in codes] == [1, 1]
