"""What fails on one rank alone is undone on all: ranks that agreed on a graph also agree on what became of it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

import inductor_passes.plugin  # noqa: F401  registers the backend
from inductor_passes import agreement
from inductor_passes.engine import judge, pipeline
from inductor_passes.trace.collector import collect
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Their own: verdicts stay with a process."""
    with Ranks(2) as pool:
        yield pool


def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return all_reduce(x, "sum", dist.group.WORLD) + all_reduce(y, "sum", dist.group.WORLD)


def sandwiched(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return all_reduce(x, "sum", dist.group.WORLD) + x + all_reduce(y, "sum", dist.group.WORLD)


def refuses(*args: object, **kwargs: object) -> judge.Judgement:
    raise RuntimeError("on this rank only")


def whole_numbers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, other = x.long(), y.long()
    return all_reduce(one, "sum", dist.group.WORLD) + 2 * one + all_reduce(other, "sum", dist.group.WORLD)


def own_piece(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A sum that is merged, and a number that differs between ranks: which rows are the rank's own."""
    at = 2 * dist.get_rank()
    return program(x, y) * 3 + all_reduce(x * y, "sum", dist.group.WORLD)[at : at + 2].sum()


PROGRAMS = {"program": program, "sandwiched": sandwiched, "whole numbers": whole_numbers, "own piece": own_piece}


def run(
    rank: int, world_size: int, failing: tuple[int, ...], codegen: str, name: str
) -> tuple[bool, set[str], list[str]]:
    """(whether results are right, passes that changed the graph, what the report says of the agreement)."""
    called = PROGRAMS[name]
    torch._dynamo.reset()
    # What another test has made of these collectives.
    agreement.forget()
    inputs = [torch.arange(8.0).reshape(4, 2) * (rank + k + 1) for k in range(2)]
    tier = "exact" if called is whole_numbers else "reassociate"
    options = {"inductor_passes.redistribute": tier, "inductor_passes.codegen": codegen}
    fault = mock.patch.object(pipeline.judge, "judge", refuses) if rank in failing else contextlib.nullcontext()
    with warnings.catch_warnings(), collect(what_if=False) as reports, fault:
        warnings.simplefilter("ignore")
        with torch._inductor.config.patch(force_disable_caches=True):
            found = torch.compile(called, backend="inductor_passes", options=options, fullgraph=True)(*inputs)
    (report,) = reports
    right = torch.equal(found, called(*inputs))
    changed = {p.name for p in report.passes if p.changed and p.rolled_back is None}
    return right, changed, [p.detail for p in report.passes if p.name == "agreement"]


@pytest.mark.parametrize("codegen", ["inductor", "aot_eager"])
def test_a_pass_that_fails_on_one_rank_is_undone_on_all(two: Ranks, codegen: str) -> None:
    for right, changed, said in two.run(run, (0,), codegen, "program"):
        assert right and "redistribute" not in changed
        assert any("undone on all ranks" in detail and "redistribute" in detail for detail in said), said


def test_what_fails_on_all_ranks_alike_is_undone_by_itself(two: Ranks) -> None:
    for right, changed, said in two.run(run, (0, 1), "aot_eager", "sandwiched"):
        assert right and "redistribute" not in changed
        assert not any("undone on all ranks" in detail for detail in said)


@pytest.mark.parametrize("codegen", ["inductor", "aot_eager"])
def test_a_term_between_two_sums_that_is_also_summed(two: Ranks, codegen: str) -> None:
    """Of its own term each rank has two: the one between, and the one in its sum."""
    for right, changed, said in two.run(run, (), codegen, "sandwiched"):
        assert right and "redistribute" in changed, said


@pytest.mark.parametrize("codegen", ["inductor", "aot_eager"])
def test_ranks_that_differ_in_their_own_pieces_agree_on_the_outcome(two: Ranks, codegen: str) -> None:
    for right, changed, said in two.run(run, (), codegen, "own piece"):
        assert right and "redistribute" in changed, said
        assert not any("undone" in detail for detail in said), said


def test_whole_numbers_are_added_in_another_order_in_the_exact_tier(two: Ranks) -> None:
    for right, changed, said in two.run(run, (), "aot_eager", "whole numbers"):
        assert right and "redistribute" in changed, said
