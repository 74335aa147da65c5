"""Rewrites that save copies (R8, R9, R10, R12, R13), on graphs of DTensor programs, all ranks in lockstep."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from inductor_passes.redistribute.prepare import prepare_groups
from inductor_passes.report import Reason, Verdict
from tests.support.redistribute_graphs import (
    LockstepError,
    assert_equal_on_all_ranks,
    capture,
    duplicate,
    group_ranks,
    integers,
    ops_of,
    rewritten,
    run_in_lockstep,
)
from tests.support.redistribute_programs import Program, settings_for
from tests.support.world import mesh_world

COPIES = {"cat", "clone", "constant_pad_nd", "slice_scatter"}


def local_shape(mesh, shape, placements):
    """Of this rank."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    plain = [Replicate() if p.is_partial() else p for p in placements]
    return compute_local_shape_and_global_offset(shape, mesh, plain)[0]


def redistribution(mesh, shape, *layouts):
    """A function from this rank's part to its part after all redistributions."""
    stride = torch.empty(shape, device="meta").stride()

    def run(x):
        d = DTensor.from_local(x, mesh, layouts[0], run_check=False, shape=torch.Size(shape), stride=stride)
        for layout in layouts[1:]:
            d = d.redistribute(placements=layout)
        return d.to_local() * 2.0

    return run


def unnoted(graph):
    """Redistributions as operators cause them: no call says the layouts, so R17 leaves them to the others."""


def on_all_ranks(
    mesh_shape, shape, layouts, exactness="exact", only=(), copy=duplicate, dtype=torch.float32, dynamo=unnoted
):
    """(ops before, ops after, report) of rank 0; equality is checked on all ranks."""
    before, after, groups, reports = {}, {}, {}, {}
    size = 1
    for s in mesh_shape:
        size *= s
    for rank in range(size):
        with mesh_world(mesh_shape, rank) as mesh:
            x = torch.zeros(local_shape(mesh, shape, layouts[0]), dtype=dtype)
            captured = capture(redistribution(mesh, shape, *layouts), [x], dynamo=dynamo)
            (before[rank],), groups[rank] = captured.graphs, captured.groups
            after[rank] = copy(before[rank])
            reports[rank] = rewritten(after[rank], settings_for(), exactness, only)
    assert_equal_on_all_ranks(before, after, groups)
    return ops_of(before[0]), ops_of(after[0]), reports[0]


@pytest.mark.parametrize(
    "shape, layouts, before, after, subject",
    [
        ((8, 13), ([Partial()], [Shard(1)]), 6, 2, "R8"),
        ((8, 13), ([Shard(1)], [Replicate()]), 2, 1, "R8"),
        ((1, 8, 6), ([Partial()], [Shard(1)]), 1, 0, "R10"),
    ],
)
def test_copies_of_redistributions(shape, layouts, before, after, subject):
    was, now, report = on_all_ranks((4,), shape, layouts)
    copies = [sum(op in COPIES for op in ops) for ops in (was, now)]
    # torch 2.11 does not copy what it trims.
    assert copies in ([before, after], [before - 1, after])
    assert {d.subject for d in report.decisions if d.verdict is Verdict.APPLIED} == {subject}


@pytest.mark.parametrize("taken, applied", [(7, True), (4, False), (6, False)])
def test_rows_that_may_be_a_rank_s_own_are_cut_on_no_rank(taken, applied):
    """One rank's first rows are another one's second: what one of them rewrites, both have to."""
    done = set()
    for rank in range(2):
        with mesh_world((2,), rank):
            program = Program((8, 6))
            parts = [program.call(torch.ops.aten.mul.Tensor, program.inputs[0], k) for k in range(2)]
            joined = program.call(torch.ops.aten.cat.default, parts, 1)
            start = 0 if applied else rank * taken
            own = program.call(torch.ops.aten.slice.Tensor, joined, 1, start, start + taken)
            copied = program.call(torch.ops.aten.clone.default, own)
            gm = torch.fx.GraphModule(torch.nn.Module(), program.output(copied))
            report = rewritten(gm, settings_for())
            done |= {(d.subject, d.verdict) for d in report.decisions}
    assert (("R8", Verdict.APPLIED) in done) == applied, done


def test_a_view_of_an_input_is_not_returned():
    """What was the caller's own copy stays one: a view of an input would let writes through."""
    with mesh_world((4,)):
        program = Program((1, 8, 6))
        pieces = program.call(torch.ops.aten.split.Tensor, program.inputs[0], 2, 1)
        parts = [program.call(operator.getitem, pieces, i) for i in range(4)]
        packed = program.call(torch.ops.aten.cat.default, parts)
        gm = torch.fx.GraphModule(torch.nn.Module(), program.output(packed))
        report = rewritten(gm, settings_for())
    assert [(d.subject, d.reason) for d in report.decisions] == [("R10", Reason.DATA_DEPENDENCY)]


@pytest.mark.parametrize("gather_dim, shard_dim", [(0, 1), (1, 0), (2, 1), (0, 2)])
def test_r12_makes_the_exchange_visible(gather_dim, shard_dim):
    import torch.distributed.tensor._collective_utils  # registers the operator

    graphs, originals, groups = {}, {}, {}
    for rank in range(4):
        with mesh_world((4,), rank):
            groups[rank] = group_ranks()
            name = next(n for n, ranks in groups[rank].items() if len(ranks) == 4)
            program = Program((4, 8, 12))
            out = program.call(
                torch.ops._dtensor.shard_dim_alltoall.default, program.inputs[0], gather_dim, shard_dim, name
            )
            originals[rank] = torch.fx.GraphModule(torch.nn.Module(), program.output(out))
            graphs[rank] = duplicate(originals[rank])
            report = rewritten(graphs[rank], settings_for())
    assert "all_to_all_single" in ops_of(graphs[0]) and "shard_dim_alltoall" not in ops_of(graphs[0])
    assert [d.subject for d in report.decisions] == ["R12"]
    assert_equal_on_all_ranks(originals, graphs, groups)


def test_r12_refuses_what_does_not_divide():
    with mesh_world((4,)):
        name = next(n for n, ranks in group_ranks().items() if len(ranks) == 4)
        program = Program((4, 9))
        out = program.call(torch.ops._dtensor.shard_dim_alltoall.default, program.inputs[0], 0, 1, name)
        gm = torch.fx.GraphModule(torch.nn.Module(), program.output(out))
        report = rewritten(gm, settings_for())
    assert [(d.subject, d.reason) for d in report.decisions] == [("R12", Reason.UNSUPPORTED)]


def storage_of_results(gm, inputs, groups):
    """Bytes of memory that the results of every rank keep alive."""
    results = run_in_lockstep(gm, inputs, groups)
    return {
        rank: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in values}.values())
        for rank, values in results.items()
    }


def test_r13_releases_what_a_slice_pins():
    """The gathered tensor goes when only an eighth of it is returned: measured on real storages."""
    before, after, groups = {}, {}, {}
    for rank in range(4):
        with mesh_world((4,), rank) as mesh:
            name = mesh.get_group().group_name
            groups[rank] = group_ranks()
            program = Program((4, 16))
            whole = program.collective("all_reduce", program.inputs[0], "max", name)
            pieces = program.call(torch.ops.aten.split.Tensor, whole, 2, 1)
            part = program.call(operator.getitem, pieces, rank)
            before[rank] = torch.fx.GraphModule(torch.nn.Module(), program.output(part))
            after[rank] = duplicate(before[rank])
            report = rewritten(after[rank], settings_for(memory_budget="+25%"))
    assert [(d.subject, d.detail) for d in report.decisions] == [("R13", "releases 224 of 256 bytes")]
    inputs = {rank: integers(gm, rank) for rank, gm in before.items()}
    assert storage_of_results(before, inputs, groups) == dict.fromkeys(range(4), 256)
    assert storage_of_results(after, inputs, groups) == dict.fromkeys(range(4), 32)
    assert_equal_on_all_ranks(before, after, groups)


@pytest.mark.parametrize(
    ("pieces_left", "budget", "applied"), [(4, "+25%", True), (4, "unlimited", False), (3, "+25%", False)]
)
def test_r13_copies_only_where_that_releases_much(pieces_left, budget, applied):
    with mesh_world((4,)) as mesh:
        program = Program((12, 16))
        whole = program.collective("all_reduce", program.inputs[0], "max", mesh.get_group().group_name)
        pieces = program.call(torch.ops.aten.split.Tensor, whole, 12 // pieces_left, 0)
        gm = torch.fx.GraphModule(torch.nn.Module(), program.output(program.call(operator.getitem, pieces, 0)))
        report = rewritten(gm, settings_for(memory_budget=budget))
    (decision,) = [d for d in report.decisions if d.subject == "R13"]
    assert (decision.verdict is Verdict.APPLIED) is applied is report.changed
    if not applied:
        assert decision.reason is Reason.NOT_PROFITABLE


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(8, 16), nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.w2(F.relu(self.w1(x)) * self.w3(x))


def sequence_parallel_mlp(mesh):
    torch.manual_seed(0)
    return parallelize_module(
        MLP(),
        mesh,
        {
            "w1": ColwiseParallel(input_layouts=Shard(1)),
            "w3": ColwiseParallel(input_layouts=Shard(1)),
            "w2": RowwiseParallel(output_layouts=Shard(1)),
        },
    )


@pytest.fixture(scope="module")
def mlp_graphs():
    """Graphs of the MLP on 4 ranks with batch 3, by kind and rank, and the groups."""
    found = {"inference": {}, "joint": {}}
    groups = {}
    for rank in range(4):
        with mesh_world((4,), rank) as mesh:
            x = torch.ones(3, 2, 8, requires_grad=True)
            model = sequence_parallel_mlp(mesh)
            captured = capture(model, [x])
            (found["joint"][rank],) = captured.joint
            with torch.no_grad():
                (found["inference"][rank],) = capture(model, [x]).graphs
            groups[rank] = captured.groups
    return found, groups


@pytest.mark.parametrize("kind, before, only", [("inference", 3, ()), ("joint", 6, ("R5", "R9", "R14"))])
def test_r9_keeps_gathered_rows_through_the_mlp(mlp_graphs, kind, before, only):
    """Batch > 1: three activation-sized copies forward and three backward, none is left."""
    found, groups = mlp_graphs
    after, reports = {}, {}
    for rank, gm in found[kind].items():
        with mesh_world((4,), rank):
            after[rank] = duplicate(gm)
            reports[rank] = rewritten(after[rank], settings_for(), "reassociate", only)
    assert [sum(op in COPIES for op in ops_of(g[0])) for g in (found[kind], after)] == [before, 0]
    assert_equal_on_all_ranks(found[kind], after, groups)
    assert [r.decisions for r in reports.values()] == [reports[0].decisions] * 4


def test_r9_is_refused_where_it_may_not_or_does_not_pay(mlp_graphs):
    found, _ = mlp_graphs
    with mesh_world((4,)):
        def reasons(exactness, **settings):
            gm = duplicate(found["inference"][0])
            report = rewritten(gm, settings_for(**settings), exactness, ("R9",))
            return [d.reason for d in report.decisions]

        assert reasons("exact") == [Reason.NUMERICS]
        assert reasons("reassociate", async_tp="auto") == [Reason.DISABLED]
        program = Program((3, 2, 8))
        name = next(n for n, ranks in group_ranks().items() if len(ranks) == 4)
        whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, name)
        pieces = program.call(torch.ops.aten.split.Tensor, whole, 3)
        parts = [program.call(operator.getitem, pieces, i) for i in range(4)]
        rows = program.call(torch.ops.aten.cat.default, parts, 1)
        gm = torch.fx.GraphModule(torch.nn.Module(), program.output(program.call(torch.ops.aten.relu.default, rows)))
        report = rewritten(gm, settings_for(), "reassociate", ("R9",))
        assert [d.reason for d in report.decisions] == [Reason.NOT_PROFITABLE]


def test_lockstep_finds_a_deadlock():
    """The simulator itself: ranks that issue collectives in different orders are an error, not a result."""
    graphs, groups, inputs = {}, {}, {}
    for rank in range(4):
        with mesh_world((2, 2), rank) as mesh:
            prepare_groups(mesh)
            groups[rank] = group_ranks()
            first, second = (mesh.get_group(d).group_name for d in ((0, 1) if rank in (0, 3) else (1, 0)))
            program = Program((4,))
            a = program.collective("all_reduce", program.inputs[0], "sum", first)
            graphs[rank] = torch.fx.GraphModule(
                torch.nn.Module(), program.output(program.collective("all_reduce", a, "sum", second))
            )
            inputs[rank] = integers(graphs[rank], rank)
    with pytest.raises(LockstepError, match="deadlock"):
        run_in_lockstep(graphs, inputs, groups)
