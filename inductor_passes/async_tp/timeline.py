"""How long a region takes: list scheduling of its parts on a compute lane and a link.

The unit is an *instance*, one part of one member. The link serves collectives in issue order; a wait holds the compute
lane until its collective has ended. At every moment the next instance is a start that is ready, else a wait that costs
nothing, else compute of the earliest part, else the wait that ends first. With one part it is the region as it was, so
one function prices before and after (list scheduling: Graham, "Bounds on multiprocessing timing anomalies", 1969).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes.async_tp.region import Region
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView

Instance = tuple[torch.fx.Node, int]
"""(member, part)."""


@dataclass(frozen=True)
class Costs:
    """Durations in ns of one part of a member: on the compute lane (issue time for starts) and on the link."""

    compute_ns: Callable[[torch.fx.Node, int], int]
    link_ns: Callable[[torch.fx.Node], int]


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
    """Schedule ``parts`` parts of the region's members; O(instances^2) in the worst case, instances are few."""
    position = view.position
    wait_of = {c.waits[0]: c.start for c in region.collectives}
    left: dict[Instance, int] = {}
    after: dict[Instance, list[Instance]] = {}
    for node in region.cuts:
        sources = [i for i in region.needs[node] if i in region.cuts]
        for part in range(parts):
            cut_here = [i for i in sources if not region.reads_whole(node, i)]
            before = [(i, part) for i in cut_here]
            before += [(i, p) for i in sources if i not in cut_here for p in range(parts)]
            left[node, part] = len(before)
            for one in before:
                after.setdefault(one, []).append((node, part))
    ready = {one for one, count in left.items() if not count}
    now = link = work = 0
    ends: dict[Instance, int] = {}
    order: list[Instance] = []

    def rank(one: Instance) -> tuple[int, int, int, int]:
        node, part = one
        if view.role(node) is Role.START:
            return (0, 0, part, position[node])
        if node in wait_of:
            end = ends[wait_of[node], part]
            return (1, 0, part, position[node]) if end <= now else (3, end, part, position[node])
        return (2, 0, part, position[node])

    while ready:
        one = min(ready, key=rank)
        ready.remove(one)
        node, part = one
        if node in wait_of:
            now = max(now, ends[wait_of[node], part])
        else:
            spent = costs.compute_ns(node, part)
            now += spent
            work += spent
        if view.role(node) is Role.START:
            link = max(link, now) + costs.link_ns(node)
            ends[one] = link
        order.append(one)
        for follower in after.get(one, ()):
            left[follower] -= 1
            if not left[follower]:
                ready.add(follower)
    return Run(tuple(order), max(now, link), work)
