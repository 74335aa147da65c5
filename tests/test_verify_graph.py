"""Rules over single FX graphs, and legal reorders of them."""

from __future__ import annotations

import random

import pytest
from verify_graphs import apply_order, fake_world, random_program

from inductor_passes import verify


@pytest.fixture(scope="module")
def groups():
    with fake_world() as names:
        yield names


def test_random_programs_and_their_legal_orders_have_no_findings(groups):
    for seed in range(60):
        rng = random.Random(seed)
        program = random_program(rng, groups)
        reference = verify.snapshot(program.graph)
        assert verify.check(program.graph) == []
        for _ in range(5):
            apply_order(program.graph, program.legal_order(rng))
            assert verify.check(program.graph, reference=reference) == []
