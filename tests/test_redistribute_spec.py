"""Blocks of a layout against torch: what distribute_tensor puts on every rank, and that blocks tile the tensor."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.redistribute.boxes import numel
from inductor_passes.redistribute.execute import torch_placement
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.spec import Partial, Replicate, Shard, Spec, SpecError, placement
from tests.support.redistribute_ranks import local_tensors


@pytest.mark.parametrize("mesh", [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 1, 2, 2)], ids=str)
def test_blocks_are_what_torch_puts_on_each_rank(mesh):
    """torch shards a tensor by its placements from left to right."""
    options = [Shard(0), Shard(1), Replicate(), Shard(0, 2), Shard(0, 3)]
    choices = list(itertools.product(options, repeat=len(mesh)))[:: 1 if len(mesh) < 4 else 7]
    for shape, placements in itertools.product(((13, 7), (5, 3), (61, 2)), choices):
        value = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        spec = Spec(Mesh(mesh), placements, shape)
        ours = local_tensors(spec, {(): value})
        for rank in spec.mesh.ranks:
            theirs = value
            for p, size, c in zip(placements, mesh, spec.mesh.coordinates(rank)):
                if isinstance(p, Shard):
                    theirs = torch_placement(p)._split_tensor(theirs, size, with_padding=False)[0][c]
            assert torch.equal(ours[rank], theirs), (shape, placements, rank)


@st.composite
def specs(draw):
    mesh = draw(st.sampled_from([(8,), (3,), (2, 4), (3, 2), (2, 2, 2), (2, 3, 2), (2, 2, 2, 2)]))
    shape = draw(st.tuples(*[st.integers(0, 9)] * draw(st.integers(1, 3))))
    options = [Replicate(), Partial("sum")]
    options += [Shard(d, f) for d in range(len(shape)) for f in (1, 2, 3)]
    return Spec(Mesh(mesh), tuple(draw(st.sampled_from(options)) for _ in mesh), shape)


@settings(max_examples=200, deadline=None)
@given(specs())
def test_blocks_are_equal_or_disjoint_and_tile_the_tensor(spec):
    layout = spec.layout
    blocks = [layout.block(spec.mesh.coordinates(r)) for r in spec.mesh.ranks]
    assert max(map(numel, blocks)) == layout.max_numel
    covered = {}
    for block in blocks:
        elements = set(itertools.product(*([i for lo, hi in part for i in range(lo, hi)] for part in block)))
        assert len(elements) == numel(block)
        for element in elements:
            assert covered.setdefault(element, block) == block
    assert len(covered) == math.prod(spec.shape)


def test_a_strided_shard_is_a_shard_order_where_both_give_the_same_blocks():
    mesh = Mesh((2, 4))
    strided = Spec(mesh, (Shard(0, 4), Shard(0)), (64, 32))
    ordered = Spec(mesh, (Shard(0), Shard(0)), (64, 32), shard_order=((0, (1, 0)),))
    assert strided.layout == ordered.layout
    assert strided.layout.cuts == (((1, 1), (0, 1)), ())
    # 9 rows in halves are 0-4 and 5-8, their quarters 2, 2, 1, 0 and 1, 1, 1, 1: the last strided shard is row 8 alone,
    # which the inner dimension chunks again and gives to its first rank; a shard order would give it to the second.
    mesh = Mesh((4, 2))
    assert Spec(mesh, (Shard(0, 2), Shard(0)), (10,)).layout.cuts == (((1, 1), (0, 1)),)
    assert Spec(mesh, (Shard(0, 2), Shard(0)), (9,)).layout.cuts == (((0, 2), (1, 1)),)


def test_sizes_of_one_and_default_orders_do_not_make_layouts_differ():
    a = Spec(Mesh((1, 4)), (Shard(0), Shard(1)), (8, 8))
    b = Spec(Mesh((1, 4)), (Partial("sum"), Shard(1)), (8, 8), shard_order=((1, (1,)),))
    assert a.layout == b.layout
    assert Spec(Mesh((2, 2)), ("S0", "S0"), (8,), shard_order=((0, (0, 1)),)).shard_order == ()


@pytest.mark.parametrize("text", ["S(0)", "_S(1, 4)", "R", "P(max)", "P(sum)"])
def test_text_round_trip(text):
    assert str(placement(text)) == text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: placement("X"), "'X'"),
        (lambda: placement("P(band)"), "sum, avg, min, max, product"),
        (lambda: placement(3), "Shard, _StridedShard, Replicate or Partial"),
        (lambda: Spec(Mesh((2,)), ("S2",), (4, 4)), "dims 0..1"),
        (lambda: Spec(Mesh((2, 2)), ("R",), (4,)), "1 placements for a mesh of 2"),
        (lambda: Spec(Mesh((2, 2)), ("P(sum)", "P(max)"), (4,)), "mixed partial"),
        (lambda: Spec(Mesh((2, 2)), ("S0", "R"), (4,), shard_order=((0, (1,)),)), "shard order"),
        (lambda: Spec.of(torch.ones(3)), "DTensorSpec or DTensor"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(SpecError, match=words):
        make()
