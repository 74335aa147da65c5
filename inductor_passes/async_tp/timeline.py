"""How long a region takes: list scheduling of its parts on a compute lane and a link.

The unit is an *instance*, one part of one member. The link serves collectives in issue order; a wait holds the compute
lane until its collective has ended. At every moment the next instance is a start that is ready, else a wait that costs
nothing, else compute of the earliest part, else the wait that ends first. With one part it is the region as it was, so
one function prices before and after (list scheduling: Graham, "Bounds on multiprocessing timing anomalies", 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes.async_tp.region import Region
from inductor_passes.ir.view import GraphView

Instance = tuple[torch.fx.Node, int]
"""(member, part)."""


@dataclass(frozen=True)
class Costs:
    """Durations in ns of a part (by number) of a member: on the compute lane (issue time for starts), on the link."""

    compute_ns: Callable[[torch.fx.Node, int], int]
    link_ns: Callable[[torch.fx.Node, int], int]


@dataclass(frozen=True)
class Run:
    """A simulated execution of a region.

    Attributes:
        order: all instances.
        makespan_ns: when compute lane and link are both done.
        compute_ns: time that the compute lane worked.
    """

    order: tuple[Instance, ...]
    makespan_ns: int
    compute_ns: int


def run(region: Region, view: GraphView, parts: int, costs: Costs) -> Run:
    """Schedule ``parts`` parts of the region's members; O(instances * log(instances))."""
    position = view.position
    wait_of = {c.waits[0]: c.start for c in region.collectives}
    starts = {c.start for c in region.collectives}
    left: dict[Instance, int] = {}
    after: dict[Instance, list[Instance]] = {}
    for node in region.cuts:
        sources = [i for i in region.needs[node] if i in region.cuts]
        whole = [i for i in sources if region.reads_whole(node, i)]
        cut_here = [i for i in sources if i not in whole]
        for part in range(parts):
            before = [(i, part) for i in cut_here]
            before += [(i, p) for i in whole for p in range(parts)]
            left[node, part] = len(before)
            for one in before:
                after.setdefault(one, []).append((node, part))
    now = link = work = 0
    ends: dict[Instance, int] = {}
    order: list[Instance] = []
    # By (part, position), and waits for what is still on its way by its end in front of these.
    issued: list[tuple[int, int, torch.fx.Node]] = []
    arrived: list[tuple[int, int, torch.fx.Node]] = []
    computed: list[tuple[int, int, torch.fx.Node]] = []
    arriving: list[tuple[int, int, int, torch.fx.Node]] = []

    def push(one: Instance) -> None:
        node, part = one
        if node in starts:
            heapq.heappush(issued, (part, position[node], node))
        elif node in wait_of:
            heapq.heappush(arriving, (ends[wait_of[node], part], part, position[node], node))
        else:
            heapq.heappush(computed, (part, position[node], node))

    def pop() -> Instance | None:
        while arriving and arriving[0][0] <= now:
            heapq.heappush(arrived, heapq.heappop(arriving)[1:])
        for heap in (issued, arrived, computed):
            if heap:
                part, _, node = heapq.heappop(heap)
                return node, part
        if not arriving:
            return None
        _, part, _, node = heapq.heappop(arriving)
        return node, part

    for one, count in left.items():
        if not count:
            push(one)
    while (taken := pop()) is not None:
        node, part = one = taken
        if node in wait_of:
            now = max(now, ends[wait_of[node], part])
        else:
            spent = costs.compute_ns(node, part)
            now += spent
            work += spent
        if node in starts:
            link = max(link, now) + costs.link_ns(node, part)
            ends[one] = link
        order.append(one)
        for follower in after.get(one, ()):
            left[follower] -= 1
            if not left[follower]:
                push(follower)
    return Run(tuple(order), max(now, link), work)
