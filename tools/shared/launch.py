"""Starting modules of this project in processes of their own, from whatever folder."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_IFF_LOOPBACK = 0x8


def environment() -> dict[str, str]:
    """This process's, with this project importable first, and ours not switched on from outside."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # The variable would switch us on in the contenders that run without us.
    kept = {name: value for name, value in os.environ.items() if name != "INDUCTOR_PASSES"}
    return {**kept, "PYTHONPATH": path}


def environment_of_ranks() -> dict[str, str]:
    """One thread per rank, this project importable, gloo on the loopback interface.

    Raises:
        ValueError: GLOO_SOCKET_IFNAME names no interface.
    """
    interface = loopback(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    network = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    # AOTAutograd's cache does not see the names of process groups, which differ between the ranks of a 2-D mesh: one
    # rank would load what another has compiled for its own groups. The FX-graph cache sees them.
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Torch's flight recorder holds the code that made the last collectives, also of graphs that are gone otherwise.
    kept = {"TORCH_FR_BUFFER_SIZE": "0"}
    return {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0", **kept, **environment(), **threads, **network}


def loopback(wanted: str, system: Path = Path("/sys/class/net")) -> str:
    """The interface for gloo: ``wanted``, else the loopback interface; "" lets gloo choose.

    Raises:
        ValueError: ``wanted`` is no interface of this machine.
    """
    known = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    if wanted:
        if known and not set(wanted.split(",")) <= known:
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={wanted!r} is no network interface; expected one of {', '.join(sorted(known))}, "
                "or unset it"
            )
        return wanted
    for flags in sorted(system.glob("*/flags")):
        with contextlib.suppress(OSError, ValueError):
            if int(flags.read_text(), 16) & _IFF_LOOPBACK:
                return flags.parent.name
    return ""


#: Status of a job that was ended because it took too long.
OUT_OF_TIME = -1


def torchrun(module: str, folder: str, ranks: int, timeout_s: int) -> tuple[int, str]:
    """Run ``module`` (its argument is ``folder``) on ``ranks`` ranks.

    Returns:
        Exit status (:data:`OUT_OF_TIME` where it took longer) and the end of the output.
    """
    variables = environment_of_ranks()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    log = Path(folder, "output.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "-m", module, folder], cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = OUT_OF_TIME
        finally:
            # Asked politely, torchrun ends its ranks; killed, it leaves them behind.
            process.terminate()
            process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")[-3000:]
