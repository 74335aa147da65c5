"""Movements as digits, held against what the operators do to positions."""

from __future__ import annotations

import operator
import random

import pytest
import torch

from inductor_passes.rewrites import permutation
from inductor_passes.rewrites.permutation import canonical, regrouped, row_major, unpack_ahead
from tests.support.redistribute_programs import Program


def positions(digits):
    """The source position of every position of the result."""
    found = [0]
    for stride, extent in digits:
        found = [p + stride * k for p in found for k in range(extent)]
    return found


@pytest.mark.parametrize("seed", range(30))
def test_digits_say_where_every_element_comes_from(seed) -> None:
    rng = random.Random(seed)
    shape = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4))]
    program = Program(tuple(shape))
    node = program.inputs[0]
    steps = []
    for _ in range(rng.randint(1, 5)):
        now = list(node.meta["val"].shape)
        kind = rng.choice(["permute", "flat", "split", "transpose", "unsqueeze"])
        if kind == "permute":
            steps.append((torch.ops.aten.permute.default, rng.sample(range(len(now)), len(now))))
        elif kind == "flat":
            steps.append((torch.ops.aten.reshape.default, [node.meta["val"].numel()]))
        elif kind == "split":
            d = rng.randrange(len(now))
            factor = rng.choice([f for f in range(1, now[d] + 1) if now[d] % f == 0])
            steps.append((torch.ops.aten.reshape.default, [*now[:d], factor, now[d] // factor, *now[d + 1 :]]))
        elif kind == "transpose":
            steps.append((torch.ops.aten.transpose.int, rng.randrange(len(now)), rng.randrange(len(now))))
        else:
            steps.append((torch.ops.aten.unsqueeze.default, rng.randint(0, len(now))))
        node = program.call(steps[-1][0], node, *steps[-1][1:])
    dims, at = row_major(shape), program.inputs[0]
    while at is not node and dims is not None:
        (at,) = at.users
        dims = permutation._applied(dims, at)
    real = torch.arange(torch.Size(shape).numel()).view(shape)
    for target, *arguments in steps:
        real = target(real, *arguments)
    assert dims is not None and positions(canonical(dims)) == real.reshape(-1).tolist()


def test_a_view_that_cuts_through_a_digit_is_unknown() -> None:
    dims = row_major([2, 3])[::-1]
    assert regrouped(dims, [6]) is not None and regrouped(dims, [4, 3]) is None


@pytest.mark.parametrize("form", ["split and cat", "permuted", "permuted in two steps", "transposed"])
@pytest.mark.parametrize("dim", [1, 2])
def test_every_way_to_unpack_a_gather_is_read_alike(form, dim) -> None:
    if form == "transposed" and dim == 2:
        pytest.skip("one transposition does not do it")
    program = Program((8, 6, 5))
    aten = torch.ops.aten
    call = program.call
    x = program.inputs[0]
    wait = call(aten.clone.default, x)
    if form == "split and cat":
        split = call(aten.split.Tensor, wait, 2)
        call(aten.cat.default, [call(operator.getitem, split, i) for i in range(4)], dim)
    else:
        grid = call(aten.view.default, wait, [4, 2, 6, 5])
        if form == "transposed":
            moved = call(aten.transpose.int, grid, 0, 1)
        elif form == "permuted":
            moved = call(aten.permute.default, grid, [1, 0, 2, 3] if dim == 1 else [1, 2, 0, 3])
        else:
            first = call(aten.permute.default, grid, [1, 0, 2, 3])
            moved = first if dim == 1 else call(aten.permute.default, first, [0, 2, 1, 3])
        dense = call(aten.clone.default, moved, memory_format=torch.contiguous_format)
        call(aten.view.default, dense, [2, 24, 5] if dim == 1 else [2, 6, 20])
    found = unpack_ahead(wait, 4)
    assert found is not None and found[0] == dim
    assert tuple(found[1][-1].meta["val"].shape) == ((2, 24, 5) if dim == 1 else (2, 6, 20))


def test_another_permutation_is_none() -> None:
    program = Program((8, 6))
    grid = program.call(torch.ops.aten.view.default, program.inputs[0], [4, 2, 6])
    moved = program.call(torch.ops.aten.permute.default, grid, [2, 0, 1])
    program.call(torch.ops.aten.reshape.default, moved, [2, 24])
    assert unpack_ahead(program.inputs[0], 4) is None
