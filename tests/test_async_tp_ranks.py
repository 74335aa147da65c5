"""Async TP on real ranks: every program and its gradient, in parts against whole, all bits, 2 and 4 gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol

from tests.support.async_tp_programs import GROUP, PROGRAMS, Program, inputs, on_gloo, trace
from tests.support.ranks import Ranks

#: Ends the names of programs in a type that sums of parts would be rounded to.
NARROW = "(narrow)"
#: Programs that name dtypes themselves.
_TYPED = ("ag0_byte_view_mm",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[request.param])


def _gathered(dim: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]:
    """A column-wise layer along ``dim``, with the gradients of activations and weight."""

    def fn(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = funcol.all_gather_tensor_autograd(x, dim, GROUP) @ w
        return y, *torch.autograd.grad(y, (x, w), dy)

    return fn


def _scattered(dim: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]:
    """A row-wise layer along ``dim``, with the gradients of activations and weight."""

    def fn(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = funcol.reduce_scatter_tensor_autograd(x @ w, "sum", dim, GROUP)
        return y, *torch.autograd.grad(y, (x, w), dy)

    return fn


def _uneven(dim: int, world: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Gathered padded shards, trimmed; the product padded again and scattered."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        full = funcol.all_gather_tensor(x, dim, GROUP)
        y = full.narrow(dim, 0, full.shape[dim] - 1) @ w
        pad = [0, 0] * (y.dim() - 1 - dim) + [0, 1]
        return funcol.reduce_scatter_tensor(torch.nn.functional.pad(y, pad), "sum", dim, GROUP)

    return fn


def of_any_world(world: int) -> list[Program]:
    """Every dimension by every dtype, forward and backward."""
    found = []
    for dtype in DTYPES:
        for dim in range(3):
            wide = [4, 8, 8]
            wide[dim] *= world
            columns = 12
            gathered = ((4, 8, 8), (wide[2], columns), (*wide[:2], columns))
            name = f"{dim}_{dtype}"
            found.append(Program(f"gathered_{name}", _gathered(dim), gathered, 2, (), dtype, world))
            product = [4, 8, columns]
            product[dim] //= world
            scattered = ((4, 8, 8), (8, columns), tuple(product))
            found.append(Program(f"scattered_{name}", _scattered(dim), scattered, 2, (), dtype, world))
            if dim < 2:
                shapes = ((4, 8, 8), (8, columns))
                found.append(Program(f"uneven_{name}", _uneven(dim, world), shapes, 1, (), dtype, world))
    return found


def _compare(rank: int, world: int) -> dict[str, str]:
    """Name of every program -> how many of its collectives came in parts, or what differs."""
    from tests.test_async_tp_programs import apply, fused_and_refused

    small = [p for p in PROGRAMS if p.fused and p.world == world and p.name not in _TYPED]
    floats = [
        replace(p, name=f"{p.name} {d} {NARROW}", dtype=d)
        for p in small
        if p.dtype == torch.float32 and not p.name.endswith("_complex")  # torch has no pairs of bfloat16
        for d in DTYPES[1:3]
    ]
    found = {}
    for program in (*small, *floats, *of_any_world(world)):
        gm = trace(program)
        # Some write to their inputs' memory or keep views of it: each run has its own.
        expected = on_gloo(gm, inputs(program, rank))
        fused, _ = fused_and_refused(apply(gm))
        answer = on_gloo(gm, inputs(program, rank))
        same = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(expected, answer, strict=True))
        found[program.name] = f"{fused} fused" if same and len(expected) == len(answer) else "differs"
    return found


@pytest.mark.ranks
def test_every_program_on_real_ranks(ranks: Ranks) -> None:
    first, *others = ranks.run(_compare)
    assert all(other == first for other in others)
    assert not [name for name, said in first.items() if said == "differs"]
    # In types narrower than float32 nothing is contracted in parts.
    whole = [name for name, said in first.items() if said == "0 fused"]
    assert all(name.endswith(NARROW) for name in whole) and len(whole) < len(first) // 5
    assert len(first) > 20
