"""The opaque operators on real ranks: against gather and matmul, matmul and scatter, alone and in a graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.settings.errors import ConfigError
from tests.support.async_tp_programs import BY_NAME, on_gloo, trace
from tests.support.bucket_graphs import check_fakes
from tests.support.ranks import Ranks
from tests.support.world import fake_world
from tests.test_async_tp_pass import link, run, small

pytestmark = pytest.mark.ranks


def _integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_ops(rank: int, world: int) -> int:
    """Both operators, all dtypes, numbers of parts and row counts that do not divide; returns how many cases."""
    import inductor_passes.async_tp.ops  # noqa: F401

    gathered_mm, mm_scattered = torch.ops.inductor_passes.gathered_mm, torch.ops.inductor_passes.mm_scattered
    name = dist.group.WORLD.group_name
    count = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        right = _integers((6, 5), 7, dtype)
        for rows in (1, 4, 7):
            shards = [_integers((rows, 6), r, dtype) for r in range(world)]
            lefts = [_integers((world * rows, 6), 10 + r, dtype) for r in range(world)]
            total = sum(left @ right for left in lefts)
            for parts in (1, 2, 3):
                found = gathered_mm(shards[rank], right, world, name, parts)
                assert torch.equal(found, torch.cat(shards) @ right)
                for op, scale in (("sum", 1), ("avg", world)):
                    found = mm_scattered(lefts[rank], right, op, world, name, parts)
                    assert torch.equal(found, total[rank * rows : (rank + 1) * rows] / scale), (dtype, rows, parts, op)
                    count += 1
    return count


def run_fused_graph(rank: int, world: int) -> tuple[bool, str]:
    """A traced program after the pass with ``lowering="op"``, executed on real ranks."""
    import tests.support.async_tp_programs as programs

    results = []
    text = ""
    for name in ("ag0_mm", "mm_rs0", "mm_rs0_avg", "mlp_with_bias"):
        program = programs.BY_NAME[name]
        gm = trace(program)
        values = programs.inputs(program, rank)
        expected = on_gloo(gm, values)[0]
        run(gm, link(32.0), mode="force", lowering="op")
        text += " | " + " ".join(
            n.target._opname for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "inductor_passes"
        )
        results.append(torch.equal(expected, on_gloo(gm, values)[0]))
    return all(results), text


@pytest.mark.parametrize("world", [2, 4])
def test_operators(world: int, request: pytest.FixtureRequest) -> None:
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world])
    assert ranks.run(check_ops) == [72] * world
    if world == 2:
        # The bias and the pair are for the other lowering.
        assert ranks.run(run_fused_graph) == [(True, " | gathered_mm | mm_scattered | mm_scattered | ")] * 2


def test_what_the_operators_do_not_understand_is_decomposed() -> None:
    with fake_world(2):
        gm = trace(BY_NAME["ag0_mm_and_output"])
        (decision,) = run(gm, link(32.0), mode="force", lowering="op", parts=(2,)).decisions
        check_fakes(gm)
    assert decision.detail.startswith("decompose") and small(gm).startswith("AG0 AG1 W0")


def test_lowering_is_checked() -> None:
    with pytest.raises(ConfigError, match="lowering"):
        AsyncTpPass(lowering="triton")  # type: ignore[arg-type]
