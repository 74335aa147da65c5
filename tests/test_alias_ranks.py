"""Writes through one view and reads through another keep their order: on real ranks, through ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.alias_programs import VIEWS, differences
from tests.support.compiled import save_profile
from tests.support.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as pool:
        yield pool


@pytest.mark.parametrize("codegen", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", VIEWS)
def test_lists_of_views_and_what_is_written_through_them(ranks: Ranks, tmp_path, kind: str, codegen: str) -> None:
    # On a slow link whatever does not depend on a wait is put in front of it.
    profile = save_profile(tmp_path / "profile.json", 1e6, 1.0, 1e3, 0.0)
    options = {
        "inductor_passes.codegen": codegen,
        "inductor_passes.verify": "strict",
        "inductor_passes.cost_profile": profile,
    }
    assert ranks.run(differences, kind, options) == [[], []]
