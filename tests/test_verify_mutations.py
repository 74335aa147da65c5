"""Every kind of illegal change is found, wherever it is made; see ``verify_mutations``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from inductor_passes import verify
from tests.support.verify_graphs import apply_order, random_program
from tests.support.verify_mutations import MUTATIONS, Case, inject
from tests.support.world import grouped_world

PROGRAMS = 40


@pytest.fixture(scope="module")
def programs():
    with grouped_world() as groups:
        made = []
        for seed in range(PROGRAMS):
            rng = random.Random(seed)
            program = random_program(rng, groups, length=18)
            reference = verify.snapshot(program.graph)
            apply_order(program.graph, program.legal_order(rng))
            made.append((program, reference))
        yield groups, made


@pytest.fixture
def injections(request) -> int:
    """How many per kind, spread over the programs: one for each, or with ``--slow`` two."""
    return PROGRAMS * (2 if request.config.getoption("slow") else 1)


def test_there_are_enough_kinds():
    assert len(MUTATIONS) >= 60 and len({m.name for m in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_illegal_change_is_found(programs, injections, mutation):
    groups, made = programs
    injected = attempts = 0
    while injected < injections:
        attempts += 1
        assert attempts < 40 * injections, f"{mutation.name} found only {injected} places"
        program, reference = made[attempts % PROGRAMS]
        case = Case(program, groups, random.Random(attempts))
        known = verify.Known()
        if injected % 4 == 0:
            verify.snapshot(case.graph, known=known)
        if not inject(mutation, case):
            continue
        injected += 1
        findings = verify.check(case.graph, reference=reference, certificates=case.certificates)
        found = {f.rule for f in findings}
        assert found & mutation.rules, f"{mutation.name}, attempt {attempts}: found {found}"
        if injected % 4 == 1:
            # What earlier looks found out about nodes hides nothing.
            again = verify.check(case.graph, reference=reference, certificates=case.certificates, known=known)
            assert again == findings
        if mutation.alone and injected % 4 == 0:
            alone = {f.rule for f in verify.check(case.graph)}
            assert alone & mutation.rules, f"{mutation.name}, attempt {attempts}, without reference: found {alone}"


@pytest.mark.parametrize("slack", [-1, 0])
def test_memory_budget(programs, slack):
    _, made = programs
    for program, _ in made:
        peak = verify.peak_bytes(program.graph)
        findings = verify.check(program.graph, memory_budget=peak + slack)
        assert [f.rule for f in findings] == (["memory"] if slack < 0 else [])


def test_the_docs_list_every_kind():
    text = (Path(__file__).parent.parent / "docs" / "inside" / "verifier.md").read_text()
    for mutation in MUTATIONS:
        rules, alone = ", ".join(sorted(mutation.rules)), "no" if mutation.alone else "yes"
        assert f"| `{mutation.name}` | {rules} | {alone} |" in text
