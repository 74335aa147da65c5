"""Calibration: the fit, the merge over ranks, and a real run on the emulated link whose constants are known."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from inductor_passes import _torch
from inductor_passes.cli.calibrate import app
from inductor_passes.cost import contention
from inductor_passes.cost.calibrate import Sample, calibrate, group_costs
from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.fit import fit_line
from inductor_passes.cost.profile import CostProfile
from inductor_passes.emulation import link as emulated_link
from tests.support.ranks import Ranks


def test_fit_finds_the_line() -> None:
    sizes = [0.0, 1e3, 1e4, 1e5, 1e6]
    alpha, beta = fit_line(sizes, [500 + 2 * s for s in sizes])
    assert alpha == pytest.approx(500) and beta == pytest.approx(2)


def test_fit_survives_outliers() -> None:
    generator = random.Random(7)
    sizes = [float(4**k) for k in range(5, 13)]
    times = [(20_000 + 3 * s) * generator.uniform(0.98, 1.02) for s in sizes]
    times[3] *= 9
    alpha, beta = fit_line(sizes, times)
    assert alpha == pytest.approx(20_000, rel=0.05) and beta == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "times", "expected"),
    [
        ([1.0, 2.0, 3.0], [5.0, 4.0, 3.0], None),
        ([1.0, 10.0, 100.0], [0.1, 2.0, 22.0], None),
        ([7.0], [3.0], (3.0, 0.0)),
        ([7.0, 7.0], [3.0, 3.0], (3.0, 0.0)),
    ],
)
def test_fit_has_no_negative_costs(
    sizes: list[float], times: list[float], expected: tuple[float, float] | None
) -> None:
    alpha, beta = fit_line(sizes, times)
    assert alpha >= 0 and beta >= 0
    assert alpha == 0 or beta == 0
    if expected:
        assert (alpha, beta) == pytest.approx(expected)


def test_fit_refuses_nonsense() -> None:
    for sizes, times in (([], []), ([1.0], [0.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="cannot fit"):
            fit_line(sizes, times)


def test_the_slowest_rank_counts() -> None:
    layout = GroupLayout(2, 1, 2)
    samples = [
        Sample(layout, "all_gather", size, 2 * size, link, 10.0)
        for size in (100, 1_000)
        for link in (50.0 + size, 70.0 + 3 * size)
    ]
    (group,) = group_costs(samples, {layout: "gloo"})
    cost = group.cost("all_gather")
    assert cost is not None and group.backend == "gloo" and group.link == "intra"
    assert cost.alpha_ns == pytest.approx(70) and cost.beta_ns_per_byte == pytest.approx(3)
    assert cost.issue_ns == pytest.approx(10) and cost.issue_ns_per_byte == 0


def _register(rank: int, world_size: int) -> None:
    emulated_link.register()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, backend="emulated", setup=_register) as pool:
        yield pool


def _calibrated(rank: int, world_size: int) -> CostProfile:
    emulated_link.set_rate(latency_ns=2_000_000, bytes_per_s=50e6)
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    return calibrate(
        [dist.group.WORLD, alone],
        dtypes=[torch.float32],
        sizes=(1 << 12, 1 << 16, 1 << 18),
        repeats=3,
        name="known",
        timed=emulated_link.timed,
    )


@pytest.mark.ranks
def test_calibration_finds_the_emulated_link(ranks: Ranks) -> None:
    mine, theirs = ranks.run(_calibrated)
    assert mine == theirs and mine.hash() == theirs.hash()
    assert mine.measured and mine.name == "known" and mine.ranks_per_host == 2
    (group,) = mine.groups
    assert group.layout == GroupLayout(2, 1, 2) and group.backend == "emulated"
    assert [c.kind for c in group.costs] == [
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "send",
        "recv",
    ]
    for cost in group.costs:
        # The step clock does not see the machine's load; what is missing to the link's time is the host's
        # share.
        link = cost.alpha_ns + cost.beta_ns_per_byte * 131_072
        assert (
            link <= 1.02 * (2e6 + 20 * 131_072) <= 1.02 * (link + cost.issue_ns + cost.issue_ns_per_byte * 262_144)
        ), cost
        # Where the fit puts the host's share, in the constant or in the slope, depends on the machine's load.
        assert cost.issue_ns + cost.issue_ns_per_byte * 262_144 > 0
    assert [p.dtype for p in mine.matmul] == ["float32"] * len(mine.matmul) and mine.matmul
    assert mine.memory_bytes_per_s > 0 and mine.kernel_ns > 0
    assert CostProfile.from_json(mine.to_json()) == mine


def _slowed(rank: int, world_size: int, cores: int) -> tuple[CostProfile, int]:
    """On a machine with ``cores``, where everything is half as fast beside a transfer on the second rank."""
    spans = 0

    def span_ns(run: Callable[[], None], device: torch.device) -> int:
        nonlocal spans
        spans += 1
        run()
        # The first four are of one small burst; then alone and beside a transfer, in turn.
        since = (spans - 1) % 10 - 4
        return 100 if since < 0 else 1_000 * (1 + rank * (since % 2))

    here = cores if rank else 64
    with (
        mock.patch.object(os, "cpu_count", lambda: here),
        mock.patch.object(contention, "span_ns", span_ns),
        mock.patch.object(contention, "_MOST", 3),
    ):
        return calibrate(dtypes=[torch.float32], sizes=(1 << 10, 1 << 18), repeats=3, name="slowed"), spans


@pytest.mark.ranks
def test_what_a_transfer_slows_down_is_the_slowest_rank_s(two_ranks: Ranks) -> None:
    (mine, spans), (theirs, _) = two_ranks.run(_slowed, 64)
    assert mine == theirs and spans == 50, "five kinds, once each"
    (group,) = mine.groups
    assert {c.kind: c.slowdown for c in group.costs if c.slowdown} == dict.fromkeys(
        ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"), 1.0
    )
    assert mine.slowdown_percent("all_gather", (0, 1)) == 100 and mine.slowdown_percent("send", (0, 1)) == 0


@pytest.mark.ranks
def test_where_one_host_has_too_few_cores_no_rank_measures_it(two_ranks: Ranks) -> None:
    """Found while it was written: a rank that measures alone waits for the others for ever."""
    for profile, spans in two_ranks.run(_slowed, 1):
        assert spans == 0 and not any(c.slowdown for g in profile.groups for c in g.costs)


@pytest.mark.ranks
def test_a_transfer_that_is_too_short_tells_nothing(two_ranks: Ranks) -> None:
    assert two_ranks.run(_short) == [(0.0, 3), (0.0, 3)]


def _short(rank: int, world_size: int) -> tuple[float, int]:
    issued = 0

    class Barrier:
        def issue(self) -> torch.Tensor:
            nonlocal issued
            issued += 1
            return torch.zeros(1)

        def finish(self, result: torch.Tensor) -> None:
            dist.barrier()

    return contention.slowdown(Barrier(), 1.0, torch.device("cpu"), 3, dist.barrier), issued


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_a_profile_names_the_backend_that_moves_the_tensors(backend: str | None) -> None:
    """A process group that was made without naming a backend is "undefined" to torch."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert "gloo" in _torch.device_backend(dist.group.WORLD, torch.device("cpu"))
        profile = calibrate(device="cpu", dtypes=(torch.float32,), sizes=(64,), repeats=1)
        assert "undefined" not in profile.name and "gloo" in profile.name
    finally:
        dist.destroy_process_group()


def test_command_needs_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "p.json")])
    assert result.exit_code != 0 and "torchrun" in result.output


def test_command_names_a_bad_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "p.json"), "--mesh", "2by2"])
    assert result.exit_code != 0 and "'2by2'" in result.output
