"""Lower bounds under a memory cap: never above the optimum of any problem, and known to be tight on some."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.implied import implied
from inductor_passes.schedule.least_memory import least_peak
from inductor_passes.schedule.local_search import search_all
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.memory_bound import best_known, memory_bound
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Problem, Storage
from inductor_passes.schedule.simulate import simulate
from inductor_passes.schedule.tables import tables
from tests.support.schedule_graphs import (
    Builder,
    best_makespan,
    every_order,
    fsdp_forward,
    moe_forward,
    random_problem,
    tp_fsdp_forward,
    training_graphs,
)


def aliased(problem: Problem, seed: int) -> Problem:
    """``problem`` with some storages read by more tasks and some kept, as views and results of the caller are."""
    rng = random.Random(seed)
    storages = []
    for storage in problem.storages:
        later = range(storage.producer + 1, len(problem))
        more = rng.sample(later, min(len(later), rng.choice([0, 0, 1, 2])))
        readers = tuple(sorted({*storage.readers, *more}))
        storages.append(dataclasses.replace(storage, readers=readers, pinned=storage.pinned or rng.random() < 0.1))
    return dataclasses.replace(problem, storages=tuple(storages))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([None, -3, -1, 0, 1, 4]), st.booleans())
def test_no_order_within_the_cap_is_faster(seed: int, tasks: int, extra: int | None, views: bool) -> None:
    """Against every order of small problems: shared links, fences, views, inputs in use, outputs that stay."""
    problem = random_problem(seed, tasks, fences=seed % 4 == 0)
    if views:
        problem = aliased(problem, seed)
    cap = least_peak(tables(problem)) if extra is None else peak_bytes(problem) + extra
    bound, optimum = memory_bound(problem, cap), best_makespan(problem, cap)
    if optimum is None:
        return
    assert bound is not None, "an order fits"
    assert lower_bound(problem) <= bound <= optimum
    known = best_known(problem, cap)
    assert known.ns == bound and (known.on == "this budget") == (bound > lower_bound(problem))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.sampled_from([0, 2, 5]))
def test_every_order_within_the_cap_keeps_what_it_implies(seed: int, tasks: int, extra: int) -> None:
    problem = aliased(random_problem(seed, tasks), seed)
    t = tables(problem)
    cap = least_peak(t) + extra
    found = implied(t, cap)
    assert found is not None
    for order in every_order(problem):
        if peak_bytes(problem, order) > cap:
            continue
        position = {i: k for k, i in enumerate(order)}
        for i, preds in enumerate(found.preds):
            assert all(position[p] < position[i] for p in preds), (order, i, preds)


def test_a_precedence_against_the_input_order() -> None:
    """Only the other of two independent branches first fits; nothing is faster than that."""
    b = Builder("branches")
    big = b.compute("big", 5, [], 100)
    b.compute("use", 5, [big], 1, pinned=True)
    kept = b.input(60, pinned=False)
    b.compute("drop", 5, [kept], 1, pinned=True)
    problem = b.build()
    found = implied(tables(problem), 110)
    assert found is not None
    assert found.preds[0] == [2] and list(found.order).index(2) < list(found.order).index(0)
    assert memory_bound(problem, 110) == 15 == best_makespan(problem, 110)


def test_no_order_fits() -> None:
    problem = fsdp_forward(3)
    assert memory_bound(problem, peak_bytes(problem) // 2) is None
    assert best_known(problem, peak_bytes(problem) // 2).on == "any memory"
    assert not plan(problem, peak_bytes(problem) // 2).feasible


def test_gathers_that_cannot_be_prefetched_are_exposed() -> None:
    """Room for one layer's parameters: every gather waits for the kernels before, and the bound says so exactly."""
    b = Builder("serial")
    x = b.input(1)
    for i in range(5):
        full = b.collective(f"AG{i}", 70, [b.input(1)], 100)
        x = b.compute("mm", 100, [x, full], 1)
    problem = b.build()
    cap = peak_bytes(problem)
    assert lower_bound(problem) == 70 + 5 * 100
    assert memory_bound(problem, cap) == simulate(problem).makespan_ns == 5 * (70 + 100)
    # With room for two there is nothing that memory forbids.
    assert memory_bound(problem, cap + 100) == lower_bound(problem)


@pytest.mark.parametrize("layers", [4, 24])
def test_tight_shapes_are_known_to_be_optimal(layers: int) -> None:
    """At the least memory tensor-parallel layers take 1.56 of what they take without a cap: no plan does better."""
    problem = tp_fsdp_forward(layers)
    found = plan(problem, least_peak(tables(problem)))
    assert found.makespan_ns > 1.5 * lower_bound(problem)
    assert (found.makespan_ns, found.bound_on) == (found.lower_bound_ns, "this budget")


def test_the_gap_at_the_least_memory_is_known() -> None:
    gaps = {}
    for problem in training_graphs(24):
        found = plan(problem, least_peak(tables(problem)))
        gaps[problem.name] = found.gap
    assert max(gaps.values()) <= 0.025, gaps


def test_more_memory_never_raises_the_bound() -> None:
    for problem in (moe_forward(6), tp_fsdp_forward(4), *(random_problem(seed, 12) for seed in range(30))):
        least = least_peak(tables(problem))
        found = [memory_bound(problem, least + extra) for extra in (0, 3, 10, 100, 10_000)]
        bounds = [one for one in found if one is not None]
        assert len(bounds) == len(found) and bounds == sorted(bounds, reverse=True)
        assert bounds[-1] == lower_bound(problem)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.sampled_from([None, 0, 3]))
def test_all_orders_tried_means_that_none_is_faster(seed: int, tasks: int, extra: int | None) -> None:
    problem = random_problem(seed, tasks, fences=seed % 5 == 0)
    cap = None if extra is None else peak_bytes(problem) + extra
    optimum = best_makespan(problem, cap)
    order, none_faster = search_all(tables(problem), problem.input_order, cap, 10_000)
    problem.check_order(order)
    assert none_faster and simulate(problem, order).makespan_ns == optimum
    found = plan(problem, cap)
    assert found.makespan_ns == found.lower_bound_ns == optimum


def test_a_search_that_lost_orders_proves_nothing() -> None:
    problem = moe_forward(4)
    cap = least_peak(tables(problem))
    order, none_faster = search_all(tables(problem), problem.input_order, cap, 2 * len(problem))
    assert not none_faster
    assert simulate(problem, order).makespan_ns <= simulate(problem).makespan_ns


def test_storages_of_no_size_and_empty_problems() -> None:
    assert memory_bound(Problem((), ()), 0) == 0
    assert memory_bound(Problem((), (), base_bytes=5), 4) is None
    b = Builder("one")
    b.compute("k", 7, [], 0)
    problem = dataclasses.replace(b.build(), storages=(Storage(0, 0), Storage(4, 0)))
    assert memory_bound(problem, 4) == 7
    assert memory_bound(problem, 3) is None
