"""A whole step in a file: the choice made again for other links, for another number of ranks, and by command."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.cli.main import app
from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.records.json_text import RecordError
from inductor_passes.report import GraphReport
from inductor_passes.schedule.problem import INPUT, Kind, Storage
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.step import derived, recompute
from inductor_passes.step.stored import StoredStep
from inductor_passes.trace.whatif import scale_links
from tests.support.compiled import compiled_reports, save_profile
from tests.support.models import LlamaConfig, llama, llama_batch
from tests.support.world import fake_world

SMALL = LlamaConfig(layers=2, dim=64, hidden=176, vocab=256, batch=8, seq=64)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[GraphReport], str]:
    """A step file of a model under "-30%", what its compilation reported, and its cost profile."""
    folder = tmp_path_factory.mktemp("step")
    profile = save_profile(folder / "profile.json", 100_000, 10.0, 5_000, 0.1)
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = simple_fsdp(llama(SMALL), mesh, reshard_after_forward="auto")
        settings = {"memory_budget": "-30%", "cost_profile": profile, "bucket": "off", "dump_problem": str(folder)}
        reports = compiled_reports(model, llama_batch(SMALL)[0], **settings)
    (path,) = folder.glob("rank0_step_*.json")
    return path, reports, profile


def stored(written: tuple[Path, list[GraphReport], str]) -> StoredStep:
    return StoredStep.from_json(json.loads(written[0].read_text()))


def test_the_choice_comes_out_of_the_file_again(written: tuple[Path, list[GraphReport], str]) -> None:
    one = stored(written)
    assert StoredStep.from_json(one.to_json()) == one
    found = recompute.points(one.step, one.gathered)
    curve = recompute.curve(found)
    said = next(p.metrics for r in written[1] for p in r.passes if p.name == recompute.NAME)
    assert derived.peak_of(one.step) == said["peak_saved_bytes"]
    point = recompute.best(found, int(said["limit_bytes"]))
    assert point is not None and (point.peak_bytes, point.step_ns) in {(p.peak_bytes, p.step_ns) for p in curve}
    # The link that it was priced with gives the same prices.
    assert one.priced(CostProfile.load(written[2])) == one


def test_a_faster_link_leaves_less_to_hide_behind(written: tuple[Path, list[GraphReport], str]) -> None:
    one = stored(written)
    fast = one.changed(lambda problem: scale_links(problem, bandwidth=Fraction(100)))
    slow, quick = (recompute.points(s.step, s.gathered) for s in (one, fast))
    assert min(p.step_ns for p in quick) < min(p.step_ns for p in slow)
    # Times of parameters follow their gathers.
    taken = {t.name: t.duration_ns for t in fast.step.forward.tasks}
    assert one.gathered and all(g.link_ns == taken[g.start] for g in fast.gathered)
    assert derived.peak_of(fast.step) == recompute.peak_of(one.step)


def test_more_ranks_hold_smaller_shards(written: tuple[Path, list[GraphReport], str]) -> None:
    one = stored(written)
    profile = CostProfile.default("h100")
    many = one.priced(profile, 64)
    ranks = tuple(range(64))
    for before, after, messages in zip(
        (one.step.forward, one.step.backward), (many.step.forward, many.step.backward), one.messages
    ):
        by_name = {m.name: m for m in messages}
        starts = [i for i, t in enumerate(before.tasks) if t.kind is Kind.START]
        assert starts
        for i in starts:
            m = by_name[before.tasks[i].name]
            gathers = m.kind == "all_gather"
            full = m.output_bytes if gathers else m.input_bytes
            sizes = (full // 64, full) if gathers else (full, full // 64)
            assert after.tasks[i].duration_ns == profile.communication_ns(m.kind, *sizes, ranks)
            mine = [k for k, s in enumerate(before.storages) if i in (s.producer, *s.readers)]
            assert {after.storages[k].size_bytes for k in mine} == set(sizes)
        # The device is another one, too.
        now, then = ([t.duration_ns for t in p.tasks if t.kind is Kind.COMPUTE] for p in (after, before))
        assert sum(now) < sum(then) / 10
    held = [sum(s.size_bytes for s in p.storages if s.producer == INPUT and s.pinned) for p in
            (one.step.forward, many.step.forward)]
    assert held[1] < held[0]


def test_another_profile_s_contention_counts(written: tuple[Path, list[GraphReport], str]) -> None:
    cost = CollectiveCost("all_gather", 50_000.0, 1.0, 100.0, 0.0, slowdown=0.5)
    group = GroupCost(GroupLayout(2, 1, 2), "gloo", "intra", (cost,))
    slow = dataclasses.replace(CostProfile.default("cpu", ranks_per_host=2), groups=(group,))
    one = stored(written).priced(slow)
    kinds = {m.name: m.kind for messages in one.messages for m in messages}
    starts = [t for p in (one.step.forward, one.step.backward) for t in p.tasks if t.kind is Kind.START]
    assert {t.slowdown_percent for t in starts if kinds[t.name] == "all_gather"} == {50}
    assert {t.slowdown_percent for t in starts if kinds[t.name] != "all_gather"} == {0}
    again = one.priced(CostProfile.default("cpu"))
    assert not any(t.slowdown_percent for p in (again.step.forward, again.step.backward) for t in p.tasks)


def test_another_device_is_what_a_compilation_for_it_says(
    written: tuple[Path, list[GraphReport], str], tmp_path: Path
) -> None:
    """The same model compiled with the device's cost profile has the same durations."""
    path = tmp_path / "h100.json"
    CostProfile.default("h100").save(path)
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = simple_fsdp(llama(SMALL), mesh, reshard_after_forward="auto")
        settings = {"memory_budget": "-30%", "cost_profile": str(path), "bucket": "off", "dump_problem": str(tmp_path)}
        compiled_reports(model, llama_batch(SMALL)[0], **settings)
    (found,) = tmp_path.glob("rank0_step_*.json")
    there = StoredStep.from_json(json.loads(found.read_text()))
    moved = stored(written).priced(CostProfile.load(str(path)))
    for name in ("forward", "backward"):
        mine, theirs = (getattr(one.step, name).tasks for one in (moved, there))
        assert [t.duration_ns for t in mine] == [t.duration_ns for t in theirs]
        assert any(t.kind is Kind.COMPUTE and t.duration_ns for t in mine)


def test_what_gloo_copies_is_not_there_on_another_device(written: tuple[Path, list[GraphReport], str]) -> None:
    one = stored(written)
    start = next(i for i, t in enumerate(one.step.forward.tasks) if t.kind is Kind.START)
    copy = Storage(1000, start, (), name="copy", workspace=True)
    forward = dataclasses.replace(one.step.forward, storages=(*one.step.forward.storages, copy))
    one = StoredStep.from_json(dataclasses.replace(one, step=dataclasses.replace(one.step, forward=forward)).to_json())
    for device, size in (("cpu", 1000), ("h100", 0)):
        assert one.priced(CostProfile.default(device)).step.forward.storages[-1].size_bytes == size


def test_a_file_without_work_takes_links_only(written: tuple[Path, list[GraphReport], str]) -> None:
    old = json.loads(written[0].read_text())
    del old["computed"]
    moved = StoredStep.from_json(old).priced(CostProfile.default("h100"))
    for name in ("forward", "backward"):
        mine, theirs = (getattr(one.step, name).tasks for one in (moved, stored(written)))
        times = [[t.duration_ns for t in tasks if t.kind is Kind.COMPUTE] for tasks in (mine, theirs)]
        assert times[0] == times[1]


def run(*arguments: object) -> tuple[int, str]:
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, [str(a) for a in ("simulate", *arguments)])
    return done.exit_code, done.output


def test_the_command_says_which_budget_a_step_needs(written: tuple[Path, list[GraphReport], str]) -> None:
    path = written[0]
    code, text = run(path, "--budget", "-30%,-99%,0", "--json", "--step", "1ns,10s", "--bandwidth-scale", "1,10")
    assert code == 0, text
    cases = json.loads(text)["cases"]
    assert [case["link"] for case in cases] == ["bandwidth x1", "bandwidth x10"]
    for case in cases:
        less, least, same = case["budgets"]
        assert less["best"]["peak_bytes"] <= case["peak_bytes"] * 0.7 + 1 and least["best"] is None
        assert same["best"]["step_ns"] <= less["best"]["step_ns"] and less["best"]["recomputed"] > 0
        never, always = case["steps"]
        assert never["least"] is None
        assert always["least"]["peak_bytes"] == case["curve"][0]["peak_bytes"]
    fastest = cases[0]["curve"][-1]
    code, text = run(path, "--step", f"{fastest['step_ns']}ns,1ns")
    assert code == 0 and f'memory_budget="={fastest["peak_bytes"]}B"' in text and "cannot be reached" in text
    code, text = run(path, "--profile", "h100", "--ranks", 64)
    assert code == 0 and "the step over its peak" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", 64], "--ranks needs --profile"),
        (["--profile", "h1oo"], "no known device"),
        (["--svg", "a.svg"], "whole step"),
        (["--step", "soon"], "is no duration"),
    ],
)
def test_what_a_step_cannot_answer(
    written: tuple[Path, list[GraphReport], str], arguments: list[Any], said: str
) -> None:
    code, text = run(written[0], *arguments)
    assert code == 2 and said in " ".join(text.replace("│", " ").split())


def test_numbers_of_nothing_are_refused(written: tuple[Path, list[GraphReport], str]) -> None:
    good = json.loads(written[0].read_text())
    wrong: list[tuple[str, Any, str]] = [
        ("candidates", [{**good["candidates"][0], "chain": [10**6]}], "names 1000000"),
        ("candidates", [{**good["candidates"][0], "backward_storages": [-1]}], "names -1"),
        ("candidates", [{**good["candidates"][0], "chain": [0], "forward_storage": 0}], "is not made by forward|make"),
        ("reads", [[0, [10**6]]], "reads names"),
        ("needs", [[10**6, [0]]], "needs names"),
        ("callers", [10**6], "callers names"),
        ("messages", [[]], "messages has 1"),
        ("computed", [[]], "computed has 1"),
        ("computed", [[{"name": "mm", "work": {"flops": -1, "bytes_moved": 0, "dtype": "float32"}}], []], "flops"),
        ("computed", [[{"name": "mm", "work": {"flops": 10**300, "bytes_moved": 0, "dtype": "a"}}], []], "flops|64"),
        ("messages", [[["a"]], []], "Message|object"),
        ("gathered", [{**good["gathered"][0], "held_bytes": 0}], "without bytes"),
        ("backward", 3, "expected an object"),
    ]
    for key, value, said in wrong:
        with pytest.raises(RecordError, match=said):
            StoredStep.from_json({**good, key: value})


def test_another_number_of_ranks_is_known_for_shards_only(written: tuple[Path, list[GraphReport], str]) -> None:
    good = json.loads(written[0].read_text())
    good["messages"][0][0]["kind"] = "all_to_all"
    with pytest.raises(ValueError, match="it has all_to_all"):
        StoredStep.from_json(good).priced(CostProfile.default("h100"), 64)
