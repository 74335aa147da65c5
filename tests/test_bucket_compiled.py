"""Merged collectives through Inductor on real ranks: forward, backward, every kind, equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.bucket.candidates import candidates
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.ir.view import GraphView
from inductor_passes.rewriting.merge import merge
from inductor_passes.simple_fsdp import MixedPrecisionPolicy, simple_fsdp
from tests.support.bucket_graphs import assert_same_bits, inputs_by_rank, run_all_ranks
from tests.support.joint_kernels import kernels_together
from tests.support.models import LlamaConfig, MLPConfig, capture_graphs, collectives, llama, llama_batch, mlp, mlp_batch
from tests.support.ranks import Ranks
from tests.support.world import fake_world

RANKS = 2


@pytest.fixture
def ranks(two_ranks: Ranks) -> Ranks:
    return two_ranks


def merge_everything(graph: torch.fx.Graph, form: str = "packed") -> None:
    """As many members per bucket as dependencies allow."""
    view = GraphView(graph)
    dependencies = Dependencies(view)
    by_key: dict[object, list[Any]] = {}
    for candidate in candidates(view, uneven_all_to_all=True)[0]:
        bucket = by_key.setdefault(candidate.key, [])
        if dependencies.conflict(bucket, candidate.collective) is None:
            bucket.append(candidate.collective)
            dependencies.merge(bucket)
    buckets = [bucket for bucket in by_key.values() if len(bucket) > 1]
    merge(graph, view, buckets, forms=[form] * len(buckets))
    graph.lint()


class Merge(CustomGraphPass):
    """Merges everything and counts collectives before and after, per graph."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.counts: list[tuple[int, int]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        before = len(GraphView(graph).collectives)
        if self.form:
            merge_everything(graph, self.form)
        self.counts.append((before, len(GraphView(graph).collectives)))

    def uuid(self) -> None:
        """Never cached: the counts are wanted every time."""


def compiled(function: Callable[..., Any], form: str) -> tuple[Callable[..., Any], Merge]:
    torch._dynamo.reset()
    one = Merge(form)
    return torch.compile(function, fullgraph=True, options={"post_grad_custom_post_pass": one}), one


@kernels_together()
def train(rank: int, world: int, form: str) -> tuple[list[tuple[int, int]], list[torch.Tensor], list[Any]]:
    """A step of a small data-parallel model: (counts, loss and gradients, their strides)."""
    config = MLPConfig(width=10, hidden=7, layers=2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = simple_fsdp(mlp(config), init_device_mesh("cpu", (world,)), mp_policy=policy)
    step, one = compiled(model, form)
    inputs, targets = mlp_batch(config, seed=rank)
    loss = torch.nn.functional.mse_loss(step(inputs).float(), targets)
    loss.backward()
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    return one.counts, [loss.detach(), *gradients], [g.stride() for g in gradients]


@pytest.mark.ranks
@pytest.mark.slow
def test_training_step_is_bit_equal(ranks: Ranks) -> None:
    plain, merged = (ranks.run(train, form) for form in ("", "packed"))
    for (counts_before, before, strides_before), (counts_after, after, strides_after) in zip(plain, merged):
        assert [count[0] for count in counts_after] == [count[0] for count in counts_before]
        assert counts_after == [(4, 1), (counts_before[1][0], 2)]
        assert strides_before == strides_after
        for b, a in zip(before, after, strict=True):
            assert torch.equal(b, a)


@kernels_together()
def every_kind(rank: int, world: int) -> tuple[list[tuple[int, int]], list[torch.Tensor], list[torch.Tensor]]:
    """(counts, eager results, results with everything merged): all kinds, dtypes mixed where they may be, splits that
    differ between ranks."""
    group = dist.group.WORLD

    def program(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        gathered = [funcol.all_gather_tensor(x * 2, 0, group) for x in (xs[0], xs[1].bfloat16(), xs[2] > 0)]
        scattered = [funcol.reduce_scatter_tensor(x + 1, "sum", 0, group) for x in xs]
        reduced = [funcol.all_reduce(x.t().bfloat16(), "sum", group) for x in xs]
        out, into = ([1, 2], [1, 3]) if rank == 0 else ([3, 2], [2, 2])
        exchanged = [
            funcol.all_to_all_single(x, out, into, group) for x in (xs[2], xs[2].double(), xs[2][:, :1].contiguous())
        ]
        return [torch.relu(y.float()) + 1 for y in (*gathered, *scattered, *reduced, *exchanged)]

    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(4, width, generator=generator) for width in (3, 5, 7)]
    step, one = compiled(program, "packed")
    merged = step(inputs)
    return one.counts, [torch.clone(x) for x in program(inputs)], merged


@pytest.mark.ranks
@pytest.mark.slow
def test_every_kind_is_bit_equal_through_inductor(ranks: Ranks) -> None:
    for counts, eager, merged in ranks.run(every_kind):
        assert counts == [(12, 4)] and len(eager) == len(merged) == 12
        for e, m in zip(eager, merged):
            assert e.shape == m.shape and torch.equal(e, m)


@pytest.mark.parametrize("uneven", [False, True])
def test_graphs_of_a_data_parallel_transformer_shrink_to_a_few_collectives(uneven: bool) -> None:
    """Forward needs one gather, backward one gather and one reduction; all outputs as before on every rank."""
    with fake_world(4):
        torch._dynamo.reset()
        config = LlamaConfig(layers=1, hidden=46 if uneven else 48)
        model = simple_fsdp(llama(config), init_device_mesh("cpu", (4,)))
        graphs = capture_graphs(model, llama_batch(config)[:1])
        for gm, expected in ((graphs.forward[0], 1), (graphs.backward[0], 2)):
            before = collectives(gm)
            inputs = inputs_by_rank(gm, 4)
            outputs = run_all_ranks(gm, inputs)
            merge_everything(gm.graph)
            gm.recompile()
            assert len(before) > 10 and len(collectives(gm)) == expected
            assert_same_bits(outputs, run_all_ranks(gm, inputs))
