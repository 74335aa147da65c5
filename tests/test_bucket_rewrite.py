"""One message for several collectives: the graph before and after, and every bit on every rank."""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.bucket.candidates import candidates
from inductor_passes.ir.view import GraphView
from inductor_passes.rewriting.as_bytes import from_bytes, to_bytes
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.merge import MergedCollective, MergeError, merge
from tests.support.bucket_graphs import (
    Program,
    assert_same_bits,
    aten,
    c10d,
    check_fakes,
    inputs_by_rank,
    kinds,
    output_layouts,
    run_all_ranks,
    text,
)
from tests.support.world import fake_world

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def merge_all(gm: torch.fx.GraphModule, form: str = "packed") -> list[MergedCollective]:
    """Merge every set of candidates with equal keys."""
    view = GraphView(gm.graph)
    found, _ = candidates(view)
    groups: dict[object, list] = {}
    for candidate in found:
        groups.setdefault(candidate.key, []).append(candidate.collective)
    merged = merge(gm.graph, view, list(groups.values()), forms=[form] * len(groups))
    gm.graph.lint()
    gm.recompile()
    check_fakes(gm)
    return merged


def merge_and_compare(gm: torch.fx.GraphModule, ranks: int, form: str = "packed") -> list[MergedCollective]:
    """Merge everything that can be; outputs keep their bits on every rank, and their layout."""
    inputs, layouts = inputs_by_rank(gm, ranks), output_layouts(gm)
    before = run_all_ranks(gm, inputs)
    merged = merge_all(gm, form)
    assert output_layouts(gm) == layouts
    assert_same_bits(before, run_all_ranks(gm, inputs))
    return merged


def test_all_gather_before_and_after() -> None:
    with fake_world(2) as world:
        p = Program()
        a, b = p.input(4, 3), p.input(1, 5)
        gathered = p.collective("all_gather", p.call(aten.mul.Tensor, a, 2.0), world)
        used = p.call(aten.add.Tensor, gathered, 1.0)
        gm = p.done(used, p.collective("all_gather", p.call(aten.mul.Tensor, b, 3.0), world))
        assert_expected_inline(
            text(gm),
            """\
%0 = input float32[4, 3]
%1 = input float32[1, 5]
%2 = mul(%0, 2.0) float32[4, 3]
%3 = all_gather_into_tensor(%2, 2) float32[8, 3]
%4 = wait_tensor(%3) float32[8, 3]
%5 = add(%4, 1.0) float32[8, 3]
%6 = mul(%1, 3.0) float32[1, 5]
%7 = all_gather_into_tensor(%6, 2) float32[2, 5]
%8 = wait_tensor(%7) float32[2, 5]
return [%5, %8]""",
        )
        merge_and_compare(gm, 2)
        assert_expected_inline(
            text(gm),
            """\
%0 = input float32[4, 3]
%1 = input float32[1, 5]
%2 = mul(%0, 2.0) float32[4, 3]
%3 = mul(%1, 3.0) float32[1, 5]
%4 = view(%2, [1, 12]) float32[1, 12]
%5 = cat([%4, %3], 1) float32[1, 17]
%6 = all_gather_into_tensor(%5, 2) float32[2, 17]
%7 = wait_tensor(%6) float32[2, 17]
%8 = slice(%7, 1, 0, 12) float32[2, 12]
%9 = clone(%8) float32[2, 12]
%10 = view(%9, [8, 3]) float32[8, 3]
%11 = slice(%7, 1, 12, 17) float32[2, 5]
%12 = clone(%11) float32[2, 5]
%13 = add(%10, 1.0) float32[8, 3]
return [%13, %12]""",
        )


def test_reduce_scatter_before_and_after() -> None:
    """Starts and waits of the second member come later: the bucket starts with the last and hands out views."""
    with fake_world(2) as world:
        p = Program()
        a, b = p.input(4, 3), p.input(2, 5)
        first = p.collective("reduce_scatter", a, world)
        between = p.call(aten.mul.Tensor, b, 3.0)
        gm = p.done(first, p.collective("reduce_scatter", between, world))
        assert_expected_inline(
            text(gm),
            """\
%0 = input float32[4, 3]
%1 = input float32[2, 5]
%2 = reduce_scatter_tensor(%0, sum, 2) float32[2, 3]
%3 = wait_tensor(%2) float32[2, 3]
%4 = mul(%1, 3.0) float32[2, 5]
%5 = reduce_scatter_tensor(%4, sum, 2) float32[1, 5]
%6 = wait_tensor(%5) float32[1, 5]
return [%3, %6]""",
        )
        merge_and_compare(gm, 2)
        assert_expected_inline(
            text(gm),
            """\
%0 = input float32[4, 3]
%1 = input float32[2, 5]
%2 = mul(%1, 3.0) float32[2, 5]
%3 = view(%0, [2, 6]) float32[2, 6]
%4 = cat([%3, %2], 1) float32[2, 11]
%5 = reduce_scatter_tensor(%4, sum, 2) float32[1, 11]
%6 = wait_tensor(%5) float32[1, 11]
%7 = view(%6, [11]) float32[11]
%8 = slice(%7, 0, 0, 6) float32[6]
%9 = view(%8, [2, 3]) float32[2, 3]
%10 = slice(%7, 0, 6, 11) float32[5]
%11 = view(%10, [1, 5]) float32[1, 5]
return [%9, %11]""",
        )


def test_mixed_dtypes_travel_as_bytes() -> None:
    with fake_world(2) as world:
        p = Program()
        a, b = p.input(3, dtype=torch.bfloat16), p.input(2, 1)
        gm = p.done(p.collective("all_gather", a, world), p.collective("all_gather", b, world))
        merge_and_compare(gm, 2)
        assert_expected_inline(
            text(gm),
            """\
%0 = input bfloat16[3]
%1 = input float32[2, 1]
%2 = view(%1, [2]) float32[2]
%3 = view(%2, torch.uint8) uint8[8]
%4 = view(%3, [1, 8]) uint8[1, 8]
%5 = view(%0, torch.uint8) uint8[6]
%6 = view(%5, [1, 6]) uint8[1, 6]
%7 = full([1, 2], 0) uint8[1, 2]
%8 = cat([%4, %6, %7], 1) uint8[1, 16]
%9 = all_gather_into_tensor(%8, 2) uint8[2, 16]
%10 = wait_tensor(%9) uint8[2, 16]
%11 = slice(%10, 1, 0, 8) uint8[2, 8]
%12 = view(%11, torch.float32) float32[2, 2]
%13 = clone(%12) float32[2, 2]
%14 = view(%13, [4, 1]) float32[4, 1]
%15 = slice(%10, 1, 8, 14) uint8[2, 6]
%16 = view(%15, torch.bfloat16) bfloat16[2, 3]
%17 = clone(%16) bfloat16[2, 3]
%18 = view(%17, [6]) bfloat16[6]
return [%18, %14]""",
        )


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_every_kind(kind: str, ranks: int) -> None:
    with fake_world(ranks) as world:
        p = Program()
        outputs = []
        for shape in [(ranks,), (2 * ranks, 3), (ranks, 1, 5), (3 * ranks, 2), (0, 4)]:
            used = p.collective(kind, p.call(aten.mul.Tensor, p.input(*shape), 1.5), world)
            outputs += [used, p.call(aten.relu.default, used)]
        gm = p.done(*outputs)
        (merged,) = merge_and_compare(gm, ranks)
        assert len(merged.members) == 5 and kinds(gm).split() == [kinds(gm)] and len(merged.waits) == 1


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_bits_of_every_reduction(op: str) -> None:
    with fake_world(4) as world:
        p = Program()
        outputs = [p.collective(kind, p.input(8, 3), world, op) for kind in KINDS[1:3] for _ in range(3)]
        gm = p.done(*outputs)
        assert len(merge_and_compare(gm, 4)) == 2
        assert sorted(kinds(gm).split()) == ["AR1", "RS0"] or sorted(kinds(gm).split()) == ["AR0", "RS1"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_of_many_dtypes(ranks: int) -> None:
    """Odd lengths, so that rows need padding to keep the wide members aligned."""
    dtypes = [torch.bfloat16, torch.float64, torch.bool, torch.int32, torch.uint8, torch.float8_e4m3fn, torch.float32]
    with fake_world(ranks) as world:
        p = Program()
        inputs = [p.input(ranks, size, dtype=dtype) for size, dtype in zip([3, 1, 7, 5, 3, 9, 1], dtypes)]
        gm = p.done(*(p.collective(kind, x, world) for kind in ("all_gather", "all_to_all") for x in inputs))
        assert [len(m.members) for m in merge_and_compare(gm, ranks)] == [7, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_non_contiguous_members_are_packed_and_layouts_kept(kind: str) -> None:
    with fake_world(2) as world:
        p = Program()
        turned = p.call(aten.permute.default, p.input(3, 4, 2), [1, 0, 2])
        every_other = p.call(aten.slice.Tensor, p.input(4, 6), 1, 0, 6, 2)
        repeated = p.call(aten.expand.default, p.input(1, 3), [2, 3])
        gm = p.done(*(p.collective(kind, x, world) for x in (turned, every_other, repeated)))
        merge_and_compare(gm, 2)
        assert len(kinds(gm).split()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_padded_members(kind: str) -> None:
    """Uneven shards arrive padded; the padding goes into the message and is cut off behind it."""
    with fake_world(4) as world:
        p = Program()
        outputs = []
        for rows in (5, 3):
            padded = p.call(aten.constant_pad_nd.default, p.input(rows, 3), [0, 0, 0, 8 - rows], 0.0)
            outputs.append(p.call(aten.slice.Tensor, p.collective(kind, padded, world), 0, 0, 2))
        (merged,) = merge_and_compare(p.done(*outputs), 4)
        assert len(merged.members) == 2


def test_several_groups_stay_apart() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        groups = [mesh.get_group(d).group_name for d in (0, 1)]
        p = Program()
        gm = p.done(*(p.collective(kind, p.input(8, i + 1), groups[i % 2]) for kind in KINDS for i in range(6)))
        merged = merge_and_compare(gm, 8)
        assert sorted((m.kind, m.group, len(m.members)) for m in merged) == sorted(
            (kind, group, 3) for kind in KINDS for group in groups
        )


def test_a_coalesced_member_brings_all_its_tensors() -> None:
    with fake_world(2) as world:
        p = Program()
        pair = p.call(c10d.all_gather_into_tensor_coalesced.default, [p.input(2, 3), p.input(5)], 2, world)
        parts = [p.wait(p.call(operator.getitem, pair, i)) for i in (0, 1)]
        gm = p.done(*parts, p.collective("all_gather", p.input(4), world))
        (merged,) = merge_and_compare(gm, 2)
        assert len(merged.results) == 3 and kinds(gm) == "AG0"


@pytest.mark.parametrize("kind", KINDS)
def test_coalesced_form_copies_nothing(kind: str) -> None:
    with fake_world(2) as world:
        p = Program()
        gm = p.done(*(p.collective(kind, p.input(4, i + 1), world) for i in range(3)))
        (merged,) = merge_and_compare(gm, 2, form="coalesced")
        names = text(gm)
        if kind == "all_to_all":
            assert merged.form == "packed"
        else:
            assert merged.form == "coalesced" and "cat(" not in names and "clone(" not in names
            assert len(merged.waits) == 3 and kinds(gm).count(" ") == 0


def test_a_bucket_may_feed_another() -> None:
    """The second bucket sends what the first returns."""
    with fake_world(2) as world:
        p = Program()
        inputs = [p.input(4, 3), p.input(8, 2)]
        scattered = [p.collective("reduce_scatter", x, world) for x in inputs]
        gm = p.done(*(p.collective("all_gather", x, world) for x in scattered))
        assert len(merge_and_compare(gm, 2)) == 2 and kinds(gm) == "RS0 AG1"


def test_members_of_a_cycle_are_refused_and_nothing_changes() -> None:
    """a1 -> b1 and b2 -> a2: either bucket is fine, both together are not."""
    with fake_world(2) as world:
        p = Program()
        a1 = p.collective("all_gather", p.input(4, 3), world)
        b1 = p.collective("reduce_scatter", a1, world)
        b2 = p.collective("reduce_scatter", p.input(4, 3), world)
        a2 = p.collective("all_gather", b2, world)
        gm = p.done(b1, a2)
        view, before = GraphView(gm.graph), text(gm)
        ag1, rs1, rs2, ag2 = view.collectives
        with pytest.raises(MergeError, match="circle"):
            merge(gm.graph, view, [[ag1, ag2], [rs1, rs2]])
        assert text(gm) == before
        merge(gm.graph, view, [[ag1, ag2]])
        gm.recompile()
        gm.graph.lint()
        assert kinds(gm) == "RS0 AG1 RS2"


def test_what_cannot_be_merged_says_why() -> None:
    with fake_world(4) as world:
        p = Program()
        x = p.input(4, 4)
        gm = p.done(
            p.collective("all_gather", x, world),
            p.collective("reduce_scatter", x, world),
            p.collective("reduce_scatter", p.call(aten.to.dtype, x, torch.float64), world),
            p.collective("reduce_scatter", x, world, "max"),
        )
        view = GraphView(gm.graph)
        gather, scatter, wide, largest = view.collectives
        for group, message in [
            ([gather], "1 members"),
            ([gather, scatter], "differ in kind"),
            ([scatter, largest], "differ in reduce_op"),
            ([scatter, wide], "several dtypes"),
        ]:
            with pytest.raises(MergeError, match=message):
                merge(gm.graph, view, [group])
        with pytest.raises(MergeError, match="two groups"):
            merge(gm.graph, view, [[gather, gather]])


def test_new_nodes_know_where_they_come_from() -> None:
    with fake_world(2) as world:
        p = Program()
        gm = p.done(*(p.collective("all_gather", p.input(4, i + 1), world) for i in range(2)))
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node.meta["custom"] = {"layer": node.name}
                node.meta["recompute"] = "yes"
        members = [c.start for c in GraphView(gm.graph).collectives]
        traces = [m.meta["stack_trace"] for m in members]
        names = [m.name for m in members]
        (merged,) = merge_all(gm)
        nodes = {n.name: n for n in gm.graph.nodes}
        assert nodes[merged.start].meta["stack_trace"] == traces[0]
        assert {nodes[n].meta["recompute"] for n in merged.added} == {"yes"}
        assert all("stack_trace" in nodes[n].meta for n in merged.added)
        packed = [n for n in merged.added if nodes[n].meta["custom"]["layer"] in names]
        assert len(packed) >= len(names)
        assert set(merged.removed).isdisjoint(nodes) and set(merged.added) <= set(nodes)
        assert [new for _, new in merged.results] == [n.name for n in gm.graph.output_node().args[0]]


def test_order_outside_the_bucket_is_kept() -> None:
    """Only what the bucket needs early moves: the independent chain keeps its order and stays where it was."""
    with fake_world(2) as world:
        p = Program()
        a, b, x = p.input(4), p.input(4), p.input(4)
        first = p.call(aten.add.Tensor, p.collective("all_gather", a, world), 1.0)
        chain = [x := p.call(aten.mul.Tensor, x, float(i)) for i in range(4)]
        needed = p.call(aten.neg.default, b)
        gm = p.done(first, x, p.collective("all_gather", needed, world))
        merge_all(gm)
        order = [n for n in gm.graph.nodes if n in [*chain, first, needed]]
        assert order == [needed, first, *chain]


def test_writes_to_inputs_stay_behind_the_pack() -> None:
    """A parameter is updated in place at the end; the bucket reads it before, although its start has moved."""
    with fake_world(2) as world:
        p = Program()
        a, b = p.input(4), p.input(4)
        first = p.collective("all_gather", a, world)
        updated = p.call(aten.copy_.default, a, b)
        second = p.collective("all_gather", b, world)
        gm = p.done(first, second, updated)
        merge_and_compare(gm, 2)
        nodes = list(gm.graph.nodes)
        start = next(n for n in nodes if n.target is c10d.all_gather_into_tensor.default)
        assert nodes.index(start) < nodes.index(updated)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), torch.float8_e4m3fn), ((), torch.bool), ((4, 0), torch.int64), ((0, 8), torch.float32)]
)
def test_scalars_and_empty_rows_as_bytes_and_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    with FakeTensorMode():
        given.meta["val"] = torch.zeros(shape).to(dtype)
        emitter = Emitter(graph, given)
        sent = to_bytes(emitter, given)
        back = from_bytes(emitter, sent, dtype)
    assert sent.meta["val"].dtype is torch.uint8
    assert back.meta["val"].dtype is dtype and back.meta["val"].shape == shape
