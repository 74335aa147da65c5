"""Measuring the live process groups and the device once, to plan with their real costs.

Every rank measures alike: sizes and repeats are fixed beforehand, so no rank leaves a loop that another is
still in. For each group layout and collective kind the median over repeats is taken per rank, then the
slowest rank's per layout (a collective is over when its last rank has it), then a line is fitted over the
sizes. The samples are exchanged before fitting, so that all ranks compute one and the same profile.

What runs are the functional collectives, as in compiled programs: they cost the host more than those of
``torch.distributed``. The host's share is what the collective costs the thread that computes: CPU time of
issuing and waiting. Where communication is moved by helper threads and the ranks use up the host's cores,
their CPU time is taken from compute too and counts as well. Elsewhere matmuls beside the largest message tell by how
much each kind slows kernels down (``contention``).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from inductor_passes import _torch
from inductor_passes.cost import contention
from inductor_passes.cost.communication import GroupLayout, message_bytes, wire_bytes
from inductor_passes.cost.fit import fit_line
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost, ProfileError
from inductor_passes.cost.roofline import Roofline, measure, synchronize
from inductor_passes.cost.specs import lookup

#: Of a message beside which matmuls are timed on an accelerator, whose links take smaller ones in no time.
_BESIDE_BYTES = 1 << 28
#: Bytes of the full message.
SIZES = tuple(1 << power for power in range(12, 23, 2))


@dataclass(frozen=True)
class Sample:
    """A collective's medians on one rank: ``link_ns`` after the host's work, ``host_ns`` of the compute thread.

    ``slowdown``: by what share kernels take longer beside it; 0.0 where that was not measured.
    """

    layout: GroupLayout
    kind: str
    input_bytes: int
    output_bytes: int
    link_ns: float
    host_ns: float
    slowdown: float = 0.0


Runner = Callable[[], None]


def calibrate(
    groups: Sequence[dist.ProcessGroup] | None = None,
    *,
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    sizes: Sequence[int] = SIZES,
    repeats: int = 7,
    ranks_per_host: int | None = None,
    name: str = "",
    timed: Callable[[Runner], int] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CostProfile:
    """Measure collectives on ``groups`` and compute on ``device``; the same profile on every rank.

    Call it on all ranks of the default group, each with its own groups in the same order.

    Args:
        groups: process groups that this rank belongs to; default: the default group.
        device: where tensors live.
        dtypes: of the matmuls.
        sizes: bytes of the full messages.
        repeats: samples per size.
        ranks_per_host: which global ranks share a host; default: as host names say.
        name: the profile's; default: made of device, world size and backend.
        timed: runs a collective on all ranks of the default group together and returns how long it took in ns;
            default: a barrier of the group and the wall clock.
        progress: called with the name of each thing that is about to be measured.

    Raises:
        ProfileError: hosts hold different numbers of ranks, or ranks of a host are not neighbours.
        RuntimeError: the default process group is not initialised.
    """
    device = torch.device(device)
    if not dist.is_initialized():
        raise RuntimeError("calibrate needs an initialised default process group; run it under torchrun")
    per_host = ranks_per_host if ranks_per_host is not None else hosts_from_names()
    crowded = _on_any_rank(device.type == "cpu" and per_host * torch.get_num_threads() >= (os.cpu_count() or 1))
    mine: list[Sample] = []
    backends: dict[GroupLayout, str] = {}
    for group in groups if groups is not None else [dist.group.WORLD]:
        layout = GroupLayout.of(tuple(dist.get_process_group_ranks(group)), per_host)
        backends[layout] = _torch.device_backend(group, device)
        for kind in _RUNNERS if layout.ranks > 1 else ():
            progress(f"{kind} on {layout.ranks} ranks")
            mine.extend(_measure_kind(kind, group, layout, device, sizes, repeats, crowded, timed))
    progress("compute")
    roofline = measure(device, dtypes, repeats)
    samples, shared, merged = _gathered(mine, roofline, backends)
    spec = lookup(_torch.device_name(device), device.type)
    return CostProfile(
        name=name or f"{spec.name}, {dist.get_world_size()} ranks, {', '.join(sorted(set(merged.values())))}",
        device=spec.name,
        measured=True,
        ranks_per_host=per_host,
        matmul=shared.matmul,
        memory_bytes_per_s=shared.bytes_per_s,
        kernel_ns=shared.kernel_ns,
        groups=group_costs(samples, merged),
        shapes=shared.shapes,
    )


def _on_any_rank(mine: bool) -> bool:
    """Hosts may differ; what is measured must not. All ranks call it together."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    return any(answers)


def _gathered(
    samples: list[Sample], roofline: Roofline, backends: dict[GroupLayout, str]
) -> tuple[list[Sample], Roofline, dict[GroupLayout, str]]:
    """All ranks' samples and backends, and the first rank's roofline; all ranks call it together."""
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (samples, roofline, backends))
    merged: dict[GroupLayout, str] = {}
    for _, _, of_rank in everything:
        merged.update(of_rank)
    return [sample for of_rank, _, _ in everything for sample in of_rank], everything[0][1], merged


def group_costs(samples: Sequence[Sample], backends: dict[GroupLayout, str]) -> tuple[GroupCost, ...]:
    """Lines fitted to all ranks' samples: the slowest rank's time per layout, kind and size."""
    result = []
    for layout in sorted({s.layout for s in samples}):
        costs = []
        for kind in _RUNNERS:
            worst: dict[tuple[int, int], tuple[float, float]] = {}
            for s in samples:
                if s.layout == layout and s.kind == kind:
                    key = (s.input_bytes, s.output_bytes)
                    link, host = worst.get(key, (0.0, 0.0))
                    worst[key] = (max(link, s.link_ns), max(host, s.host_ns))
            if not worst:
                continue
            wires = [float(wire_bytes(kind, i, o, layout.ranks)) for i, o in worst]
            fulls = [float(message_bytes(kind, i, o, layout.ranks)) for i, o in worst]
            alpha, beta = fit_line(wires, [link for link, _ in worst.values()])
            issue, issue_per_byte = fit_line(fulls, [max(1.0, host) for _, host in worst.values()])
            slowdown = max(s.slowdown for s in samples if s.layout == layout and s.kind == kind)
            costs.append(CollectiveCost(kind, alpha, beta, issue, issue_per_byte, slowdown))
            if kind == "send":
                costs.append(CollectiveCost("recv", alpha, beta, issue, issue_per_byte, slowdown))
        result.append(GroupCost(layout, backends.get(layout, ""), layout.link, tuple(costs)))
    return tuple(result)


def hosts_from_names() -> int:
    """Ranks per host, as host names say; all ranks call it together.

    Raises:
        ProfileError: hosts hold different numbers of ranks, or ranks of a host are not neighbours.
    """
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    per_host = next((i for i, n in enumerate(names) if n != names[0]), len(names))
    hosts = [names[i : i + per_host] for i in range(0, len(names), per_host)]
    regular = all(len(host) == per_host and len(set(host)) == 1 for host in hosts)
    if not regular or len({host[0] for host in hosts}) != len(hosts):
        raise ProfileError(f"hosts by rank are {names}; expected equally many neighbouring ranks on each host")
    return per_host


def _measure_kind(
    kind: str,
    group: dist.ProcessGroup,
    layout: GroupLayout,
    device: torch.device,
    sizes: Sequence[int],
    repeats: int,
    crowded: bool,
    timed: Callable[[Runner], int] | None,
) -> list[Sample]:
    samples = []
    for size in sizes:
        per_rank = max(1, size // 4 // layout.ranks)
        run, input_bytes, output_bytes, messages = _RUNNERS[kind](group, per_rank, device)
        try:
            run()
        except RuntimeError:
            # The backend lacks this collective, on every rank alike.
            return []
        times = [_sample(run, group, device, crowded, timed) for _ in range(repeats)]
        link = median(t[0] for t in times) / messages
        host = median(t[1] for t in times) / messages
        samples.append(Sample(layout, kind, input_bytes, output_bytes, link, host))
    if timed is None and not crowded:
        # An emulated link takes nothing from compute; what helper threads take is in ``host_ns`` where it counts.
        slowed = _slowdown(kind, group, layout, device, max(sizes), repeats)
        samples = [replace(one, slowdown=slowed) for one in samples]
    return samples


def _slowdown(
    kind: str, group: dist.ProcessGroup, layout: GroupLayout, device: torch.device, size: int, repeats: int
) -> float:
    """By what share a collective slows kernels down; 0.0 of one that is not issued apart from its wait."""
    if device.type != "cpu":
        size = max(size, _BESIDE_BYTES)
    run = _RUNNERS[kind](group, max(1, size // 4 // layout.ranks), device)[0]
    if not isinstance(run, _Functional):
        return 0.0
    link = median(_sample(run, group, device, False, None)[0] for _ in range(repeats))
    return contention.slowdown(run, link, device, repeats, lambda: dist.barrier(group))


def _sample(
    run: Runner,
    group: dist.ProcessGroup,
    device: torch.device,
    crowded: bool,
    timed: Callable[[Runner], int] | None,
) -> tuple[float, float]:
    """(ns on the link, ns that it took from the compute thread); their sum is what a blocking call takes."""
    host: list[int] = []

    def call() -> None:
        thread, process, wall = time.thread_time_ns(), time.process_time_ns(), time.perf_counter_ns()
        run()
        if device.type == "cpu":
            own = time.thread_time_ns() - thread
            host.extend((own, max(own, time.process_time_ns() - process) if crowded else own))
        else:
            host.extend([time.perf_counter_ns() - wall] * 2)
        synchronize(device)

    if timed is not None:
        elapsed = timed(call)
    else:
        dist.barrier(group)
        synchronize(device)
        begin = time.perf_counter_ns()
        call()
        elapsed = time.perf_counter_ns() - begin
    own, taken = host
    return float(max(1, elapsed - own)), float(taken)


# What each maker returns: the collective to run, its input and output bytes, messages in sequence.
_Made = tuple[Runner, int, int, int]


class _Functional:
    """Issues the functional collective ``name`` on ``message`` and waits for it."""

    def __init__(self, name: str, group: dist.ProcessGroup, message: torch.Tensor, *arguments: Any) -> None:
        self._start, self._wait = _torch.collective_op(name), _torch.collective_op("wait_tensor")
        self._arguments = message, *arguments, group.group_name

    def issue(self) -> torch.Tensor:
        result: torch.Tensor = self._start(*self._arguments)
        return result

    def finish(self, result: torch.Tensor) -> None:
        self._wait(result)

    def __call__(self) -> None:
        self.finish(self.issue())


def _all_gather(group: dist.ProcessGroup, count: int, device: torch.device) -> _Made:
    mine = torch.ones(count, device=device)
    run = _Functional("all_gather_into_tensor", group, mine, group.size())
    return run, 4 * count, 4 * count * group.size(), 1


def _reduce_scatter(group: dist.ProcessGroup, count: int, device: torch.device) -> _Made:
    full = torch.ones(count * group.size(), device=device)
    run = _Functional("reduce_scatter_tensor", group, full, "sum", group.size())
    return run, 4 * full.numel(), 4 * count, 1


def _all_reduce(group: dist.ProcessGroup, count: int, device: torch.device) -> _Made:
    full = torch.zeros(count * group.size(), device=device)
    # In place, as Inductor makes them where it can; zeros stay zeros.
    return _Functional("all_reduce_", group, full, "sum"), 4 * full.numel(), 4 * full.numel(), 1


def _all_to_all(group: dist.ProcessGroup, count: int, device: torch.device) -> _Made:
    source = torch.ones(count * group.size(), device=device)
    splits = [count] * group.size()
    run = _Functional("all_to_all_single", group, source, splits, splits)
    return run, 4 * source.numel(), 4 * source.numel(), 1


def _broadcast(group: dist.ProcessGroup, count: int, device: torch.device) -> _Made:
    full = torch.ones(count * group.size(), device=device)
    return _Functional("broadcast", group, full, 0), 4 * full.numel(), 4 * full.numel(), 1


def _ping_pong(group: dist.ProcessGroup, count: int, device: torch.device) -> _Made:
    """Neighbouring ranks send to and fro: two messages in sequence; the last of an odd number stays out."""
    full = torch.ones(count * group.size(), device=device)
    rank = dist.get_group_rank(group, dist.get_rank())
    partner = rank ^ 1

    def run() -> None:
        if partner >= group.size():
            return
        peer = dist.get_global_rank(group, partner)
        steps = (dist.send, dist.recv) if rank < partner else (dist.recv, dist.send)
        for step in steps:
            step(full, peer, group=group)

    return run, 4 * full.numel(), 4 * full.numel(), 2


_RUNNERS: dict[str, Callable[[dist.ProcessGroup, int, torch.device], _Made]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _ping_pong,
}
