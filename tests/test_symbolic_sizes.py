"""Sizes that are only known at run time: as many collectives as with static ones, right for the whole range."""

from __future__ import annotations

import itertools
import operator
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx
from hypothesis import Phase, given, settings
from torch._dynamo.utils import counters

from inductor_passes import _torch
from inductor_passes.bucket.pass_ import BucketPass
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.report import PassReport, Reason, Verdict
from inductor_passes.trace.collector import collect
from inductor_passes.verify.facts.view import View
from inductor_passes.verify.values import Program as Values
from inductor_passes.verify.values import changed_values
from inductor_passes.verify.values.sizes import Size, Symbol, UndecidedError, _Reader, size_of
from tests.support.bucket_graphs import assert_same_bits, aten
from tests.support.compiled import dotted
from tests.support.models import WorldGather
from tests.support.ranks import Ranks
from tests.support.symbolic_graphs import SymbolicProgram, at_sizes
from tests.support.world import fake_world

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
PROFILE = CostProfile.default("cuda")


def three(kind: str, symbolic: bool, world: str, *, multiple: int = 2) -> tuple[torch.fx.GraphModule, SymbolicProgram]:
    """Three collectives of inputs with rows of their own, each between pointwise operators."""
    p = SymbolicProgram(symbolic)
    outputs = []
    for rows in (8, 12, 4):
        x = p.call(aten.neg.default, p.rows(rows, 3, multiple=multiple))
        y = p.exchange(x, world, 2) if kind == "all_to_all" else p.collective(kind, x, world)
        outputs.append(p.call(aten.mul.Tensor, y, 2.0))
    return p.done(*outputs), p


def bucketed(gm: torch.fx.GraphModule) -> PassReport:
    config = PassConfig(memory_budget="unlimited", verify="strict")
    done = run_passes(gm.graph, [BucketPass()], config, PROFILE)
    gm.recompile()
    return done.report.passes[0]


@pytest.mark.parametrize("kind", KINDS)
def test_symbolic_collectives_travel_together_as_static_ones_do(kind: str) -> None:
    with fake_world(2) as world:
        static, symbolic = (three(kind, one, world) for one in (False, True))
        wanted = bucketed(static[0])
        sizes = [(8, 12, 4), (4, 4, 4), (4, 10, 6), (16, 4, 32)]
        before = [at_sizes(symbolic[0], rows, 2) for rows in sizes]
        guards = len(symbolic[1].env.guards)
        report = bucketed(symbolic[0])
        assert not report.findings
        counts = [len(GraphView(gm.graph).collectives) for gm in (static[0], symbolic[0])]
        assert counts == [1, 1]
        assert [(d.verdict, d.reason) for d in report.decisions] == [(d.verdict, d.reason) for d in wanted.decisions]
        assert len(symbolic[1].env.guards) == guards, symbolic[1].env.guards[guards:]
        for rows, expected in zip(sizes, before):
            assert_same_bits(expected, at_sizes(symbolic[0], rows, 2))


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_to_all"])
def test_what_is_not_known_to_divide_stays(kind: str) -> None:
    with fake_world(2) as world:
        gm, _ = three(kind, True, world, multiple=1)
        report = bucketed(gm)
    assert not report.changed and len(GraphView(gm.graph).collectives) == 3
    assert {d.reason for d in report.decisions} == {Reason.RANGE}


def test_types_that_would_need_padding_of_unknown_width_stay_apart() -> None:
    """Rows of 3 bfloat16 beside rows of float32: their bytes are multiples of 4 only where the rows are even."""

    def graph(world: str, multiple: int) -> torch.fx.GraphModule:
        p = SymbolicProgram()
        inputs = [p.rows(8, 3, dtype=t, multiple=multiple) for t in (torch.bfloat16, torch.float32)]
        return p.done(*(p.collective("all_gather", x, world) for x in inputs))

    with fake_world(2) as world:
        odd, even = (graph(world, multiple) for multiple in (1, 4))
        report = bucketed(odd)
        assert not report.changed and {d.reason for d in report.decisions} == {Reason.MIXED_DTYPE}
        before = [at_sizes(even, rows, 2) for rows in ((8, 8), (4, 12))]
        assert bucketed(even).changed
        for rows, expected in zip(((8, 8), (4, 12)), before):
            assert_same_bits(expected, at_sizes(even, rows, 2))


def test_offsets_of_the_example_are_no_offsets_of_the_range() -> None:
    """A merged graph that is right at the sizes it was traced with, and at no others, is not proven."""
    with fake_world(2) as world:
        gm, _ = three("all_reduce", True, world)
        before = Values(View(gm.graph))
        bucketed(gm)
        assert changed_values(before, Values(View(gm.graph))) == []
        cut = [n for n in gm.graph.nodes if n.target is aten.slice.Tensor]
        assert len(cut) == 3
        for node in cut:
            node.args = torch.fx.node.map_arg(node.args, _at_example)
        assert changed_values(before, Values(View(gm.graph)))


def _at_example(node: torch.fx.Node) -> Any:
    value = node.meta["val"]
    return _torch.size_hint(value) if isinstance(value, torch.SymInt) else node


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int, bool]]:
    """Per collective: kind, input, columns, whether the input is transposed before (of all_reduce) or cast."""
    return draw(
        st.lists(
            st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.sampled_from([1, 3, 16]), st.booleans()),
            min_size=2,
            max_size=6,
        )
    )


@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(programs(), st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_random_programs_are_right_at_other_sizes(program: list[tuple[str, int, int, bool]], halves: list[int]) -> None:
    with fake_world(2) as world:
        p = SymbolicProgram()
        inputs = [p.rows(rows, 3, multiple=2) for rows in (8, 4, 12, 20)]
        outputs = []
        for kind, source, columns, other in program:
            x = p.call(aten.slice.Tensor, inputs[source], 1, 0, columns)
            if kind == "all_reduce" and other:
                x = p.call(aten.permute.default, x, [1, 0])
            elif kind == "all_gather" and other:
                x = p.call(aten._to_copy.default, x, dtype=torch.bfloat16)
            x = p.call(aten.neg.default, x)
            y = p.exchange(x, world, 2) if kind == "all_to_all" else p.collective(kind, x, world)
            outputs.append(p.call(aten.add.Tensor, y, 1.0))
            if other:
                inputs[source] = p.call(aten.abs.default, inputs[source])
        gm = p.done(*outputs)
        guards = len(p.env.guards)
        rows = [2 * half for half in halves]
        expected = at_sizes(gm, rows, 2)
        report = bucketed(gm)
        assert report.rolled_back is None and not report.findings
        assert len(p.env.guards) == guards
        assert_same_bits(expected, at_sizes(gm, rows, 2))


# -- sizes of a proof -------------------------------------------------------------------------------------------

_A, _B = Symbol("a", 2, None), Symbol("b", 1, 6)


@st.composite
def polynomials(draw: st.DrawFn) -> Any:
    """A small polynomial of two symbols."""
    monomials: list[Any] = [(), ((_A, 1),), ((_B, 1),), ((_A, 1), (_B, 1)), ((_A, 2),)]
    terms = {m: draw(st.integers(-4, 4)) for m in draw(st.lists(st.sampled_from(monomials), max_size=3))}
    return sum((c * (Size({m: 1}) if m else 1) for m, c in terms.items()), 0)


def _value(size: Any, a: int, b: int) -> Fraction | int:
    if not isinstance(size, Size):
        return size
    total: Fraction | int = 0
    for monomial, factor in size.terms.items():
        for symbol, power in monomial:
            factor = factor * (a if symbol == _A else b) ** power
        total += factor
    return total


@settings(max_examples=150, deadline=None)
@given(polynomials(), polynomials())
def test_what_is_decided_holds_for_every_value(x: Any, y: Any) -> None:
    points = list(itertools.product((2, 3, 7, 40), (1, 2, 6)))
    for decide in (lambda p, q: p == q, lambda p, q: p < q, lambda p, q: p <= q, lambda p, q: p > q):
        try:
            said = decide(x, y)
        except UndecidedError:
            continue
        assert all(decide(_value(x, *point), _value(y, *point)) == said for point in points), (x, y)
    try:
        quotient, rest = divmod(x, y)
    except (UndecidedError, ZeroDivisionError):
        return
    if isinstance(x, Size) or isinstance(y, Size):
        for point in points:
            found = divmod(_value(x, *point), _value(y, *point))
            assert found == (_value(quotient, *point), _value(rest, *point)), (x, y)


def test_a_symbol_stands_for_what_it_is_known_to_be_a_multiple_of() -> None:
    p = SymbolicProgram()
    size = p.rows(8, 3, multiple=2).meta["val"].shape[0]
    read = _Reader(size).read
    half = read((size // 2).node.expr)
    assert half * 2 == read(size.node.expr) and half >= 1
    assert _torch.same_size(size // 2 * 2, size) and _torch.is_multiple(size * 3, 6) and not _torch.is_multiple(size, 4)
    # Torch rules the least value out where a result of one row would be another program.
    assert size // 2 != 1
    assert _Reader(size).read((size // 2).node.expr) >= 2


def test_a_symbol_with_one_value_is_that_value() -> None:
    p = SymbolicProgram()
    size = p.rows(4, 3, multiple=4).meta["val"].shape[0]
    assert 4 <= size <= 7
    assert size_of(size) == 4


@pytest.mark.parametrize("how", ["slice", "narrow", "split"])
def test_as_many_rows_as_another_input_has_in_the_example(how: str) -> None:
    """The rows of one input, cut out of two in one buffer at the length of the other, with the old fake tensor."""
    with fake_world(2):
        p = SymbolicProgram()
        x, y = p.rows(8, 3), p.rows(8, 3)
        read = p.call(aten.neg.default, x)
        gm = p.done(read)
        before = Values(View(gm.graph))
        for own in (True, False):
            with gm.graph.inserting_before(read):
                rows, others = (p.number(aten.sym_size.int, one, 0) for one in ((x, y) if own else (y, x)))
                both = p.call(aten.cat.default, [x, y])
                if how == "split":
                    pieces = p.call(aten.split_with_sizes.default, both, [rows, others])
                    cut = p.call(operator.getitem, pieces, 0)
                    pieces.meta["val"] = [x.meta["val"], y.meta["val"]]
                else:
                    target = aten.slice.Tensor if how == "slice" else aten.narrow.default
                    cut = p.call(target, both, 0, 0, rows)
            cut.meta["val"] = x.meta["val"]
            read.args = (cut,)
            found = changed_values(before, Values(View(gm.graph)))
            assert [f.rule for f in found] == ([] if own else ["value-unproven"]), found


# -- compiled ---------------------------------------------------------------------------------------------------


def every_kind(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    world = dist.group.WORLD
    gathered = [funcol.all_gather_tensor(t.sin(), 0, world) * 2 for t in (x, y)]
    reduced = [funcol.all_reduce(t.cos(), "sum", world) + 1 for t in (x, y)]
    scattered = [funcol.reduce_scatter_tensor(t * 3, "sum", 0, world) for t in (x, y)]
    return [*gathered, *reduced, *scattered]


SIZES = ((8, 12), (4, 6), (16, 4), (6, 32))


def _inputs(rows: tuple[int, int], rank: int, dynamic: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    given = [torch.randint(-4, 5, (count, 5), generator=generator).float() for count in rows]
    for tensor in given if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    return given


def run_dynamic(rank: int, world: int) -> tuple[int, list[str], list[tuple[int, int]], str]:
    """Graphs compiled, reasons of decisions, sizes at which something differs from eager, and the report's range."""
    torch._dynamo.reset()
    counters.clear()
    options = dotted(codegen="inductor", memory_budget="unlimited")
    compiled = torch.compile(every_kind, backend="inductor_passes", options=options)
    wrong = []
    with collect(what_if=False) as reports:
        for rows in SIZES:
            found = compiled(*_inputs(rows, rank, True))
            expected = every_kind(*_inputs(rows, rank, False))
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True)):
                wrong.append(rows)
    reasons = {d.reason.value for r in reports for p in r.passes if p.name == "bucket" for d in p.decisions}
    (said,) = [note for note in reports[0].notes if note.startswith("holds for")]
    return counters["stats"]["unique_graphs"], sorted(reasons), wrong, said


@pytest.mark.ranks
def test_one_compiled_graph_serves_every_size(two_ranks: Ranks) -> None:
    for graphs, reasons, wrong, said in two_ranks.run(run_dynamic):
        assert graphs == 1 and reasons == [Reason.PROFITABLE.value] and wrong == []
        assert said.count("from 4 in steps of 2") == 2 and "(example 8)" in said and "(example 12)" in said


def test_a_size_that_torch_compiles_for_itself_has_a_graph_of_its_own() -> None:
    """One row per rank is another program to torch (``s // 2 != 1``): two graphs, both with merged collectives."""
    with fake_world(2):
        torch._dynamo.reset()
        compiled = torch.compile(every_kind, backend="inductor_passes", options=dotted(rank_agreement="trust"))
        counters.clear()
        with collect(what_if=False) as reports:
            compiled(*_inputs((8, 12), 0, True))
            compiled(*_inputs((6, 4), 0, True))
            assert counters["stats"]["unique_graphs"] == 1
            for tensor in (given := _inputs((2, 12), 0, False)):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            compiled(*given)
        assert counters["stats"]["unique_graphs"] == 2
        applied = [[d for p in r.passes for d in p.decisions if d.verdict is Verdict.APPLIED] for r in reports]
        assert len(applied) == 2 and all(len(one) >= 6 for one in applied)


def trained(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return torch.stack([WorldGather.apply(t.sin()).cos().sum() for t in (x, y, z)]).sum()


def test_backward_is_merged_as_forward_is() -> None:
    """Gathers of activations forward, reduce-scatters of their gradients backward, in graphs of three symbols."""
    counts = []
    with fake_world(2):
        for dynamic in (False, True):
            torch._dynamo.reset()
            counters.clear()
            options = dotted(rank_agreement="trust", memory_budget="unlimited")
            compiled = torch.compile(trained, backend="inductor_passes", options=options)
            with collect(what_if=False) as reports:
                for rows in ((8, 6, 4), (10, 4, 12)) if dynamic else ((8, 6, 4),):
                    given = [torch.randn(count, 5, requires_grad=True) for count in rows]
                    for tensor in given if dynamic else ():
                        torch._dynamo.mark_dynamic(tensor, 0)
                    compiled(*given).backward()
            assert counters["stats"]["unique_graphs"] == 1
            passes = [(r.phase, p) for r in reports for p in r.passes if p.name == "bucket"]
            counts.append([(phase, p.metrics.get("collectives_after")) for phase, p in passes])
    assert counts == [[("forward", 1), ("backward", 1)]] * 2
