"""The kernels under Triton's interpreter: several processes, shared memory, random delays, many epochs.

The interpreter runs a process's programs one after the other; it exercises the flags between processes, the order of
tiles and the arithmetic, not fences, caches or co-residency of a device.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import environment

pytest.importorskip("triton")

WORKER = "tests.support.async_tp_kernel_worker"


@pytest.mark.parametrize(("world", "epochs"), [(2, 3), (3, 1), (4, 1)])
def test_kernels(world: int, epochs: int, tmp_path: Path) -> None:
    file = tmp_path / "shared"
    file.write_bytes(bytes(16 * world * (1 << 16)))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", WORKER, str(rank), str(world), str(file), str(epochs)],
            env=environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + 120
    # A rank that failed raises no more flags: the others would spin for ever.
    while any(r.poll() is None for r in ranks) and not any(r.poll() for r in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
    answers = [rank.communicate() for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(err[-3000:] for _, err in answers)
    for out, _ in answers:
        assert out.split() == ["ok", str(7 * epochs)]
