"""Settings of FSDP2 and DDP that adopted models take: changed after adoption, or given when they were wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from inductor_passes import adopt
from inductor_passes.operators import CollectiveKind
from inductor_passes.trace.collector import collect
from tests.support import wrapped
from tests.support.ranks import Ranks
from tests.support.world import fake_world
from tests.support.wrapped import Net, compare, sharded

PLANNED = {"inductor_passes.codegen": "aot_eager", "inductor_passes.rank_agreement": "trust"}


def gathers(step: Any) -> dict[str, int]:
    """Gathered parameters by phase of the graphs that a step compiles; empty where it compiles none."""
    with collect(what_if=False) as reports:
        step(torch.randn(5, wrapped.WIDTH)).sum().backward()
    gather = CollectiveKind.ALL_GATHER
    return {r.phase: sum(len(c.parameters) for c in r.collectives if c.kind == gather) for r in reports}


def test_resharding_after_forward_can_be_changed_after_adoption() -> None:
    """Backward gathers again only where forward's whole parameters were dropped."""
    with fake_world(2):
        torch._dynamo.reset()
        model: Any = adopt(sharded(Net()))
        step = torch.compile(model, backend="inductor_passes", options=PLANNED)
        first = gathers(step)
        assert first["forward"] > 0 and first["backward"] > 0
        model.set_reshard_after_forward(False)
        kept = gathers(step)
        assert kept["forward"] == first["forward"] and kept["backward"] == 0
        assert gathers(step) == {}
        model.blocks[0].set_reshard_after_forward(True)
        assert 0 < gathers(step)["backward"] < first["backward"]


def static_graph(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, static_graph=True)


def views_of_buckets(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def small_buckets(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)


def own_buffers(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("wrap", "parts"),
    # DDP itself fails with static_graph when the first batch is inside no_sync().
    [(static_graph, 1), (views_of_buckets, 1), (views_of_buckets, 2), (small_buckets, 1), (small_buckets, 2)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_options_of_ddp(two_ranks: Ranks, wrap: Any, parts: int) -> None:
    found = two_ranks.run(compare, wrap, Net, None, parts)
    assert all(max(one) == 0 for one in found), found


@pytest.mark.ranks
def test_statistics_that_ddp_leaves_alone(two_ranks: Ranks) -> None:
    """Each rank keeps statistics of its own."""
    found = two_ranks.run(compare, own_buffers, wrapped.Norms)
    assert all(max(one) == 0 for one in found), found
