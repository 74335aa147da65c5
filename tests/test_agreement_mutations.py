"""Every kind of change that the verifier's mutations make to a graph changes its digest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from inductor_passes.agreement.lines import Description, describe
from inductor_passes.agreement.roles import IncomparableError
from inductor_passes.ir.view import GraphView
from tests.support.verify_graphs import apply_order, random_program
from tests.support.verify_mutations import MUTATIONS, Case, inject
from tests.support.world import grouped_world as world_with_groups


@pytest.fixture(scope="module")
def programs() -> Iterator[tuple[dict[str, str], list[tuple[Any, Description]]]]:
    """Random programs with their descriptions."""
    with world_with_groups() as groups:
        made = []
        for seed in range(40):
            rng = random.Random(seed)
            program = random_program(rng, groups, length=18)
            apply_order(program.graph, program.legal_order(rng))
            made.append((program, describe(GraphView(program.graph), {}, 0, 8)))
        yield groups, made


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if not m.name.startswith("claim_")], ids=lambda m: m.name)
def test_every_change_of_a_graph_changes_its_digest(programs: Any, mutation: Any) -> None:
    groups, made = programs
    found = 0
    for attempts in range(2000):
        if found == 4:
            break
        program, before = made[attempts % len(made)]
        case = Case(program, groups, random.Random(attempts))
        if not inject(mutation, case):
            continue
        found += 1
        try:
            after = describe(GraphView(case.graph), {}, 0, 8)
        except (KeyError, IncomparableError):
            continue  # no graph that could be run
        assert (after.digest, after.literals.values) != (before.digest, before.literals.values)
    assert found


def test_a_copy_of_a_graph_has_its_digest(programs: Any) -> None:
    groups, made = programs
    for program, before in made:
        after = describe(GraphView(Case(program, groups, random.Random(0)).graph), {}, 0, 8)
        assert (after.digest, after.literals) == (before.digest, before.literals)
