"""Tuning on real ranks over a link of known speed: what is measured, what comes of it, and what cannot hang."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._inductor.codecache import PyCodeCache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import inductor_passes
from inductor_passes.cost.profile import CostProfile
from inductor_passes.emulation import link as emulated_link
from inductor_passes.models import MLPConfig, mlp, mlp_batch
from inductor_passes.trace.collector import collect
from inductor_passes.trace.reader import read_trace
from inductor_passes.tuning import measuring, tape
from tests.support.compiled import save_profile
from tests.support.ranks import Ranks
from tests.support.tuned import ranks_on_a_link

pytestmark = pytest.mark.ranks

MODEL = MLPConfig(width=128, hidden=256, layers=3, batch=16)
#: The link that there is: some 15 to 30 ms for a gather.
LATENCY_NS, BYTES_PER_S = 2_000_000, 5e6
STEPS = 3


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_on_a_link(LATENCY_NS, BYTES_PER_S, tmp_path_factory.mktemp("cache")) as ranks:
        yield ranks


def made(world: int) -> torch.nn.Module:
    torch._dynamo.reset()
    return inductor_passes.simple_fsdp(mlp(MODEL), init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))


def train(rank: int, world: int, steps: int, **settings: Any) -> dict[str, Any]:
    """Losses and gradients of some steps, and the reports that are there then."""
    model = made(world)
    step = torch.compile(model, options=inductor_passes.options(**settings), fullgraph=True)
    x = mlp_batch(MODEL, seed=rank + 1)[0]
    losses = []
    with collect(what_if=False) as reports:
        for _ in range(steps):
            loss = step(x).square().mean()
            loss.backward()
            losses.append(loss.item())
    assert measuring.finished()
    grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    return {
        "losses": losses,
        "gradients": [g.numpy().tobytes() for g in grads if g is not None],
        "reports": [r.to_json() for r in reports],
        "clocks": sum("_inductor_passes_clock" in vars(m) for m in PyCodeCache.modules),
        "stand-ins": sum(vars(m).get("torch", torch) is not torch for m in PyCodeCache.modules),
    }


def settings_of(tmp: Path, **more: Any) -> dict[str, Any]:
    """With a profile of a link that is twice as fast as the one that there is, and memory for several messages only."""
    profile = save_profile(tmp / "assumed.json", LATENCY_NS / 2, 1e9 / BYTES_PER_S / 2, 20_000, 0.1)
    return {"cost_profile": profile, "tune_file": str(tmp / "tuned.json"), "memory_budget": "+5%", **more}


def run(pool: Ranks, steps: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    return pool.run(_train_with, steps, settings)


def _train_with(rank: int, world: int, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    # The link's own clock, which other load does not move: processor time, and waits on the link.
    with mock.patch.object(tape, "host_ns", emulated_link._current().clock.now_ns):
        return train(rank, world, steps, **settings)


@pytest.fixture(scope="module")
def tuned(pool: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    tmp = tmp_path_factory.mktemp("tuned")
    return tmp, run(pool, STEPS + 3, settings_of(tmp, tune=STEPS))


def test_results_are_the_same_bits_and_nothing_stays_in_the_code(
    pool: Ranks, tuned: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    off = run(pool, STEPS + 3, settings_of(tmp_path))
    for with_it, without in zip(tuned[1], off):
        assert with_it["losses"] == without["losses"] and with_it["gradients"] == without["gradients"]
        assert with_it["clocks"] == with_it["stand-ins"] == 0
        assert all(report["timing"] is None for report in without["reports"])


def test_all_ranks_hold_one_account_and_one_profile(tuned: tuple[Path, list[dict[str, Any]]]) -> None:
    tmp, (first, second) = tuned
    timings = [[report["timing"] for report in one["reports"]] for one in (first, second)]
    assert timings[0] == timings[1]
    for report in first["reports"]:
        found = report["timing"]
        assert (found["steps"], found["ranks"]) == (STEPS, [0, 1])
        # Gathers of this model differ by less than the factor of four that tells a slope.
        assert found["note"].startswith("latency and bandwidth of all_gather")
        assert [c["label"] for c in found["collectives"]] == [c["label"] for c in report["collectives"]]
        assert found["predicted_ns"] == report["schedules"][-1]["makespan_after_ns"]
        # A step takes no less than its kernels and stalls.
        parts = sum(k["measured_ns"] for k in found["kernels"]) + sum(
            c["measured_stall_ns"] for c in found["collectives"]
        )
        assert found["measured_ns"] > 0.5 * parts > 0
    profile = CostProfile.load(tmp / "tuned.json")
    assert profile.measured and profile.name.startswith("tuned from made up: 3 steps on 2 ranks from")
    assert profile.hash() in {report["timing"]["profile_hash"] for report in first["reports"]}


def test_transfers_are_no_faster_than_the_link(tuned: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, _) = tuned
    seen = 0
    for report in first["reports"]:
        for one in report["timing"]["collectives"]:
            whole = one["size_bytes"]
            truth = LATENCY_NS + whole / 2 / BYTES_PER_S * 1e9
            assert one["predicted_ns"] == pytest.approx(truth / 2, rel=0.01)
            if one["known"] == "measured":
                seen += 1
                assert one["measured_ns"] > 0.9 * truth
    assert seen >= 4


def test_the_next_run_predicts_better(pool: Ranks, tuned: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """The first profile's link is twice as fast as the true one; the next run plans with what was measured."""
    tmp, (before, _) = tuned
    more = {"cost_profile": str(tmp / "tuned.json"), "tune": STEPS, "tune_file": str(tmp_path / "next.json")}
    (after, _) = run(pool, STEPS + 3, more)
    errors = []
    for one in (before, after):
        timings = [r["timing"] for r in one["reports"]]
        predicted, measured = (sum(t[f"{what}_ns"] for t in timings) for what in ("predicted", "measured"))
        errors.append(abs(measured - predicted) / measured)
    assert errors[1] < errors[0], errors
    assert errors[0] > 0.3, "the first prediction was far off"
    timed = [(c["kind"], c["size_bytes"]) for r in before["reports"] for c in r["timing"]["collectives"]]
    notes = {r["timing"]["note"] for r in before["reports"]}
    for report in after["reports"]:
        for c in report["collectives"]:
            truth = LATENCY_NS + c["size_bytes"] / 2 / BYTES_PER_S * 1e9
            sizes = [size for kind, size in timed if kind == c["kind"]]
            if c["size_bytes"] < min(sizes):
                # The next plan may send a bias alone. Its time is mostly the latency, of which the profile knows no
                # more than its note says.
                assert any(n.startswith("latency and bandwidth of") and c["kind"] in n for n in notes), notes
                assert c["duration_ns"] > 0.9 * truth / 2, "no faster than was assumed before"
            else:
                assert c["duration_ns"] > 0.9 * truth, [r["timing"] for r in before["reports"]]


def _warm(rank: int, world: int, settings: dict[str, Any]) -> Any:
    # As in another process: nothing that was loaded is there, the caches on disk are.
    PyCodeCache.cache_clear()
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    del AOTAutogradCache
    return train(rank, world, STEPS + 2, **settings)


def test_code_from_a_warm_cache_is_timed_as_well(
    pool: Ranks, tuned: tuple[Path, list[dict[str, Any]]]
) -> None:
    tmp, (cold, _) = tuned
    (warm, other) = pool.run(_warm, settings_of(tmp, tune=STEPS))
    assert [r["from_cache"] for r in warm["reports"]] == [True, True]
    assert [r["digest"] for r in warm["reports"]] == [r["digest"] for r in cold["reports"]]
    for mine, theirs in zip(warm["reports"], other["reports"]):
        assert mine["timing"] == theirs["timing"] and mine["timing"]["ranks"] == [0, 1]
    assert warm["losses"][0] == cold["losses"][0] and warm["clocks"] == 0


def _broken(rank: int, world: int, settings: dict[str, Any]) -> Any:
    """Two graphs of forward, and inference."""
    model = made(world)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return model(y)

    compiled = torch.compile(step, options=inductor_passes.options(**settings))
    x = mlp_batch(MODEL, seed=rank + 1)[0]
    with collect(what_if=False) as reports, torch.no_grad():
        for _ in range(STEPS + 2):
            compiled(x)
    assert measuring.finished()
    return [(r.phase, r.timing.steps if r.timing else 0, r.timing.ranks if r.timing else ()) for r in reports]


def test_graphs_between_breaks_and_inference_are_timed(pool: Ranks, tmp_path: Path) -> None:
    found = pool.run(_broken, settings_of(tmp_path, tune=STEPS, rank_agreement="60s"))
    assert found[0] == found[1]
    assert found[0] and all(one == ("inference", STEPS, (0, 1)) for one in found[0])


#: How long the ranks' threads wait for each other where one stays away.
PATIENCE_S = 2.0


def _apart(rank: int, world: int, settings: dict[str, Any], how: str) -> Any:
    """Training while rank 1 does not take part in the exchange, or comes late."""
    real = measuring.exchange

    def changed(*args: Any) -> Any:
        if rank == 1 and how == "never":
            raise RuntimeError("this rank's thread is gone")
        if rank == 1:
            time.sleep(3 * PATIENCE_S)
        return real(*args[:-2], PATIENCE_S, args[-1])

    with mock.patch.object(measuring, "exchange", changed):
        return train(rank, world, STEPS + 2, **settings)


@pytest.mark.parametrize("how", ["never", "late"])
def test_a_rank_that_stays_away_costs_the_profile_only(pool: Ranks, tmp_path: Path, how: str) -> None:
    first, second = pool.run(_apart, settings_of(tmp_path, tune=STEPS), how)
    assert len(first["losses"]) == len(second["losses"]) == STEPS + 2
    for report in first["reports"]:
        timing = report["timing"]
        assert timing["ranks"] == [0], "its own times"
        assert timing["note"] == "no cost profile was written: rank 1 did not hand in any times"
    assert not (tmp_path / "tuned.json").exists()
    if how == "late":
        assert all(r["timing"]["note"] for r in second["reports"]), "it takes what the others settled on"


def _traced(rank: int, world: int, settings: dict[str, Any]) -> Any:
    return train(rank, world, STEPS + 2, **settings)["reports"]


def test_a_trace_has_the_times_under_the_graph_that_they_belong_to(tmp_path: Path) -> None:
    with ranks_on_a_link(LATENCY_NS, BYTES_PER_S, tmp_path / "cache", TORCH_TRACE=str(tmp_path / "trace")) as ranks:
        reports = ranks.run(_traced, settings_of(tmp_path, tune=STEPS))
    for graph in read_trace(tmp_path / "trace").graphs:
        assert graph.report is not None
        (mine,) = [r for r in reports[graph.rank] if r["phase"] == graph.report.phase]
        assert graph.report.timing is not None
        assert json.loads(json.dumps(graph.report.to_json()["timing"])) == mine["timing"]


def _two_meshes(rank: int, world: int, settings: dict[str, Any]) -> Any:
    """Tensor parallelism by FSDP: the forward concerns all ranks, the backward those of one data-parallel group."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    split = parallelize_module(inner, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = inductor_passes.simple_fsdp(split, mesh["dp"])
    step = torch.compile(model, options=inductor_passes.options(**settings), fullgraph=True)
    with collect(what_if=False) as reports:
        for _ in range(STEPS + 2):
            step(torch.ones(8, 64)).square().mean().backward()
    assert measuring.finished()
    name, deadline = "", time.monotonic() + 30
    while "on 4 ranks" not in name or len(name.rpartition("plans ")[2].split()) < 2:
        assert time.monotonic() < deadline, name
        time.sleep(0.2)
        name = CostProfile.load(settings["tune_file"]).name
    return [(r.phase, r.timing.ranks, r.timing.profile, r.timing.note) for r in reports if r.timing is not None]


def test_graphs_of_different_ranks_give_one_file(tmp_path: Path) -> None:
    settings = {"tune": STEPS, "tune_file": str(tmp_path / "tuned.json"), "rank_agreement": "120s"}
    with ranks_on_a_link(0, 1e9, tmp_path / "cache", 4) as ranks:
        found = ranks.run(_two_meshes, settings)
    for rank, one in enumerate(found):
        assert [(phase, members) for phase, members, _, _ in one] == [
            ("forward", (0, 1, 2, 3)),
            ("backward", (rank % 2, rank % 2 + 2)),
        ]
        assert {path for _, _, path, _ in one} == {settings["tune_file"]}
        assert ("rank 0 writes" in one[1][3]) is (rank % 2 == 1)
    assert [path.name for path in tmp_path.glob("tuned*")] == ["tuned.json"]
