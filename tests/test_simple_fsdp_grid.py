"""Data parallelism on four real ranks: hybrid sharding, and two dimensions with tensor parallelism."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.models import (
    LlamaConfig,
    MLPConfig,
    cross_entropy,
    llama,
    llama_batch,
    mlp,
    mlp_batch,
    tensor_parallel,
)
from tests.support.parity import assert_trains_alike, whole
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

LLAMA = LlamaConfig(layers=1, batch=4, seq=8, dtype=torch.float64)
#: Three and five rows over two shards.
MLP = MLPConfig(width=5, hidden=3, dtype=torch.float64)


@pytest.fixture
def pool(four_ranks: Ranks) -> Ranks:
    return four_ranks


def train_hybrid(rank: int, world_size: int, backend: str | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference = mlp(MLP)
    model = simple_fsdp(copy.deepcopy(reference), mesh, mode="hybrid_shard")
    batches = [mlp_batch(MLP, seed) for seed in (1, 2)]
    assert_trains_alike(model, reference, batches, mse_loss, index=rank, count=world_size, backend=backend)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_hybrid_shard(pool: Ranks, backend: str | None) -> None:
    pool.run(train_hybrid, backend)


def train_two_dimensional(
    rank: int, world_size: int, backend: str | None, sequence_parallel: bool, options: dict
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = llama(LLAMA)
    model = tensor_parallel(copy.deepcopy(reference), mesh["tp"], sequence_parallel=sequence_parallel)
    simple_fsdp(model, mesh["dp"], **options)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), reference.get_parameter(name)), name
    batches = [llama_batch(LLAMA, seed) for seed in (1, 2)]
    assert_trains_alike(
        model,
        reference,
        batches,
        cross_entropy,
        index=mesh["dp"].get_local_rank(),
        count=2,
        backend=backend,
    )


@pytest.mark.parametrize(
    ("backend", "sequence_parallel", "options"),
    [
        (None, False, {}),
        ("aot_eager", False, {}),
        ("aot_eager", True, {}),
        ("aot_eager", True, {"mode": "replicate"}),
        (None, True, {"shard_dim": 1}),
    ],
    ids=["tp", "tp-compiled", "sp-compiled", "sp-replicate-compiled", "sp-dim1"],
)
def test_two_dimensions(pool: Ranks, backend: str | None, sequence_parallel: bool, options: dict) -> None:
    pool.run(train_two_dimensional, backend, sequence_parallel, options)


def checkpoint_two_dimensional(rank: int, world_size: int, folder: str) -> None:
    """A strided layout is saved as the tensor that it stands for, and clipping sees all of its pieces."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = llama(LLAMA)
    model = tensor_parallel(copy.deepcopy(reference), mesh["tp"], sequence_parallel=True)
    simple_fsdp(model, mesh["dp"])
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    alone = llama(LlamaConfig(layers=1, seed=7, dtype=torch.float64))
    weights = alone.state_dict()
    dcp.load({"model": weights}, checkpoint_id=folder)
    for name, value in reference.state_dict().items():
        assert torch.equal(weights[name], value), name
    tokens, targets = llama_batch(LLAMA)
    cross_entropy(reference(tokens), targets).backward()
    part = mesh["dp"].get_local_rank()
    cross_entropy(model(tokens.chunk(2)[part]), targets.chunk(2)[part]).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)), expected)


def test_two_dimensional_checkpoint_and_clipping(pool: Ranks, tmp_path: Path) -> None:
    pool.run(checkpoint_two_dimensional, str(tmp_path))
