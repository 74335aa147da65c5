"""Programs that once broke a promise: compiled with default settings on real ranks, against eager, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import inductor_passes
from inductor_passes.trace.collector import collect
from tests.support import gated
from tests.support.ranks import Ranks

WORLD = 2


def gather(x: torch.Tensor) -> torch.Tensor:
    """All ranks' rows; the function was renamed in torch 2.13."""
    return (getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor)(x, 0, dist.group.WORLD)


def reduce(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """The reduction over all ranks."""
    return funcol.all_reduce(x, op, dist.group.WORLD)


def cast_to_8_bits(x: torch.Tensor) -> torch.Tensor:
    return gather(x).to(torch.float8_e4m3fn).to(torch.float32) * 2


def cast_from_8_bits(x: torch.Tensor) -> torch.Tensor:
    return gather(x.to(torch.float8_e5m2).to(torch.float32)) + 1


def cast_to_bool(x: torch.Tensor) -> torch.Tensor:
    return gather(x * 1.0).to(torch.bool).to(torch.float32) + 1


def scalar_beside_matmul(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gather(x) @ x.t(), reduce(x.sum())


PROGRAMS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (cast_to_8_bits, cast_from_8_bits, cast_to_bool, scalar_beside_matmul)
}


def _run(rank: int, world: int, name: str, codegen: str, options: dict[str, Any]) -> list[str]:
    """Compare with eager; returns what was applied, and raises on a difference."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    inputs = [torch.randn(16, 32) if name == "scalar_beside_matmul" else torch.randn(512, 512)]
    program = PROGRAMS[name]
    expected = program(*inputs)
    if codegen == "inductor":
        compiled = torch.compile(program, fullgraph=True, options=inductor_passes.options(verify="strict", **options))
    else:
        dotted = {f"inductor_passes.{k}": v for k, v in {"verify": "strict", "codegen": codegen, **options}.items()}
        compiled = torch.compile(program, fullgraph=True, backend="inductor_passes", options=dotted)
    with collect(what_if=False) as reports:
        found = compiled(*inputs)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, found))):
        assert a.dtype == b.dtype
        if codegen == "inductor":
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(a, b), (a, b)
    return [d.subject for r in reports for p in r.passes for d in p.decisions if d.verdict.value == "applied"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as pool:
        yield pool


@pytest.mark.ranks
@pytest.mark.parametrize("codegen", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["cast_to_8_bits", "cast_from_8_bits", "cast_to_bool"])
def test_a_cast_that_moves_before_its_gather_travels_on_every_backend(ranks: Ranks, name: str, codegen: str) -> None:
    applied = ranks.run(_run, name, codegen, {"memory_budget": "unlimited"})
    assert all("R7" in one for one in applied)


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["auto", "force"])
def test_a_scalar_reduction_beside_async_tp(ranks: Ranks, mode: str) -> None:
    applied = ranks.run(_run, "scalar_beside_matmul", "aot_eager", {"async_tp": mode, "memory_budget": "unlimited"})
    assert all(("async_tp" in one) == (mode == "force") for one in applied)


def _differ(rank: int, world: int, number: int, codegen: str) -> tuple[bool, list[str], list[str]]:
    """Whether the results are those of the program; what the ranks found out; what was applied."""
    torch._dynamo.reset()
    program = gated.DIFFER[number]
    settings = {"redistribute": "reassociate", "rank_agreement": f"{gated.PATIENT_S:g}s", "verify": "strict"}
    if codegen == "inductor":
        compiled = torch.compile(lambda x: program(rank, x), options=inductor_passes.options(**settings))
    else:
        dotted = {f"inductor_passes.{k}": v for k, v in {"codegen": codegen, **settings}.items()}
        compiled = torch.compile(lambda x: program(rank, x), backend="inductor_passes", options=dotted)
    with collect(what_if=False) as reports:
        # On one rank some of these programs are equal: other sizes keep their graphs apart.
        right = gated.right(compiled, program, rank, width=4 + number + (codegen == "inductor") * len(gated.DIFFER))
    said = [p.detail for r in reports for p in r.passes if p.name == "agreement"]
    applied = [d.subject for r in reports for p in r.passes for d in p.decisions if d.verdict.value == "applied"]
    return right, said, applied


@pytest.mark.ranks
@pytest.mark.parametrize("codegen", ["aot_eager", "inductor"])
@pytest.mark.parametrize("number", range(len(gated.DIFFER)), ids=[f.__name__ for f in gated.DIFFER])
def test_programs_that_differ_between_ranks_run_as_without_us(ranks: Ranks, number: int, codegen: str) -> None:
    """One rank alone reads, returns, casts or repeats something: no rank drops or changes a collective."""
    for rank, (right, said, applied) in enumerate(ranks.run(_differ, number, codegen)):
        assert right
        # Where what they send is the same, it may be merged and reordered together; nothing else may be done to it.
        kept, led = "collectives stay as they are", "graphs differ between ranks, their collectives do not"
        assert len(said) == 1 and (kept in said[0] or led in said[0]) and f"rank {rank} has" in said[0]
        # Found: how many results a graph has counted as a setting, and the next graphs of one rank were not waited for.
        assert "was told" not in said[0], said
        assert set(applied) <= ({"reorder", "bucket"} if led in said[0] else {"reorder"})
