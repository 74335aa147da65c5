"""Two ranks with a real, slow link: two network namespaces of this machine, joined by a pair of virtual interfaces.

The token-bucket filter of ``tc`` limits the rate of both ends. Sockets, gloo and its threads are real; the processor is
idle while the link is busy, so overlap shows in the wall clock. Linux, needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tools.shared.launch import ROOT, environment_of_ranks

#: Messages near this size pass faster than the rate says.
BURST = "256kb"
_SUBNET = "10.213.78"


def unavailable() -> str:
    """Why this machine has no such link; "" when it has."""
    if sys.platform != "linux" or not all(map(shutil.which, ("ip", "tc"))):
        return "network namespaces need Linux with ip(8) and tc(8)"
    return "" if os.geteuid() == 0 else "making network namespaces needs root"


@contextlib.contextmanager
def hosts(mbit: float) -> Iterator[list[str]]:
    """Names of two namespaces that reach each other at ``mbit``; both are gone afterwards."""
    names = [f"wire{os.getpid()}-{host}" for host in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for host, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"{_SUBNET}.{host + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")
            shape = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{mbit:g}mbit", "burst", BURST]
            _ip("netns", "exec", name, "tc", *shape, "latency", "50ms")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def run(module: str, folder: str, mbit: float, timeout_s: float) -> tuple[int, str]:
    """Run ``module`` (its argument is ``folder``) as one rank in each namespace.

    Returns:
        The first exit status that is not 0 (-1: out of time) and the end of the output.
    """
    logs = [Path(folder, f"output{rank}.log") for rank in range(2)]
    with hosts(mbit) as names, contextlib.ExitStack() as files:
        ranks = []
        for rank, name in enumerate(names):
            environment = {
                **environment_of_ranks(),
                "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": f"{_SUBNET}.1", "MASTER_PORT": "29557",
                "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2",
            }
            output = files.enter_context(logs[rank].open("wb"))
            command = ["ip", "netns", "exec", name, sys.executable, "-m", module, folder]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT))
        end = time.monotonic() + timeout_s
        # One that failed never comes to the next collective, and the other would wait for it.
        while any(r.poll() is None for r in ranks) and not any(r.poll() for r in ranks) and time.monotonic() < end:
            time.sleep(0.2)
        late = all(r.poll() in (None, 0) for r in ranks) and any(r.poll() is None for r in ranks)
        for one in ranks:
            one.terminate()
        codes = [one.wait() for one in ranks]
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace")[-2000:] for log in logs)
    return (-1 if late else next((c for c in codes if c), 0)), tail
