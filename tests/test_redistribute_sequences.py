"""Collectives one after the other, of every kind, on every group: no rewrite fails on them, and all ranks agree.

A gather of what a reduction left equal on all ranks repeats it: no layout says that. R11 took
it for one, and failed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
import torch
import torch.fx

from inductor_passes.report import PassReport
from tests.support.redistribute_graphs import assert_equal_on_all_ranks, duplicate, group_ranks, rewritten
from tests.support.redistribute_programs import Program, settings_for
from tests.support.world import mesh_world

SHAPE = (2, 2)
RANKS = 4
ROWS = 1024
#: Kind, and the mesh dimensions of its group.
Step: TypeAlias = tuple[str, tuple[int, ...]]
Steps: TypeAlias = tuple[Step, ...]
SHORT = {"all_reduce": "AR", "all_gather_into_tensor": "AG", "reduce_scatter_tensor": "RS", "all_to_all_single": "A2A"}
STEPS: list[Step] = list(itertools.product(SHORT, ((0,), (1,), (0, 1))))
_DRAWN = random.Random(1)
LONGER: list[Steps] = [tuple(_DRAWN.choices(STEPS, k=_DRAWN.randint(3, 4))) for _ in range(100)]


def chained(steps: Steps, rank: int) -> torch.fx.GraphModule:
    """What a rank computes; row 0 of the mesh is ranks 0 and 1."""
    row, column = {rank // 2 * 2, rank // 2 * 2 + 1}, {rank % 2, rank % 2 + 2}
    members = {(0,): column, (1,): row, (0, 1): set(range(RANKS))}
    names = {frozenset(ranks): name for name, ranks in group_ranks().items()}
    program = Program((ROWS, 1))
    node = program.inputs[0]
    for kind, dims in steps:
        size = len(members[dims])
        rows = node.meta["val"].shape[0] // size
        given: dict[str, tuple[object, ...]] = {
            "all_reduce": ("sum",),
            "all_gather_into_tensor": (size,),
            "reduce_scatter_tensor": ("sum", size),
            "all_to_all_single": ([rows] * size, [rows] * size),
        }
        node = program.collective(kind, node, *given[kind], names[frozenset(members[dims])])
    return torch.fx.GraphModule(torch.nn.Module(), program.output(node))


class Found:
    """Of one program, by rank: before, after, reports, groups."""

    def __init__(self) -> None:
        self.before: dict[int, torch.fx.GraphModule] = {}
        self.after: dict[int, torch.fx.GraphModule] = {}
        self.groups: dict[int, dict[str, tuple[int, ...]]] = {}
        self.reports: list[PassReport | Exception] = []


@pytest.fixture(scope="module")
def found() -> Iterator[dict[Steps, Found]]:
    programs: dict[Steps, Found] = {steps: Found() for steps in (*itertools.product(STEPS, STEPS), *LONGER)}
    settings: Any = settings_for()
    for rank in range(RANKS):
        with mesh_world(SHAPE, rank):
            for steps, one in programs.items():
                one.before[rank] = chained(steps, rank)
                one.after[rank] = duplicate(one.before[rank])
                one.groups[rank] = group_ranks()
                try:
                    one.reports.append(rewritten(one.after[rank], settings, "reassociate"))
                except Exception as error:
                    one.reports.append(error)
    yield programs


def checked(one: Found) -> None:
    for report in one.reports:
        assert isinstance(report, PassReport) and report.rolled_back is None, report
    assert_equal_on_all_ranks(one.before, one.after, one.groups)


def named(steps: Steps) -> str:
    return " ".join(SHORT[kind] + "".join(map(str, dims)) for kind, dims in steps)


@pytest.mark.parametrize("steps", itertools.product(STEPS, STEPS), ids=named)
def test_two_collectives(found: dict[Steps, Found], steps: Steps) -> None:
    checked(found[steps])


@pytest.mark.parametrize("part", range(10))
def test_more_collectives(found: dict[Steps, Found], part: int) -> None:
    for steps in LONGER[part::10]:
        checked(found[steps])
