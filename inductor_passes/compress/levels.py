"""A group over hosts and devices as two levels: the ranks of each host, and those at the same place on every host.

What is narrowed between hosts only needs a process group for either level. None is made here: a mesh of hosts by
devices has made both, on all of its ranks alike. Hosts are those of the cost profile.
"""

from __future__ import annotations

from dataclasses import dataclass

from inductor_passes import _torch
from inductor_passes.compress.refused import RefusedError
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.groups import Group, resolve
from inductor_passes.ir.view import Collective
from inductor_passes.report import Reason


@dataclass(frozen=True)
class Levels:
    """The two levels of a group, as this rank belongs to them.

    Attributes:
        inside: the group's ranks on this rank's host.
        between: its ranks at this rank's place on every host.
        by_host: the flat group counts host by host; otherwise place by place.
    """

    inside: Group
    between: Group
    by_host: bool


def spans_levels(collective: Collective, profile: CostProfile) -> bool:
    """Whether a group has several hosts and several ranks on one of them."""
    layout = profile.layout(collective.group.ranks)
    return layout.hosts > 1 and layout.ranks_on_host > 1


def levels_of(collective: Collective, profile: CostProfile) -> Levels:
    """The two levels of a group that :func:`spans_levels`.

    Raises:
        RefusedError: it has none, or a process group is missing; the detail says which.
    """
    if not isinstance(collective.group_argument, str):
        raise RefusedError(Reason.DIFFERENT_GROUP, "the graph looks its process groups up when it runs")
    ranks, here = collective.group.ranks, _torch.process_rank()
    hosts: dict[int, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(rank // profile.ranks_per_host, []).append(rank)
    if len({len(one) for one in hosts.values()}) != 1:
        said = ", ".join(str(len(one)) for one in hosts.values())
        raise RefusedError(Reason.DIFFERENT_GROUP, f"hosts hold different numbers of its ranks: {said}")
    rows = [tuple(one) for one in hosts.values()]
    inside = next((row for row in rows if here in row), None)
    if inside is None:
        raise RefusedError(Reason.DIFFERENT_GROUP, f"rank {here} is none of its ranks")
    columns = list(zip(*rows, strict=True))
    between = columns[inside.index(here)]
    by_host = ranks == tuple(rank for row in rows for rank in row)
    if not by_host and ranks != tuple(rank for column in columns for rank in column):
        raise RefusedError(Reason.DIFFERENT_GROUP, "its order is neither host by host nor place by place")
    return Levels(_existing(inside, "on one host"), _existing(between, "at one place of every host"), by_host)


def _existing(ranks: tuple[int, ...], which: str) -> Group:
    """The process group of exactly these ranks, in this order."""
    name = _torch.group_name_of(ranks)
    found = None if name is None else resolve(name)
    if found is None or found.ranks != ranks:
        missing = f"no process group of the {len(ranks)} ranks {which}: {list(ranks)}"
        raise RefusedError(
            Reason.DIFFERENT_GROUP, missing, "init_device_mesh(device, (hosts, ranks on a host)) before compiling"
        )
    return found
