"""Digests of plans compared between real ranks through the store."""

from __future__ import annotations

import time
import warnings

import pytest
import torch.distributed as dist

from inductor_passes import verify
from tests.support.ranks import Ranks

LINES = ["start all_gather at model.py:10", "start all_reduce at model.py:12"]
OTHER = ["start all_gather at model.py:10", "start broadcast at model.py:99"]


def compare(rank, digest, lines, key, group=None, **kwargs):
    name = (group or dist.group.WORLD).group_name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = verify.compare_digests(digest, lines, name, key=key, **{"timeout_s": 60, **kwargs})
        except verify.RanksDifferError as error:
            return "error", str(error)
    return [f.rule for f in found], " ".join(f.message for f in found), len(caught)


def agreeing(rank, world):
    return [compare(rank, "same", LINES, "agreeing") for _ in range(3)]


def differing(rank, world, mode):
    odd = rank == 1
    return compare(rank, "odd" if odd else "same", OTHER if odd else LINES, f"differing {mode}", mode=mode)


def with_a_silent_rank(rank, world):
    if rank == 2:
        return None
    began = time.monotonic()
    return compare(rank, "same", LINES, "silent", timeout_s=1.0, mode="error"), time.monotonic() - began


def in_a_subgroup(rank, world):
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    return compare(rank, "even", LINES, "subgroup", group=group)


def outside_of_the_group(rank, world):
    group = dist.new_group([0, 2])
    if rank == 1:
        return [f.rule for f in verify.compare_digests("x", [], "no such group", key="k")]
    return group is not None


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3) as pool:
        yield pool


@pytest.mark.ranks
def test_ranks_that_agree(ranks):
    assert ranks.run(agreeing) == [[([], "", 0)] * 3] * 3


@pytest.mark.ranks
def test_first_difference_is_shown_on_every_rank(ranks):
    results = ranks.run(differing, "warn")
    assert [r[0] for r in results] == [["ranks-differ"]] * 3
    for rank, found in enumerate(results):
        assert f"line 1 rank {rank} has" in found[1] and "model.py:12" in found[1] and "model.py:99" in found[1]
        assert found[2] == 1


@pytest.mark.ranks
def test_difference_as_error(ranks):
    for kind, message in ranks.run(differing, "error"):
        assert kind == "error" and "model.py:12" in message and "model.py:99" in message


@pytest.mark.ranks
def test_a_rank_that_does_not_take_part_is_no_error_and_hangs_nobody(ranks):
    results = ranks.run(with_a_silent_rank, timeout=60)
    for found, seconds in results[:2]:
        assert found[0] == ["ranks-unanswered"] and "in time" in found[1]
        assert seconds < 30


@pytest.mark.ranks
def test_only_the_ranks_of_a_subgroup_compare(ranks):
    assert ranks.run(in_a_subgroup) == [([], "", 0), None, ([], "", 0)]


@pytest.mark.ranks
def test_a_group_that_does_not_exist(ranks):
    assert ranks.run(outside_of_the_group)[1] == ["ranks-unanswered"]


@pytest.mark.parametrize(
    "kwargs,message", [({"mode": "panic"}, "mode='panic'"), ({"timeout_s": 0}, "timeout_s=0")]
)
def test_bad_settings(kwargs, message):
    with pytest.raises(ValueError, match=message):
        verify.compare_digests("d", [], "g", key="k", **kwargs)
