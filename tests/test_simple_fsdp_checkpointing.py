"""Activation checkpointing of regions with attention and dropout, compiled beside DTensor parameters, on real ranks.

Numbers are those of the same model in one process without compilation. torch 2.12 and 2.13 alone fail on all of these:
"expected all tensors_saved_with_vc_check to be Tensors".
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import dropout, mse_loss, scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import inductor_passes
from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.compiled import dotted
from tests.support.joint_kernels import kernels_together
from tests.support.models import Llama, LlamaConfig, cross_entropy, llama, llama_batch, tensor_parallel
from tests.support.parity import assert_trains_alike, whole
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

LLAMA = LlamaConfig(vocab=16, dim=8, layers=1, heads=2, kv_heads=2, hidden=12, batch=4, seq=4, dtype=torch.float64)


def of(codegen: str) -> dict[str, Any]:
    """Arguments of ``torch.compile`` that have our passes on."""
    if codegen == "aot_eager":
        return {"backend": "inductor_passes", "options": dotted()}
    return {"backend": "inductor", "options": inductor_passes.options(verify="strict")}


class Checkpointed(nn.Module):
    """Runs what it holds again in backward."""

    def __init__(self, inner: nn.Module, **how: Any) -> None:
        super().__init__()
        self.inner = inner
        self.how = how

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, *args, use_reentrant=False, **self.how)  # type: ignore[no-any-return]


def keep_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    return create_selective_checkpoint_contexts(keep_products)


def data_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


class Block(nn.Module):
    """Attention and a residual: few kernels to compile."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.into = nn.Linear(size, 3 * size, dtype=torch.float64)
        self.out = nn.Linear(size, size, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x)[:, None].chunk(3, -1)
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


@kernels_together()
def train_blocks(rank: int, world_size: int, codegen: str) -> None:
    """Two steps, gradients after each, weights at the end; one region saves nothing, the other one some products."""
    torch.manual_seed(0)
    reference = nn.Sequential(Checkpointed(Block(6)), Checkpointed(Block(6), context_fn=selective))
    model = simple_fsdp(copy.deepcopy(reference), data_mesh(world_size))
    batches = [(torch.randn(4, 3, 6).double(), torch.randn(4, 3, 6).double()) for _ in range(2)]
    assert_trains_alike(model, reference, batches, mse_loss, index=rank, count=world_size, **of(codegen))


def test_full_and_selective_regions(two_ranks: Ranks) -> None:
    two_ranks.run(train_blocks, "inductor")


def checkpointed(model: Llama) -> Llama:
    """Every block is a region of its own."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = Checkpointed(layer)
    return model


def train(rank: int, world_size: int, options: dict[str, Any]) -> None:
    reference = checkpointed(llama(LLAMA))
    if options.get("mode") == "hybrid_shard":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = data_mesh(world_size)
    model = simple_fsdp(copy.deepcopy(reference), mesh, **options)
    batches = [llama_batch(LLAMA, seed) for seed in (1, 2)]
    assert_trains_alike(model, reference, batches, cross_entropy, index=rank, count=world_size, **of("aot_eager"))


@pytest.mark.parametrize(
    "options",
    [{}, {"reshard_after_forward": False}, {"reshard_after_forward": "auto"}, {"mode": "replicate"}],
    ids=["reshard", "keep", "auto", "replicate"],
)
def test_every_layout(two_ranks: Ranks, options: dict[str, Any]) -> None:
    two_ranks.run(train, options)


def test_hybrid_shard(four_ranks: Ranks) -> None:
    four_ranks.run(train, {"mode": "hybrid_shard"})


def train_tensor_parallel(rank: int, world_size: int) -> None:
    """Without simple_fsdp: parameters are DTensors all the same."""
    reference = llama(LLAMA)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    model = checkpointed(tensor_parallel(copy.deepcopy(reference), mesh))
    step: Callable[..., Any] = torch.compile(model, fullgraph=True, **of("aot_eager"))
    named = dict(model.named_parameters())
    for seed in (1, 2):
        tokens, targets = llama_batch(LLAMA, seed)
        expected = cross_entropy(reference(tokens), targets)
        actual = cross_entropy(step(tokens), targets)
        expected.backward()
        actual.backward()
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)
        for (name, parameter), mine in zip(reference.named_parameters(), named.values(), strict=True):
            torch.testing.assert_close(whole(mine.grad), parameter.grad, rtol=1e-9, atol=1e-10, msg=name)


def test_tensor_parallel(two_ranks: Ranks) -> None:
    two_ranks.run(train_tensor_parallel)


# -- dropout --------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Attention weights and results are dropped. Each column of the result is proportional to one element of ``scale``.

    So the gradient of the result's sum is the sum of the result's columns over ``scale``, with the masks of forward.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = torch.diag(self.scale)[None, None]
        y = scaled_dot_product_attention(x[None, None], x[None, None], value, dropout_p=0.2)
        return dropout(y[0, 0], 0.4)


class Regions(nn.Module):
    """The same input through several regions."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.regions = nn.ModuleList(Checkpointed(Dropping(size)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([region(x) for region in self.regions])


@kernels_together()
def draw(rank: int, world_size: int, codegen: str) -> None:
    """Backward draws the masks of forward again, which differ between regions, ranks and steps."""
    model = simple_fsdp(Regions(2, 8), data_mesh(world_size))
    step: Callable[..., Any] = torch.compile(model, fullgraph=True, **of(codegen))
    torch.manual_seed(rank)
    seen = []
    for _ in range(2):
        result = step(torch.randn(8, 8))
        result.sum().backward()
        for region, own in zip(model.regions, result.detach()):
            stored = dict(region.named_parameters())["inner.scale"]
            expected = own.sum(0) / whole(stored.detach())
            dist.all_reduce(expected)
            torch.testing.assert_close(whole(stored.grad), expected / world_size)
            stored.grad = None
            dropped = (own == 0).float()
            everywhere = [torch.empty_like(dropped) for _ in range(world_size)]
            dist.all_gather(everywhere, dropped)
            seen += everywhere
    assert all(0 < mask.mean() < 1 for mask in seen)
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.parametrize("codegen", ["inductor", "aot_eager"])
def test_dropout_draws_the_same_masks_again(two_ranks: Ranks, codegen: str) -> None:
    two_ranks.run(draw, codegen)


def drop_like_eager(rank: int, world_size: int) -> None:
    """The same seed gives the masks that execution without compilation draws."""
    torch.manual_seed(0)
    model = simple_fsdp(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), data_mesh(world_size))
    x = torch.randn(4, 8)
    results = []
    for run in (model, torch.compile(model, fullgraph=True, **of("aot_eager"))):
        torch.manual_seed(rank)
        results.append(run(x))
    torch.testing.assert_close(*results)


def test_aot_eager_draws_as_eager_does(two_ranks: Ranks) -> None:
    two_ranks.run(drop_like_eager)
