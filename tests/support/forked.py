"""Processes that begin with torch and this package imported: forked from one that has done nothing else.

Importing takes four seconds of a processor. A process that forks has no threads and has computed nothing, so a child
finds what a fresh interpreter finds after its imports. What is read while torch is imported cannot be set later:
there are processes that fork for each of a few environments, and a process with other variables is started afresh
(``forks``).

For each environment there are two that fork: children of different ones have different seeds of their hashes, so what
depends on the order of a set differs between ranks, as it does in life.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.processes import collect_rarely

#: What is imported before the first child: what compiles, shards and sends.
PRELOADED = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "torch._inductor.fx_passes.fuse_attention",
    "torch.utils.cpp_extension",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed._functional_collectives",
    "torch._dynamo.dce_extra_outputs",
    "torch._export.passes.collect_tracepoints_pass",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.extern_node_serializer",
    "torch._inductor.fx_passes.efficient_conv_bn_eval",
    "torch._subclasses.schema_check_mode",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "inductor_passes.engine.hooks",
    "inductor_passes.engine.kernels",
    "inductor_passes.engine.passes",
    "inductor_passes.engine.pipeline",
    "inductor_passes.plugin",
    "inductor_passes.simple_fsdp",
    "inductor_passes.adoption",
    "inductor_passes.trace.collector",
)
#: Calls of torch that work out something once in a process, the same whatever it compiles: two seconds of a processor
#: in every child's first compilation otherwise. A torch that lacks one of them leaves it to the child.
_ONCE = (
    ("torch._inductor.codecache", "torch_key", ()),
    ("torch._inductor.codegen.common", "init_backend_registration", ()),
    ("torch._inductor.fx_passes.joint_graph", "lazy_init", ("cpu",)),
    ("torch._inductor.fx_passes.post_grad", "lazy_init", ()),
    ("torch._dynamo.backends.registry", "_lazy_import", ()),
)
#: Variables that may differ from those of the process that forks: they are read when they are needed.
LATE = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS", "TORCH_TRACE"}

_PR_SET_PDEATHSIG = 1
#: How often a child that is waited for is asked for again.
_POLL_S = 0.02


def die_with_parent() -> None:
    """This process ends when the one that started it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A forked process, with what is used of ``subprocess.Popen``."""

    def __init__(self, pid: int, parent: Forks) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; negative: the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: it lives after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            self.returncode = self._parent.ask(("status", self.pid))
            if self.returncode is None:
                if deadline is not None and time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("forked", timeout or 0.0)
                time.sleep(_POLL_S)
        return self.returncode


class Forks:
    """A process that forks others on demand.

    Args:
        variables: its environment, and that of its children.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forked", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._variables,
                start_new_session=True,
            )
        atexit.register(self.close)

    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, module: str, function: str, descriptor: int, log: str, variables: Mapping[str, str]) -> Child:
        """A child, leading a session of its own, that calls ``module.function(descriptor)`` and writes to ``log``."""
        late = {key: variables[key] for key in LATE if key in variables}
        return Child(self.ask(("fork", (module, function, log, late)), descriptor), self)

    def ask(self, request: object, descriptor: int | None = None) -> Any:
        """Send a request, with an open file; the answer."""
        socket.send_fds(self._socket, [pickle.dumps(request)], [] if descriptor is None else [descriptor])
        return pickle.loads(self._socket.recv(1 << 16))

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        self._process.kill()
        self._process.wait()


#: By environment and rank.
_forks: dict[tuple[int, int], Forks] = {}


def forks(rank: int, variables: Mapping[str, str], environments: Sequence[Mapping[str, str]]) -> Forks | None:
    """What forks this rank; None: a process with these variables has to be started afresh.

    Args:
        environments: those in which many ranks start.
    """
    number = next((i for i, one in enumerate(environments) if _fits(one, variables)), None)
    if number is None:
        return None
    which = number, rank % 2
    if which not in _forks or not _forks[which].alive():
        _forks[which] = Forks(environments[number])
    return _forks[which]


def _fits(own: Mapping[str, str], variables: Mapping[str, str]) -> bool:
    """Whether a process with these variables may be forked from one with its ``own``."""
    return {k for k in {*variables, *own} if variables.get(k) != own.get(k)} <= LATE


def _child(module: str, function: str, log: str, late: dict[str, str], descriptor: int) -> None:
    die_with_parent()
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(late)
    if not os.environ.get("TORCH_LOGS"):
        # Torch takes an empty one for a wrong one.
        os.environ.pop("TORCH_LOGS", None)
    if {"TORCH_LOGS", "TORCH_TRACE"} & late.keys():
        from torch._logging import _internal

        # Torch decides what is logged when it is imported; it opens the file of a trace with the first record.
        _internal.LOG_TRACE_HANDLER = None
        _internal._init_logs()
    getattr(importlib.import_module(module), function)(descriptor)


def _work_out_once() -> None:
    import torch

    for module, function, devices in _ONCE:
        with contextlib.suppress(ImportError, TypeError):
            if (call := getattr(importlib.import_module(module), function, None)) is not None:
                call(*map(torch.device, devices))


def _serve(descriptor: int) -> None:
    die_with_parent()
    for name in PRELOADED:
        # Some are not in every version of torch.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _work_out_once()
    collect_rarely()
    server = socket.socket(fileno=descriptor)
    ended: dict[int, int] = {}
    while True:
        message, files, *_ = socket.recv_fds(server, 1 << 16, 1)
        if not message:
            os._exit(0)
        kind, what = pickle.loads(message)
        if kind == "fork":
            pid = os.fork()
            if pid == 0:
                server.close()
                try:
                    _child(*what, files[0])
                except BaseException:
                    traceback.print_exc()
                os._exit(1)
            os.close(files[0])
            server.sendall(pickle.dumps(pid))
        else:
            with contextlib.suppress(ChildProcessError):
                found, status = os.waitpid(what, os.WNOHANG)
                if found:
                    ended[what] = os.waitstatus_to_exitcode(status)
            server.sendall(pickle.dumps(ended.get(what)))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
