"""What the rewrites make of real DTensor models: collectives, bytes and copies, counted on the graphs."""

from __future__ import annotations

import pytest
import torch

from tests.support.redistribute_graphs import capture, duplicate, rewritten, run_in_lockstep, tensors
from tests.support.redistribute_models import MODELS, counted, graphs_of
from tests.support.redistribute_programs import settings_for
from tests.support.world import mesh_world


@pytest.fixture(scope="module")
def captured():
    """Graphs of every model on rank 0, once."""
    found = {}

    def get(name, joint=False):
        if (name, joint) not in found:
            with mesh_world(MODELS[name][1]) as mesh:
                found[name, joint] = graphs_of(name, mesh, joint)
        return found[name, joint]

    return get


def counts(captured, name, exactness, backward, joint=False):
    graphs = captured(name, joint)
    with mesh_world(MODELS[name][1]):
        return counted(graphs, exactness, backward)


def test_a_tensor_parallel_block_reduces_twice_backward(captured):
    before, after = counts(captured, "TP block", "reassociate", True)
    assert (before.collectives, after.collectives) == ({"all_reduce": 5}, {"all_reduce": 2})
    assert before.bytes == 2.5 * after.bytes
    before, after = counts(captured, "TP block", "exact", True)
    assert before == after


def test_a_sequence_parallel_block_scatters_twice_backward(captured):
    before, after = counts(captured, "TP + SP block, inputs per linear", "reassociate", True)
    assert [c.collectives["reduce_scatter"] for c in (before, after)] == [5, 2]
    # Each sum is packed once instead of each of its terms.
    assert (before.copies, after.copies) == (7, 4)


def test_hybrid_shard_reduces_its_gradients_on_shards(captured):
    before, after = counts(captured, "hybrid shard, 6 weights of 8 KiB", "reassociate", True)
    assert (before.bytes, after.bytes) == (86_016, 49_152)
    assert before.collectives == after.collectives == {"all_reduce": 6, "reduce_scatter": 6}


@pytest.mark.parametrize("backward, exactness", [(False, "exact"), (True, "reassociate")])
def test_two_dimensional_shards_take_one_collective_per_weight(captured, backward, exactness):
    before, after = counts(captured, "2-D sharded, 3 weights", exactness, backward)
    assert [sum(c.collectives.values()) for c in (before, after)] == [6, 3]
    assert before.bytes == after.bytes


def test_weights_travel_in_the_dtype_that_is_used(captured):
    before, after = counts(captured, "float32 weights used in bfloat16", "exact", False)
    assert before.bytes == 2 * after.bytes


@pytest.mark.parametrize("backward, before", [(False, 2), (True, 3)])
def test_an_mlp_with_batch_above_one_copies_nothing(captured, backward, before):
    """Its gathers and reduce_scatters are along dimension 1: one copy each, without the joint rewrite."""
    name = "TP + SP MLP, batch 3"
    assert counts(captured, name, "exact", backward)[0].copies == before
    assert counts(captured, name, "reassociate", backward, joint=True)[1].copies == 0


def test_all_ranks_of_a_block_agree():
    """Forward and backward graphs of the TP block, all ranks, before and after: equal up to rounding of sums."""
    graphs, after, groups = {}, {}, {}
    for rank in range(4):
        with mesh_world((4,), rank) as mesh:
            captured = graphs_of("TP block", mesh)
            groups[rank] = captured.groups
            graphs[rank] = captured.graphs[captured.backward.index(True)]
            after[rank] = duplicate(graphs[rank])
            rewritten(after[rank], settings_for(), "reassociate")
    generator = torch.Generator().manual_seed(0)
    shared = [
        torch.rand(n.meta["val"].shape, generator=generator) + 0.5
        for n in graphs[0].graph.nodes
        if n.op == "placeholder" and isinstance(n.meta["val"], torch.Tensor)
    ]
    inputs = {rank: [t * (1 + rank / 8) for t in shared] for rank in graphs}
    wanted, got = (run_in_lockstep(g, inputs, groups) for g in (graphs, after))
    for rank in graphs:
        for a, b in zip(tensors(wanted[rank]), tensors(got[rank]), strict=True):
            assert (a - b).abs().max() <= 1e-5 * a.abs().max(), f"rank {rank}"


def test_symbolic_sizes_are_left_as_they_are_or_rewritten_alike():
    """A dynamic batch: what needs no size is rewritten, what needs one is not, and nothing breaks."""
    with mesh_world((4,)) as mesh:
        from torch.distributed.tensor import DTensor, Shard

        def function(x):
            d = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
            return d.full_tensor().to(torch.bfloat16)

        (gm,) = capture(function, [torch.zeros(6, 3)], dynamic=True).graphs
        report = rewritten(gm, settings_for())
    assert [d.subject for d in report.decisions] == ["R7"] and report.changed
