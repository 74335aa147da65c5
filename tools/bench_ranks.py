"""Starting the ranks of a benchmark on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def environment_of_ranks() -> dict[str, str]:
    """One thread per rank, this project importable."""
    # AOTAutograd's cache does not see the names of process groups, which differ between the ranks of a 2-D mesh: one
    # rank would load what another has compiled for its own groups. The FX-graph cache sees them.
    environment = {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0", **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), environment.get("PYTHONPATH", "")]))
    return environment


def torchrun(script: str, folder: str, ranks: int, timeout_s: int) -> tuple[int, str]:
    """Run ``script`` (beside this file, its argument is ``folder``) on ``ranks`` ranks.

    Returns:
        Exit status (-1: out of time) and the end of the output.
    """
    environment = environment_of_ranks()
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    log = Path(folder, "output.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(HERE / script), folder], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            # Asked politely, torchrun ends its ranks; killed, it leaves them behind.
            process.terminate()
            process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")[-3000:]
