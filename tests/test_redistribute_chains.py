"""R6 and R11: chains of DTensor redistributions, replaced by the cheapest plan, on all ranks in lockstep."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from inductor_passes import _torch
from inductor_passes.ir.canonical import shards
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Reason, Verdict
from inductor_passes.rewrites.audit import sent_bytes
from inductor_passes.rewrites.chain import own_group
from inductor_passes.verify.facts.view import View
from inductor_passes.verify.values import Program as Values
from inductor_passes.verify.values.layouts import Layouts
from inductor_passes.verify.values.own import Own
from tests.support.redistribute_graphs import assert_equal_on_all_ranks, duplicate, group_ranks, rewritten
from tests.support.redistribute_programs import Program, settings_for
from tests.support.world import mesh_world
from tests.test_redistribute_copies import on_all_ranks

R, P, S = Replicate(), Partial(), Shard


def applied(report):
    return [d.subject for d in report.decisions if d.verdict is Verdict.APPLIED]


@pytest.mark.parametrize(
    "layouts, before, after, rewrite",
    [
        (([R, S(0)], [S(0), S(0)]), ["all_gather_into_tensor"], ["all_to_all_single"], "R11"),
        (([S(0), S(1)], [S(1), S(0)]), ["all_gather_into_tensor"] * 2, ["all_to_all_single"], "R11"),
        (([S(0), S(0)], [R, R]), ["all_gather_into_tensor"] * 2, ["all_gather_into_tensor"], "R1"),
    ],
)
def test_chains_of_dtensor_become_one_collective(layouts, before, after, rewrite):
    was, now, report = on_all_ranks((2, 3), (36, 12), layouts)
    assert [[op for op in ops if op.startswith("all_")] for ops in (was, now)] == [before, after]
    assert applied(report) == [rewrite]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=["real", "complex"])
@pytest.mark.parametrize(
    "layouts",
    [
        ([R, S(1)], [R, S(0)]),  # along one group; on CPU DTensor gathers and slices
        ([S(1), R], [S(0), R]),
        ([StridedShard(0, split_factor=3), S(0)], [S(1), S(0)]),
        ([StridedShard(0, split_factor=3), S(0)], [S(0), S(0)]),
    ],
    ids=["inner", "outer", "strided to another dimension", "strided to plain"],
)
def test_an_exchange_is_no_gather(layouts, dtype):
    was, now, report = on_all_ranks((2, 3), (360, 120), layouts, dtype=dtype)
    assert "all_gather_into_tensor" in was and "all_to_all_single" in now and "all_gather_into_tensor" not in now
    assert "R11" in applied(report)


def test_an_exchange_that_is_alike_everywhere_has_equal_splits():
    """Bucketing and scheduling then treat it as any other collective."""
    with mesh_world((2, 3)):
        gm = Program((6, 12))
        name = next(n for n, ranks in group_ranks().items() if len(ranks) == 3 and 0 in ranks)
        whole = gm.collective("all_gather_into_tensor", gm.inputs[0], 3, name)
        split = gm.call(torch.ops.aten.split.Tensor, whole, 4, 1)
        split.meta["source_fn_stack"] = [("one", "redistribute")]
        graph = gm.output(gm.call(torch.ops.aten.neg.default, gm.call(operator.getitem, split, 0)))
        module = torch.fx.GraphModule(torch.nn.Module(), graph)
        assert applied(rewritten(module, settings_for())) == ["R11"]
        (exchange,) = GraphView(graph).collectives
        assert exchange.kind == "all_to_all" and exchange.start.args[1:3] == ([24] * 3, [24] * 3)
        assert shards(GraphView(graph)).ranks_agree


def test_a_reduction_that_is_sliced_becomes_a_reduce_scatter():
    layouts = ([P, R], [R, R], [S(0), R])
    was, now, report = on_all_ranks((2, 3), (6, 12), layouts, "reassociate")
    assert "all_reduce" in was and "reduce_scatter_tensor" in now and "all_reduce" not in now
    assert applied(report) == ["R6"]
    _, _, report = on_all_ranks((2, 3), (6, 12), layouts, "exact")
    assert [(d.subject, d.reason) for d in report.decisions] == [("R6", Reason.NUMERICS), ("R11", Reason.NUMERICS)]


@pytest.mark.parametrize(
    "layouts, before, after",
    [
        (
            ([P, S(1)], [S(0), S(0)]),
            ["all_gather_into_tensor", "reduce_scatter_tensor"],
            ["reduce_scatter_tensor", "all_to_all_single"],
        ),
        (
            ([P, S(0)], [R, S(1)]),
            ["all_gather_into_tensor", "all_reduce"],
            ["reduce_scatter_tensor", "all_to_all_single"],
        ),
        (([P, R], [R, S(0)]), ["all_reduce"], ["all_reduce"]),
        (([P, P], [S(0), S(1)]), ["reduce_scatter_tensor"] * 2, ["reduce_scatter_tensor"]),
    ],
    ids=["gather, scatter, slice", "exchange, reduce", "reduce, slice", "scatter two dimensions"],
)
def test_a_chain_with_reductions_is_planned_as_a_whole(layouts, before, after):
    was, now, report = on_all_ranks((2, 3), (720, 360), layouts, "reassociate")
    moves = ("all_", "reduce_")
    assert [[op for op in ops if op.startswith(moves)] for ops in (was, now)] == [before, after]
    assert applied(report) == ["R11"]
    _, exact, _ = on_all_ranks((2, 3), (720, 360), layouts, "exact")
    assert [op for op in exact if "reduce_" in op] == [op for op in was if "reduce_" in op]


@pytest.mark.parametrize(
    "layouts, copies",
    [(([S(0), S(1)], [R, R]), (1, 1)), (([S(1), S(1)], [R, R]), (2, 1)), (([S(0), S(0)], [S(1), S(1)]), (2, 1))],
    ids=["both dimensions", "one dimension twice", "exchange"],
)
def test_equal_parts_are_packed_and_unpacked_by_one_copy(layouts, copies):
    was, now, _ = on_all_ranks((2, 3), (720, 360), layouts)
    assert tuple(sum(op in ("cat", "clone") for op in ops) for ops in (was, now)) == copies


def test_a_chain_ends_where_a_padded_dimension_is_cut():
    """The first ranks have nothing to trim there: what they see divides, and what the last rank sees does not."""
    _, now, report = on_all_ranks((2, 3), (36, 11), ([P, S(0)], [S(1), S(1)]), "reassociate")
    assert "reduce_scatter_tensor" in now and "R11" not in applied(report)


def sliced_gather(rank, index, call, shape=(2, 3), pieces=2):
    """A gather over the last mesh dimension and one piece of it, traced from ``call``."""
    program = Program((6, 4))
    name = next(n for n, ranks in group_ranks().items() if len(ranks) == shape[-1] and rank in ranks)
    whole = program.collective("all_gather_into_tensor", program.inputs[0], shape[-1], name)
    split = program.call(torch.ops.aten.split.Tensor, whole, 6 * shape[-1] // pieces)
    split.meta["source_fn_stack"] = [("one", call)]
    part = program.call(operator.getitem, split, index)
    return torch.fx.GraphModule(torch.nn.Module(), program.output(program.call(torch.ops.aten.neg.default, part)))


@pytest.mark.parametrize(
    "call, index, matched", [("redistribute", 0, True), ("chunk", 0, False), ("redistribute", 1, False), ("", 0, False)]
)
def test_only_a_proven_own_slice_counts(call, index, matched):
    """A piece that the user picks looks the same on this rank; on the others it is another piece than their own."""
    with mesh_world((2, 3)):
        gm = sliced_gather(0, index, call)
        report = rewritten(gm, settings_for())
    assert (applied(report) == ["R11"]) is matched


@pytest.mark.parametrize(
    "other, written, own", [(None, (), True), (0, (), True), (1, (), False), (1, (0,), False), (1, (-2,), False)]
)
def test_what_a_second_split_reads_is_read_of_the_first(other, written, own):
    """DTensor splits once per piece that it packs: piece 0 of one split is nobody's own where another reads piece 1."""
    with mesh_world((2, 3)):
        gm = sliced_gather(0, 0, "redistribute")
        (split,) = [n for n in gm.graph.nodes if n.target is torch.ops.aten.split.Tensor]
        (piece,) = [n for n in split.users if n.users]
        if other is not None:
            with gm.graph.inserting_after(piece):
                twin = gm.graph.node_copy(split)
                # The same dimension may be written down in several ways.
                twin.args = (*split.args[:2], *written)
            with gm.graph.inserting_after(twin):
                taken = gm.graph.call_function(operator.getitem, (twin, other))
            taken.meta["val"] = twin.meta["val"][other]
            out = gm.graph.output_node()
            out.args = ([*out.args[0], taken],)
        assert (own_group(split, piece) is not None) is own
        program = Values(View(gm.graph))
        found = Own(program, 0, Layouts(program, 0)).group(program.record(split), 0)
    assert (found is not None) is own


def test_two_mesh_dimensions_of_one_size_are_ambiguous():
    with mesh_world((2, 2)):
        gm = sliced_gather(0, 0, "redistribute", shape=(2, 2))
        report = rewritten(gm, settings_for())
    assert not report.changed
    assert [(d.subject, d.reason) for d in report.decisions] == [("R11", Reason.DIFFERENT_GROUP)]
    assert "2 groups of that size" in report.decisions[0].detail


def test_a_user_chunk_keeps_all_ranks_together():
    """All ranks take piece 0: a rewrite that took it for each rank's own would leave the others waiting."""
    before, after, groups = {}, {}, {}
    for rank in range(6):
        with mesh_world((2, 3), rank):
            groups[rank] = group_ranks()
            before[rank] = sliced_gather(rank, 0, "chunk")
            after[rank] = duplicate(before[rank])
            rewritten(after[rank], settings_for())
    assert_equal_on_all_ranks(before, after, groups)


def test_bytes_of_the_catalogue():
    """(2, 4), float32 [64, 32]: [R, S0] -> [S0, S0] sends 1024 bytes instead of 6144."""
    from tests.test_redistribute_copies import capture, local_shape, redistribution, unnoted

    with mesh_world((2, 4)) as mesh:
        layouts = ([R, S(0)], [S(0), S(0)])
        x = torch.zeros(local_shape(mesh, (64, 32), layouts[0]))
        (gm,) = capture(redistribution(mesh, (64, 32), *layouts), [x], dynamo=unnoted).graphs
        assert sum(sent_bytes(c) for c in GraphView(gm.graph).collectives) == 6144
        report = rewritten(gm, settings_for())
        (start,) = (n for n in gm.graph.nodes if _torch.op_name(n.target).endswith("all_to_all_single"))
    assert applied(report) == ["R11"] and "all_to_all (1024 bytes)" in report.decisions[0].detail
    # This rank keeps its part and sends the rest of what others need; nobody sends or receives more than 1024 bytes.
    assert 4 * sum(start.args[2]) <= 1024 and 4 * sum(start.args[1]) <= 1024


def test_empty_shards_switch_off_what_ranks_could_decide_differently():
    """5 rows on 4 ranks: rank 3 holds none, and its graph does not show who reads the gathered tensor elsewhere."""
    for rank, (pieces, rows) in {0: (3, 2), 3: (None, 0)}.items():
        with mesh_world((4,), rank) as mesh:
            program = Program((5, 4))
            name = mesh.get_group().group_name
            once = program.collective("all_reduce", program.inputs[0], "max", name)
            program.collective("all_reduce", once, "max", name)
            if pieces:
                split = program.call(torch.ops.aten.split.Tensor, once, 2)
                part = program.call(operator.getitem, split, rank)
            else:
                part = program.call(torch.ops.aten.full.default, [rows, 4], 0.0)
            gm = torch.fx.GraphModule(torch.nn.Module(), program.output(program.call(torch.ops.aten.neg.default, part)))
            report = rewritten(gm, settings_for())
            assert not report.changed
            assert Reason.UNSUPPORTED in {d.reason for d in report.decisions}
