"""The long search for best orders: legal, within the cap, at the optimum where that is known, and it goes on."""

from __future__ import annotations

import pytest

from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.simulate import simulate
from tests.support.schedule_graphs import best_makespan, fsdp_backward, random_problem
from tools.benchmarks import best as bench_best
from tools.benchmarks.best_search import STORED, search


@pytest.mark.parametrize("seed", range(8))
def test_small_problems_are_solved(seed: int) -> None:
    problem = random_problem(seed, tasks=8)
    cap = simulate(problem).peak_bytes
    found = search(problem, cap, 0.5, seed)
    assert found.makespan_ns == best_makespan(problem, cap)
    assert simulate(problem, found.order).peak_bytes == found.peak_bytes <= cap
    problem.check_order(tuple(found.order))


def test_a_stored_order_is_where_the_next_search_begins() -> None:
    problem = fsdp_backward(12)
    cap = simulate(problem).peak_bytes
    row = bench_best._searched("g", problem, "0", cap, 0.02, 0, None)
    assert row["best_ns"] <= plan(problem, cap).makespan_ns <= row["plan_ns"]
    again = bench_best._searched("g", problem, "0", cap, 1e-9, 0, row)
    assert again["best_ns"] == row["best_ns"] and again["minutes"] > row["minutes"]
    assert all(by != STORED for *_, by in again["improvements"])
    # Of another problem it says nothing.
    assert bench_best._known_order(fsdp_backward(11), row) is None
    assert bench_best._known_order(problem, {**row, "order": row["order"][::-1]}) is None


def test_the_page_says_what_was_found() -> None:
    row = {"graph": "g", "budget": "0", "nodes": 9, "bound_ns": 100, "plan_ns": 102, "best_ns": 100}
    row |= {"rounds": 3, "minutes": 10.0, "improvements": [(1, 100, "exact windows")]}
    text = "\n".join(bench_best._body([row]))
    assert "| g | 0 | 9 | 1.0200 | 1.0000 | 1.0200 | 3 | 10 | exact windows |" in text
    assert "largest 1.0200 (g, budget 0)" in text
