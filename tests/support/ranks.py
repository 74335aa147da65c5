"""Real ranks for tests: processes of their own, joined by gloo over loopback.

``run_ranks(fn, world_size, *args)`` starts ``world_size`` processes, calls ``fn(rank, world_size, *args)`` in
each of them with the default process group initialised, and returns the results by rank. ``fn`` must be a
module-level function of an importable module, and its arguments and results must be picklable.

Unless unusual variables are asked for, the processes are forked with torch imported (``forked``). Starting one
still costs more than running a check: a test file that has several checks keeps one :class:`Ranks` open (a
module-scoped fixture) and calls :meth:`Ranks.run` per check. A pool that lost a rank to an error or a timeout starts
again on the next call, so that one failing test does not take the others with it. Ranks compile their C++ kernels
together (``joint_kernels``).
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.device import BACKEND, VARIABLES, take_device
from tests.support.forked import LATE, Child, die_with_parent, forks
from tests.support.processes import LIMIT_S, collect_rarely, environment

#: How long the other ranks may go on after one has failed: long enough to report an error of their own.
GRACE_S = 3.0

#: A rank whose pool was killed while it waits for another rank ends by itself after this long.
COLLECTIVE_LIMIT = datetime.timedelta(minutes=30)

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
    "HF_HUB_OFFLINE": "1",
    # Beside other load one of four ranks may need more than the 10 s that the others wait for it by default.
    "INDUCTOR_PASSES_RANK_AGREEMENT": "60s",
}
if sys.platform == "linux":
    _ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"
#: What ranks inherit: variables as they were before a test, or a library that a test imports, set others.
_PLAIN = environment(**_ENVIRONMENT)
#: Environments in which many ranks start, so that it pays to fork them.
FORKED = (_PLAIN, {**_PLAIN, "TRITON_INTERPRET": "1"})


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; the message holds every rank's traceback or output."""


class Ranks:
    """A pool of ``world_size`` processes, one per rank; a context manager.

    Args:
        world_size: number of ranks.
        backend: backend of the default process group.
        setup: module-level function called as ``setup(rank, world_size)`` in a fresh process before the
            process group is made, e.g. to register a backend.
        env: environment variables of the processes, on top of those with which this process began.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = BACKEND,
        setup: Callable[[int, int], None] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.world_size = world_size
        self._backend = backend
        self._setup = setup
        self._env = {**VARIABLES, **(env or {})}
        self._resources = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes] | Child] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._logs: list[str] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = LIMIT_S) -> list[Any]:
        """``fn(rank, world_size, *args)`` on every rank; the results by rank.

        Raises:
            RankError: a rank raised, died or took longer than ``timeout`` seconds.
        """
        if fn.__module__ == "__main__":
            raise ValueError(f"{fn.__qualname__} lives in __main__; ranks import functions of modules")
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            # A rank that has already died shows up as the end of its pipe below, with its output.
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(pickle.dumps((fn, args)))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = multiprocessing.connection.wait(open_pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                answers[rank] = self._receive(rank)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(answers) == self.world_size and all(ok for ok, _ in answers.values()):
            # Gloo wakes up a hundred times a second for every process group that was ever made: an idle pool with
            # many of them took a third of a processor.
            self._signal(signal.SIGSTOP)
            return [answers[rank][1] for rank in range(self.world_size)]
        raise RankError(self._failure(fn.__qualname__, answers, timeout))

    def close(self) -> None:
        """End the processes that this pool started, and their children."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._resources.close()
        self._processes, self._pipes, self._logs = [], [], []

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all ranks and their children."""
        for process in self._processes:
            # Each rank leads its own session, so this reaches its compile workers and nobody else.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _start(self) -> None:
        folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="ranks_"))
        for rank in range(self.world_size):
            ours, theirs = multiprocessing.Pipe()
            log = os.path.join(folder, f"rank{rank}.log")
            with theirs:
                self._processes.append(self._process(rank, theirs.fileno(), log))
            self._pipes.append(ours)
            self._logs.append(log)
            ours.send((rank, self.world_size, os.path.join(folder, "store"), self._backend, list(sys.path)))
            ours.send_bytes(pickle.dumps(self._setup))

    def _process(self, rank: int, descriptor: int, log: str) -> subprocess.Popen[bytes] | Child:
        late = {key: os.environ[key] for key in LATE if key in os.environ}
        variables = {**_PLAIN, **late, **self._env}
        with open(log, "wb") as output:
            if (found := forks(rank, variables, FORKED)) is not None:
                return found.start(__name__, "serve", descriptor, log, variables)
            return subprocess.Popen(
                [sys.executable, "-m", __name__, str(descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[descriptor],
                env=variables,
                start_new_session=True,
            )

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            ok, payload = pickle.loads(self._pipes[rank].recv_bytes())
            return bool(ok), payload
        except (EOFError, ConnectionResetError):
            return False, f"died with exit status {self._processes[rank].wait()}\n{self._tail(rank)}"

    def _tail(self, rank: int) -> str:
        with open(self._logs[rank], errors="replace") as log:
            return log.read()[-4000:]

    def _failure(self, name: str, answers: dict[int, tuple[bool, Any]], timeout: float) -> str:
        lines = [f"{name} failed on {self.world_size} ranks"]
        for rank in range(self.world_size):
            if rank not in answers:
                state = f"did not answer (limit {timeout:g} s, or another rank failed)\n{self._tail(rank)}"
            else:
                ok, payload = answers[rank]
                state = "finished" if ok else str(payload)
            lines.append(f"--- rank {rank}: {state}")
        self.close()
        return "\n".join(lines)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = LIMIT_S,
    backend: str = BACKEND,
    setup: Callable[[int, int], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """``fn(rank, world_size, *args)`` on fresh ranks; the results by rank. Options: :class:`Ranks`."""
    with Ranks(world_size, backend=backend, setup=setup, env=env) as ranks:
        return ranks.run(fn, *args, timeout=timeout)


def serve(descriptor: int) -> None:
    """A rank's main loop: take (function, arguments), answer (ok, result), until the pipe closes."""
    # A rank that is stopped would not notice that its pipe was closed.
    die_with_parent()
    pipe = multiprocessing.connection.Connection(descriptor)
    rank, world_size, store, backend, path = pipe.recv()
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    take_device(rank, world_size)
    setup = pickle.loads(pipe.recv_bytes())
    if setup is not None:
        setup(rank, world_size)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=COLLECTIVE_LIMIT
    )
    from tests.support.joint_kernels import kernels_together

    collect_rarely()
    with kernels_together():
        _answer(pipe, rank, world_size)


def _answer(pipe: multiprocessing.connection.Connection, rank: int, world_size: int) -> None:
    import torch

    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            # The pool is gone and so are its other ranks: nothing that a graceful shutdown could wait for.
            os._exit(0)
        try:
            fn, args = pickle.loads(request)
            answer = pickle.dumps((True, fn(rank, world_size, *args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        pipe.send_bytes(answer)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
