"""The ranks that other tests stand on: results by rank, errors with tracebacks, timeouts, recovery."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, Ranks, run_ranks

pytestmark = pytest.mark.ranks


def add_up(rank: int, world_size: int, base: int) -> tuple[int, int, int]:
    total = torch.tensor(base + rank)
    dist.all_reduce(total)
    return rank, world_size, int(total)


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("the culprit")
    dist.barrier()


def hang(rank: int, world_size: int) -> None:
    time.sleep(600)


def die(rank: int, world_size: int) -> None:
    print("last words", flush=True)
    os._exit(7)


def variable(rank: int, world_size: int) -> str:
    return os.environ["RANKS_TEST"]


def main_module(rank: int, world_size: int) -> str | None:
    return sys.modules["__main__"].__spec__.name


def inherited(rank: int, world_size: int) -> str | None:
    return os.environ.get("RANKS_TEST")


def word(rank: int, world_size: int) -> int:
    return hash("word")


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def test_results_come_by_rank(pool: Ranks) -> None:
    assert pool.run(add_up, 10) == [(0, 2, 21), (1, 2, 21)]


def test_an_error_brings_its_traceback_and_the_pool_recovers(pool: Ranks) -> None:
    with pytest.raises(RankError, match="KeyError: 'the culprit'"):
        pool.run(fail_on_one)
    assert pool.run(add_up, 1) == [(0, 2, 3), (1, 2, 3)]


def test_a_hang_ends_at_the_limit(pool: Ranks) -> None:
    with pytest.raises(RankError, match="did not answer"):
        pool.run(hang, timeout=0.5)


def test_a_dead_rank_is_reported_with_its_output(pool: Ranks) -> None:
    with pytest.raises(RankError, match=r"exit status 7\s+last words"):
        pool.run(die)


def test_one_shot_ranks_take_an_environment() -> None:
    assert run_ranks(variable, 2, env={"RANKS_TEST": "yes"}) == ["yes", "yes"]


def test_ranks_differ_in_the_seed_of_their_hashes(pool: Ranks) -> None:
    """What depends on the order of a set is not the same on all ranks, as in programs that are started by rank."""
    assert len(set(pool.run(word))) == 2


@pytest.mark.parametrize("variables", [{}, {"TRITON_INTERPRET": "1"}])
def test_ranks_are_forked_whatever_was_set_since(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries set variables when they are imported, as torch does when it loads its first C++ kernel."""
    monkeypatch.setenv("RANKS_TEST", "set since")
    with Ranks(2, env=variables) as ranks:
        assert ranks.run(main_module) == ["tests.support.forked"] * 2
        assert ranks.run(inherited) == [None] * 2


def test_ranks_with_other_variables_are_started_afresh() -> None:
    assert run_ranks(main_module, 2, env={"RANKS_TEST": "yes"}) == ["tests.support.ranks"] * 2
