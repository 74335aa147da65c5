"""Group algebra, exhaustively on all meshes of up to three dimensions and 16 ranks."""

import itertools
import math

import pytest

from inductor_passes.redistribute.mesh import Mesh, MeshError, Strided, nesting, product

SHAPES = [
    shape for n in (1, 2, 3) for shape in itertools.product(range(1, 17), repeat=n) if math.prod(shape) <= 16
]


def subsets(n):
    return [c for k in range(n + 1) for c in itertools.combinations(range(n), k)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_partition_the_mesh(shape):
    mesh = Mesh(shape)
    for dims in subsets(len(shape)):
        groups = mesh.groups(dims)
        assert sorted(r for g in groups for r in g) == list(range(mesh.size))
        assert {len(g) for g in groups} == {mesh.group_size(dims)}
        for g in groups:
            for r in g:
                assert mesh.group(r, dims) == g
                others = [mesh.coordinates(x) for x in g]
                fixed = [m for m in range(mesh.ndim) if m not in dims]
                assert all(c[m] == mesh.coordinates(r)[m] for c in others for m in fixed)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_coordinates_invert_ranks(shape):
    mesh = Mesh(shape, tuple(reversed(range(math.prod(shape)))))
    for rank in mesh.ranks:
        assert mesh.rank(mesh.coordinates(rank)) == rank


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flattening_in_any_order_permutes_one_group(shape):
    mesh = Mesh(shape)
    for dims in subsets(len(shape)):
        for order in itertools.permutations(dims):
            for rank in mesh.ranks:
                flat, group, slots = mesh.flattened(rank, order), mesh.group(rank, order), mesh.slots(rank, order)
                assert group == mesh.group(rank, dims)
                assert tuple(group[s] for s in slots) == flat
                # The last dim varies fastest.
                for a, b in itertools.pairwise(flat):
                    ca, cb = (tuple(mesh.coordinates(x)[d] for d in order) for x in (a, b))
                    assert ca < cb
        assert mesh.slots(0, dims) == tuple(range(mesh.group_size(dims)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strided_sets_products_and_nesting(shape):
    mesh = Mesh(shape)
    for dims in subsets(len(shape)):
        for group in mesh.groups(dims):
            strided = Strided.of(group)
            assert strided is not None
            assert strided.ranks() == group and strided.size == len(group) and strided.offset == group[0]
            assert 1 not in strided.sizes and list(strided.strides) == sorted(strided.strides, reverse=True)
    for outer, inner in itertools.product(subsets(len(shape)), repeat=2):
        for rank in mesh.ranks:
            a, b = mesh.group(rank, outer), mesh.group(rank, inner)
            joint = product(a, b)
            if any(shape[d] > 1 for d in set(outer) & set(inner)):
                assert joint is None and nesting(a, b) is None
                continue
            assert joint == mesh.group(rank, tuple(set(outer) | set(inner)))
            # Gathering over the inner group, then the outer one, puts rank (j, i) at j * len(inner) + i.
            order = nesting(a, b)
            assert order is not None
            sequence = [r for j in a for r in mesh.group(j, inner)]
            assert [joint[s] for s in order] == sequence


def test_sets_that_are_no_grid():
    assert Strided.of((0, 1, 3)) is None
    assert Strided.of((0, 1, 4, 6)) is None
    assert Strided.of(()) is None
    assert product((0, 1), (2, 3)) is None
    assert product((0, 1), (0, 1, 2, 3)) is None
    assert product((0, 1), (0, 1)) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mesh(()), "shape"),
        (lambda: Mesh((0, 2)), "sizes >= 1"),
        (lambda: Mesh((2, 2), (0, 1, 2)), "4 different ranks"),
        (lambda: Mesh((2,), (1, 1)), "different ranks"),
        (lambda: Mesh((2, 2)).group(0, (0, 0)), r"\(0, 0\)"),
        (lambda: Mesh((2, 2)).group(0, (2,)), "0..1"),
        (lambda: Mesh((2, 2)).coordinates(7), "rank 7"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(MeshError, match=words):
        make()
