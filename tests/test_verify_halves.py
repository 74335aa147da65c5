"""Rotary embeddings take halves of each head: on two ranks a half may be a rank's own part, so it is not followed.

Sums over ranks of what is made of such halves are compared all the same, also where a pass computes them in parts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes import verify
from tests.support.world import fake_world

T = torch.Tensor
BATCH, SEQ, HEADS, DIM = 4, 6, 2, 4
SHAPES = (*((BATCH, SEQ, HEADS * DIM),) * 2, *((SEQ, 1, DIM),) * 2, *((HEADS * DIM, HEADS * DIM),) * 2)


def products(x: T, second: T, rest: T, more: tuple[T, ...], begin: int) -> T:
    """The sum of two products, one of them rotated, scattered along the sequence."""
    cos, sin, v, w = more
    heads, others = (one.reshape(-1, SEQ, HEADS, DIM) for one in (x, second))
    half = DIM // 2
    halves = torch.cat([-heads[..., half:], others[..., begin : begin + half]], -1)
    total = (heads * cos + halves * sin).reshape(-1, HEADS * DIM) @ v + rest.reshape(-1, HEADS * DIM) @ w
    return funcol.reduce_scatter_tensor(total.view(-1, SEQ, HEADS * DIM), "sum", 1, dist.group.WORLD)


def whole(x: T, rest: T, *more: T) -> T:
    return products(x, x, rest, more, 0)


def in_parts(
    first: tuple[int, int], second: tuple[int, int], rest: tuple[int, int], begin: int = 0
) -> Callable[..., T]:
    """As :func:`whole`, in two parts of the batch; which rows each of both takes of its operands."""

    def run(x: T, other: T, *more: T) -> T:
        parts = [
            products(x[a : a + 2], x[b : b + 2], other[c : c + 2], more, begin) for a, b, c in zip(first, second, rest)
        ]
        return torch.cat(parts)

    return run


RIGHT, SWAPPED = (0, 2), (2, 0)


@pytest.mark.parametrize(
    ("parts", "right"),
    [
        (in_parts(RIGHT, RIGHT, RIGHT), True),
        (in_parts(SWAPPED, SWAPPED, SWAPPED), False),
        (in_parts(SWAPPED, SWAPPED, RIGHT), False),
        (in_parts(RIGHT, SWAPPED, RIGHT), False),
        (in_parts(RIGHT, RIGHT, RIGHT, begin=2), False),
        (in_parts(RIGHT, RIGHT, RIGHT, begin=1), False),
    ],
    ids=["right", "all rows swapped", "rotated rows swapped", "rows of a half swapped", "another half", "overlapping"],
)
def test_halves_in_parts_of_the_batch(parts: Callable[..., T], right: bool) -> None:
    """Found by the benchmark of async TP: a backward that was right was undone."""
    with fake_world(2):
        inputs = [torch.randn(*shape) for shape in SHAPES]
        was, now = (make_fx(f, tracing_mode="fake")(*inputs) for f in (whole, parts))
        for node in now.graph.nodes:
            if node.op == "call_function":
                node._rename(f"of_parts_{node.name}")
        names = [tuple(n.name for n in gm.graph.nodes if n.op == "call_function") for gm in (was, now)]
        found = verify.check(
            now.graph, reference=verify.snapshot(was.graph), numerics="reassociate", group_order="any",
            certificates=(verify.Certificate("parts", *names),),
        )  # fmt: skip
        assert {f.rule for f in found} == (set() if right else {"value-changed"}), found
