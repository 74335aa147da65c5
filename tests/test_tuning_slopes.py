"""Latency and bandwidth out of measured times: told apart only where sizes and times tell them, and else moved so that
no message becomes absurd. On made-up links whose truth is known, with noise."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inductor_passes.cost.fit import fit_line, shared_out, slope_error, spread
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.trace.profiled import Pair
from inductor_passes.trace.reprofile import others_scaled, profile_from, unfitted
from tests.support.tuned import MS

RANKS = (0, 1)
MIB = 1 << 20
STEPS = 10


def link(alpha_ns: float, ns_per_byte: float) -> CostProfile:
    """A profile of two ranks, per wire byte: half of a gather's result."""
    base = CostProfile.default("cpu", ranks_per_host=2)
    layout = base.layout(RANKS)
    costs = (CollectiveCost("all_gather", alpha_ns, ns_per_byte, 1.0, 0.0),)
    return dataclasses.replace(base, groups=(GroupCost(layout, "made up", layout.link, costs),))


def predicted(profile: CostProfile, size: int) -> int:
    return profile.communication_ns("all_gather", size // 2, size, RANKS)


def measured(truth: CostProfile, sizes: Sequence[int], jitter_ns: float, seed: int, steps: int = STEPS) -> list[Pair]:
    """What comes of timing gathers whose times are off by up to ``jitter_ns`` either way."""
    rng, pairs = random.Random(seed), []
    for number, size in enumerate(sizes):
        ns = [max(1.0, predicted(truth, size) + rng.uniform(-jitter_ns, jitter_ns)) for _ in range(steps)]
        about = "all_gather", size, RANKS
        pairs.append(Pair("transfer", f"AG{number}", 1, round(median(ns)), *about, 1, spread(ns)))
    return pairs


def tuned(base: CostProfile, pairs: Sequence[Pair]) -> CostProfile:
    return profile_from(base, pairs, every_size=True)


def cost(profile: CostProfile) -> CollectiveCost:
    found = profile.groups[0].cost("all_gather")
    assert found is not None
    return found


seeds = st.integers(0, 2**32)


@example(20.0 * MS, 500.0, 1024, 4, 8.0 * MS, 1)
@given(st.floats(1e4, 5e7), st.floats(0.05, 2e3), st.integers(512, MIB), st.integers(4, 256), st.floats(0, 2e7), seeds)
def test_a_slope_that_is_fitted_is_the_links(
    alpha: float, beta: float, size: int, wider: int, jitter: float, seed: int
) -> None:
    """Whatever the noise: it is within a factor of three, or it is not fitted and that is said."""
    base, truth = link(5e4, 0.8), link(alpha, beta)
    pairs = measured(truth, (size, wider * size), jitter, seed)
    found = cost(tuned(base, pairs)).beta_ns_per_byte
    if not unfitted(base, pairs, every_size=True):
        # A time is a whole number of ns.
        assert beta / 3 - 0.01 <= found <= 3 * beta + 0.01


@pytest.mark.parametrize("seed", range(40))
def test_two_near_sizes_on_a_slow_link_do_not_make_large_messages_absurd(seed: int) -> None:
    """Found: 20 ms + 500 ns per byte, measured at 1 and 4 KiB, gave 6155, 1027 and 3621 ns per byte, so up to 6.2 s."""
    base, truth = link(5e4, 0.8), link(20 * MS, 500)
    pairs = measured(truth, (1024, 4096), 8 * MS, seed)
    assert predicted(tuned(base, pairs), MIB) < 2 * predicted(truth, MIB)
    (said,) = unfitted(base, pairs, every_size=True)
    assert said.startswith("latency and bandwidth of all_gather between 2 ranks are not told apart: what larger mes")
    naive = fit_line([512, 2048], [p.measured_ns for p in pairs])
    assert naive[1] < 4 * slope_error([512, 2048], [p.spread_ns or 0.0 for p in pairs])


def test_sizes_that_tell_the_slope_give_it() -> None:
    base, truth = link(5e4, 0.8), link(20 * MS, 500)
    pairs = measured(truth, (1024, MIB // 4), 8 * MS, 1)
    assert unfitted(base, pairs, every_size=True) == []
    assert cost(tuned(base, pairs)).beta_ns_per_byte == pytest.approx(500, rel=0.2)


def off(profile: CostProfile, truth: CostProfile, size: int) -> float:
    """By which factor a prediction is off, at least 1."""
    ratio = predicted(profile, size) / predicted(truth, size)
    return max(ratio, 1 / ratio)


@given(st.floats(1e5, 1e7), st.floats(0.1, 10), st.floats(0.02, 400), st.floats(0, 0.2), seeds)
def test_on_a_link_whose_latency_is_wrong_small_messages_leave_bandwidth(
    alpha: float, beta: float, wrong: float, jitter: float, seed: int
) -> None:
    """One size, a tenth of whose time was taken for bandwidth: messages a thousand times as large are about right,
    where scaling both would make them up to ``wrong`` times too long."""
    base, truth = link(alpha, beta), link(wrong * alpha, beta)
    size = 2 * max(1, round(alpha / beta / 10))
    pairs = measured(truth, (size, size), jitter * predicted(truth, size), seed)
    after = tuned(base, pairs)
    assert off(after, truth, size) < 1.3
    assert off(after, truth, 1000 * size) < 2.5
    assert unfitted(base, pairs, every_size=True) != []


@given(st.floats(1e4, 1e6), st.floats(0.1, 10), st.floats(0.02, 400), st.floats(0, 0.2), seeds)
def test_on_a_link_whose_bandwidth_is_wrong_large_messages_leave_latency(
    alpha: float, beta: float, wrong: float, jitter: float, seed: int
) -> None:
    """One size, a tenth of whose time was taken for latency: what is much larger or smaller is about right."""
    base, truth = link(alpha, beta), link(alpha, wrong * beta)
    size = 2 * max(1, round(10 * alpha / beta))
    pairs = measured(truth, (size, size), jitter * predicted(truth, size), seed)
    after = tuned(base, pairs)
    for other in (size, 1000 * size, max(2, size // 1000)):
        assert off(after, truth, other) < 2.5


@given(
    st.floats(0, 1e7), st.floats(0, 1e3), st.lists(st.integers(0, 1 << 30), min_size=1, max_size=5), st.floats(1, 1e12)
)
def test_what_is_shared_out_adds_up(alpha: float, beta: float, sizes: list[int], total: float) -> None:
    a, b = shared_out(alpha, beta, sizes, total)
    assert a >= 0 and b >= 0
    assert a * len(sizes) + b * sum(sizes) == pytest.approx(total, rel=1e-6)
    before = alpha * len(sizes) + beta * sum(sizes)
    if before and total >= before:
        assert a >= alpha * (1 - 1e-9) and b >= beta * (1 - 1e-9)
        assert a <= alpha * total / before * 2 + total and b * sum(sizes) <= total * (1 + 1e-6)


def test_kinds_that_were_not_measured_do_not_take_a_latency_for_a_bandwidth() -> None:
    """A gather that takes 400 times longer for its latency makes no reduce-scatter of 64 MiB 400 times longer."""
    base = CostProfile.default("cpu", ranks_per_host=2)
    small = base.communication_ns("all_gather", 512, 1024, RANKS)
    pairs = [Pair("transfer", "AG0", small, 400 * small, "all_gather", 1024, RANKS)]
    after = others_scaled(base, tuned(base, pairs), pairs)
    before = base.communication_ns("reduce_scatter", 64 * MIB, 32 * MIB, RANKS)
    assert after.communication_ns("reduce_scatter", 64 * MIB, 32 * MIB, RANKS) < 4 * before
    one = base.communication_ns("reduce_scatter", 1024, 512, RANKS)
    assert after.communication_ns("reduce_scatter", 1024, 512, RANKS) == pytest.approx(400 * one, rel=0.01)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([(1024, 4), (2048, 5)], "the largest message has less than 4 times the bytes of the smallest"),
        ([(1024, 1), (MIB, 900)], ""),
    ],
)
def test_why_a_slope_is_not_fitted_is_said(pairs: list[tuple[int, int]], why: str) -> None:
    """Times that were measured once: a slope that stands out by itself is believed, too."""
    base = link(5e4, 0.8)
    found = [Pair("transfer", f"AG{k}", 1, ns * MS, "all_gather", n, RANKS) for k, (n, ns) in enumerate(pairs)]
    said = unfitted(base, found, every_size=True)
    assert [one.rpartition(": ")[2] for one in said] == [why] * bool(why)
    shares = [dataclasses.replace(one, shared=2) for one in found]
    (of_shares,) = unfitted(base, shares, every_size=True)
    assert of_shares.endswith("no transfer was seen alone, only queues as a whole")


def test_outliers_do_not_move_a_spread() -> None:
    assert spread([5.0]) is None and spread([5.0, 5.0]) == 0
    assert spread([10, 11, 12, 9, 1000]) == pytest.approx(1.4826 * 1.5)
    assert spread([10, 13, 30]) == pytest.approx(1.4826 * 10)


def test_the_slower_of_two_groups_counts() -> None:
    base = link(5e4, 0.8)
    one = Pair("transfer", "AG0", 1, 2 * MS, "all_gather", MIB, (0, 1))
    other = Pair("transfer", "AG0", 1, 6 * MS, "all_gather", MIB, (2, 3))
    assert predicted(tuned(base, [one, other]), MIB) == predicted(tuned(base, [other, one]), MIB)
    assert predicted(tuned(base, [one, other]), MIB) == pytest.approx(6 * MS, rel=0.01)
