"""A second plan on real ranks over a link of known speed: swapped in at one call, back where it is slower, or not."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor.codecache import PyCodeCache
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes.cost.profile import CostProfile
from inductor_passes.emulation import link as emulated_link
from inductor_passes.engine import again as compiling
from inductor_passes.models import MLPConfig, mlp, mlp_batch
from inductor_passes.pin import file as plan_file
from inductor_passes.report import SwapOutcome
from inductor_passes.trace.collector import collect
from inductor_passes.tuning import measuring, replanning, tape
from inductor_passes.tuning.clock import function_of
from tests.support.compiled import save_profile
from tests.support.ranks import Ranks
from tests.support.tuned import ranks_on_a_link

pytestmark = pytest.mark.ranks

#: Widths that two and three ranks divide.
MODEL = MLPConfig(width=96, hidden=192, layers=3, batch=16)
#: The link that there is: a message costs much by itself, so that merging gains much.
LATENCY_NS, BYTES_PER_S = 4_000_000, 20e6
STEPS, MOST = 3, 600
OVER = {one.value for one in SwapOutcome} - {SwapOutcome.AGREED.value, SwapOutcome.SWAPPED.value}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_on_a_link(LATENCY_NS, BYTES_PER_S, tmp_path_factory.mktemp("cache")) as ranks:
        yield ranks


def assumed(tmp: Path, ranks: int = 2, latency_ns: float = 0.0) -> str:
    """A profile of a link on which messages cost nothing by themselves, or what they do."""
    return save_profile(tmp / "assumed.json", latency_ns, 1e9 / BYTES_PER_S, 20_000, 0.1, ranks=ranks)


def settings_of(tmp: Path, profile: str, **more: Any) -> dict[str, Any]:
    given = {"tune": STEPS, "tune_file": str(tmp / "tuned.json"), "tune_swap": "on", "rank_agreement": "20s"}
    return {"cost_profile": profile, "memory_budget": "unlimited", **given, **more}


def swaps(reports: list[Any]) -> list[dict[str, Any]]:
    timings = [report.to_json()["timing"] for report in reports]
    return [one["swap"] for one in timings if one is not None and one["swap"] is not None]


def planned_again_with(profile: str) -> AbstractContextManager[Any]:
    """Second plans are made with this profile, if there is one, instead of what was measured."""
    if not profile:
        return contextlib.nullcontext()
    corrected = CostProfile.load(profile)
    return mock.patch.object(replanning.Replanning, "_shared_profile", lambda one: corrected)


def train(
    rank: int,
    world: int,
    steps: int,
    settings: dict[str, Any],
    cold: bool = True,
    config: MLPConfig = MODEL,
    corrected: str = "",
) -> dict[str, Any]:
    """Losses of each step, until all ranks know what becomes of both graphs, or for so many steps.

    Args:
        corrected: the profile that second plans are made with, "" for what was measured.
    """
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    torch.manual_seed(0)
    random.seed(0)
    model = inductor_passes.simple_fsdp(mlp(config), init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    options = {} if not cold else {"fx_graph_cache": False}
    step = torch.compile(model, options=inductor_passes.options(inductor=options, **settings), fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = mlp_batch(config, seed=rank + 1)[0]
    losses: list[float] = []
    draws: list[float] = []
    modules: list[dict[str, Any]] = []
    add = measuring._graphs.add

    def added(planned: Any, compile_id: str, module: dict[str, Any], kept: Any) -> None:
        modules.append(module)
        add(planned, compile_id, module, kept)

    with (
        planned_again_with(corrected),
        mock.patch.object(measuring._graphs, "add", added),
        torch._functorch.config.patch(enable_autograd_cache=not cold),
        mock.patch.object(tape, "host_ns", emulated_link._current().clock.now_ns),
        collect(what_if=False) as reports,
    ):
        while len(losses) < (steps or MOST):
            loss = step(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            # Of the program's own generators, also while a second plan is being compiled and ranks are waited for.
            draws += [torch.rand(()).item(), random.random()]
            optimizer.step()
            optimizer.zero_grad()
            if len(losses) > STEPS:
                # Waiting costs the emulated link a processor, and what compiles meanwhile needs one.
                time.sleep(0.03)
            found = swaps(reports)
            over = torch.tensor([float(len(found) == 2 and all(one["outcome"] in OVER for one in found))])
            dist.all_reduce(over)
            if not steps and over.item() == world:
                break
    assert measuring.finished()
    hands_on = ("_through_turnstile", "_through_clock")
    functions = [function_of(module) for module in modules]
    return {
        "losses": losses,
        "draws": draws,
        "parameters": [p.to_local().detach().numpy().tobytes() for p in model.parameters()],  # type: ignore[attr-defined]
        "swaps": swaps(reports),
        "phases": [r.phase for r in reports],
        "plans": [r.plan for r in reports],
        "notes": [note for r in reports for note in r.notes],
        "stand-ins": [f.__code__.co_name for f in functions if f.__code__.co_name in hands_on],
    }


def same_bits(pool: Ranks, tuned: list[dict[str, Any]], settings: dict[str, Any]) -> bool:
    """Whether every step of every rank had the loss that it has without tuning, and parameters are the same."""
    plain = {key: value for key, value in settings.items() if not key.startswith("tune")}
    without = pool.run(train, len(tuned[0]["losses"]), plain)
    return all(a[key] == b[key] for a, b in zip(tuned, without) for key in ("losses", "draws", "parameters"))


def test_ranks_with_uneven_shards_change_together(pool: Ranks, tmp_path: Path) -> None:
    """One rank pads its shard, so its kernels cost something else; what they send, and the plan, are the same."""
    settings = settings_of(tmp_path, assumed(tmp_path))
    # Whether these few short messages, as measured, make another plan is chance.
    corrected = save_profile(tmp_path / "corrected.json", LATENCY_NS, 1e9 / BYTES_PER_S, 20_000, 0.1, ranks=2)
    found = pool.run(train, 0, settings, True, MLPConfig(width=31, hidden=63, layers=2, batch=16), corrected)
    first, second = ([{**one, "predicted_ns": 0, "peak_bytes": 0} for one in rank["swaps"]] for rank in found)
    assert first == second, "ranks hold one outcome; each predicts what its own kernels take, and need"
    assert first[0]["outcome"] in {SwapOutcome.KEPT.value, SwapOutcome.RETURNED.value} and first[0]["call"], first
    assert all("something else" not in one["why"] for one in first)


def test_a_faster_plan_is_swapped_in_at_one_call(pool: Ranks, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, assumed(tmp_path))
    tuned = pool.run(train, 0, settings)
    assert tuned[0]["swaps"] == tuned[1]["swaps"], "ranks hold one outcome"
    assert tuned[0]["phases"] == ["forward", "backward"]
    for one in tuned[0]["swaps"]:
        assert (one["outcome"], one["why"], one["back"]) == (SwapOutcome.KEPT.value, "", 0)
        assert one["call"] > STEPS + 1 and len(tuned[0]["losses"]) > one["call"]
        assert 0 < one["after_ns"] < one["before_ns"]
    assert tuned[0]["stand-ins"] == ["_through_turnstile"] * 2, "of both graphs the first module hands on"
    assert same_bits(pool, tuned, settings)
    plans = plan_file.load(str(tmp_path / "tuned.plan.json"))
    assert [plan.phase for plan in plans.graphs] == ["forward", "backward"]
    assert all(max(map(len, plan.buckets or ())) > 2 for plan in plans.graphs)
    # Costs under which nothing of this would be planned.
    assert _pinned(pool, tmp_path, {})[0]["losses"] == tuned[0]["losses"][:2]


def _pinned(pool: Ranks, folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Two steps of a run that follows the plans which tuning wrote."""
    # The program of the next run numbers its graphs as this one did, this process goes on counting.
    text = json.loads((folder / "tuned.plan.json").read_text())
    for plan in text["graphs"]:
        del plan["graph_index"]
    (folder / "any.json").write_text(json.dumps(text))
    again: list[dict[str, Any]] = pool.run(
        train, 2, {"plan": str(folder / "any.json"), "memory_budget": "unlimited", **settings}
    )
    assert sum(note.startswith("pinned by") for note in again[0]["notes"]) == 2
    for rank in again:
        assert len(rank["plans"]) == 2
        for followed, plan in zip(rank["plans"], text["graphs"]):
            assert all(followed[key] == plan[key] for key in ("buckets", "order", "kernels"))
    return again


def _misled(rank: int, world: int, settings: dict[str, Any]) -> Any:
    """Training in which the corrected profile is of another link."""
    wrong = CostProfile.load(settings.pop("wrong"))
    with mock.patch.object(measuring, "corrected", lambda *_: wrong):
        return train(rank, world, 0, settings)


def test_a_slower_plan_goes_again_at_one_call(pool: Ranks, tmp_path: Path) -> None:
    right = assumed(tmp_path, latency_ns=LATENCY_NS)
    Path(right).rename(tmp_path / "right.json")
    settings = settings_of(tmp_path, str(tmp_path / "right.json"))
    tuned = pool.run(_misled, {**settings, "wrong": assumed(tmp_path)})
    assert tuned[0]["swaps"] == tuned[1]["swaps"]
    for one in tuned[0]["swaps"]:
        assert (one["outcome"], one["why"]) == (SwapOutcome.RETURNED.value, "")
        assert one["back"] > one["call"] + STEPS and one["after_ns"] >= one["before_ns"] > 0
    assert tuned[0]["stand-ins"] == [], "the code is what Inductor generated"
    assert same_bits(pool, tuned, settings)
    # The corrected profile alone would make the slower plan again. The file pins the one that was faster.
    again = _pinned(pool, tmp_path, {"cost_profile": assumed(tmp_path)})
    assert [plan["order"] for plan in again[0]["plans"]] == [plan["order"] for plan in tuned[0]["plans"]]


def _hindered(rank: int, world: int, settings: dict[str, Any], how: str) -> Any:
    """Training in which rank 1 is hindered."""
    with contextlib.ExitStack() as stack:

        def instead(owner: Any, name: str, made: Any) -> None:
            if rank == 1:
                stack.enter_context(mock.patch.object(owner, name, made))

        def fails(*_: Any) -> Any:
            raise RuntimeError("no compiler here")

        def comes_late(self: Any, real: Any = replanning.Vote.cast) -> Any:
            time.sleep(3.0)
            return real(self)

        if how == "fails":
            instead(compiling._torch, "lower_again", fails)
        elif how == "differs":
            other = CostProfile.load(settings["cost_profile"])
            # Ranks write at the same time.
            folder = Path(settings["tune_file"]).parent / f"other{rank}"
            # Neither by what was measured, which on a busy machine may give rank 0 the plan that it has.
            made = CostProfile.load(assumed(folder, latency_ns=5e8 if rank else LATENCY_NS))
            assert other.hash() != made.hash()
            stack.enter_context(mock.patch.object(replanning.Replanning, "_shared_profile", lambda self: made))
        elif how == "late":
            stack.enter_context(mock.patch.object(replanning, "_AT_CALL", 0.05))
            instead(replanning.Vote, "cast", comes_late)
        # What other tests swapped in is what an equal graph would begin with.
        return train(rank, world, 0, settings, config=replace(MODEL, hidden=160))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("fails", "rank 1: compiling it failed: RuntimeError: no compiler here"),
        ("differs", "rank 1 planned something else than rank 0"),
        ("late", "rank 1 did not come to that call within 1 s"),
    ],
)
def test_what_rank_1_cannot_no_rank_does(pool: Ranks, tmp_path: Path, how: str, why: str) -> None:
    for rank in range(2):
        (tmp_path / f"other{rank}").mkdir()
    settings = settings_of(tmp_path, assumed(tmp_path))
    tuned = pool.run(_hindered, settings, how)
    assert tuned[0]["swaps"] == tuned[1]["swaps"]
    for one in tuned[0]["swaps"]:
        assert (one["outcome"], one["why"], one["call"]) == (SwapOutcome.NOTHING.value, why, 0)
    assert tuned[0]["stand-ins"] == tuned[1]["stand-ins"] == []
    assert len(set(tuned[0]["losses"])) > STEPS, "training went on"


def _apart(rank: int, world: int, settings: dict[str, Any], theirs: dict[str, Any]) -> Any:
    """Rank 1 has other settings; what took longest to compile again."""
    began: list[str] = []
    real = compiling.compile_again
    counted = mock.patch.object(compiling, "compile_again", lambda *a: began.append("compiled") or real(*a))
    with counted:
        found = train(rank, world, 12, {**settings, **(theirs if rank == 1 else {})})
    assert measuring.finished()
    return {**found, "compiled again": began}


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({"tune_swap": "off"}, ("tune_swap differs: rank {} has ", "on", "off")),
        ({"tune": STEPS + 2}, ("tune differs: rank {} has ", str(STEPS), str(STEPS + 2))),
    ],
)
def test_ranks_whose_settings_differ_say_so_and_compile_nothing(
    pool: Ranks, tmp_path: Path, theirs: dict[str, Any], why: tuple[str, str, str]
) -> None:
    tuned = pool.run(_apart, settings_of(tmp_path, assumed(tmp_path)), theirs)
    says, mine, other = why
    sentences = {f"{says.format(0)}{mine} and rank 1 has {other}", f"{says.format(1)}{other} and rank 0 has {mine}"}
    for one in tuned:
        assert one["compiled again"] == [] and len(one["swaps"]) == 2
        assert {swap["outcome"] for swap in one["swaps"]} == {SwapOutcome.NOTHING.value}
        assert {swap["why"] for swap in one["swaps"]} <= sentences
    assert tuned[0]["swaps"] == tuned[1]["swaps"]


def _warm(rank: int, world: int, settings: dict[str, Any]) -> Any:
    """Rank 1 finds its graphs in a cache."""
    train(rank, world, STEPS, settings, cold=False)
    return train(rank, world, 0, settings, cold=rank != 1)


def test_code_from_a_cache_has_no_graph_to_plan_again(pool: Ranks, tmp_path: Path) -> None:
    tuned = pool.run(_warm, settings_of(tmp_path, assumed(tmp_path)))
    assert tuned[0]["swaps"] == tuned[1]["swaps"]
    for one in tuned[0]["swaps"]:
        assert one["outcome"] == SwapOutcome.NOTHING.value
        assert one["why"] == "rank 1: its code came out of a cache, which keeps no graph to plan again"


def test_a_profile_that_was_right_gives_the_same_plan(pool: Ranks, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, assumed(tmp_path, latency_ns=LATENCY_NS))
    same = {**settings, "wrong": settings["cost_profile"]}
    for one in pool.run(_misled, same)[0]["swaps"]:
        assert one["outcome"] == SwapOutcome.NOTHING.value
        assert one["why"].endswith("the corrected profile gives the same plan") and one["plan"].endswith("plan.json")


def test_three_ranks_change_together(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, assumed(tmp_path, ranks=3))
    with ranks_on_a_link(LATENCY_NS, BYTES_PER_S, tmp_path / "cache", 3) as ranks:
        tuned = ranks.run(train, 0, settings)
        assert tuned[0]["swaps"] == tuned[1]["swaps"] == tuned[2]["swaps"]
        # Three ranks share two processors with whatever else runs: which plan is faster is not asked here.
        outcomes = {one["outcome"] for one in tuned[0]["swaps"]}
        assert outcomes and outcomes <= {SwapOutcome.KEPT.value, SwapOutcome.RETURNED.value}
        assert same_bits(ranks, tuned, settings)
