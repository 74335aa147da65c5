"""Our kernels down to a GPU's machine code, without a GPU: whether a launch fits, and what it waits for."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from inductor_passes.kernels.tiles import tiles_for
from tools.benchmarks.assemble import GENERATIONS, Assembled, Launch, assembled, launches

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

LAUNCHES = (
    {one: {launch.name: launch for launch in launches(one)} for one in GENERATIONS} if find_spec("triton") else {}
)
#: The one that most is tried for.
HOPPER = LAUNCHES.get(90, {})


def _asm(launch: Launch, generation: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Assembled:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    try:
        return assembled(launch, generation)
    except OSError as error:
        pytest.skip(f"this Triton has no assembler here: {error}")


@pytest.mark.parametrize(
    "case",
    [(name, 90) for name in HOPPER if "bf16" in name or name.startswith("unpack")]
    + [(name, 90) for name in ("gather + matmul, fp32, bias", "matmul + scatter, fp32", "reduce, fp32")]
    + [("gather + matmul, bf16", 80), ("matmul + scatter, bf16", 100)],
    ids=lambda case: f"{case[0]} sm_{case[1]}",
)
def test_a_launch_fits_its_device(case: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, generation = case
    launch, (shared, _) = LAUNCHES[generation][name], GENERATIONS[generation]
    one = _asm(launch, generation, tmp_path, monkeypatch)
    assert one.shared <= shared
    # A persistent kernel has one block per multiprocessor; a block's threads share 64 Ki registers.
    assert one.registers * launch.warps * 32 <= 65536
    # The page has the figures; they differ a little from one Triton to the next.
    assert one.spilled <= (512 if launch.matmul else 64)
    assert (one.tensor_cores > 0) == launch.matmul
    assert (one.waits > 0, one.releases > 0) == launch.messages


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_gathered_matrix_is_read_behind_its_flag(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton starts loads of a loop ahead of it: not ahead of the wait for the rows that they read."""
    one = _asm(HOPPER[f"gather + matmul, {dtype}"], 90, tmp_path, monkeypatch)
    first = one.ptx.find("cp.async.cg")
    assert 0 < one.first_wait < first
    # Between the flag and the loads all threads meet: one of them has read the flag.
    assert "bar.sync" in one.ptx[one.first_wait : first]


def test_wide_loads_and_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of peers come as numbers: the kernel says that they are aligned, and is believed."""
    gemm = _asm(HOPPER["gather + matmul, bf16"], 90, tmp_path, monkeypatch)
    assert all(", 0x10," in line for line in gemm.ptx.splitlines() if "cp.async.cg" in line)
    norm = _asm(HOPPER["all-reduce + norm, one shot, 8192 columns, bf16"], 90, tmp_path, monkeypatch)
    assert "ld.volatile.global.v4" in norm.ptx or "ld.global.cv.v4" in norm.ptx
    assert "st.global.v4" in norm.ptx


@pytest.mark.parametrize(
    ("shared", "stages"),
    [(227 << 10, 3), (163 << 10, 3), (99 << 10, 2), (48 << 10, 1)],
    ids=["H100", "A100", "L40S", "any"],
)
def test_as_many_stages_as_fit(shared: int, stages: int) -> None:
    tiles = tiles_for(torch.device("cuda"), torch.bfloat16, shared)
    assert tiles.stages == stages and stages * (tiles.m + tiles.n) * tiles.k * 2 <= max(shared, 48 << 10)
