"""Pipelines on real ranks: planned steps end, and compute what one process computes."""

from __future__ import annotations

import pytest
import torch

import inductor_passes
from inductor_passes.trace.collector import collect
from tests.support import pipelines
from tests.support.ranks import Ranks

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops._c10d_functional, "irecv"), reason="functional messages exist from torch 2.13 on"
)


def _steps(rank: int, world_size: int, batched: bool) -> tuple[list[bool], list[str], int]:
    """Run a planned step twice; (whether each pass changed the graph, order checks, receives issued ahead)."""
    torch._dynamo.reset()
    inputs = pipelines.microbatches(world_size + 2, 8, 16)
    pair = pipelines.weights(world_size, 16)[rank]
    loss, gradients = pipelines.whole(world_size, inputs)
    step = pipelines.stage(rank, world_size, pipelines.group_name(), batched)
    with collect(what_if=False) as reports:
        options = inductor_passes.options(memory_budget="unlimited", verify="strict")
        compiled = torch.compile(step, fullgraph=True, options=options)
        for _ in range(2):
            found = compiled(inputs, *pair)
    for ours, theirs in zip(found[1:], gradients[rank], strict=True):
        torch.testing.assert_close(ours, theirs)
    if rank == world_size - 1:
        torch.testing.assert_close(found[0], loss)
    (report,) = reports
    changed = [p.changed for p in report.passes if p.name == "reorder"]
    return changed, [report.order_check], len(report.collectives)


@pytest.mark.parametrize(("world_size", "batched"), [(2, False), (4, True)])
def test_a_planned_pipeline_is_one_process(world_size: int, batched: bool) -> None:
    with Ranks(world_size) as ranks:
        found = ranks.run(_steps, batched)
    for changed, checks, messages in found:
        assert changed == [True] and messages > 0
        assert all(check.startswith("as planned") for check in checks)
