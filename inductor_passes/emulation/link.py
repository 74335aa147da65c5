"""A process group on one machine whose collectives take as long as on a link of your choice.

Data travels with gloo over loopback, so results are right; each ``Work`` makes its waiter sleep until the
collective would have arrived on the emulated link (``link_model``). Transfers progress without the compute
thread, as on a network card. Use it to test and to show overlap without a cluster:

    import inductor_passes.emulation.link as emulated_link
    emulated_link.register()
    dist.init_process_group("emulated")          # under torchrun, one machine
    emulated_link.set_rate(latency_ns=200_000, bytes_per_s=75e6)
    with emulated_link.step_clock() as clock:
        loss = step()
    print(clock.time.wall_ns, clock.time.exposed_ns)

Every collective is logged with its issue, its begin and end on the link, and its wait. The real transfer must
be faster than the emulated one; ``StepTime.violations`` counts where it was not.

Environment (read by :func:`register`): ``EMULATED_LINK_LATENCY_NS``, ``EMULATED_LINK_BYTES_PER_S`` for all
links, ``EMULATED_LINK_INTRA_...`` / ``EMULATED_LINK_INTER_...`` for one, and ``EMULATED_LINK_RANKS_PER_HOST``
(default: all ranks on one host, so that every group uses the link ``intra``).

Limits: all ranks on one Linux machine; CPU tensors; a wait through a ``Future`` sleeps but is not logged; a send is
over for the sender when its own link has served it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from inductor_passes import _torch
from inductor_passes.cost.communication import INTER, INTRA
from inductor_passes.emulation.group import BACKEND, EmulatedGroup, LinkState
from inductor_passes.emulation.link_model import Message, Rate, Record, StepClock

__all__ = [
    "BACKEND",
    "EmulatedGroup",
    "log",
    "now_ns",
    "ranks_per_host",
    "register",
    "set_rate",
    "step_clock",
    "timed",
    "watch",
]

_ENV = "EMULATED_LINK_"


def _rate_from_env(environ: Mapping[str, str], link: str) -> Rate:
    def value(name: str, default: str) -> str:
        return environ.get(f"{_ENV}{link.upper()}_{name}", environ.get(_ENV + name, default))

    latency, bandwidth = value("LATENCY_NS", "0"), value("BYTES_PER_S", "inf")
    try:
        return Rate(int(float(latency)), float(bandwidth))
    except ValueError as error:
        raise ValueError(
            f"{_ENV}LATENCY_NS={latency} or {_ENV}BYTES_PER_S={bandwidth} is not allowed: {error}"
        ) from None


_state: LinkState | None = None
_library: torch.library.Library | None = None


def _current() -> LinkState:
    if _state is None:
        raise RuntimeError("the emulated link is not registered; call inductor_passes.emulation.link.register() first")
    return _state


def register() -> None:
    """Make ``dist.init_process_group("emulated")`` known. Call it on the thread that computes; twice is harmless."""
    global _state, _library
    if _state is not None:
        return
    _state = LinkState(
        {name: _rate_from_env(os.environ, name) for name in (INTRA, INTER)},
        int(os.environ.get(_ENV + "RANKS_PER_HOST", "0")),
    )
    dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])
    # These two call the group through a C++ method that a Python process group cannot override before 2.14.
    _library = torch.library.Library("_c10d_functional", "IMPL")
    _library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, "CPU")
    _library.impl("reduce_scatter_tensor_out", _reduce_scatter_tensor_out, "CPU")


def set_rate(latency_ns: int = 0, bytes_per_s: float = float("inf"), link: str | None = None) -> None:
    """Set what a link (default: all) does from now on. Call it on all ranks alike, with nothing in flight."""
    links = _current().links
    if link is not None and link not in links:
        raise ValueError(f"link is {link!r}; expected one of {', '.join(links)}")
    for name in links if link is None else (link,):
        links[name].rate = Rate(latency_ns, bytes_per_s)


def ranks_per_host() -> int | None:
    """How many neighbouring ranks count as one host; None: all."""
    return _current().ranks_per_host or None


def log() -> list[Record]:
    """All collectives since the last step began, in issue order."""
    return list(_current().log)


def now_ns() -> int:
    """The virtual clock of this rank, which other load on the machine does not move; it has no known beginning."""
    return _current().clock.now_ns()


def step_clock() -> StepClock:
    """A clock for ``with``; all ranks enter together. See :class:`StepClock`.

    Raises:
        RuntimeError: more than one intra-op thread: the clock counts the CPU time of one.
    """
    state = _current()
    if torch.get_num_threads() != 1:
        raise RuntimeError(
            f"the step clock counts one thread's CPU time, but torch uses {torch.get_num_threads()}; "
            "call torch.set_num_threads(1) or set OMP_NUM_THREADS=1"
        )
    group = dist.group.WORLD
    if not isinstance(group, EmulatedGroup):
        raise RuntimeError(f"the default process group is {group}; expected one of backend {BACKEND!r}")
    return StepClock(state.clock, state.links.values(), state.log, group.align)


@contextlib.contextmanager
def watch() -> Iterator[list[Message]]:
    """What every collective of a ``with`` block carries, in order of issue: to see which tensors travel.

    Copies cost time and memory, so do not measure in such a block.
    """
    state = _current()
    messages: list[Message] = []
    state.watched = messages
    try:
        yield messages
    finally:
        state.watched = None


def timed(run: Callable[[], None]) -> int:
    """Virtual ns that ``run`` takes when all ranks start it together; a clock for ``calibrate`` under load."""
    with step_clock() as clock:
        run()
    return clock.time.virtual_ns


def _make_group(options: Any, _backend_options: Any) -> EmulatedGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return EmulatedGroup(
        _current(),
        options.store,
        options.group_rank,
        options.group_size,
        str(options.group_id),
        ranks,
        options.timeout,
    )


def _all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    group = _torch.process_group(group_name)
    method = _torch.group_method(group, "all_gather_single", "_allgather_base")
    _torch.register_work(out, method(out, input.contiguous(), c10d.AllgatherOptions()))
    return out


def _reduce_scatter_tensor_out(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    group = _torch.process_group(group_name)
    method = _torch.group_method(group, "reduce_scatter_single", "_reduce_scatter_base")
    options = dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, reduce_op.upper())
    _torch.register_work(out, method(out, input.contiguous(), options))
    return out
