"""Narrowed messages: what is narrowed, how exact that is, what is told, and which forgeries are found out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes import ConfigError, PassConfig, verify
from inductor_passes.bucket.pass_ import BucketPass
from inductor_passes.compress.form import Form, form_of
from inductor_passes.compress.pass_ import CompressPass
from inductor_passes.cost.communication import KINDS, GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.engine import complain, unfit
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir import parameters
from inductor_passes.ir.view import GraphView
from inductor_passes.records import once
from inductor_passes.report import PassReport, Reason, Verdict
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.settings.narrowing import Narrowing
from tests.support.bucket_graphs import (
    Program,
    assert_same_bits,
    check_fakes,
    inputs_by_rank,
    output_layouts,
    run_all_ranks,
)
from tests.support.graphs import GraphBuilder, aten
from tests.support.world import fake_world

cast = torch.ops.prims.convert_element_type.default
NAMES = ("bf16", "int8", "e4m3", "e5m2")
MOVED = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def link(ranks: int, per_byte_ns: float) -> CostProfile:
    """A measured link on which every collective costs this much."""
    costs = tuple(CollectiveCost(kind, 1_000.0, per_byte_ns, 100.0, 0.0) for kind in KINDS)
    group = GroupCost(GroupLayout(ranks, 1, ranks), "test", "wire", costs)
    return replace(CostProfile.default("cpu", ranks), measured=True, groups=(group,))


def config(rules: object, error: str = "0.08", **other: str) -> PassConfig:
    return PassConfig.from_mapping(
        {"compress": rules, "compress_error": error, "verify": "strict", "memory_budget": "unlimited", **other}
    )


def run(gm: torch.fx.GraphModule, chosen: PassConfig, profile: CostProfile) -> PassReport:
    done = run_passes(gm.graph, [CompressPass(chosen.narrowing)], chosen, profile)
    gm.graph.lint()
    gm.recompile()
    (report,) = done.report.passes
    # It is told wherever notes are shown, and so is why nothing is narrowed of what the settings ask for.
    asked = [one for one in report.decisions if one.reason is not Reason.DISABLED]
    assert len(done.report.notes) == bool(asked)
    none = f"compress: 0 of {len(asked)} message{'s' * (len(asked) > 1)} narrowed: "
    for note in done.report.notes:
        assert note.startswith("compress: ") and ("at most" in note) == bool(done.report.narrowed)
        assert note.startswith(none) != bool(done.report.narrowed)
        assert done.report.narrowed or all(one.reason.value in note for one in asked)
    return report


# -- settings ----------------------------------------------------------------------------------------------------


def test_off_by_default_and_then_not_there() -> None:
    assert PassConfig().compress == "off"
    assert not any(isinstance(one, CompressPass) for one in passes_of(PassConfig()))
    assert not any(isinstance(one, CompressPass) for one in passes_of(config({"dp": "off"})))
    assert any(isinstance(one, CompressPass) for one in passes_of(config("auto")))


def test_a_dictionary_is_its_text() -> None:
    rules = {"*.norm.weight": "off", "dp": "int8", "*": "auto"}
    one = config(rules)
    assert one == config("*.norm.weight=off, dp=int8, *=auto".replace(" ", ""))
    assert one.narrowing.rules == tuple(rules.items())
    assert [config(one).narrowing.rules for one in ("int8", "*=int8")] == [(("*", "int8"),)] * 2
    assert PassConfig.from_env({"INDUCTOR_PASSES_COMPRESS": "dp=int8"}).narrowing.rules == (("dp", "int8"),)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compress", "on"),
        ("compress", "dp=int4"),
        ("compress", "dp=int8,dp=off"),
        ("compress", {"*": "int8", "dp": "off"}),
        ("compress", {}),
        ("compress", {"a,b": "int8"}),
        ("compress", {"dp": 8}),
        ("compress", None),
        ("compress_dtypes", "int8,fp4"),
        ("compress_dtypes", ""),
        ("compress_dtypes", "int8,bf16,int8"),
        ("compress_block", "100"),
        ("compress_block", 128),
        ("compress_error", "0"),
        ("compress_error", "1"),
        ("compress_error", "nan"),
    ],
)
def test_bad_values_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}="):
        PassConfig.from_mapping({key: value})


# -- forms -------------------------------------------------------------------------------------------------------


def round_trip(form: Form, rows: torch.Tensor) -> torch.Tensor:
    """What arrives of some blocks."""
    return traced(form, rows.shape[0], rows.shape[1])(rows)  # type: ignore[no-any-return]


def traced(form: Form, *shape: int) -> torch.fx.GraphModule:
    """Narrowing and widening, without a message in between."""
    builder = GraphBuilder()
    x = builder.placeholder("x", *shape)
    emit = Emitter(builder.graph, x)
    with emit.standing_for(x):
        result = form.widened(emit, form.narrowed(emit, x))
    builder.graph.output(result)
    return torch.fx.GraphModule(torch.nn.Module(), builder.graph)


def blocks(form: Form, values: list[float]) -> torch.Tensor:
    flat = torch.zeros(form.blocks(len(values)) * form.block)
    flat[: len(values)] = torch.tensor(values, dtype=torch.float32)
    return flat.view(-1, form.block)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [64, 128, 256])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300), st.integers(-100, 20))
def test_the_error_is_within_the_bound(name: str, size: int, values: list[float], exponent: int) -> None:
    form = form_of(name, size)
    rows = blocks(form, values) * 2.0**exponent
    peak = rows.abs().amax(1, keepdim=True)
    allowed = float(form.error) * peak + 2.0**-126
    assert bool(((round_trip(form, rows) - rows).abs() <= allowed).all())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(st.floats(-(2.0**127), 2.0**127, width=32).filter(lambda x: abs(x) > 2.0**-100), st.integers(1, 200))
def test_blocks_of_one_value(name: str, value: float, count: int) -> None:
    form = form_of(name, 64)
    rows = blocks(form, [value] * count)
    found = round_trip(form, rows)
    assert bool(((found - rows).abs() <= float(form.error) * abs(value)).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -math.nan])
def test_what_is_not_finite_arrives_not_finite(name: str, value: float) -> None:
    form = form_of(name, 64)
    rows = torch.randn(3 * 64, generator=torch.Generator().manual_seed(0)).view(-1, form.block)
    rows.view(-1)[70] = value
    found = round_trip(form, rows).view(-1)
    assert not bool(found[70].isfinite())
    # Other blocks are as they are.
    assert bool(found[:64].isfinite().all())
    assert bool(found[128:].isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_zeros_denormals_and_the_largest_numbers(name: str) -> None:
    form = form_of(name, 64)
    assert bool((round_trip(form, torch.zeros(2 * 64).view(-1, form.block)) == 0).all())
    tiny = torch.full((64,), 2.0**-140).view(-1, form.block)
    assert bool((round_trip(form, tiny) - tiny).abs().amax() <= 2.0**-126)
    largest = torch.full((64,), torch.finfo(torch.bfloat16).max).view(-1, form.block)
    found = round_trip(form, largest)
    assert bool(found.isfinite().all())
    assert bool(((found - largest).abs() <= float(form.error) * largest).all())


def test_generated_code_keeps_the_bounds() -> None:
    """Inductor's kernels for all forms, on blocks of every kind."""
    forms = [form_of(name, 64) for name in NAMES]

    modules = [traced(form, 12, 64) for form in forms]

    def all_forms(rows: torch.Tensor) -> list[torch.Tensor]:
        return [module(rows) for module in modules]

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 64, generator=generator) * 10.0 ** torch.arange(-6.0, 6.0).unsqueeze(1)
    rows[3], rows[4], rows[5] = 0.0, 2.0**-140, -7.0
    rows[6, 5], rows[7, 6], rows[8, 7] = math.inf, -math.inf, math.nan
    peak = rows.abs().amax(1, keepdim=True)
    finite = rows.isfinite().all(1)
    for form, found in zip(forms, torch.compile(all_forms)(rows), strict=True):
        allowed = float(form.error) * peak + 2.0**-126
        assert bool(((found - rows).abs() <= allowed)[finite].all()), form.name
        assert not bool(found[~rows.isfinite()].isfinite().any()), form.name
        assert form.name == "bf16" or not bool(found[~finite].isfinite().any())


@pytest.mark.parametrize("shape", [(64, 512), (50, 272)], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_generated_code_has_vectors(kind: str, shape: tuple[int, int]) -> None:
    """On a CPU: wide elements are read in vectors, codes too where blocks are whole; scales call no function."""
    torch._dynamo.reset()
    with fake_world(2) as group:
        p = Program()
        gm = p.done(p.call(aten.neg.default, p.collective(kind, p.input(*shape), group)))
        assert run(gm, config({"*": "int8"}), link(2, 1.0)).changed
        _, (code,) = run_and_get_code(torch.compile(gm), torch.randn(*shape))
    assert "exp2" not in code and "log2" not in code
    narrows, *_, widens = code.split("async_compile.cpp_pybinding")[1:]
    one_by_one = re.compile(r"auto tmp\d+ = in_ptr0\[")
    assert "Vectorized<float>::loadu(in_ptr0" in narrows and not one_by_one.search(narrows)
    assert shape[0] == 50 or "Vectorized<uint8_t>::loadu(in_ptr0" in widens


def test_rounding_is_to_even() -> None:
    """A largest element just below 127 gives the scale 1: codes are whole numbers, and halves lie between two."""
    row = torch.zeros(1, 64)
    row[0, :6] = torch.tensor([126.9, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert round_trip(form_of("int8", 64), row)[0, :6].tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]


# -- collectives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize(
    ("shape", "dtype", "world"),
    [((16, 24), torch.float32, 4), ((12, 37), torch.float32, 2), ((8, 40), torch.bfloat16, 4)],
)
def test_on_all_ranks(kind: str, name: str, shape: tuple[int, int], dtype: torch.dtype, world: int) -> None:
    """Every rank gets what it got, within the bound of each rounding, and all ranks the same."""
    if name == "bf16" and dtype is torch.bfloat16:
        return
    with fake_world(world) as group:
        p = Program()
        gm = p.done(p.call(aten.neg.default, p.collective(kind, p.input(*shape, dtype=dtype), group, "avg")))
        values = inputs_by_rank(gm, world)
        expected, layouts = run_all_ranks(gm, values), output_layouts(gm)
        report = run(gm, config({"*": name}), link(world, 1.0))
        assert report.changed
        check_fakes(gm)
        assert output_layouts(gm) == layouts
        found = run_all_ranks(gm, values)
    peak = max(float(x.abs().max()) for x in values[0])
    hops = 2 if kind == "all_reduce" else 1
    allowed = (float(form_of(name, 128).error) * hops * 1.1 + (0 if dtype is torch.float32 else 2.0**-7)) * peak
    for e, f in zip(expected[0], found[0], strict=True):
        assert float((e.float() - f.float()).abs().max()) <= allowed
    if kind in ("all_gather", "all_reduce"):
        assert all(torch.equal(f, found[0][0]) for f in found[0])


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(MOVED),
    st.sampled_from(NAMES),
    st.sampled_from(["64", "128", "256"]),
    st.integers(2, 4),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 2**31 - 1),
)
def test_random_sizes(kind: str, name: str, block: str, world: int, rows: int, columns: int, seed: int) -> None:
    """Proven (`verify="strict"`), and within the bound on every rank: of each term, and once more of an all_reduce."""
    with fake_world(world) as group:
        p = Program()
        gm = p.done(p.call(aten.neg.default, p.collective(kind, p.input(rows * world, columns), group)))
        values = inputs_by_rank(gm, world, seed)
        expected = run_all_ranks(gm, values)
        run(gm, config({"*": name}, compress_block=block), link(world, 1.0))
        found = run_all_ranks(gm, values)
    error = float(form_of(name, int(block)).error)
    peaks = [float(x.abs().max()) for x in values[0]]
    terms = error * (max(peaks) if kind in ("all_gather", "all_to_all") else sum(peaks))
    again = error * (sum(peaks) + terms) if kind == "all_reduce" else 0.0
    assert max(float((e - f).abs().max()) for e, f in zip(expected[0], found[0])) <= (terms + again) * 1.001


@pytest.mark.parametrize("wide", [False, True], ids=["all narrow", "first one wide"])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("between", ["mm", "neg"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_sum_of_what_some_ranks_hold_alike(dim: int, between: str, kind: str, wide: bool) -> None:
    """On a 2 x 2 mesh: reduced over one dimension, computed with, and then narrowed over all ranks."""
    with fake_world(4) as everybody:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        p = Program()
        x = p.collective("all_reduce", p.input(32, 16), mesh.get_group(dim).group_name)
        y = p.call(aten.mm.default, x, p.call(aten.permute.default, x, [1, 0])) if between == "mm" else p.call(
            aten.neg.default, x
        )
        gm = p.done(p.collective(kind, y, everybody))
        values = inputs_by_rank(gm, 4)
        expected = run_all_ranks(gm, values)
        rules = "mesh_a=off,mesh_b=off,*=bf16" if wide else "*=bf16"
        report = run(gm, config(rules), link(4, 1.0))
        assert report.changed and report.rolled_back is None
        found = run_all_ranks(gm, values)
    for e, f in zip(expected[0], found[0], strict=True):
        assert float((e - f).abs().max()) <= 0.05 * float(e.abs().max())


Values = Callable[[Program, torch.fx.Node, tuple[str, str]], torch.fx.Node]


def _added_to_itself(p: Program, x: torch.fx.Node, groups: tuple[str, str]) -> torch.fx.Node:
    return p.call(aten.add.Tensor, x, x)


def _largest(p: Program, x: torch.fx.Node, groups: tuple[str, str]) -> torch.fx.Node:
    return p.collective("all_reduce", x, groups[0], "max")


def _largest_of_some(p: Program, x: torch.fx.Node, groups: tuple[str, str]) -> torch.fx.Node:
    return p.collective("all_reduce", x, groups[1], "max")


def _total(p: Program, x: torch.fx.Node, groups: tuple[str, str]) -> torch.fx.Node:
    return p.collective("all_reduce", x, groups[0])


def _total_of_some(p: Program, x: torch.fx.Node, groups: tuple[str, str]) -> torch.fx.Node:
    return p.collective("all_reduce", x, groups[1])


def _mean_of_some(p: Program, x: torch.fx.Node, groups: tuple[str, str]) -> torch.fx.Node:
    return p.collective("all_reduce", x, groups[1], "avg")


def _gathered(p: Program, x: torch.fx.Node, groups: tuple[str, str]) -> torch.fx.Node:
    return p.collective("all_gather", x, groups[0])


def _with_its_total(p: Program, x: torch.fx.Node, groups: tuple[str, str]) -> torch.fx.Node:
    return p.call(aten.add.Tensor, x, _total(p, x, groups))


def _less_than_twice_its_total(p: Program, x: torch.fx.Node, groups: tuple[str, str]) -> torch.fx.Node:
    total = _total_of_some(p, x, groups)
    return p.call(aten.sub.Tensor, x, p.call(aten.add.Tensor, total, total))


def _ones(p: Program, x: torch.fx.Node, groups: tuple[str, str]) -> torch.fx.Node:
    return p.call(aten.mul.Tensor, p.call(aten.full.default, [32, 16], 1.0), 1.0)


ALIKE = [
    *(_added_to_itself, _largest, _largest_of_some, _total, _total_of_some, _mean_of_some, _gathered),
    *(_with_its_total, _less_than_twice_its_total, _ones),
]


@pytest.mark.parametrize("rules", ["*=int8", "mesh_a=off,*=bf16"])
@pytest.mark.parametrize("some", [False, True], ids=["all ranks", "one dimension"])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("value", ALIKE, ids=lambda f: f.__name__)
def test_a_sum_that_adds_a_value_several_times(value: Values, kind: str, some: bool, rules: str) -> None:
    """What ranks hold alike, or one of them adds up twice. Found: undone, as one side counted and the other did not."""
    with fake_world(4) as everybody:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        a, b = (mesh.get_group(d).group_name for d in (0, 1))
        p = Program()
        y = value(p, p.input(32, 16), (everybody, a))
        gm = p.done(p.call(aten.neg.default, p.collective(kind, y, b if some else everybody)))
        values = inputs_by_rank(gm, 4)
        expected = run_all_ranks(gm, values)
        report = run(gm, config(rules), link(4, 1.0))
        assert report.changed and report.rolled_back is None
        found = run_all_ranks(gm, values)
    for e, f in zip(expected[0], found[0], strict=True):
        assert float((e - f).abs().max()) <= 0.05 * float(e.abs().max())


def test_odd_sizes_of_an_all_reduce() -> None:
    for shape in ((1,), (3,), (7, 39), (1, 257)):
        with fake_world(4) as group:
            p = Program()
            gm = p.done(p.collective("all_reduce", p.input(*shape), group))
            values = inputs_by_rank(gm, 4)
            expected = run_all_ranks(gm, values)
            report = run(gm, config({"*": "int8"}), link(4, 1.0))
            found = run_all_ranks(gm, values)
            peak = sum(float(x.abs().max()) for x in values[0])
            # A message of a block is longer than what it carries.
            assert report.changed == (math.prod(shape) > 130)
            assert max(float((e - f).abs().max()) for e, f in zip(expected[0], found[0])) <= 0.02 * peak


@pytest.mark.parametrize(("elements", "name"), [(4096, "bf16"), (130, "int8")])
def test_a_sum_that_gets_no_smaller_is_left_alone(elements: int, name: str) -> None:
    """Found: all_reduce counted the way to the sum twice before, and the way back less than once after."""
    with fake_world(2) as group:
        p = Program()
        half = p.call(torch.ops.prims.convert_element_type.default, p.input(elements), torch.float16)
        gm = p.done(p.collective("all_reduce", half, group))
        report = run(gm, config({"*": name}), link(2, 1.0))
    (left,) = report.decisions
    assert not report.changed and left.reason is Reason.NOT_PROFITABLE and "gets no smaller" in left.detail


def chain(group: str, rows: int = 256) -> torch.fx.GraphModule:
    """A gather that a matmul waits for, and one that the matmul hides."""
    p = Program()
    first = p.collective("all_gather", p.input(rows, 1024), group)
    hidden = p.start("all_gather", p.input(rows, 1024), group)
    product = p.call(aten.mm.default, first, p.input(1024, 1024))
    return p.done(p.call(aten.neg.default, product), p.call(aten.neg.default, p.wait(hidden)))


def test_auto_narrows_what_shortens_the_step_and_nothing_else() -> None:
    with fake_world(2) as group:
        gm = chain(group)
        report = run(gm, config("auto", "0.01"), link(2, 1.0))
    assert [d.verdict for d in report.decisions] == [Verdict.APPLIED, Verdict.REFUSED]
    taken, left = report.decisions
    assert (taken.reason, left.reason) == (Reason.PROFITABLE, Reason.HIDDEN)
    assert taken.gain_ns > 0
    assert "int8 in blocks of 128: 1048576 -> 266240 bytes sent" in taken.detail
    assert "within 0.004" in taken.detail
    assert report.metrics["makespan_after_ns"] < report.metrics["makespan_before_ns"]


def test_auto_leaves_a_fast_link_alone() -> None:
    with fake_world(2) as group:
        gm = chain(group)
        before = str(gm.graph)
        report = run(gm, config("auto", "0.01"), link(2, 0.001))
        assert str(gm.graph) == before
    assert not report.changed
    assert {d.reason for d in report.decisions} == {Reason.NOT_PROFITABLE}
    assert all(d.setting.startswith("compress=") for d in report.decisions)


def as_integers(p: Program, value: torch.fx.Node) -> torch.fx.Node:
    return p.call(aten._to_copy.default, p.call(aten.view.default, value, [-1]), dtype=torch.int64)


def test_bits_are_read_behind_a_maximum_over_ranks_too() -> None:
    """Found by the fuzzer: a zero of the other sign, rounded to float8 and looked at as a byte."""
    with fake_world(2) as group:
        p = Program()
        gathered = p.collective("all_gather", p.input(64, 8), group)
        largest = p.collective("all_reduce", gathered, group, "max")
        rounded = p.call(aten._to_copy.default, largest, dtype=torch.float8_e4m3fn)
        gm = p.done(p.call(aten.view.dtype, rounded, torch.uint8))
        before = str(gm.graph)
        report = run(gm, config({"*": "int8"}, "0.01"), link(2, 1.0))
        assert str(gm.graph) == before
    assert [d.reason for d in report.decisions] == [Reason.NUMERICS] * 2


def test_what_is_only_compared_is_narrowed() -> None:
    with fake_world(2) as group:
        p = Program()
        gm = p.done(p.call(aten.le.Scalar, p.collective("all_gather", p.input(64, 8), group), 0.5))
        assert run(gm, config({"*": "int8"}, "0.01"), link(2, 1.0)).changed


@pytest.mark.parametrize(
    ("rules", "error", "make", "reason"),
    [
        ({"other": "int8"}, "0.01", lambda p, g: p.collective("all_gather", p.input(64, 8), g), Reason.DISABLED),
        ({"*": "e4m3"}, "0.01", lambda p, g: p.collective("all_gather", p.input(64, 8), g), Reason.NUMERICS),
        ({"*": "int8"}, "0.01", lambda p, g: p.collective("all_gather", p.input(4), g), Reason.NOT_PROFITABLE),
        # A block for each rank's piece is more than the message.
        ({"*": "int8"}, "0.01", lambda p, g: p.collective("reduce_scatter", p.input(64), g), Reason.NOT_PROFITABLE),
        (
            {"*": "int8"},
            "0.01",
            lambda p, g: p.collective("all_reduce", p.input(64, 8), g, "max"),
            Reason.MIXED_REDUCE_OP,
        ),
        (
            {"*": "int8"},
            "0.01",
            lambda p, g: p.collective("all_gather", p.input(64, 8, dtype=torch.int64), g),
            Reason.UNSUPPORTED,
        ),
        (
            {"*": "int8"},
            "0.01",
            lambda p, g: p.collective("all_gather", p.input(64, 8, dtype=torch.float64), g),
            Reason.UNSUPPORTED,
        ),
        ({"*": "int8"}, "0.01", lambda p, g: p.collective("all_gather", p.input(0, 8), g), Reason.UNSUPPORTED),
        # Found by the fuzzer: a rewrite had moved the conversion of what is sent behind the message.
        (
            {"*": "int8"},
            "0.01",
            lambda p, g: as_integers(p, p.collective("all_gather", p.input(64, 8), g)),
            Reason.NUMERICS,
        ),
    ],
)
def test_refusals_say_why(
    rules: object, error: str, make: Callable[[Program, str], torch.fx.Node], reason: Reason
) -> None:
    with fake_world(2) as group:
        p = Program()
        gm = p.done(make(p, group))
        before = str(gm.graph)
        report = run(gm, config(rules, error), link(2, 1.0))
        assert str(gm.graph) == before
    assert [d.reason for d in report.decisions] == [reason]
    assert report.decisions[0].detail


@pytest.mark.parametrize(
    ("name", "error"), [("e4m3", "0.01"), ("e5m2", "0.04"), ("int8", "0.001"), ("auto", "0.001")]
)
def test_a_type_that_errs_more_than_is_admitted_is_warned_of(
    name: str, error: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: the setting was accepted, did nothing, and no text said so."""
    monkeypatch.setattr(once, "warned", set())
    with fake_world(2) as group:
        for rules in ({"*": name}, {"*": name if name == "auto" else f"{name}/between"}, {"other": name}):
            p = Program()
            run(p.done(p.collective("all_gather", p.input(64, 64), group)), config(rules, error), link(2, 1.0))
    (said,) = {one.getMessage() for one in caplog.records if "errs by up to" in one.getMessage()}
    advice = said.rpartition(";")[2].split('"')[1]
    assert f'compress: "{name}" narrows nothing' in said and f"admits {error}" in said
    with fake_world(2) as group:
        p = Program()
        gm = p.done(p.collective("all_gather", p.input(64, 64), group))
        assert run(gm, config(name, advice), link(2, 1.0)).changed


def test_rules_go_by_group_and_the_first_that_fits() -> None:
    with fake_world(2) as group:
        for rules, narrowed in (({group: "int8"}, True), ({group: "off", "*": "int8"}, False), ({"*": "bf16"}, True)):
            p = Program()
            gm = p.done(p.collective("all_gather", p.input(64, 8), group))
            assert run(gm, config(rules), link(2, 1.0)).changed == narrowed


def test_entries_that_fit_nothing_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """With the names that would have; entries that others hide are told apart; a forward alone says nothing."""
    complain._warned.clear()
    unfit._seen.clear()
    with fake_world(2) as group:
        p = Program()
        gm = p.done(p.collective("all_gather", p.input(64, 8), group), p.collective("all_reduce", p.input(64), group))
        start = next(n for n in gm.graph.nodes if "all_gather" in n.name)
        start.meta[parameters.META_KEY] = [parameters.Carried("norm.weight", "norm", "Model", True)]
        view = GraphView(gm.graph)
        rules = {"tp": "int8", "norm.*": "bf16", "*.weight": "off", group: "int8", "*": "auto"}
        assert unfit.note(view, config(rules), "forward") == ""
        said = unfit.note(view, config(rules), "backward")
        assert unfit.note(view, config(rules), "backward") == ""
        # All rules fit something, or there is only one for everything.
        assert unfit.note(view, config({"*.weight": "off", "*": "auto"}), "inference") == ""
        assert unfit.note(view, config("auto"), "inference") == ""
    assert said.startswith('compress: entry "tp" fits no message of the graphs compiled so far')
    assert "parameters norm.weight" in said and group in said
    assert 'entry "*.weight" stands behind others' in said
    assert [r.message for r in caplog.records] == [f"inductor_passes: {said}"]


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_narrowed_messages_are_merged(kind: str) -> None:
    """Buckets of what was narrowed, on all ranks, and the numbers that single messages give."""
    chosen = config({"*": "int8"})
    with fake_world(2) as group:

        def made() -> torch.fx.GraphModule:
            p = Program()
            waits = [p.collective(kind, p.input(16, width), group) for width in (40, 32, 24)]
            return p.done(*(p.call(aten.neg.default, wait) for wait in waits))

        single, merged = made(), made()
        values = inputs_by_rank(single, 2)
        run(single, chosen, link(2, 1.0))
        expensive = link(2, 1.0)
        costs = tuple(replace(cost, alpha_ns=1e7) for cost in expensive.groups[0].costs)
        expensive = replace(expensive, groups=(replace(expensive.groups[0], costs=costs),))
        done = run_passes(merged.graph, [CompressPass(chosen.narrowing), BucketPass()], chosen, expensive)
        merged.recompile()
        assert [p.changed for p in done.report.passes] == [True, True], done.report.passes
        assert done.report.passes[1].metrics["collectives_after"] == 1
        assert_same_bits(run_all_ranks(single, values), run_all_ranks(merged, values))


def test_a_message_that_carries_what_another_brought() -> None:
    """Found: the second one read the wait that the first had replaced; gradients of hybrid sharding are sent so."""
    with fake_world(2) as group:
        p = Program()
        piece = p.collective("reduce_scatter", p.input(64, 32), group)
        gm = p.done(p.call(aten.neg.default, p.collective("all_reduce", piece, group)))
        values = inputs_by_rank(gm, 2)
        expected = run_all_ranks(gm, values)
        report = run(gm, config({"*": "int8"}), link(2, 10.0))
        found = run_all_ranks(gm, values)
    assert report.metrics["narrowed"] == 2 and report.rolled_back is None
    torch.testing.assert_close(found[0][0], expected[0][0], rtol=0, atol=2.0)


def test_async_tp_chooses_first() -> None:
    """What async TP cuts into parts is not narrowed; what it leaves is."""
    with fake_world(2) as group:
        p = Program()
        cut = p.call(aten.mm.default, p.collective("all_gather", p.input(64, 64), group), p.input(64, 64))
        other = p.collective("all_gather", p.input(64, 63), group)
        gm = p.done(cut, p.call(aten.neg.default, other))
        chosen = config({"*": "int8"}, async_tp="force", numerics="reassociate")
        done = run_passes(gm.graph, passes_of(chosen), chosen, link(2, 1.0))
    by_name = {one.name: one for one in done.report.passes}
    assert by_name["async_tp"].changed
    verdicts = [d.verdict for d in by_name["compress"].decisions]
    assert verdicts.count(Verdict.APPLIED) == 1
    assert Verdict.REFUSED in verdicts
    assert not any(one.rolled_back for one in done.report.passes)


# -- bounds that are allowed, see test_compress_forgeries too ----------------------------------------------------


class Narrow:
    """A graph whose messages were narrowed, what it was, and the certificates."""

    def __init__(self, kind: str, name: str, group: str) -> None:
        p = Program()
        gm = p.done(p.call(aten.neg.default, p.collective(kind, p.input(16, 32), group)))
        self.gm, self.before = gm, verify.snapshot(gm.graph)
        from inductor_passes.compress.emit import replace as narrow

        (collective,) = GraphView(gm.graph).collectives
        self.certificates = (narrow(gm.graph, collective, form_of(name, 64)).certificate,)

    def findings(self, rounding: Fraction | None = Fraction(8, 100)) -> list[str]:
        """What the verifier says, with every new node certified."""
        names = {node.name for node in self.gm.graph.nodes if node.op == "call_function"}
        (given,) = self.certificates
        everything = replace(given, added=tuple(names - set(self.before.nodes)))
        found = verify.check(self.gm.graph, reference=self.before, certificates=[everything], rounding=rounding)
        return [str(f) for f in found]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", MOVED)
def test_what_the_pass_makes_is_proven_under_its_bound_only(kind: str, name: str) -> None:
    with fake_world(4) as group:
        made = Narrow(kind, name, group)
        error = form_of(name, 64).error
        assert made.findings(error) == []
        assert made.findings(error - Fraction(1, 10**6)), "more than is allowed"
        assert made.findings(None), "narrowing is off"
        made.certificates = (replace(made.certificates[0], narrowed=()),)
        assert made.findings(error), "a rounding that no certificate names"


def test_narrowing_is_what_the_settings_say() -> None:
    chosen = Narrowing.parse("auto", "int8,bf16", "64", "0.01")
    assert chosen.dtypes == ("bf16", "int8")
    assert chosen.error == Fraction(1, 100)
    assert not chosen.is_off


def test_a_result_that_is_waited_for_again_stays() -> None:
    """Its memory has to be a collective's; the other collective of the graph is narrowed all the same."""
    with fake_world(2) as group:
        p = Program()
        again, other = p.input(64, 32), p.input(64, 16)
        gm = p.done(p.wait(p.collective("all_gather", again, group)), p.collective("all_gather", other, group))
        report = run(gm, config("*=int8"), link(2, 10.0))
    assert [d.verdict for d in report.decisions] == [Verdict.REFUSED, Verdict.APPLIED]
    assert report.decisions[0].reason is Reason.UNSUPPORTED


CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: aten.slice.Tensor(x, 0, 0, 32),
    "later slice": lambda x: aten.slice.Tensor(x, 0, 32, 64),
    "split": lambda x: aten.split.Tensor(x, 32)[0],
    "chunk of columns": lambda x: aten.split.Tensor(x, x.shape[1] // 2, 1)[1],
    "select": lambda x: aten.select.int(x, 0, 1),
    "unbind": lambda x: aten.unbind.int(x)[1],
}


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("before", ("input", "sum", "product"))
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ("all_reduce", "reduce_scatter"))
def test_a_sum_of_what_may_be_a_rank_s_own(kind: str, cut: str, before: str, ranks: int) -> None:
    """One rank's graph does not say whether every rank takes the first half, or each its own."""

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = {"input": torch.neg, "sum": lambda x: x.sum(1), "product": lambda x: x @ weight}[before](x)
        x = CUTS[cut](x)
        if kind == "all_reduce":
            return funcol.all_reduce(x, "sum", group)
        return funcol.reduce_scatter_tensor(x, "sum", 0, group)

    with fake_world(ranks) as group:
        gm = make_fx(program, tracing_mode="fake")(torch.ones(64, 32, 256), torch.ones(256, 256))
        report = run(gm, config("*=int8"), link(ranks, 10.0))
    assert [d.verdict for d in report.decisions] == [Verdict.APPLIED], report.decisions
    assert report.rolled_back is None


def summed(group: str) -> torch.fx.GraphModule:
    """A sum that every rank reads as it is: codes and scales are memory on top of it."""
    p = Program()
    x = p.call(aten.mul.Tensor, p.input(900, 10), 1)
    return p.done(p.call(aten.mul.Tensor, p.collective("all_reduce", x, group), 1))


def test_what_is_asked_for_is_kept_although_less_memory_plans_faster_without(caplog: pytest.LogCaptureFixture) -> None:
    complain._warned.clear()
    slow = link(2, 0.001)
    with fake_world(2) as group:
        for budget, narrowed in (("unlimited", True), ("2GiB", True), ("0", False)):
            chosen = config("*=int8", memory_budget=budget)
            gm = summed(group)
            done = run_passes(gm.graph, passes_of(chosen), chosen, slow)
            (report,) = [one for one in done.report.passes if one.name == "compress"]
            assert report.changed and (report.rolled_back is None) == narrowed, budget
            said = [r.message for r in caplog.records if "although a setting asks for it" in r.message]
            assert bool(said) != narrowed
    assert "raise memory_budget" in said[0]
