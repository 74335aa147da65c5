"""Random programs with lists of views and writes through their elements: the passes keep results, the verifier agrees.

More of them: ``python -m tests.test_view_programs FIRST COUNT``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.fx

from inductor_passes import verify
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.compilation import Known
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.report import Finding, Reason
from tests.support.verify_graphs import Program, apply_order
from tests.support.view_programs import random_view_program
from tools.fuzzing import cases, judging, running

RANKS = 4
PROGRAMS = 30
World = tuple[dict[str, str], dict[str, int]]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with cases.world(RANKS) as names:
        yield _named(names)


def _named(names: tuple[str, ...]) -> World:
    return dict(zip(("world", "a", "b"), names)), {"world": 4, "a": 2, "b": 2}


def _program(seed: int, world: World) -> tuple[Program, torch.fx.GraphModule, random.Random]:
    rng = random.Random(seed)
    program = random_view_program(rng, *world)
    return program, torch.fx.GraphModule(torch.nn.Module(), program.graph), rng


def _against(findings: list[Finding]) -> list[Finding]:
    """Findings that are not about what Inductor may do in place, which no order of a program excludes."""
    return [f for f in findings if judging.IN_PLACE not in f.message]


def legal_orders(seed: int, world: World) -> str:
    """What is wrong with the verifier's word on a program and two of its legal orders; "" when nothing is."""
    program, module, rng = _program(seed, world)
    inputs = running.inputs_of(module, RANKS)
    if found := _against(verify.check(program.graph)):
        return f"the program is refused: {found[0].rule}: {found[0].message}"
    expected = running.execute(module, inputs, "prompt")
    reference = verify.snapshot(program.graph)
    for timing in ("late", None):
        apply_order(program.graph, program.legal_order(rng))
        if found := _against(verify.check(program.graph, reference=reference)):
            return f"a legal order is refused: {found[0].rule}: {found[0].message}"
        if timing and (said := running.differs(expected, running.execute(module, inputs, timing))):
            return f"a legal order has other results: {said}"
    return ""


def passes(seed: int, world: World) -> tuple[str, bool]:
    """(what is wrong with what the passes make of a program, whether they changed it)."""
    _, module, rng = _program(seed, world)
    inputs = running.inputs_of(module, RANKS)
    expected = running.execute(module, inputs, "prompt")
    settings: dict[str, Any] = {"memory_budget": rng.choice(["0", "+20%", "unlimited"])}
    settings["redistribute"] = rng.choice(["off", "exact"])
    config = PassConfig(**settings)
    profile = CostProfile.default(rng.choice(["cpu", "cuda"]), ranks_per_host=rng.choice([1, 8]))
    report = run_passes(module.graph, passes_of(config), config, profile, known=Known("inference")).report
    for one in report.passes:
        if one.rolled_back in (Reason.EXCEPTION, Reason.VERIFIER) and judging.IN_PLACE not in one.detail:
            return f"pass {one.name} was undone: {one.detail}", False
    changed = any(one.changed and one.rolled_back is None for one in report.passes)
    for timing in ("prompt", "late") if changed else ():
        if said := running.differs(expected, running.execute(module, inputs, timing)):
            return f"other results ({timing}): {said}", True
    return "", changed


def test_the_verifier_knows_every_legal_order(world: World) -> None:
    for seed in range(PROGRAMS):
        assert legal_orders(seed, world) == "", f"program {seed}"


def test_the_passes_keep_results(world: World) -> None:
    changed = 0
    for seed in range(PROGRAMS, 2 * PROGRAMS):
        said, moved = passes(seed, world)
        assert said == "", f"program {seed}"
        changed += moved
    assert changed > PROGRAMS // 2


def _run(first: int, count: int) -> int:
    failures = 0
    with cases.world(RANKS) as names:
        for seed in range(first, first + count):
            for said in (legal_orders(seed, _named(names)), passes(seed, _named(names))[0]):
                failures += said != ""
                if said:
                    print(f"program {seed}: {said}", flush=True)
            judging.quiet()
    print(f"{count} programs, {failures} failures")
    return failures


if __name__ == "__main__":
    sys.exit(_run(int(sys.argv[1]), int(sys.argv[2])) > 0)
