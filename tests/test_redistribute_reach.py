"""What compiled redistributions cost, against the plans for them: no more, on every mesh that cuts evenly.

``tools/bench reach`` has all pairs, uneven ones too; here are those that were once above their plan.
"""

from __future__ import annotations

import logging

import pytest

from inductor_passes.redistribute.spec import Placement, placement
from tools.benchmarks.reach import measured

FLAT = (
    "S0,S0 S1,S1", "S0,S1 S1,S0", "R,S0 R,S1", "R,S0 S0,S0", "S0,S0 R,R", "P,S1 S0,S0", "S1,S0 R,S0", "P,R R,S0",
)  # fmt: skip
CUBE = ("S0,S0,S0 S1,S1,S1", "R,S0,S1 S0,S1,R", "S0,P,S1 S0,S1,R")
SHAPE = (3072, 1536)
#: What a collective costs the host counts: here one of more bytes is planned in the place of two.
MORE_BYTES = {(4, 4): {"P,S1 S0,S0 backward"}}


def placements(text: str) -> tuple[Placement, ...]:
    return tuple(placement(p) for p in text.split(","))


@pytest.mark.parametrize("mesh", [(2, 4), (4, 4), (2, 3), (2, 2, 2)], ids=str)
def test_compiled_redistributions_reach_their_plans(mesh: tuple[int, ...]) -> None:
    logging.getLogger("torch").setLevel(logging.ERROR)
    above, more = set(), set()
    for pair in FLAT if len(mesh) == 2 else CUBE:
        source, target = map(placements, pair.split())
        for row in measured(mesh, SHAPE, source, target, 0):
            if row.compiled.bytes > row.default.bytes:
                assert row.compiled.collectives < row.default.collectives, row
                more.add(f"{pair} {row.phase}")
            if row.compiled.worse_than(row.plan):
                above.add(f"{pair} {row.phase}")
    assert above == set() and more == MORE_BYTES.get(mesh, set())
