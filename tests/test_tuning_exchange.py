"""Ranks that exchange their times through a store: one result for all, or none and a sentence, within bounded time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist

from inductor_passes.agreement.board import Board, StoreError
from inductor_passes.agreement.session import Session
from inductor_passes.tuning.again import ENDED
from inductor_passes.tuning.exchange import Result, exchange
from tests.support.tuned import FailingBoard

LIMIT_S = 60.0


def joined(records: Mapping[int, bytes]) -> Any:
    return {"records": [records[rank].decode() for rank in sorted(records)]}


class Dies(Exception):
    """A rank ends in the middle."""


def talk(
    ranks: int, timeout_s: float, *, missing: tuple[int, ...] = (), late: Mapping[int, float] | None = None,
    boards: Mapping[int, FailingBoard] | None = None, combine: Any = joined, store: Any = None,
    names: Mapping[int, str] | None = None,
) -> dict[int, Result]:
    """What each rank holds in the end; a rank that dies is left out."""
    store = store or dist.HashStore()
    held: dict[int, Result] = {}

    def one(rank: int) -> None:
        time.sleep((late or {}).get(rank, 0.0))
        session = Session(store, rank, range(ranks))
        board = (boards or {}).get(rank) or Board(store)
        name = (names or {}).get(rank, "plan 0")
        result = exchange(session, board, name, f"times of {rank}".encode(), combine, timeout_s, "forward_0")
        if not result.why.endswith("Dies: gone"):
            held[rank] = result

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks) if rank not in missing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a rank hangs"
    return held


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_ranks_hold_one_result(ranks: int) -> None:
    held = talk(ranks, 20.0)
    assert len(held) == ranks and len({one.digest for one in held.values()}) == 1
    assert held[0].content == {"records": [f"times of {rank}" for rank in range(ranks)]}


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_does_not_come_costs_the_result_and_nothing_else(gone: int) -> None:
    held = talk(3, 0.3, missing=(gone,))
    assert len(held) == 2 and all(one.content is None for one in held.values())
    assert all("not all of ranks 0, 1, 2 came" in one.why for one in held.values())


def test_a_rank_that_dies_after_the_others_know_it_is_named() -> None:
    store = dist.HashStore()
    held = talk(3, 3.0, boards={2: FailingBoard(store, 0, Dies)}, store=store)
    assert held[0].why == held[1].why == "rank 2 did not hand in any times"
    assert held[0].content is None and held[1].content is None


def test_a_first_rank_that_dies_is_named() -> None:
    store = dist.HashStore()
    held = talk(2, 3.0, boards={0: FailingBoard(store, 2, Dies)}, store=store)
    assert held[1].content is None and held[1].why == "rank 0 did not answer rank 1"


def test_a_rank_that_timed_another_plan_is_not_taken_for_one_that_is_silent() -> None:
    held = talk(2, 1.0, names={1: "other 0"})
    assert held[0].why == "rank 1 timed another plan: other, and not plan"
    assert held[1].why == "rank 0 timed another plan: plan, and not other"
    assert held[0].content is held[1].content is None


def test_a_store_that_is_lost_is_said() -> None:
    store = dist.HashStore()
    held = talk(2, 20.0, boards={1: FailingBoard(store, 2, StoreError)}, store=store)
    assert held[0].content is not None, "its times were there"
    assert held[1].content is None and "store cannot be used" in held[1].why


def test_a_program_that_ends_first_is_not_a_store_that_fails() -> None:
    """Found by an outsider: a rank had handed in nothing, and the program ended while the other one waited for it."""
    session, board = Session(dist.HashStore(), 0, range(1)), Board(dist.HashStore())
    board.closed = ENDED
    result = exchange(session, board, "plan 0", b"", joined, 1.0)
    assert result.content is None and result.why == "the program ended before the ranks' times were put together"


def test_times_that_do_not_fit_together_are_said_on_all_ranks() -> None:
    def refuse(_: Mapping[int, bytes]) -> Any:
        raise ValueError("another plan")

    held = talk(3, 20.0, combine=refuse)
    assert {one.why for one in held.values()} == {"the ranks' times do not fit together: another plan"}


@pytest.mark.parametrize("seed", range(20))
def test_no_two_ranks_hold_different_results(seed: int) -> None:
    """Ranks come late, die or lose the store at random places: what is held is one result or none."""
    rng = random.Random(seed)
    store, ranks = dist.HashStore(), rng.randint(2, 4)
    boards = {}
    for rank in range(ranks):
        if rng.random() < 0.4:
            boards[rank] = FailingBoard(store, rng.randint(0, 6), rng.choice((Dies, StoreError)))
    late = {rank: rng.choice((0.0, 0.0, 0.1, 0.3, 0.6)) for rank in range(ranks)}
    held = talk(ranks, 0.4, late=late, boards=boards, store=store)
    assert len({one.digest for one in held.values() if one.content is not None}) <= 1
    assert all(one.content is not None or one.why for one in held.values())
