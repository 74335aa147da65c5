"""Plans as files: written, read, edited, refused, and really the order of the generated code on two ranks."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import inductor_passes
from inductor_passes.cli.main import app
from inductor_passes.config import PassConfig
from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.engine import complain, identity
from inductor_passes.pin import file as plan_file
from inductor_passes.pin.file import GraphPlan, PlanFileError, load, text_of
from inductor_passes.pin.pins import Pins
from inductor_passes.report import GraphReport
from inductor_passes.trace.collector import collect
from tests.support.compiled import save_profile
from tests.support.models import WorldGather
from tests.support.ranks import Ranks
from tests.support.trace_samples import fsdp_problem, planned
from tests.support.world import fake_world
from tests.test_report import TraceDir

WIDTH = 16


def model(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = torch.relu(x @ WorldGather.apply(weight))
    return x.sum()


def make(layers: int = 3, width: int = WIDTH) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(layers)
    draw = [torch.randint(-2, 3, (n, width), generator=generator).float() for n in [8] + [width // 2] * layers]
    return draw[0], [w.requires_grad_() for w in draw[1:]]


@pytest.fixture
def world() -> Iterator[None]:
    torch._dynamo.reset()
    complain._warned.clear()
    with fake_world(2):
        yield
    torch._dynamo.reset()


def compile_step(layers: int = 3, width: int = WIDTH, **settings: Any) -> list[GraphReport]:
    """Forward and backward without code generation: the FX level."""
    torch._dynamo.reset()
    values = {"codegen": "aot_eager", "memory_budget": "unlimited", "bucket": "off", **settings}
    options = {f"inductor_passes.{k}": v for k, v in values.items()}
    x, weights = make(layers, width)
    with collect(what_if=False) as reports:
        loss = torch.compile(model, backend="inductor_passes", options=options)(x, weights)
        if loss.requires_grad:
            loss.backward()
    return reports


@pytest.fixture
def plans(world: None, tmp_path: Path) -> Path:
    compile_step(dump_plan=str(tmp_path / "plans"))
    return tmp_path / "plans"


def by_phase(folder: Path) -> dict[str, Path]:
    """Files by phase; their numbers depend on what this process compiled before."""
    return {path.name.split("_")[0]: path for path in folder.glob("*.json")}


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    change(data["graphs"][0])
    path.write_text(json.dumps(data))


def test_a_plan_is_a_readable_file_and_pins_what_it_says(plans: Path) -> None:
    files = by_phase(plans)
    assert set(files) == {"forward", "backward"}
    lines = files["forward"].read_text().splitlines()
    assert any(line.strip().startswith('"all_gather_into_tensor"') for line in lines), "one name per line"
    free = compile_step()
    pinned = compile_step(plan=str(plans))
    for a, b in zip(free, pinned):
        assert a.schedules[0].schedule_after == b.schedules[0].schedule_after
        assert any("pinned by" in note for note in b.notes)
        assert a.digest != b.digest, "the digest tells by which file a graph was pinned"
    assert {d.reason.value for p in pinned[0].passes if p.name == "reorder" for d in p.decisions} == {
        "pinned by plan file"
    }


def test_a_plan_is_followed_whatever_was_tried_while_it_was_found(world: None, tmp_path: Path) -> None:
    """Other buckets and other budgets were tried, and left names behind."""
    dear = save_profile(tmp_path / "dear.json", 200_000, 0.1, 20_000, 0.1)
    settings = {"bucket": "on", "cost_profile": dear, "memory_budget": "+60%"}
    made = compile_step(5, 64, dump_plan=str(tmp_path / "plans"), **settings)
    pinned = compile_step(5, 64, plan=str(tmp_path / "plans"), **settings)
    for one, again in zip(made, pinned):
        assert one.plan["buckets"], "names of merged messages are at stake"
        assert any(note.startswith("pinned by") for note in again.notes), again.notes
        assert again.plan["order"] == one.plan["order"] and again.plan["buckets"] == one.plan["buckets"]


def two_profiles(folder: Path) -> dict[str, str]:
    """Under one of them reductions become exchanges; their paths."""
    paths = {}
    for name, per_byte in (("exchanges", 2e4), ("reduces", 9e4)):
        costs = tuple(
            CollectiveCost(kind, 1_000.0, cost, 100.0, 0.0)
            for kind, cost in (("reduce_scatter", 4e4), ("all_to_all", per_byte), ("all_gather", 2e4))
        )
        group = GroupCost(GroupLayout(2, 1, 2), "test", "wire", costs)
        profile = replace(CostProfile.default("cpu", 2), name=name, measured=True, groups=(group,))
        paths[name] = str(folder / f"{name}.json")
        profile.save(paths[name])
    return paths


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_plan_with_its_costs_is_followed_whatever_the_profile(world: None, tmp_path: Path, exchanges: bool) -> None:
    """Found: reductions that become exchanges by measured costs are in no list of a plan, and its order did not fit."""
    paths = two_profiles(tmp_path)
    mine, other = ("exchanges", "reduces") if exchanges else ("reduces", "exchanges")
    made = compile_step(cost_profile=paths[mine], dump_plan=str(tmp_path / "plans"))
    kinds = [str(c.kind) for c in made[1].collectives]
    assert kinds.count("all_to_all") == (3 if exchanges else 0)
    backward = by_phase(tmp_path / "plans")["backward"]
    with pytest.raises(Exception, match="`order` does not fit the graph"):
        compile_step(cost_profile=paths[other], plan=str(backward))

    def with_costs(graph: dict[str, Any]) -> None:
        graph["costs"] = CostProfile.load(paths[mine]).to_json()

    edit(backward, with_costs)
    pinned = compile_step(cost_profile=paths[other], plan=str(backward))
    assert pinned[1].plan["order"] == made[1].plan["order"]
    # What it is predicted to take is by the setting's.
    assert all(report.cost_profile.startswith(other) for report in pinned)
    assert [f"decided by its costs: {mine}" in " ".join(report.notes) for report in pinned] == [False, True]
    # And a figure by the plan's own is marked: found by an outsider.
    planned = [next(s for s in report.schedules if s.level == "fx") for report in pinned]
    assert [s.costs.startswith(mine) for s in planned] == [False, True] and planned[0].costs == ""


@pytest.mark.parametrize("exchanges", [True, False])
def test_where_a_plan_is_given_up_the_settings_costs_decide(world: None, tmp_path: Path, exchanges: bool) -> None:
    paths = two_profiles(tmp_path)
    mine, other = ("exchanges", "reduces") if exchanges else ("reduces", "exchanges")
    compile_step(cost_profile=paths[mine], dump_plan=str(tmp_path / "plans"))
    backward = by_phase(tmp_path / "plans")["backward"]

    def damaged(graph: dict[str, Any]) -> None:
        graph["costs"] = CostProfile.load(paths[mine]).to_json()
        graph["order"] = graph["order"][::-1]

    edit(backward, damaged)
    replanned = compile_step(cost_profile=paths[other], plan=str(backward), plan_mismatch="replan")
    alone = compile_step(cost_profile=paths[other])
    assert any(note.startswith("pinned plan given up") for note in replanned[1].notes)
    assert replanned[1].schedules[-1].makespan_after_ns == alone[1].schedules[-1].makespan_after_ns
    kinds = [str(c.kind) for c in replanned[1].collectives]
    assert kinds.count("all_to_all") == (0 if exchanges else 3)


def test_where_a_plan_is_given_up_its_budget_is_too(plans: Path) -> None:
    path = by_phase(plans)["backward"]

    def damaged(graph: dict[str, Any]) -> None:
        graph["memory_budget"] = "unlimited"
        graph["order"] = graph["order"][::-1]

    edit(path, damaged)
    settings = {"memory_budget": "+5%", "bucket": "on"}
    replanned = compile_step(plan=str(path), plan_mismatch="replan", **settings)[1]
    assert any(note.startswith("pinned plan given up") for note in replanned.notes)
    assert not any("gives it the memory budget" in note for note in replanned.notes)
    assert replanned.schedules[-1].budget_bytes == compile_step(**settings)[1].schedules[-1].budget_bytes


def test_costs_in_a_plan_are_those_of_a_profile(plans: Path) -> None:
    path = by_phase(plans)["forward"]
    edit(path, lambda graph: graph.update(costs={"schema_version": 1, "name": 3}))
    with pytest.raises(PlanFileError, match=r"forward.*json: .*costs: "):
        load(str(path))


def test_an_edited_order_is_used(plans: Path) -> None:
    path = by_phase(plans)["forward"]

    def wait_at_once(graph: dict[str, Any]) -> None:
        names = graph["order"]
        starts = [n for n in names if n.startswith("all_gather")]
        rest = [n for n in names if n not in starts]
        waits = [n for n in rest if n.startswith("wait_tensor")]
        for start, wait in zip(sorted(starts), sorted(waits)):
            rest.insert(rest.index(wait), start)
        graph["order"] = rest

    edit(path, wait_at_once)
    (forward, _) = compile_step(plan=str(path))
    assert forward.schedules[0].schedule_after.startswith("AG0 WAG0 mm AG1 WAG1 mm AG2 WAG2 mm")
    assert compile_step()[0].schedules[0].schedule_after.startswith("AG0 AG1"), "ours would prefetch"


def test_edited_buckets_are_used_and_the_rest_is_planned(plans: Path) -> None:
    path = by_phase(plans)["forward"]

    def merge(graph: dict[str, Any]) -> None:
        graph["buckets"] = [list(graph["collectives"])[:2]]
        del graph["order"]

    edit(path, merge)
    (forward, _) = compile_step(plan=str(path), bucket="on")
    assert len(forward.collectives) == 2
    decided = {d.node: d for p in forward.passes if p.name == "bucket" for d in p.decisions}
    assert [d.verdict.value for d in decided.values()] == ["applied", "applied", "refused"]


def illegal_wait(graph: dict[str, Any]) -> None:
    wait = next(n for n in graph["order"] if n.startswith("wait_tensor"))
    graph["order"].remove(wait)
    graph["order"].insert(0, wait)


def unknown_task(graph: dict[str, Any]) -> None:
    graph["order"][-1] = "mm_99"


def other_model(graph: dict[str, Any]) -> None:
    name = next(iter(graph["collectives"]))
    graph["collectives"][name] = "all_gather 1 bytes, 2 ranks"
    graph["collectives"]["gone"] = graph["collectives"].pop(list(graph["collectives"])[1])


def foreign_bucket(graph: dict[str, Any]) -> None:
    graph["buckets"] = [[next(iter(graph["collectives"])), "nobody"]]


ILLEGAL = {
    "a wait before its start": (illegal_wait, r"wait_tensor\w* waits for all_gather\w*, which starts later"),
    "a task of another graph": (unknown_task, r"`order` does not fit the graph: missing: mm_99; new: "),
    "another model": (other_model, r"has changed since .*missing: gone; new: all_gather\w+; changed: all_gather\w+ \("),
    "a bucket of unknown collectives": (foreign_bucket, r"`buckets\[0\]` names nobody"),
}


@pytest.mark.parametrize(("change", "message"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_what_does_not_fit_is_an_error_or_planned_anew(
    plans: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = by_phase(plans)["forward"]
    edit(path, change)
    with pytest.raises(Exception, match=message) as caught:
        compile_step(plan=str(path), bucket="on")
    assert "replan" in str(caught.value)
    expected = compile_step()
    bucket = "on" if change is foreign_bucket else "off"
    replanned = compile_step(plan=str(path), plan_mismatch="replan", bucket=bucket)
    if bucket == "off":
        assert replanned[0].schedules[0].schedule_after == expected[0].schedules[0].schedule_after
    assert any(re.search(message, note) for note in replanned[0].notes)


def test_a_bucket_of_collectives_that_depend_on_each_other_is_refused(plans: Path, tmp_path: Path) -> None:
    del plans

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.relu(funcol.all_reduce(x @ x, "sum", dist.group.WORLD))
        return x

    def run(**settings: Any) -> None:
        torch._dynamo.reset()
        options = {"codegen": "aot_eager", "memory_budget": "unlimited", **settings}
        prefixed = {f"inductor_passes.{k}": v for k, v in options.items()}
        torch.compile(chain, backend="inductor_passes", options=prefixed)(torch.ones(4, 4))

    run(dump_plan=str(tmp_path / "chain"))
    path = by_phase(tmp_path / "chain")["inference"]
    edit(path, lambda graph: graph.update(buckets=[list(graph["collectives"])]))
    with pytest.raises(Exception, match="`buckets` is not allowed: merged collectives depend on each other"):
        run(plan=str(path))


@torch.no_grad()
def test_the_memory_budget_holds_for_pinned_orders(world: None, tmp_path: Path) -> None:
    """What was planned without a limit does not fit into none at all."""
    compile_step(dump_plan=str(tmp_path / "plans"))
    path = by_phase(tmp_path / "plans")["inference"]

    def everything_first(graph: dict[str, Any]) -> None:
        starts = [n for n in graph["order"] if n.startswith("all_gather")]
        graph["order"] = [*starts, *(n for n in graph["order"] if n not in starts)]

    edit(path, everything_first)
    assert compile_step(plan=str(path))[0].schedules[0].method == "pinned"
    with pytest.raises(Exception, match=r"bytes at its peak, the memory budget allows \d+; raise memory_budget"):
        compile_step(plan=str(path), memory_budget="0")


def test_the_plan_is_part_of_the_cache_key(plans: Path) -> None:
    profile = CostProfile.default("cpu")
    settings = PassConfig(plan=str(plans))
    first = identity.cache_key(settings, profile)
    assert first == identity.cache_key(settings, profile) != identity.cache_key(PassConfig(), profile)
    edit(by_phase(plans)["forward"], lambda graph: graph.update(predicted={"step_ns": 1}))
    assert identity.cache_key(settings, profile) != first


def test_out_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = TraceDir(tmp_path / "trace", monkeypatch)
    problem = fsdp_problem(2)
    report, answer = planned(problem)
    report.plan = SAMPLE.to_json()
    traces.add(report, problem, answer.order)
    done = CliRunner().invoke(app, ["report", str(traces.path), "--plans", str(tmp_path / "plans")])
    assert done.exit_code == 0, done.output
    assert load(str(tmp_path / "plans")).graphs == (SAMPLE,)


SAMPLE = GraphPlan(
    *("forward", 0, {"a": "all_gather 8 bytes, 2 ranks", "b": ""}, ("redistribute/R5",), (("a", "b"),)),
    *(("a",), ("a", "w"), ("k",), "0/0", 0, 2),
)
BAD: dict[str, tuple[Any, str]] = {
    "no object": ([], "expected an object"),
    "version": ({"schema_version": 9, "graphs": []}, "schema_version 9; expected 1"),
    "key": ({"schema_version": 1, "graphs": [{**SAMPLE.to_json(), "path": "/etc"}]}, "path is unknown; expected"),
    "phase": ({"schema_version": 1, "graphs": [{**SAMPLE.to_json(), "phase": "../x"}]}, "phase is '../x'"),
    "order": ({"schema_version": 1, "graphs": [{**SAMPLE.to_json(), "order": [1]}]}, r"order\[0\] is 1; expected text"),
    "twice": ({"schema_version": 1, "graphs": [{**SAMPLE.to_json(), "order": ["a", "a"]}]}, "'a' twice"),
    "kept": ({"schema_version": 1, "graphs": [{**SAMPLE.to_json(), "kept": "a"}]}, "kept is 'a'; expected a list"),
    "bucket": ({"schema_version": 1, "graphs": [{**SAMPLE.to_json(), "buckets": [["a"]]}]}, "at least two"),
    "graphs": ({"schema_version": 1, "graphs": [SAMPLE.to_json()] * 2}, "forward_0 is planned twice"),
}


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD.keys())
def test_bad_files_are_named(data: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFileError, match=f"plan.json.*{message}"):
        load(str(path))
    with pytest.raises(PlanFileError, match=r"plan\.json"):
        inductor_passes.options(plan=str(path))


def test_hostile_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"", b"\x80\x04\x8c\x05posix", b"[" * 200_000, b"nope"):
        (tmp_path / "p.json").write_bytes(content)
        with pytest.raises(PlanFileError, match=r"p\.json"):
            load(str(tmp_path))
    monkeypatch.setattr(plan_file, "MAX_FILE_BYTES", 3)
    with pytest.raises(PlanFileError, match="too many"):
        load(str(tmp_path))
    for path in ("missing.json", "/dev/zero"):
        with pytest.raises(PlanFileError, match="existing file"):
            load(path)


def test_a_link_out_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text(text_of([SAMPLE]))
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "link.json").symlink_to(outside)
    with pytest.raises(PlanFileError, match="holds no plan"):
        load(str(tmp_path / "plans"))


names = st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=5)


@given(order=st.none() | names, kept=st.none() | names, kernels=st.none() | names, index=st.integers(0, 9))
def test_files_say_what_they_were_made_of(
    order: list[str] | None, kept: list[str] | None, kernels: list[str] | None, index: int
) -> None:
    one = dataclasses.replace(
        SAMPLE,
        graph_index=index,
        order=None if order is None else tuple(order),
        kept=None if kept is None else tuple(kept),
        kernels=None if kernels is None else tuple(kernels),
    )
    assert GraphPlan.from_json(json.loads(text_of([one]))["graphs"][0], "x") == one


# -- generated code on two ranks ---------------------------------------------------------------------------------------


def pinned_on_ranks(rank: int, world_size: int, folder: str) -> tuple[list[str], list[str], bool]:
    """Compile, make an edit that no planner would make, compile again with it; orders, checks, equal gradients."""
    plans = Path(folder) / "plans"
    settings = {"memory_budget": "unlimited", "bucket": "off", "verify": "strict"}

    def train(**more: Any) -> tuple[list[GraphReport], list[torch.Tensor]]:
        torch._dynamo.reset()
        x, weights = make()
        with collect(what_if=False) as reports:
            step = torch.compile(model, options=inductor_passes.options(**settings, **more))
            step(x, weights).backward()
        return reports, [w.grad for w in weights if w.grad is not None]

    free, expected = train(dump_plan=str(plans))
    dist.barrier()
    if rank == 0:
        for path in plans.glob("*.json"):
            edit(path, _waits_right_behind_starts)
    dist.barrier()
    pinned, found = train(plan=str(plans))
    same = len(found) == 3 and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    orders = [r.schedules[-1].schedule_after for r in (*free, *pinned)]
    return orders, [r.order_check for r in pinned], same


def _waits_right_behind_starts(graph: dict[str, Any]) -> None:
    kernels = graph["kernels"]
    collectives = list(graph["collectives"])
    waits = [k for k in kernels if k.startswith("wait_tensor")]
    starts = [k for k in kernels if k in collectives]
    assert len(waits) == len(starts) == len(collectives), graph
    order = [k for k in kernels if k not in waits]
    for start, wait in zip(sorted(starts), sorted(waits)):
        order.insert(order.index(start) + 1, wait)
    graph["kernels"] = order


@pytest.mark.ranks
def test_the_generated_code_runs_in_the_pinned_order(tmp_path: Path, two_ranks: Ranks) -> None:
    answers = two_ranks.run(pinned_on_ranks, str(tmp_path))
    assert answers[0] == answers[1]
    orders, checks, same = answers[0]
    assert same and checks == ["as planned", "as planned"]
    free, pinned = orders[:2], orders[2:]
    assert free[0] != pinned[0]
    for text in pinned:
        labels = [label for label in text.split() if re.match(r"W?(AG|RS)\d", label)]
        assert all(b == "W" + a for a, b in zip(labels[::2], labels[1::2])), text


def test_kernels_of_another_rank_that_do_not_fit_are_said_to_be_planned() -> None:
    """A rank that pads its shard has other kernels than its neighbour."""
    made = Pins(GraphPlan(kernels=("a", "b"), rank=0), "plans", "", rank=1)
    assert made.foreign(("b", "a")) == ""
    assert made.foreign(("a", "c")) == "`kernels` are those of rank 0, and rank 1 has others: missing: b; new: c"
    assert replace(made, rank=0).foreign(("a", "c")) == ""
    problem = fsdp_problem(1)
    assert made.kernel_plan(problem, [task.name for task in problem.tasks], None) is None
