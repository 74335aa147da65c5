"""Captured graphs and the planner's benchmark, on one small model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inductor_passes.cost.profile import CostProfile
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import simulate
from tests.support.world import fake_world
from tools.benchmarks import plan as bench_plan
from tools.benchmarks.plan import IN_TREE, INPUT, OURS, OURS_BUCKETED, Row
from tools.capture.graphs import Graphs, as_problem, capture
from tools.capture.models import SCENARIOS
from tools.capture.stacked import stacked
from tools.shared.record import Provenance

PROFILE = CostProfile.default("cuda")


@pytest.fixture(scope="module")
def graphs() -> Iterator[Graphs]:
    scenario = SCENARIOS["latency_bound"]
    with fake_world(scenario.world):
        yield capture(scenario, 1, joint=True)


def test_a_backward_graph_is_stacked(graphs: Graphs) -> None:
    one = graphs["backward"]
    size = len(one.graph.nodes)
    deep = stacked(one, 3 * size)
    assert 3 * size <= len(deep.graph.nodes) < 4 * size
    # Each repetition waits for the one before: the last result depends on the first gradient.
    reached = {n for n in deep.graph.nodes if n.op == "placeholder" and n.name == "tangents_1"}
    for node in deep.graph.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    assert list(deep.graph.nodes)[-2] in reached
    starts = [[n for n in gm.graph.nodes if "all_gather" in str(n.target)] for gm in (one, deep)]
    assert len(starts[1]) % len(starts[0]) == 0 and len(starts[1]) >= 3 * len(starts[0])
    with pytest.raises(ValueError, match="backward graph"):
        stacked(graphs["forward"], 3 * size)


def test_capture_sees_the_whole_step(graphs: Graphs) -> None:
    assert set(graphs) == {"joint", "forward", "backward"}
    counts = {}
    for phase, gm in graphs.items():
        tasks = as_problem(gm, PROFILE, phase).problem.tasks
        counts[phase] = [sum(t.label.startswith(kind) for t in tasks) for kind in ("AG", "RS")]
    # 7 matrices and 2 norms in a layer, embedding, norm and output around it; the embedding is not gathered again.
    assert counts["forward"] == [12, 0]
    assert counts["backward"] == [11, 12]
    # Full size: parameters exist as shapes only.
    embedding = next(n for n in graphs["forward"].graph.find_nodes(op="placeholder"))
    assert tuple(embedding.meta["val"].shape) == (8192 // 64, 512)


def test_a_stored_problem_plans_like_the_captured_one(graphs: Graphs) -> None:
    problem = as_problem(graphs["backward"], PROFILE, "backward").problem
    stored = Problem.from_json(json.loads(json.dumps(problem.to_json())))
    assert stored == problem
    assert simulate(stored) == simulate(problem)


def test_contenders_are_judged_alike_and_ours_is_not_worse(graphs: Graphs) -> None:
    gm = graphs["backward"]
    before = [n.name for n in gm.graph.nodes]
    contenders = (INPUT, IN_TREE[0], IN_TREE[2], OURS, OURS_BUCKETED)
    rows = {(r.contender, r.budget): r for r in bench_plan.run_graph("g", gm, PROFILE, contenders, ("unlimited", "0"))}
    assert [n.name for n in gm.graph.nodes] == before
    assert all(r.error == "" for r in rows.values())
    for budget in ("unlimited", "0"):
        plain, in_tree = rows[INPUT, budget], rows[IN_TREE[0], budget]
        mine, bucketed = rows[OURS, budget], rows[OURS_BUCKETED, budget]
        assert plain.makespan_ns == simulate(as_problem(gm, PROFILE, "g").problem).makespan_ns
        assert mine.bound_ns <= mine.own_bound_ns <= mine.makespan_ns < plain.makespan_ns
        assert mine.makespan_ns <= in_tree.makespan_ns
        assert 0 < bucketed.any_buckets_ns <= bucketed.makespan_ns <= mine.makespan_ns
        assert bucketed.any_buckets_ns < bucketed.bound_ns
        assert mine.collectives == plain.collectives == 23
    assert max(rows[c, "0"].peak_bytes for c in (OURS, OURS_BUCKETED)) <= rows[INPUT, "0"].peak_bytes
    assert rows[OURS_BUCKETED, "unlimited"].collectives < 23 > rows[IN_TREE[2], "unlimited"].collectives


def test_a_contender_that_fails_is_a_row(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(gm: torch.fx.GraphModule, *_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(bench_plan, "ours", broken)
    (row,) = bench_plan.run_graph("g", graphs["forward"], PROFILE, [OURS], ["0"])
    assert row.error == "RuntimeError: no"


def _row(contender: str, makespan: int, peak: int = 100, budget: str = "0", error: str = "") -> Row:
    return Row("g-1.forward", contender, budget, 10, 1000, 1000, makespan, peak, 100, 3, 1.5, error)


def test_the_report_tells_where_ours_falls_short() -> None:
    rows = [_row(INPUT, 1500), _row(IN_TREE[0], 1050, 120), _row(OURS, 1080, 101), _row(OURS_BUCKETED, 1040)]
    (line,) = bench_plan.shortfalls(rows)
    assert line == (
        "- g-1.forward, budget 0, ours: 1.080 of the bound (1.080 of the bound of the graph it left); "
        "peak 1.0100 of the input's; 2.9% slower than in-tree scheduling (which breaks the budget)"
    )
    good = [dataclasses.replace(r, makespan_ns=1001, peak_bytes=100) for r in rows]
    assert bench_plan.shortfalls(good) == ["None."]


def test_rows_of_several_runs_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(command: str, commit: str) -> Provenance:
        source = Provenance(command, commit, "2026-01-01", {"Python": "3"}, {"cores": "2"})
        monkeypatch.setattr(bench_plan, "provenance", lambda: source)
        return source

    file = tmp_path / "latency_bound-1.forward.json"
    graph = "latency_bound-1.forward"
    rows = [dataclasses.replace(row, graph=graph) for row in (_row(INPUT, 1500), _row(OURS, 1080))]
    first = ran("all", "aaa")
    bench_plan._store(file, rows, "d", "H100")
    second = ran("ours", "bbb")
    bench_plan._store(file, rows[1:], "d", "H100")
    stored = json.loads(file.read_text())
    assert {r["contender"]: r["commit"] for r in stored["rows"]} == {INPUT: "aaa", OURS: "bbb"}
    assert bench_plan.runs_of([stored]) == [first, second]
    found = bench_plan.load(tmp_path)
    table = bench_plan.run_lines(found, [first, second])
    assert "| aaa | 2026-01-01 | `all` | 1 | 1 | 0 | input |" in table
    assert "| bbb | 2026-01-01 | `ours` | 1 | 1 | 0 | ours |" in table
    source = bench_plan._source([first, second], found)
    assert source is not None and source.commit == "aaa, bbb (see Runs)"
    # Once all its rows are replaced, a run is no longer named.
    bench_plan._store(file, rows, "d", "H100")
    assert bench_plan.runs_of([json.loads(file.read_text())]) == [second]
    assert bench_plan._source([second], bench_plan.load(tmp_path)) == second
    # A graph is the same if it differs by as little as between runs.
    bench_plan._store(file, [dataclasses.replace(rows[1], bound_ns=rows[1].bound_ns + 1)], "d", "H100")
    assert [r.contender for r in bench_plan.load(tmp_path)] == [INPUT, OURS]
    # Of another graph nothing is kept.
    bench_plan._store(file, [dataclasses.replace(rows[0], nodes=11)], "d", "H100")
    assert [r.contender for r in bench_plan.load(tmp_path)] == [INPUT]


def test_a_page_can_be_taken_apart_again(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    bench_plan.unpack(tmp_path / "none.json", folder)
    assert list(folder.iterdir()) == []
    bench_plan.unpack(bench_plan.RESULTS / "plan.json", folder)
    found = bench_plan.load(folder)
    assert len({row.graph for row in found}) == 20
    # Every stored row names its run.
    files = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    runs = {(run.commit, run.date) for run in bench_plan.runs_of(files)}
    assert {(row.commit, row.date) for row in found} == runs


def test_the_report_has_means_and_violations() -> None:
    rows = [_row(INPUT, 2000), _row(IN_TREE[0], 0, 0, error="E: x"), _row(OURS, 1000)]
    rows += [dataclasses.replace(r, graph="h-1.forward", makespan_ns=4000, error="") for r in rows]
    text = "\n".join(bench_plan.markdown(rows, ["g 1"], "H100"))
    assert "| g-1.forward | 10 | 2.0000 | failed | 1.0000 |" in text
    # A graph that somebody failed on is left out of the means of all.
    assert "| **the 1 that all finished** | | **4.0000** | **4.0000** | **4.0000** |" in text
    assert "| each on what it finished (graphs) | | 2.8284 (2) | 4.0000 (1) | 2.0000 (2) |" in text
    over = bench_plan.violations([_row(OURS, 1, 150), _row(OURS, 1, 100)])
    assert over == "1 over, at most 1.500"
