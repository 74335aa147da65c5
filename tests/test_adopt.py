"""An adopted model trains as the wrapped one that it was: layouts, precisions, accumulation, odd parameters."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.support import wrapped
from tests.support.device import ON_CPU
from tests.support.ranks import Ranks
from tests.support.wrapped import compare, compare_planned

pytestmark = pytest.mark.ranks

TWO = [
    wrapped.flat,
    wrapped.sharded,
    wrapped.kept,
    wrapped.half,
    wrapped.fp16,
    wrapped.narrow,
    wrapped.listed,
    wrapped.ignoring,
    wrapped.frozen,
    wrapped.second_dim,
    wrapped.replicated,
    wrapped.divided,
    wrapped.ddp,
]
FOUR = [wrapped.sharded, wrapped.hybrid, wrapped.tensor_parallel, wrapped.fewer_ranks, wrapped.ddp]


def _name(value: Any) -> str:
    return value.__name__


def _same(found: list[tuple[float, float]], rounding: float = 0.0) -> None:
    assert all(off <= rounding and worst <= rounding for off, worst in found), found


def _rounding(wrap: Any) -> float:
    """What is gathered along another dimension is a view: some processors' matrix products round otherwise then."""
    return 1e-6 if wrap is wrapped.second_dim else 0.0


@pytest.mark.parametrize("wrap", TWO, ids=_name)
def test_two_ranks_train_bit_for_bit_as_before(two_ranks: Ranks, wrap: Any) -> None:
    _same(two_ranks.run(compare, wrap), _rounding(wrap))


@pytest.mark.parametrize("wrap", TWO, ids=_name)
def test_gradients_of_several_batches_are_reduced_once(two_ranks: Ranks, wrap: Any) -> None:
    _same(two_ranks.run(compare, wrap, wrapped.Net, None, 3), _rounding(wrap))


@pytest.mark.parametrize("wrap", FOUR, ids=_name)
@pytest.mark.parametrize("parts", [1, 2])
def test_four_ranks_train_as_before(four_ranks: Ranks, wrap: Any, parts: int) -> None:
    """Four numbers have several sums."""
    _same(four_ranks.run(compare, wrap, wrapped.Net, None, parts), 1e-6)


@pytest.mark.parametrize("wrap", [wrapped.sharded, wrapped.ddp], ids=_name)
def test_fifty_steps(two_ranks: Ranks, wrap: Any) -> None:
    _same(two_ranks.run(compare, wrap, wrapped.Net, None, 1, 50))


@pytest.mark.parametrize("parts", [1, 2])
def test_experts_on_a_mesh_of_their_own(four_ranks: Ranks, parts: int) -> None:
    _same(four_ranks.run(compare, wrapped.expert_parallel, wrapped.Mixture, None, parts), 1e-6)


@pytest.mark.parametrize("make", [wrapped.Tied, wrapped.Shared, wrapped.Norms], ids=_name)
@pytest.mark.parametrize("wrap", [wrapped.flat, wrapped.ddp], ids=_name)
@pytest.mark.parametrize("parts", [1, 2])
def test_parameters_that_are_read_twice_and_statistics(
    two_ranks: Ranks, make: type[nn.Module], wrap: Any, parts: int
) -> None:
    if make is wrapped.Norms and wrap is wrapped.flat:
        # Each rank has statistics of its own, so this compares with itself.
        assert two_ranks.run(compare, wrap, make, None, parts)[0] == (0.0, 0.0)
        return
    # In one graph each read is reduced by itself, and the parts are added.
    rounding = 0.0 if make is wrapped.Norms or (wrap is wrapped.ddp and parts > 1) else 1e-6
    _same(two_ranks.run(compare, wrap, make, None, parts), rounding)


@pytest.mark.parametrize("wrap", [wrapped.sharded, wrapped.kept, wrapped.half, wrapped.ddp], ids=_name)
@pytest.mark.parametrize("parts", [1, 2])
def test_compiled_with_our_passes(two_ranks: Ranks, wrap: Any, parts: int) -> None:
    """Shards are uneven: also where a graph returns them or whole gradients, ranks agree and buckets form."""
    for differences, said, merged in two_ranks.run(compare_planned, wrap, parts):
        # The compiled graph has Inductor's decompositions, which round differently from eager.
        # On GPUs it also keeps values in float32 that eager rounds to bfloat16.
        assert max(differences) <= ((2e-3 if ON_CPU else 2e-2) if wrap is wrapped.half else 1e-6), differences
        # DDP's parameters are whole: a graph whose gradients are held has no collectives.
        assert not said and (merged or (wrap is wrapped.ddp and parts > 1)), (said, merged)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_that_are_empty_on_some_ranks(request: pytest.FixtureRequest, ranks: int) -> None:
    """They make no other graph: ranks agree, and buckets form."""
    pool: Ranks = request.getfixturevalue("two_ranks" if ranks == 2 else "four_ranks")
    for differences, said, merged in pool.run(compare_planned, wrapped.sharded, 1, wrapped.Gated):
        # The last block runs twice: its gradients are added after they are reduced.
        assert max(differences) <= 1e-5, differences
        assert not said and merged, (said, merged)


@pytest.mark.parametrize("wrap", [wrapped.sharded, wrapped.half, wrapped.ddp], ids=_name)
@pytest.mark.parametrize("parts", [1, 2])
def test_compiled_without_our_passes(two_ranks: Ranks, wrap: Any, parts: int) -> None:
    _same(two_ranks.run(compare, wrap, wrapped.Net, "aot_eager", parts))
